"""The executor of programs: hooks report where the model is, and the operations up to there run."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence

import torch
import torch.distributed as dist

from megatron_fsdp.config import EngineConfig
from megatron_fsdp.machine.collectives import GradScale
from megatron_fsdp.machine.device import Device
from megatron_fsdp.machine.torch_compat import (
    graph_task,
    in_backward,
    on_backward_end,
    uncompiled,
    without_overrides,
)
from megatron_fsdp.plan import program as plan
from megatron_fsdp.plan.program import AGAIN, BEGINS, ENTER, EXIT, GRAD, KEEP, OVER, Token
from megatron_fsdp.runtime.consensus import Consensus
from megatron_fsdp.runtime.gatherer import Gatherer
from megatron_fsdp.runtime.programs import Compiled, Key, Programs
from megatron_fsdp.runtime.reducer import Reducer
from megatron_fsdp.runtime.timeline import Watch
from megatron_fsdp.runtime.unit import Unit
from megatron_fsdp.state.param_group import ParamGroup

#: Of the memory that the first step leaves free, what residency may take; the rest is left to fragments.
_USABLE = 0.9


@dataclasses.dataclass(slots=True)
class Call:
    """One forward of a unit. The graph keeps it, so it refers to nothing of the model."""

    unit: int
    began: int
    """Event counter of the schedule at its beginning."""
    key: Key | None
    """Of the forward pass that it was in; None for recomputation."""
    forward: int
    """Number of that pass."""
    generation: int
    """Installs before it."""
    parent: Call | None
    """The call that it is inside of."""
    returned: int = 0
    """Event counter of the schedule at its return."""


@dataclasses.dataclass(slots=True)
class Pass:
    """One forward or backward that runs."""

    key: Key
    number: int
    compiled: Compiled | None
    """None: no program covers it; ranks ask each other before every all-gather."""
    at: int = 0
    """Markers that are behind it."""
    trace: list[Token] = dataclasses.field(default_factory=list)
    forwards: set[int] = dataclasses.field(default_factory=set)
    """Of a backward, numbers of the forwards whose graphs it has entered."""
    depth: int = 0
    """Of a backward, calls that were open when it began."""
    begun: set[int] = dataclasses.field(default_factory=set)
    """Of a backward, calls whose backward has begun, by when they began."""
    finished: collections.Counter[int] = dataclasses.field(default_factory=collections.Counter)
    """Of a backward, calls by unit whose backward is over."""
    reduced: set[int] = dataclasses.field(default_factory=set)
    """Of a backward without a program, units that it has reduced."""
    left: dict[int, list[tuple[int, int | None]]] = dataclasses.field(default_factory=dict)
    """Of a backward without a program, by unit its gradients when its calls so far were over."""
    whole: frozenset[int] = frozenset()
    """Of a backward inside a forward, the units that the forward has gathered."""


class Schedule:
    """Runs every unit's transitions at the right time; the same code on CUDA and CPU.

    The first pass of each kind runs in lockstep: ranks ask each other before every all-gather which unit is next. Its
    trace makes the program of the passes that follow, on every rank the same one. Then nobody asks: at an event all
    operations up to its marker run, those of units that this rank leaves out among them, so all ranks communicate in
    one order. A reshard is local: a rank that is inside a unit keeps it until it leaves.

    If all ranks were alike, what the program does not have is recorded in lockstep again, and the program grows. If
    they had differed, it raises: ranks cannot know of each other's events without asking in every step.

    `print(model.schedule)` shows the programs and the memory that they need.
    """

    def __init__(self, units: list[Unit], config: EngineConfig, device: Device, scales: dict[bool, GradScale]):
        self.units = units
        self.root = units[0]
        self.config = config
        self.device = device
        self.watch = Watch(device)
        self._reducer = Reducer(device, scales, self.watch)
        self._gatherer = Gatherer(device, self.watch)
        # Memory that goes when the model does must not be handed out again while another stream still uses it.
        weakref.finalize(self, device.join, (*self._reducer.streams, *self._gatherer.streams)).atexit = False
        self._consensus = Consensus.of(units, device.torch_device)
        self.programs = Programs(units, config, self._consensus, _binder(weakref.proxy(self)))
        self._decides_residency = config.fsdp_residency_bytes == "auto" and device.is_cuda and len(units) > 1
        # -- where the step is, the same on all ranks --
        self._phase = ""
        self._whole = {unit.number for unit in units if not unit.needs_gather}
        """Units that the programs run so far have left gathered."""
        self._forward: Pass | None = None
        self._backward: Pass | None = None
        self._passes = 0
        self._last_key: Key | None = None
        """Of the last forward."""
        self._shared: dict[Key, int] = {}
        """By key of a forward, through how many the last backward went, where it was more than one."""
        self._finalizes = False
        """The backward that runs is the last of its cycle."""
        self.generation = 0
        """Counts changes of compute weights: a backward belongs to the weights of its forward."""
        self.lost_weights: list[str] | None = None
        """Parameters whose installed values a step without install has overwritten; None: no such step since."""
        # -- where this rank is --
        self.events = 0
        """That have been reported; with it calls are ordered."""
        self._open: list[Call] = []
        """Calls that have not returned, the innermost one last."""
        self._used = [0] * len(units)
        """Number of uses of each unit: calls in forward, uses in backward, and holds."""
        self._uses: list[tuple[int, int, int]] = []
        """Calls whose backward runs: unit, when the call began, and the graph task."""
        self._held: set[int] = set()
        """Units recomputed in this backward whose own backward is to come."""
        self._lenders: set[int] = set()
        """Units that returned views of their weights to a forward that runs or whose backward may come."""
        self._awaited = 0
        """Backwards that forwards since the last install may bring."""
        self.model_auto_sync = False
        self.is_last_microbatch = True
        self.microbatch_count = 0
        self._has_run = False
        """Some backward is over: memory has been used as it will be."""
        self.taken_by: str | None = None
        """Name of the context that shows parameters of its own; until it ends, no forward can run."""
        self.on_order: Callable[[Sequence[Unit]], bool] = lambda units: True
        """Called between steps with the order in which units were found to run, until it says that it has taken it."""
        self._order_taken: tuple[int, ...] = ()
        self.on_auto_sync = lambda: None
        """Called at the end of a backward when `model_auto_sync` is on."""

    # -- what users see -------------------------------------------------------------------------------------------

    def __str__(self) -> str:
        """Every program with its peak memory, and where the passes that run are."""
        return "\n\n".join(filter(None, [str(self.programs), self.where()]))

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Inside, passes have programs of their own: for steps that run other parts of the model, on all ranks."""
        before, self._phase = self._phase, name
        try:
            yield
        finally:
            self._phase = before

    def forget(self) -> None:
        """Drops all programs: the next pass of each kind is recorded anew. Call it between steps, on all ranks.

        Raises:
            RuntimeError: the model runs.
        """
        if self.is_running:
            raise RuntimeError("model.schedule.forget() inside the model's forward or backward; call it between steps.")
        self.rest()
        self.programs.forget()
        self._shared.clear()

    def where(self) -> str:
        """Rank, pass, program counter, next operation and last event of each pass that runs, or which was the last."""
        running = [each for each in (self._forward, self._backward) if each is not None]
        return "; ".join(map(self._where, running)) or f"rank {dist.get_rank()}, after pass {self._passes}"

    def _where(self, running: Pass) -> str:
        label = [unit.label for unit in self.units].__getitem__
        text = f"rank {dist.get_rank()}, pass {running.number} ({running.key.text(self.units)}), "
        if running.compiled is None:
            text += "not in a program"
        else:
            ops = running.compiled.program.ops
            pc = (*running.compiled.starts, len(ops))[running.at]
            text += f"operation {pc} of {len(ops)}: " + (f"{ops[pc].kind} {label(ops[pc].unit)}" if ops[pc:] else "end")
        return text + (f", last event: {running.trace[-1][0]} {label(running.trace[-1][1])}" if running.trace else "")

    @property
    def resident(self) -> list[Unit]:
        """Units that stay gathered until the optimizer steps."""
        return [self.units[number] for number in sorted(self.programs.resident)]

    @property
    def gather_stream(self) -> object:
        """Stream on which gathered weights get their storage and give it back."""
        return self._gatherer.streams[0]

    @property
    def is_running(self) -> bool:
        """A forward, or a backward, is not over."""
        return self._forward is not None or self._backward is not None or in_backward()

    def in_forward_of(self, unit: Unit) -> bool:
        """A forward that began with this unit, the root or one called by hand, has not ended."""
        return self._forward is not None and self._forward.key.unit == unit.number

    # -- events of forward ----------------------------------------------------------------------------------------

    def enter(self, unit: Unit) -> bool:
        """The unit's module is about to run; says if a pass begins. **Collective**, as every event may be."""
        if self._backward is not None:
            self.end_interrupted_backward()
        begins = self._forward is None or unit.is_root
        if begins:
            self._begin_forward(unit)
        running = self._forward
        self._open_call(unit, running.key, running.number)
        self._used[unit.number] += 1
        self._reach(running, (ENTER, unit.number))
        self._show(unit)
        return begins

    def _open_call(self, unit: Unit, key: Key | None, forward: int) -> None:
        self.events += 1
        parent = self._open[-1] if self._open else None
        self._open.append(Call(unit.number, self.events, key, forward, self.generation, parent))

    def returned(self, unit: Unit) -> Call | None:
        """The unit's module has run, in forward or inside backward; gives the call that is over."""
        self.events += 1
        while self._open:  # a checkpoint stops its recomputation early, and then nothing returns
            call = self._open.pop()
            if call.unit == unit.number:
                call.returned = self.events
                return call
        return None

    def exit(self, unit: Unit, *, awaits_backward: bool, lends: bool) -> None:
        """The unit's module has run in forward. The root stays gathered until its backward is over, if one may come.

        A unit that `lends` its weights, whose output views them, stays in use on this rank as long.
        """
        running, number = self._forward, unit.number
        if running is None:
            return
        self._used[number] -= 1
        if number == running.key.unit and not self._open:  # a unit may call itself
            self._end_forward(running, keeps=awaits_backward and unit.is_root)
            return
        if lends and running.key.unit == 0:
            self._lenders.add(number)
        self._let_go(number)
        self._reach(running, (EXIT, number))

    def _begin_forward(self, unit: Unit) -> None:
        if self._forward is not None:  # it raised, and nothing told
            self.abort_forward()
        if self._lenders and not self._awaited:
            self.release()
        self._gatherer.follow()
        self._last_key = Key(unit.number, torch.is_grad_enabled(), self._phase)
        self._forward = self._begin(self._last_key)
        self._open.clear()

    def _begin(self, key: Key) -> Pass:
        """A new pass; reshards what the last one has left gathered and this one does not begin with."""
        self._passes += 1
        compiled = self.programs.get(key)
        if compiled is not None and self._forward is None:
            self._release_all(compiled.head)
        return Pass(key, self._passes, compiled)

    def _end_forward(self, running: Pass, *, keeps: bool) -> None:
        """The forward of the pass's own unit is over: runs the rest of the program, or records it. **Collective**."""
        own = running.key.unit
        running.trace.append((KEEP if keeps else EXIT, own))
        self._finish(running)
        if running.compiled is None:
            self._record(running)
            if (KEEP, own) in self.programs.recorded(running.key).trace:
                self._whole.add(own)
        self._forward = None
        self._awaited += keeps
        self._end_loans()
        self._let_go_of_all(kept=own if keeps else -1)

    def abort_forward(self) -> None:
        """The forward that runs was interrupted; no more of it will come. **Collective**.

        Other ranks may go on with the pass, or have come to another place of it: this rank takes part in the rest.
        """
        running, self._forward = self._forward, None
        self._open.clear()
        if running is not None:
            self._finish(running)
        self.settle()

    # -- events of backward ---------------------------------------------------------------------------------------

    def recompute(self, unit: Unit) -> None:
        """The unit's module is about to run inside backward; it stays gathered for its own backward, which follows."""
        running, number = self._backward or self._begin_backward(None), unit.number
        self._open_call(unit, None, 0)
        if number not in self._held:
            self._held.add(number)
            self._used[number] += 1
        self._end_uses(running, self.events, graph_task())
        self._reach(running, (AGAIN, number))
        self._show(unit)

    def gradient_arrived(self, unit: Unit, call: Call) -> None:
        """The gradient of the output of a unit's `call` is there.

        The calls around it begin their backward first, although their own gradient may come later or in the same
        tensor: so one order holds whatever a rank leaves out at their ends.
        """
        running, task = self._backward or self._begin_backward(call.key), graph_task()
        if call.key is not None and call.forward not in running.forwards:
            self._enter_graph(running, call.forward)
        del self._open[running.depth :]  # of recomputation that was stopped early
        begin: list[Call] = []
        each: Call | None = call
        while each is not None and each.began not in running.begun:
            begin.append(each)
            each = each.parent
        for each in reversed(begin):
            self._begin_use(running, each, task)

    def _begin_use(self, running: Pass, call: Call, task: int) -> None:
        number = call.unit
        self.events += 1
        running.begun.add(call.began)
        self._uses.append((number, call.began, task))
        self._used[number] += 1
        self._end_uses(running, call.returned or self.events, task)
        self._reach(running, (GRAD, number))
        self._show(self.units[number])

    def _begin_backward(self, key: Key | None) -> Pass:
        for unit in self._reducer.in_flight:  # of the micro-batch before
            self._reducer.drain(unit)
        forward = key or self._last_key or Key(0, False, self._phase)  # the first forward runs in another backward
        self._backward = running = self._begin(forward.backward(self._shared.get(forward, 1)))
        running.depth = len(self._open)
        running.whole = frozenset(self._whole if self._forward is not None else ())
        self._finalizes = self.config.overlap_grad_reduce and (self.model_auto_sync or self.is_last_microbatch)
        on_backward_end(self.finish_backward)
        return running

    def _enter_graph(self, running: Pass, forward: int) -> None:
        """The backward goes on in the graph of another forward: known, or recorded anew, if all ranks run the same.

        Raises:
            NotImplementedError: they do not, so that each has come to another place of the other forward.
        """
        running.forwards.add(forward)
        if len(running.forwards) == 1:
            return
        recorded = self.programs.recorded(running.key.forward)
        if recorded is not None and not recorded.is_spmd:
            self._finish(running)  # so that no rank waits for one that has raised
            raise NotImplementedError(
                "ranks run different units in this model, and several of its forwards share one backward, in which "
                "ranks could wait for each other for ever; call backward for each forward's loss by itself."
            )
        if running.compiled is not None and len(running.forwards) > running.key.forwards:
            self._leave_program(running)

    def _end_uses(self, running: Pass, since: int, task: int) -> None:
        """Ends the uses of calls that began after event `since`, or in a graph task inside `task`.

        Autograd runs nodes in the reverse of the order in which forward made them. So when the gradient of a call's
        output arrives, the backward of whatever began after that call had returned is over.
        """
        ended = [use for use in self._uses if use[1] > since or use[2] > task]
        if not ended:
            return
        self._uses = [use for use in self._uses if not (use[1] > since or use[2] > task)]
        left = {number for number, _, _ in self._uses}
        for number, _, _ in ended:
            self._used[number] -= 1
            running.finished[number] += 1
            if number in self._held and number not in left:
                self._held.discard(number)
                self._used[number] -= 1
        for number in dict.fromkeys(number for number, _, _ in ended):
            if not self._used[number]:
                running.trace.append((OVER, number))
                if running.compiled is None:
                    running.left[number] = self.units[number].grad_versions()
                self._let_go(number)

    @uncompiled
    def finish_backward(self) -> None:
        """The outermost backward is over: runs the rest of the program, or records it. **Collective**."""
        running = self._backward
        running.trace += [(OVER, number) for number in dict.fromkeys(number for number, _, _ in reversed(self._uses))]
        self._end_all_uses()
        running.trace += [(OVER, number) for number in self._used_elsewhere(running)]
        self._finish(running)
        if running.compiled is None:
            self._reduce_the_rest(running)
            running.key = running.key.backward(max(1, len(running.forwards)))
            self._record(running)
        else:
            self._check_strays(running)
        self._shared.pop(running.key.forward, None)
        if len(running.forwards) > 1:
            self._shared[running.key.forward] = len(running.forwards)
        self._end_backward(running)
        self.microbatch_count += 1
        self._has_run = True
        if self.model_auto_sync and self._forward is None:  # a backward inside a forward leaves that its weights
            self.on_auto_sync()

    def _used_elsewhere(self, running: Pass) -> list[int]:
        """Units whose gradients have grown since they were left: of weights that they had returned to others."""
        strays = self.strays() if running.left else []
        return [
            number
            for number, grads in running.left.items()
            if (unit := self.units[number]) in strays
            if number in running.reduced or unit.grad_versions() != grads
        ]

    def _end_all_uses(self) -> None:
        for number in (*(use[0] for use in self._uses), *self._held):
            self._used[number] -= 1
        self._uses.clear()
        self._held.clear()

    def _check_strays(self, running: Pass) -> None:
        """Raises RuntimeError if gradients have come after their reduction: they would be lost."""
        late = self.strays()
        if late:
            raise RuntimeError(
                f"gradients of unit {late[0].label} came after their place in the program ({self._where(running)}). "
                "Call model.schedule.forget() on all ranks between steps, and run every unit in the first one."
            )

    def strays(self) -> list[Unit]:
        """Units with gradients that no reduction has taken, in the order of registration."""
        with without_overrides():
            return [unit for unit in self.units if any(param.grad is not None for param in unit.trainable)]

    def _end_backward(self, running: Pass) -> None:
        self.watch.turn_back(None)
        self._backward = None
        self._awaited = max(0, self._awaited - max(1, len(running.forwards)))
        self._let_go_of_all()
        for number in sorted(running.whole - self._whole):  # the forward around it goes on where it was
            self._gather(number)

    def end_interrupted_backward(self) -> None:
        """Reshards what a backward that raised has left behind, and forgets its gradients; nothing if none did."""
        if self._backward is None or in_backward():
            return
        running = self._backward
        self._reducer.wait()
        for group in (group for unit in self.units for group in unit.groups if group.main_grad is not None):
            group.main_grad.discard()
        self._end_all_uses()
        self._finish(running)  # other ranks may have come farther
        self._reducer.wait()
        self._release_all()
        self._open.clear()
        self._end_backward(running)

    # -- running a program ----------------------------------------------------------------------------------------

    def _reach(self, running: Pass, token: Token) -> None:
        """The rank has come to an event of the pass: runs what the program has in front of it. **Collective**."""
        running.trace.append(token)
        compiled, at = running.compiled, running.at
        if compiled is not None:
            if at < len(compiled.markers) and compiled.markers[at] == token:
                for operation in compiled.segments[at]:
                    operation()
                running.at = at + 1
                return
            place = compiled.find(token, at)
            if place is not None:
                self._run(running, place + 1)
                return
            self._leave_program(running)
        if token[0] in BEGINS:
            self._lockstep(running, token[1])

    def _run(self, running: Pass, stop: int) -> None:
        """Runs the segments before number `stop`. **Collective**."""
        while running.at < stop:
            for operation in running.compiled.segments[running.at]:
                operation()
            running.at += 1

    def _finish(self, running: Pass) -> None:
        """Runs what is left of a pass, for this rank and for others. **Collective**."""
        if running.compiled is None:
            self._lockstep(running, None)
        else:
            self._run(running, len(running.compiled.segments))

    def _leave_program(self, running: Pass) -> None:
        """An event that the program does not have: the rest of the pass runs in lockstep, if ranks were alike.

        Raises:
            RuntimeError: they had differed when the program was recorded.
        """
        compiled = running.compiled
        if not compiled.program.is_spmd:
            where = self._where(running)
            self._finish(running)  # so that no rank waits for this one
            raise RuntimeError(
                f"{where} is not in its program from there on, and ranks ran different units when it was recorded. "
                "Call model.schedule.forget() on all ranks between steps and run every unit in the first one, or give "
                "steps that run other units a model.schedule.phase()."
            )
        (furthest,) = self._consensus.largest([running.at])
        self._run(running, furthest)
        done = compiled.program.ops[: compiled.starts[furthest]]
        running.reduced = {op.unit for op in done if op.kind == plan.REDUCE}
        running.compiled = None
        self._release_all()

    # -- operations -----------------------------------------------------------------------------------------------

    def _gather(self, number: int, *, stays: bool = True) -> None:
        """An all-gather that all ranks make, whatever each of them holds. **Collective**.

        Args:
            number: of the unit; nothing happens if the programs so far have left it gathered.
            stays: a program will reshard it.
        """
        if number in self._whole:
            return
        if stays:
            self._whole.add(number)
        self._gatherer.gather(self.units[number])

    def _release(self, number: int) -> None:
        self._whole.discard(number)
        self._let_go(number)

    def _release_all(self, kept: Collection[int] = ()) -> None:
        """Reshards what programs have left gathered, but for residents and `kept`; this rank keeps what it uses."""
        for number in sorted(self._whole & self.programs.comes_and_goes - self.programs.resident - set(kept)):
            self._release(number)

    def _let_go(self, number: int) -> None:
        """Shows the unit's shards, and reshards it, as far as neither this rank nor a program needs more of it."""
        if self._used[number]:
            return
        unit = self.units[number]
        if number in self._whole or number in self._lenders:
            unit.show_sharded()
        else:
            self._gatherer.reshard(unit)

    def _let_go_of_all(self, kept: int = -1) -> None:
        """A pass is over, or nothing runs: see `_let_go`. The unit `kept` shows its full parameters all the same."""
        for unit in self.units:
            if (unit.shows_unsharded or unit.is_gathered) and unit.number != kept:
                self._let_go(unit.number)

    def _finalize(self, number: int) -> None:
        if self._finalizes:
            self._reducer.finalize(self.units[number])

    def _show(self, unit: Unit) -> None:
        """Lets the unit's modules see its full parameters, which the compute stream has waited for."""
        if unit.gather_event is not None or unit.refresh_event is not None:
            self._gatherer.wait_for(unit)
        unit.show_unsharded()

    # -- passes that no program covers ----------------------------------------------------------------------------

    def _lockstep(self, running: Pass, wanted: int | None) -> None:
        """Gathers what ranks want next, the lowest unit first, until that is `wanted`. **Collective**.

        Args:
            running: the pass, on all ranks.
            wanted: what this rank is about to use; None once its pass is over, until those of all ranks are.
        """
        none = len(self.units)
        stay = self.programs.resident | set(range(none)) - self.programs.comes_and_goes
        while True:
            claims = self._claims(running) if running.key.forwards else []
            lowest, *reducible = self._consensus.smallest([none if wanted is None else wanted, *claims])
            for number in reversed([number for number, is_agreed in enumerate(reducible) if is_agreed]):
                if number not in running.reduced:
                    self._reduce_in_lockstep(running, self.units[number])
            if lowest == none:
                return
            self._gather(lowest, stays=lowest in stay)
            if lowest == wanted:
                return
            self._let_go(lowest)

    def _claims(self, running: Pass) -> list[bool]:
        """By unit, whether this rank is sure that no more of its gradients will come in this backward."""
        claims = [False] * len(self.units)
        for number, count in running.finished.items():
            is_over = count >= self.programs.calls(running.key.forward, number) and not self._used[number]
            unit = self.units[number]
            claims[number] = is_over and bool(unit.trainable) and unit.has_all_grads()
        return claims

    def _reduce_in_lockstep(self, running: Pass, unit: Unit) -> None:
        running.reduced.add(unit.number)
        self._make_room(unit)
        self._reducer.reduce(unit)
        self._finalize(unit.number)

    def _reduce_the_rest(self, running: Pass) -> None:
        """Reduces what has not been, and what came in later parts on some rank; the root last. **Collective**."""
        trained = [unit for unit in reversed(self.units) if unit.trainable]
        strays = self.strays()
        late = self._consensus.largest([unit in strays for unit in trained])
        for unit, is_late in zip(trained, late, strict=True):
            if is_late or unit.number not in running.reduced:
                self._reduce_in_lockstep(running, unit)

    def _make_room(self, unit: Unit) -> None:
        """Drains what must be before the unit's gradients are staged: as the program has it, or by the same rule."""
        running, facts = self._backward, self.programs.facts
        if running is not None and running.compiled is not None:
            for number in running.compiled.drains.get(unit.number, ()):
                self._reducer.drain(self.units[number])
            return
        for oldest in self._reducer.in_flight:
            staging = (other for other in self.units if other is not unit and other.has_staged_grads)
            staged = [facts[other.number].staged_numel for other in (*self._reducer.in_flight, *staging)]
            numel = facts[unit.number].staged_numel
            if numel and self.programs.in_flight.is_full(staged, numel):
                self._reducer.drain(oldest)

    def _record(self, running: Pass) -> None:
        """The pass is over, in lockstep: makes its program; nothing but residents is left gathered. **Collective**."""
        self._whole -= self.programs.comes_and_goes - self.programs.resident
        self.programs.record(running.key, tuple(running.trace))

    # -- reductions -----------------------------------------------------------------------------------------------

    def lend_gradient(self, unit: Unit, group: ParamGroup, slot: int) -> torch.Tensor | None:
        """Memory in which backward may compute the gradient of parameter `slot` of `group`; None: other memory."""
        if not unit.has_staged_grads:
            self._make_room(unit)
        return self._reducer.lend(unit, group, slot)

    def watch_own_grads(self, watcher: Callable[[ParamGroup], None]) -> None:
        """Shows `watcher` every group whose gradients are complete, before they are reduced, on the current stream."""
        self._reducer.before_collect = watcher

    def wait_for_reductions(self) -> None:
        """Makes the current stream wait for every reduction that has been started."""
        self._reducer.wait_without_forgetting()

    def finalize_open(self) -> None:
        """Starts every reduction that was deferred to the end of the cycle. **Collective**."""
        for number in self.programs.reduction_order(self._phase):
            self._reducer.finalize(self.units[number])

    def finish_reductions(self) -> None:
        """Finalizes what is still open, and makes the current stream wait for every reduction. **Collective**."""
        self.end_interrupted_backward()
        for unit in reversed(self.strays()):  # of a backward that went through no unit's output
            self._reducer.reduce(unit)
        self.finalize_open()
        self._reducer.wait()

    # -- the rest of a step ---------------------------------------------------------------------------------------

    def install(self) -> None:
        """Makes every compute weight follow its main weight. **Collective** if a codec is, and once for residency."""
        self._awaited = 0
        self.rest()
        for unit in self.units:
            for group in unit.groups:
                group.install()
        self._gatherer.follow_install()
        self._whole = {unit.number for unit in self.units if not unit.needs_gather}
        self.generation, self.lost_weights = self.generation + 1, None
        if not self._has_run:
            return
        order = self.programs.forward_order()
        if self._decides_residency:
            self._decides_residency = False
            self.programs.keep_resident(int(_USABLE * self.device.free_nbytes()), [unit for unit in order if unit])
        if order != self._order_taken and self.on_order([self.units[number] for number in order]):
            self._order_taken = order

    def gather_ahead(self) -> None:
        """Starts the gathers that the next forward needs first. **Collective**."""
        self._gatherer.follow()
        compiled = self.programs.get(Key(0, torch.is_grad_enabled(), self._phase))
        if compiled is None:
            self._gather(0)
            return
        for operation in compiled.segments[0]:
            operation()

    def gather_all(self) -> None:
        """Rebuilds every resting weight that is not current. **Collective**."""
        self._gatherer.follow()
        for unit in self.units:
            if not unit.gathers_weights:
                self._gather(unit.number)

    def release(self) -> None:
        """Reshards weights that are not resident, and shows sharded parameters everywhere."""
        self._end_loans()
        self._whole -= self.programs.comes_and_goes - self.programs.resident
        self._let_go_of_all()

    def rest(self) -> None:
        """Reshards every weight and shows sharded parameters everywhere."""
        self._end_loans()
        self._whole -= self.programs.comes_and_goes
        self._let_go_of_all()

    def _end_loans(self) -> None:
        """Forgets units that lent their weights, once the forwards they lent them to have had their backwards."""
        if not self._awaited:
            self._lenders.clear()

    def settle(self) -> None:
        """Makes the current stream wait for every gather, reshards and shows sharded parameters."""
        for unit in self.units:
            self._gatherer.wait_for(unit)
        self._used = [0] * len(self._used)
        self.rest()


def _binder(schedule: Schedule) -> Callable[[plan.Op], Callable[[], None]]:
    """Makes operations callables without arguments, which keep no schedule alive."""

    def bind(op: plan.Op) -> Callable[[], None]:
        unit = schedule.units[op.unit]
        operations = {
            plan.REFRESH: (schedule._gatherer.refresh, unit),
            plan.GATHER: (functools.partial(Schedule._gather, schedule), op.unit),
            plan.WAIT: (schedule._gatherer.wait_for, unit),
            plan.RELEASE: (functools.partial(Schedule._release, schedule), op.unit),
            plan.DRAIN: (schedule._reducer.drain, unit),
            plan.REDUCE: (schedule._reducer.reduce, unit),
            plan.FINALIZE: (functools.partial(Schedule._finalize, schedule), op.unit),
        }
        return functools.partial(*operations[op.kind])

    return bind
