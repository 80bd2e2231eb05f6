"""The step as data: programs, lists of operations on units, made from recorded passes; and rewrites of them. Pure.

A *pass* is one forward or one backward of the model. While it runs, hooks report *events*: a unit is entered or left,
the gradient of its output has arrived, it is run again inside backward. The events of a pass are its *trace*. `build`
turns a trace into a *program*, a straight list of operations with the events as markers between them; the operations
in front of a marker run when the event is reported. Rewrites (`carry`, `resident`, `prefetch`, `limit_in_flight`) take
a program and give another one. They keep the order of markers, all-gathers and reductions, so ranks stay in step.

Units are numbers, in the order of registration; the root is unit 0.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import graphlib
import heapq
from collections.abc import Collection, Iterable, Sequence
from difflib import SequenceMatcher
from typing import NamedTuple

# -- events: what hooks report --
ENTER = "enter"
"""A unit's forward begins."""
EXIT = "exit"
"""It is over."""
KEEP = "keep"
"""The root's forward is over and its backward may come: the root stays gathered. Only recorded, never a marker."""
GRAD = "grad"
"""The gradient of a unit's output has arrived: its backward begins."""
AGAIN = "again"
"""A unit's forward begins inside backward: activation recomputation."""
OVER = "over"
"""The backward of a unit's calls so far is over. Only recorded: in a steady pass the event that shows it follows."""
EVENTS = (ENTER, EXIT, KEEP, GRAD, AGAIN, OVER)
#: The unit must be readable from this event on.
BEGINS = frozenset({ENTER, GRAD, AGAIN})
_UNMARKED = frozenset({KEEP, OVER})

# -- operations --
AT = "at"
"""A marker: what precedes it runs when its event is reported."""
REFRESH = "refresh"
"""Starts the all-gather over the outer axis that an optimizer step left to be done."""
GATHER = "all-gather"
WAIT = "wait"
"""The compute stream waits for the unit's all-gather."""
RELEASE = "reshard"
"""Frees the gathered weights once the work issued so far has read them."""
DRAIN = "drain"
"""The compute stream waits for the unit's reduction, whose staging memory is free then."""
REDUCE = "reduce-scatter"
"""Starts the reduction of the unit's gradients of this backward (under strategies 0 and 1 they only accumulate)."""
FINALIZE = "finalize"
"""In the last backward of a cycle: starts what is left, over either axis."""

Token = tuple[str, int]
"""(event, unit)."""
Trace = tuple[Token, ...]


class Op(NamedTuple):
    """One operation on one unit."""

    kind: str
    unit: int
    event: str = ""
    """Of a marker."""


class UnitFacts(NamedTuple):
    """Facts about a unit for scheduling."""

    label: str
    parent: int | None = None
    """The innermost unit around it; None: the root itself."""
    gathers: bool = True
    """Its weights must be all-gathered, before each use or once after a step."""
    numel: int = 0
    """Elements of the weights that are there only while gathered; 0: an all-gather after a step is all."""
    nbytes: int = 0
    """Their bytes."""
    refreshes: bool = False
    """An optimizer step leaves an all-gather over the outer axis."""
    reduces: bool = True
    """It is trained."""
    staged_numel: int = 0
    """Elements staged for the reduction of one backward; 0: gradients accumulate where they are reduced."""
    staged_nbytes: int = 0
    """Their bytes."""


@dataclasses.dataclass(frozen=True)
class Program:
    """Operations of every rank in one kind of pass, whatever part of the model it runs."""

    trace: Trace
    """The trace that it was built from."""
    ops: tuple[Op, ...]
    is_spmd: bool = True
    """All ranks recorded the same trace."""

    @functools.cached_property
    def markers(self) -> dict[Token, list[int]]:
        """Program counters of each event's markers, ascending."""
        markers = collections.defaultdict(list)
        for pc, op in enumerate(self.ops):
            if op.kind == AT:
                markers[op.event, op.unit].append(pc)
        return markers

    @functools.cached_property
    def begin(self) -> int:
        """Program counter of the first marker."""
        return min((places[0] for places in self.markers.values()), default=len(self.ops))

    @functools.cached_property
    def gathered_first(self) -> frozenset[int]:
        """The two units that are gathered first: they may have been gathered before the pass begins."""
        return frozenset([op.unit for op in self.ops if op.kind == GATHER][:2])

    def text(self, labels: Sequence[str]) -> str:
        """One line for each operation: its program counter, and markers at the margin."""
        width = len(str(len(self.ops)))
        return "\n".join(
            f"{pc:{width}}  {op.event} {labels[op.unit]}:"
            if op.kind == AT
            else f"{pc:{width}}    {op.kind} {labels[op.unit]}"
            for pc, op in enumerate(self.ops)
        )


