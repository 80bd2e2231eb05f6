"""The programs of a model: recorded once for each kind of pass, rewritten as the options ask, and made callable."""

from __future__ import annotations

import bisect
import collections
import dataclasses
import itertools
import logging
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch.distributed as dist

from megatron_fsdp.config import REDUCTIONS_IN_FLIGHT, UNITS_AHEAD, EngineConfig
from megatron_fsdp.plan import program as plan
from megatron_fsdp.plan.double_buffer import BUFFERS
from megatron_fsdp.plan.program import AT, DRAIN, ENTER, GATHER, REDUCE, Program, Token, Trace
from megatron_fsdp.runtime.consensus import Consensus
from megatron_fsdp.runtime.unit import Unit, contains

logger = logging.getLogger(__name__)

#: A program that would become longer than this many times the longest pass that it holds is replaced by one for the
#: last pass alone.
_MOST_GROWTH = 2
#: More than any memory, and a number that ranks can tell each other.
_MOST_NBYTES = 2**62
_MIB = 2**20

Operation = Callable[[], None]


class Key(NamedTuple):
    """The kind of a pass."""

    unit: int
    """The unit that it begins with: the root, or one that is called outside the root's forward."""
    is_recorded: bool
    """Autograd records the forward."""
    phase: str = ""
    """As `model.schedule.phase()` says."""
    forwards: int = 0
    """Of a backward, through how many forwards it goes; 0: it is a forward."""

    @property
    def forward(self) -> Key:
        """Of the forwards of a backward."""
        return self._replace(forwards=0)

    def backward(self, forwards: int = 1) -> Key:
        """Of the backward of so many forwards."""
        return self._replace(forwards=forwards)

    def text(self, units: Sequence[Unit]) -> str:
        """For messages."""
        kind = "backward" if self.forwards else "forward" if self.is_recorded else "forward without gradients"
        kind += f" of {self.forwards} forwards" if self.forwards > 1 else ""
        kind += f" of unit {units[self.unit].label}" if self.unit else ""
        return kind + (f" in phase {self.phase!r}" if self.phase else "")


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A program as callables."""

    program: Program
    markers: tuple[Token, ...]
    segments: tuple[tuple[Operation, ...], ...]
    """Operations in front of each marker, and behind the last one."""
    starts: tuple[int, ...]
    """Program counters at which segments begin."""
    places: dict[Token, list[int]]
    """Numbers of the markers of each event."""
    drains: dict[int, list[int]]
    """By unit, whose reductions are drained before its own."""
    head: frozenset[int]
    """Units that are gathered first; what else an earlier pass has left gathered is resharded before."""

    @classmethod
    def of(cls, program: Program, bind: Callable[[plan.Op], Operation]) -> Compiled:
        """The program with `bind` making a callable of each operation."""
        markers: list[Token] = []
        segments: list[list[Operation]] = [[]]
        starts, places, drains = [0], collections.defaultdict(list), collections.defaultdict(list)
        waiting: list[int] = []
        for pc, op in enumerate(program.ops):
            if op.kind == AT:
                places[op.event, op.unit].append(len(markers))
                markers.append((op.event, op.unit))
                segments.append([])
                starts.append(pc + 1)
                continue
            segments[-1].append(bind(op))
            if op.kind == DRAIN:
                waiting.append(op.unit)
            elif op.kind == REDUCE:
                drains[op.unit], waiting = waiting, []
        gathers = (op.unit for op in program.ops if op.kind == GATHER)
        head = frozenset(itertools.islice(gathers, 2))
        return cls(program, tuple(markers), tuple(map(tuple, segments)), tuple(starts), places, drains, head)

    def find(self, token: Token, start: int) -> int | None:
        """Number of the first such marker at or behind number `start`."""
        places = self.places.get(token, ())
        index = bisect.bisect_left(places, start)
        return places[index] if index < len(places) else None


class Programs:
    """Programs of all kinds of passes, by key; the same on all ranks."""

    def __init__(
        self, units: Sequence[Unit], config: EngineConfig, consensus: Consensus, bind: Callable[[plan.Op], Operation]
    ):
        self.facts = [_facts_of(unit, units) for unit in units]
        self.comes_and_goes = frozenset(unit.number for unit in units if unit.gathered_numel)
        """Units whose weights are there only while they are gathered."""
        self.resident: frozenset[int] = frozenset()
        """Of those, the ones that stay gathered until the optimizer steps."""
        self._units = units
        self._consensus = consensus
        self._bind = bind
        has_slots, numel = config.fsdp_double_buffer, config.suggested_communication_unit_size
        depth, ahead_numel = (UNITS_AHEAD, numel) if config.overlap_param_gather else (0, None)
        self._ahead = plan.Ahead(depth, ahead_numel, BUFFERS - 1 if has_slots else None)
        self.in_flight = plan.InFlight(REDUCTIONS_IN_FLIGHT, numel, has_slots)
        """How many reductions may be on their way."""
        self._recorded: dict[Key, Program] = {}
        """Everything in place."""
        self._compiled: dict[Key, Compiled] = {}
        self._calls: dict[Key, collections.Counter[int]] = {}
        """How often passes enter each unit."""
        if config.fsdp_residency_bytes not in (0, "auto"):
            self.keep_resident(min(config.fsdp_residency_bytes, _MOST_NBYTES), range(1, len(units)))
            if not self.resident and dist.get_rank() == 0:
                self._warn_of_residency(config.fsdp_residency_bytes)

    def get(self, key: Key) -> Compiled | None:
        """The program of passes of this kind; None: none has been recorded."""
        return self._compiled.get(key)

    def recorded(self, key: Key) -> Program | None:
        """As it was recorded, everything in place."""
        return self._recorded.get(key)

    def calls(self, key: Key, unit: int) -> int:
        """Number of entries of a forward of this kind into a unit; 1 if it is not known."""
        return self._calls.get(key, {}).get(unit, 1)

    def forget(self) -> None:
        """Drops everything that has been recorded."""
        self._recorded.clear()
        self._compiled.clear()
        self._calls.clear()

    def record(self, key: Key, own: Trace) -> None:
        """Makes the program of passes like one that has just ended with this rank's trace `own`. **Collective**."""
        traces = self._consensus.traces(own)
        before, forward = self._recorded.get(key), self._recorded.get(key.forward)
        is_spmd = len(traces) == 1 and all(known is None or known.is_spmd for known in (before, forward))
        trace = plan.union(traces)
        longest = len(trace)
        if before is not None:
            grown = plan.union([trace, before.trace])
            if len(grown) <= _MOST_GROWTH * max(longest, before.longest):
                trace, longest = grown, max(longest, before.longest)
        if not is_spmd and key.unit == 0:
            ran = {unit for _, unit in forward.trace} if forward is not None and key.forwards else ()
            trace = plan.completed(trace, self.facts, ran)
        program = plan.build(trace, self.facts, is_spmd=is_spmd)
        self._recorded[key] = dataclasses.replace(program, longest=longest)
        self._calls[key] = collections.Counter(unit for event, unit in trace if event == ENTER)
        for changed in {key, key.forward} & self._recorded.keys():
            self._compile(changed)

    def _compile(self, key: Key) -> None:
        program = self._recorded[key]
        if not key.forwards and key.backward() in self._recorded:
            program = plan.carry(program, self._recorded[key.backward()])
        program = plan.resident(program, self.resident)
        program = plan.prefetch(program, self._ahead, self.facts)
        program = plan.limit_in_flight(program, self.in_flight, self.facts)
        self._compiled[key] = Compiled.of(program, self._bind)

    def keep_resident(self, budget_nbytes: int, order: Sequence[int]) -> None:
        """Keeps units gathered, as many as the smallest budget of all ranks allows. **Collective**."""
        (budget_nbytes,) = self._consensus.smallest([budget_nbytes])
        self.resident = plan.choose_resident(order, self.facts, budget_nbytes)
        kept = sum(self.facts[number].nbytes for number in self.resident)
        logger.info("%.1f of %.1f MiB keep weights gathered between uses", kept / _MIB, budget_nbytes / _MIB)
        for key in self._recorded:
            self._compile(key)

    def _warn_of_residency(self, budget_nbytes: int) -> None:
        sizes = [fact.nbytes for fact in self.facts[1:] if fact.nbytes]
        reason = (
            "has no effect: no unit's weights come and go. Use it with zero_dp_strategy 3, and name the modules that "
            "are units."
        )
        if sizes:
            reason = f"keeps nothing gathered: the smallest unit has {min(sizes)} bytes."
        logger.warning("residency_bytes=%d %s", budget_nbytes, reason)

    def forward_order(self) -> tuple[int, ...]:
        """Units as the training forward enters them; as they are registered before there was one."""
        program = self._recorded.get(Key(0, True))
        if program is None:
            return tuple(range(len(self.facts)))
        return tuple(dict.fromkeys(number for event, number in program.trace if event == ENTER))

    def reduction_order(self, phase: str) -> list[int]:
        """Trained units as backward reduces them; before there was one, as if it mirrored their registration."""
        program = self._recorded.get(Key(0, True, phase).backward())
        if program is not None:
            return [op.unit for op in program.ops if op.kind == REDUCE]
        return [unit for unit in reversed(range(len(self.facts))) if self.facts[unit].reduces]

    def peaks(self) -> dict[str, plan.Peak]:
        """By kind of pass, the most memory for communication: simulated, without running anything."""
        return {
            key.text(self._units): plan.simulate(compiled.program, self.facts, self.resident)[0]
            for key, compiled in self._compiled.items()
        }

    def __str__(self) -> str:
        """Every program with its peak memory."""
        labels = [unit.label for unit in self._units]
        texts = []
        for (kind, peak), compiled in zip(self.peaks().items(), self._compiled.values(), strict=True):
            ranks = "all ranks alike" if compiled.program.is_spmd else "ranks differ"
            weights = f"{peak.weights / _MIB:.1f} MiB of gathered weights at {peak.weights_pc}"
            grads = f"{peak.grads / _MIB:.1f} MiB of gradients in flight at {peak.grads_pc}"
            title = f"{kind}: {len(labels)} units, {ranks}; peak {weights}, {grads}"
            texts.append(f"{title}\n{compiled.program.text(labels)}")
        return "\n\n".join(texts) or "no pass has been recorded yet"


def _facts_of(unit: Unit, units: Sequence[Unit]) -> plan.UnitFacts:
    around = [other for other in units if other is not unit and contains(other, unit)]
    grads = [group.main_grad for group in unit.groups if group.main_grad is not None]
    return plan.UnitFacts(
        label=unit.label,
        parent=max(around, key=lambda other: len(other.fqn)).number if around else None,
        gathers=any(group.plan.gathers_weights or group.plan.gathers_after_install for group in unit.groups),
        numel=unit.gathered_numel,
        nbytes=unit.gathered_nbytes,
        refreshes=any(group.plan.refreshes_along_outer for group in unit.groups),
        reduces=bool(grads),
        staged_numel=sum(grad.staged_numel for grad in grads),
        staged_nbytes=sum(grad.staged_nbytes for grad in grads),
    )