# -- from traces to a program -----------------------------------------------------------------------------------------


def union(traces: Iterable[Trace]) -> Trace:
    """A short common supersequence: a function of the set of traces, so alike on all ranks.

    Between what two traces have in common, units come in the order of registration, in a backward in the reverse of it.
    """
    distinct = sorted(set(traces), key=lambda trace: (-len(trace), trace))
    nothing: Trace = ()
    return _sorted(distinct) or functools.reduce(_merged, distinct, nothing)


def _sorted(traces: Sequence[Trace]) -> Trace | None:
    """Every event as often as the trace that has it most often; None: traces have them in orders that contradict."""
    sorter: graphlib.TopologicalSorter[tuple[Token, int]] = graphlib.TopologicalSorter()
    for trace in traces:
        count: collections.Counter[Token] = collections.Counter()
        before: tuple[tuple[Token, int], ...] = ()
        for token in trace:
            event = (token, count[token])
            count[token] += 1
            sorter.add(event, *before)
            before = (event,)
    try:
        sorter.prepare()
    except graphlib.CycleError:
        return None
    sign = -1 if any(is_of_backward(trace) for trace in traces) else 1
    ready: list[tuple[int, tuple[Token, int]]] = []
    result: list[Token] = []
    while sorter.is_active():
        for event in sorter.get_ready():
            heapq.heappush(ready, (sign * event[0][1], event))
        _, event = heapq.heappop(ready)
        result.append(event[0])
        sorter.done(event)
    return tuple(result)


def _merged(one: Trace, other: Trace) -> Trace:
    """A common supersequence of traces whose orders contradict. Quadratic; runs when a program is recorded."""
    merged: list[Token] = []
    for kind, start, stop, other_start, other_stop in SequenceMatcher(None, one, other, autojunk=False).get_opcodes():
        merged += one[start:stop]
        merged += () if kind == "equal" else other[other_start:other_stop]
    return tuple(merged)


def is_of_backward(trace: Trace) -> bool:
    """The trace is that of a backward."""
    return any(event in (GRAD, AGAIN, OVER) for event, _ in trace)


def completed(trace: Trace, facts: Sequence[UnitFacts], ran: Collection[int] = ()) -> Trace:
    """`trace` with one use of every unit that no rank has used, where its registered neighbours would place it.

    Args:
        trace: of a pass of the whole model in which ranks differ.
        facts: of all units.
        ran: for a backward, the units that some rank ran in forward: frozen ones among them have no backward.
    """
    is_backward = is_of_backward(trace)
    used = {unit for _, unit in trace}
    tokens = list(trace)
    for unit, fact in enumerate(facts):
        if unit in used or (is_backward and unit in ran and not fact.reduces):
            continue
        # Either kind of checkpoint finds its events here.
        use = (AGAIN, GRAD, AGAIN, OVER) if is_backward else (ENTER, EXIT)
        place = _place(tokens, unit, facts, is_backward=is_backward)
        tokens[place:place] = [(event, unit) for event in use]
        used.add(unit)
    return tuple(tokens)


def _place(tokens: list[Token], unit: int, facts: Sequence[UnitFacts], *, is_backward: bool) -> int:
    """Behind the last sibling registered before `unit`, or at the parent's begin; in backward the mirror image."""
    parent = facts[unit].parent
    siblings = [other for other in reversed(range(unit)) if facts[other].parent == parent]
    for sibling in siblings:
        for n, (event, other) in enumerate(tokens):
            if other == sibling and (is_backward or event == EXIT):
                return n if is_backward else n + 1
    if is_backward:
        over = [n for n, token in enumerate(tokens) if token == (OVER, parent)]
        return over[-1] if over else len(tokens)
    assert parent is not None, "a forward of the whole model enters the root"
    return tokens.index((ENTER, parent)) + 1


class _Use(NamedTuple):
    """From the token at `start` to before the one at `stop` a unit must be readable."""

    unit: int
    start: int
    stop: int


def _uses(trace: Trace) -> list[_Use]:
    """Every stretch of a trace over which a unit is used, by its begin."""
    uses: list[_Use] = []
    begun: dict[int, int] = {}
    depth: collections.Counter[int] = collections.Counter()
    kept = {unit for event, unit in trace if event == KEEP}
    for n, (event, unit) in enumerate(trace):
        if event in BEGINS:
            begun.setdefault(unit, n)
            depth[unit] += 1
        elif event == EXIT:
            depth[unit] = max(0, depth[unit] - 1)
        is_over = event == OVER or (event == EXIT and not depth[unit])
        if is_over and unit in begun and unit not in kept:
            uses.append(_Use(unit, begun.pop(unit), n))
    return sorted(uses + [_Use(unit, start, len(trace)) for unit, start in begun.items()], key=lambda use: use.start)


def _recomputed_together(trace: Trace, uses: Sequence[_Use]) -> list[_Use]:
    """Uses of a backward in which ranks differ: those that overlap, some of them recomputed, last until all are over.

    Units that a rank leaves out at a checkpoint's end move the begin of recomputation, so there the order of events
    differs from one choice of units to the next.
    """
    spans: list[tuple[int, int]] = []
    for use in uses:
        if use.unit and spans and use.start < spans[-1][1]:
            spans[-1] = (spans[-1][0], max(spans[-1][1], use.stop))
        elif use.unit:
            spans.append((use.start, use.stop))
    spans = [(start, stop) for start, stop in spans if any(event == AGAIN for event, _ in trace[start:stop])]
    held: dict[tuple[int, int], _Use] = {}
    for use in uses:
        stop = next((stop for start, stop in spans if use.unit and start <= use.start < stop), 0)
        held.setdefault((use.unit, stop or use.start), use._replace(stop=stop or use.stop))
    return list(held.values())


def build(trace: Trace, facts: Sequence[UnitFacts], *, is_spmd: bool = True) -> Program:
    """The program that does everything in place: all-gather before a use, reshard after it, reduce after the last one.

    What no rank used has a zero gradient on all ranks, and is reduced at the end of backward.
    """
    starts, stops = collections.defaultdict(list), collections.defaultdict(list)
    uses = _uses(trace)
    last_over = {unit: n for n, (event, unit) in enumerate(trace) if event == OVER}
    if not is_spmd:
        uses = _recomputed_together(trace, uses)
        for use in uses:
            if last_over.get(use.unit, use.stop) < use.stop:
                last_over[use.unit] = use.stop
    for use in uses:
        starts[use.start].append(use.unit)
        stops[use.stop].append(use.unit)
    reduced = collections.defaultdict(list)
    for unit in sorted(last_over, key=lambda unit: last_over[unit]):
        reduced[last_over[unit]].append(unit)
    is_backward = is_of_backward(trace)
    kept = {unit for event, unit in trace if event == KEEP}
    order = dict.fromkeys(unit for _, unit in trace)
    ops = [] if is_backward else [Op(REFRESH, unit) for unit in order if facts[unit].refreshes]
    for n, (event, unit) in enumerate((*trace, (OVER, -1))):
        ops += [Op(RELEASE, u) for u in stops[n] if facts[u].numel and not (u in kept and n == len(trace))]
        ops += [Op(kind, u) for u in reduced[n] if facts[u].reduces for kind in (REDUCE, FINALIZE)]
        for begun in starts[n]:
            if facts[begun].gathers:
                ops += [Op(GATHER, begun), Op(WAIT, begun)]
        ops += [Op(AT, unit, event)] if event not in _UNMARKED else []
    if is_backward:
        rest = [unit for unit, fact in enumerate(facts) if fact.reduces and unit not in last_over]
        ops += [op for unit in rest for op in (Op(REDUCE, unit), Op(FINALIZE, unit))]
    return Program(trace, tuple(ops), is_spmd)


# -- rewrites ---------------------------------------------------------------------------------------------------------


def carry(forward: Program, backward: Program) -> Program:
    """`forward` without the reshards at its end of what `backward` gathers first: that goes over as it is.

    Both in place. An all-gather of a unit that is gathered already does nothing, so `backward` stays as it is.
    """
    last = max((n for n, op in enumerate(forward.ops) if op.kind == GATHER), default=-1)
    released = {op.unit for op in forward.ops[last + 1 :] if op.kind == RELEASE}
    carried = set()
    for op in backward.ops:
        if op.kind == GATHER and op.unit in released:
            carried.add(op.unit)
        elif op.kind == GATHER and op.unit != 0:
            break
        elif op.kind == RELEASE:
            break
    ops = (op for n, op in enumerate(forward.ops) if not (n > last and op.kind == RELEASE and op.unit in carried))
    return dataclasses.replace(forward, ops=tuple(ops))


def resident(program: Program, kept: Collection[int]) -> Program:
    """`program` without the reshards of units that stay gathered until the optimizer steps."""
    return dataclasses.replace(
        program, ops=tuple(op for op in program.ops if not (op.kind == RELEASE and op.unit in kept))
    )


def choose_resident(order: Sequence[int], facts: Sequence[UnitFacts], budget_nbytes: int) -> frozenset[int]:
    """The units that stay gathered within a budget.

    The last ones of the forward come first: backward needs them at once, with nothing to hide their gathers behind.
    """
    kept: set[int] = set()
    for unit in reversed(order):
        if 0 < facts[unit].nbytes <= budget_nbytes and unit not in kept:
            kept.add(unit)
            budget_nbytes -= facts[unit].nbytes
    return frozenset(kept)


class Ahead(NamedTuple):
    """Distance by which all-gathers run ahead of their use."""

    depth: int
    """Units, where `numel` does not decide."""
    numel: int | None = None
    """Elements, however many units they are; a unit that would pass it is not prefetched."""
    most: int | None = None
    """Units, whatever else decides: they have no more buffers."""

    def allows(self, units: int, numel: int) -> bool:
        """So many units, of so many elements together, may be gathered ahead."""
        if self.most is not None and units > self.most:
            return False
        return units <= self.depth if self.numel is None else numel <= self.numel


def prefetch(program: Program, ahead: Ahead, facts: Sequence[UnitFacts]) -> Program:
    """`program` with its all-gathers earlier, each in front of the begin of an earlier use, as far as `ahead` allows.

    No all-gather passes another one, or a reshard of its own unit; at an event it follows the reshards.
    """
    ops = list(program.ops)
    for i, gather in enumerate(ops):
        if gather.kind != GATHER:
            continue
        place = n = i
        coming = {gather.unit}
        while n > 0 and ahead.allows(len(coming), sum(facts[unit].numel for unit in coming)):
            n -= 1
            before = ops[n]
            if before.kind == GATHER or (before.kind == RELEASE and before.unit == gather.unit):
                break
            if before.kind == AT and before.event in BEGINS:
                place = n
                coming.add(before.unit)
        ops.insert(place, ops.pop(i))
    return dataclasses.replace(program, ops=tuple(ops))


class InFlight(NamedTuple):
    """Amount that may be staged for reductions at a time."""

    most: int
    """Units, where `numel` does not decide, and with `is_strict` always."""
    numel: int | None = None
    """Elements; one reduction is always let through."""
    is_strict: bool = False
    """There are no more buffers."""

    def is_full(self, staged: Collection[int], numel: int) -> bool:
        """With reductions of these `staged` sizes on their way, one of `numel` more elements must wait."""
        if not staged:
            return False
        if self.numel is None or (self.is_strict and len(staged) >= self.most):
            return len(staged) >= self.most
        return numel + sum(staged) > self.numel


def limit_in_flight(program: Program, limit: InFlight, facts: Sequence[UnitFacts]) -> Program:
    """`program` with drains of the oldest reductions in front of those that would pass the limit."""
    ops: list[Op] = []
    flying: dict[int, int] = {}
    for op in program.ops:
        if op.kind == REDUCE and facts[op.unit].staged_numel:
            numel = facts[op.unit].staged_numel
            while limit.is_full(flying.values(), numel):
                oldest = next(iter(flying))
                del flying[oldest]
                ops.append(Op(DRAIN, oldest))
            flying[op.unit] = numel
        ops.append(op)
    return dataclasses.replace(program, ops=tuple(ops))


# -- simulation -------------------------------------------------------------------------------------------------------


class Peak(NamedTuple):
    """The most memory for communication in a pass, in bytes, and the program counters where it is reached."""

    weights: int
    weights_pc: int
    grads: int
    grads_pc: int


def simulate(
    program: Program, facts: Sequence[UnitFacts], gathered: Collection[int] = ()
) -> tuple[Peak, frozenset[int]]:
    """Walks a program as a rank that runs all of it would.

    Args:
        program: of any pass.
        facts: of all units.
        gathered: units that are gathered when the pass begins.

    Returns:
        The peaks, and the units that are gathered when it is over.

    Raises:
        AssertionError: a unit is used while it is not gathered, reduced twice, or more is drained than in flight.
    """
    whole, flying, reduced = set(gathered), {}, set()
    peak = Peak(0, 0, 0, 0)
    for pc, op in enumerate(program.ops):
        fact = facts[op.unit]
        if op.kind == GATHER:
            whole.add(op.unit)
        elif op.kind == RELEASE:
            assert op.unit in whole, f"{pc}: {fact.label} is resharded twice"
            whole.discard(op.unit)
        elif op.kind == WAIT or (op.kind == AT and op.event in BEGINS):
            assert op.unit in whole or not fact.numel, f"{pc}: {fact.label} is not gathered"
        elif op.kind == REDUCE:
            assert op.unit not in reduced, f"{pc}: {fact.label} is reduced twice"
            reduced.add(op.unit)
            flying[op.unit] = fact.staged_nbytes
        elif op.kind == DRAIN:
            del flying[op.unit]
        weights, grads = sum(facts[unit].nbytes for unit in whole), sum(flying.values())
        if weights > peak.weights:
            peak = peak._replace(weights=weights, weights_pc=pc)
        if grads > peak.grads:
            peak = peak._replace(grads=grads, grads_pc=pc)
    return peak, frozenset(unit for unit in whole if facts[unit].numel)
