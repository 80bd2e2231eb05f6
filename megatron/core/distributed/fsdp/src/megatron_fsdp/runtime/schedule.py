"""The executor of programs: hooks report where the model is, and the operations up to there run."""

from __future__ import annotations

import bisect
import collections
import contextlib
import dataclasses
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import nn

from megatron_fsdp.config import EngineConfig
from megatron_fsdp.machine.collectives import GradScale
from megatron_fsdp.machine.device import Device, Stream
from megatron_fsdp.machine.torch_compat import graph_task, in_backward, on_backward_end, uncompiled, without_overrides
from megatron_fsdp.plan import program as plan
from megatron_fsdp.plan.program import Program, Token
from megatron_fsdp.runtime.communication import Gatherer, Reducer
from megatron_fsdp.runtime.programs import Consensus, Key, Programs
from megatron_fsdp.runtime.timeline import Timeline
from megatron_fsdp.runtime.unit import Unit
from megatron_fsdp.state.param_group import ParamGroup

#: Of the memory that the first step leaves free, the part that residency may take; the rest is left to fragments.
_USABLE = 0.9


@dataclasses.dataclass(slots=True, eq=False)
class UnitCall:
    """One forward of a unit. The graph keeps it, so it refers to nothing of the model."""

    unit: int
    began: int
    """Event counter of the schedule at its beginning."""
    parent: UnitCall | None
    """The call that it is inside of."""
    key: Key | None
    """Of the forward pass that it was in; None for recomputation."""
    forward: int
    """Number of that pass."""
    generation: int
    """Installs before it."""
    returned: int = 0
    """Event counter of the schedule at its return."""
    backward: int = 0
    """Number of the last backward pass that has come to it."""


@dataclasses.dataclass(slots=True)
class Pass:
    """One forward or backward that runs."""

    key: Key
    number: int
    program: Program | None
    """None: no program covers it; ranks ask each other before every all-gather."""
    pc: int = 0
    """The next operation of the program."""
    trace: list[Token] = dataclasses.field(default_factory=list)
    # -- of a backward --
    forward: int = 0
    """Number of the forward whose graph it entered last."""
    is_last: bool = False
    """It is the last one of its cycle."""
    depth: int = 0
    """Calls that were open when it began: it runs inside them."""
    gathered_around: frozenset[int] = frozenset()
    """Units that the forward around it has gathered."""
    uses: list[tuple[int, int, int]] = dataclasses.field(default_factory=list)
    """Calls whose backward runs: unit, when the call began, and the graph task."""
    recomputed: set[int] = dataclasses.field(default_factory=set)
    """Units whose own backward is to come after their recomputation; they stay gathered until it is over."""
    finished: collections.Counter[int] = dataclasses.field(default_factory=collections.Counter)
    """Calls by unit whose backward is over."""
    reduced: set[int] = dataclasses.field(default_factory=set)
    """Without a program: units that have been reduced."""


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
        self.timeline = Timeline(device)
        self._reducer = Reducer(device, self.timeline, scales)
        self._gatherer = Gatherer(device, self.timeline)
        # Memory that goes when the model does must not be handed out again while another stream still uses it.
        weakref.finalize(self, device.join, (*self._reducer.streams, *self._gatherer.streams)).atexit = False
        self._consensus = Consensus.of(units, device.torch_device)
        self.programs = Programs(units, config, self._consensus)
        self._decides_residency = config.fsdp_residency_bytes == "auto" and device.is_cuda and len(units) > 1
        # -- the same on all ranks --
        self._phase = ""
        self._gathered = {unit.number for unit in units if not unit.needs_gather}
        """Units that the programs run so far have left gathered."""
        self._forward: Pass | None = None
        self._backward: Pass | None = None
        self._passes = 0
        self._last_forward = Key(0, False, "")
        self.generation = 0
        """Counts changes of compute weights: a backward belongs to the weights of its forward."""
        self.lost_weights: list[str] | None = None
        """Parameters whose installed values a step without install has overwritten; None: no such step since."""
        self.model_auto_sync = False
        self.is_last_microbatch = True
        self.microbatch_count = 0
        self.blocked_by: str | None = None
        """The context that shows parameters of its own in the modules; until it ends, no forward can run."""
        # -- this rank's own --
        self.events = 0
        """Events reported so far; calls are ordered by them."""
        self._open: list[UnitCall] = []
        """Calls that have not returned, the innermost one last."""
        self.on_order: Callable[[Sequence[Unit]], bool] = lambda units: True
        """Called between steps with units in the order in which they run, until it returns True for that order."""
        self._reported_order: tuple[int, ...] = ()
        self.on_auto_sync = lambda: None
        """Called at the end of a backward when `model_auto_sync` is on."""

    # -- for users ------------------------------------------------------------------------------------------------

    def __str__(self) -> str:
        """Every program with its peak memory, and where the passes that run are."""
        return f"{self.programs}\n\n{self.where()}"

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
        self.check_idle("model.schedule.forget()")
        self.reshard_all()
        self.programs.forget()

    def where(self) -> str:
        """Rank, pass, program counter, next operation and last event of each pass that runs, or which was the last."""
        running = [each for each in (self._forward, self._backward) if each is not None]
        return "; ".join(map(self._where, running)) or f"rank {dist.get_rank()}, after pass {self._passes}"

    def _where(self, running: Pass) -> str:
        text = f"rank {dist.get_rank()}, pass {running.number} ({running.key.text(self.units)}), "
        if running.program is None:
            text += "not in a program"
        else:
            ops = running.program.ops
            following = [f"{op.kind} {self.units[op.unit].label}" for op in ops[running.pc :][:1]]
            text += f"operation {running.pc} of {len(ops)}: {''.join(following) or 'end'}"
        return text + "".join(f", last event: {event} {self.units[n].label}" for event, n in running.trace[-1:])

    @property
    def resident(self) -> list[Unit]:
        """Units that stay gathered until the optimizer steps."""
        return [self.units[number] for number in sorted(self.programs.resident)]

    @property
    def gather_stream(self) -> Stream:
        """The stream on which gathered weights get their storage and give it back."""
        return self._gatherer.streams[0]

    @property
    def is_running(self) -> bool:
        """A forward, or a backward, is not over."""
        return self._forward is not None or self._backward is not None or in_backward()

    # -- preconditions --------------------------------------------------------------------------------------------

    def check_unblocked(self, action: str) -> None:
        """Raises RuntimeError if a context shows parameters of its own in the modules."""
        if self.blocked_by is not None:
            raise RuntimeError(f"{action} inside {self.blocked_by} would not see its parameters; leave it first.")

    def check_idle(self, action: str) -> None:
        """Raises RuntimeError if the model runs, or a context shows parameters of its own in the modules."""
        self.end_interrupted_backward()
        if self.is_running:
            raise RuntimeError(
                f"{action} inside the model's forward or backward would take its weights away; call it before or after."
            )
        self.check_unblocked(action)

    def note_uninstalled_step(self, stepped: Iterable[nn.Parameter]) -> None:
        """Records that main weights of these sharded parameters have changed, and kept compute weights have not.

        Where compute weights are not kept, no forward runs, and no earlier forward has a backward, until `install`.
        """
        stepped_ids = set(map(id, stepped))
        groups = [group for unit in self.units for group in unit.groups if not group.keeps_installed]
        overwritten = {id(param) for group in groups if group.requires_grad for param in group.params}
        params = (param for unit in self.units for param in unit.params if id(param.unsharded) in overwritten)
        lost = [param.fqn for param in params if id(param.sharded) in stepped_ids]
        self.generation += bool(lost)
        self.lost_weights = [*dict.fromkeys([*(self.lost_weights or ()), *lost])]

    @contextlib.contextmanager
    def showing_sharded(self) -> Iterator[None]:
        """Inside, modules show sharded parameters, whatever they are doing; nothing is gathered or released."""
        shown = [unit for unit in self.units if unit.shows_unsharded]
        for unit in shown:
            unit.show_sharded()
        try:
            yield
        finally:
            for unit in shown:
                unit.show_unsharded()

    # -- events of forward ----------------------------------------------------------------------------------------

    def enter(self, unit: Unit) -> bool:
        """Reports that the unit's module is about to run; says if a pass begins. **Collective**, like every event."""
        if self._backward is not None:
            self.end_interrupted_backward()
        begins = self._forward is None or unit.is_root
        if begins:
            self._begin_forward(unit)
        running = self._forward
        assert running is not None, "a forward has begun"
        self._open_call(unit, running.key, running.number)
        self._reach(running, plan.ENTER, unit.number)
        unit.show_unsharded()
        return begins

    def exit(self, unit: Unit, *, awaits_backward: bool) -> UnitCall | None:
        """Reports that the unit's module has run, in forward or inside backward; gives the call that is over.

        The root stays gathered until its backward is over, if one may come.
        """
        self.events += 1
        running, number, call = self._forward, unit.number, None
        while self._open and call is None:  # a checkpoint stops its recomputation early, and then nothing returns
            last = self._open.pop()
            if last.unit == number:
                call, last.returned = last, self.events
        if running is None or in_backward():
            return call
        if number == running.key.unit and not self._open:  # a unit may call itself
            self._end_forward(running, keeps=awaits_backward and unit.is_root)
        else:
            self._reshard_unused(number)
            self._reach(running, plan.EXIT, number)
        return call

    def _open_call(self, unit: Unit, key: Key | None, forward: int) -> None:
        self.events += 1
        parent = self._open[-1] if self._open else None
        self._open.append(UnitCall(unit.number, self.events, parent, key, forward, self.generation))

    def _begin_forward(self, unit: Unit) -> None:
        if self._forward is not None:  # it raised, and nothing told
            self.abort_forward()
        self._gatherer.wait_for_compute()
        self._last_forward = Key(unit.number, torch.is_grad_enabled(), self._phase)
        self._forward = self._begin(self._last_forward)
        self._open.clear()

    def _begin(self, key: Key) -> Pass:
        """A new pass; reshards what the last one has left gathered and this one does not begin with."""
        self._passes += 1
        program = self.programs.get(key)
        if program is not None and self._forward is None:
            self._reshard_gathered(self.programs.resharded - program.gathered_first)
        return Pass(key, self._passes, program)

    def _end_forward(self, running: Pass, *, keeps: bool) -> None:
        """The forward of the pass's own unit is over: runs the rest of the program, or records it. **Collective**."""
        own = running.key.unit
        running.trace.append((plan.KEEP if keeps else plan.EXIT, own))
        self._finish(running)
        if running.program is None:
            self._record(running)
            if (plan.KEEP, own) in self.programs.recorded[running.key].trace:
                self._gathered.add(own)
        self._forward = None
        self._reshard_all_unused(kept=own if keeps else -1)

    def aborts_forward(self, unit: Unit) -> bool:
        """The forward that runs began with this unit, whose module has raised."""
        return self._forward is not None and self._forward.key.unit == unit.number

    def abort_forward(self) -> None:
        """The forward that runs was interrupted; no more of it will come. **Collective**.

        Other ranks may go on with the pass, or have come to another place of it: this rank takes part in the rest.
        """
        running, self._forward = self._forward, None
        self._open.clear()
        if running is not None:
            self._finish(running)
        self.reshard_all()

    # -- events of backward ---------------------------------------------------------------------------------------

    def recompute(self, unit: Unit) -> None:
        """Reports that the unit's module is about to run inside backward; it stays gathered for its own backward."""
        running = self._backward or self._begin_backward(self._last_forward)
        self._open_call(unit, None, 0)
        running.recomputed.add(unit.number)
        self._end_uses(running, self.events, graph_task())
        self._reach(running, plan.AGAIN, unit.number)
        unit.show_unsharded()

    def gradient_arrived(self, call: UnitCall) -> None:
        """Reports the gradient of the output of a unit's `call`.

        The calls around it begin their backward first, although their own gradient may come later or in the same
        tensor: so one order holds whatever a rank leaves out at their ends.
        """
        running, task = self._backward or self._begin_backward(call.key or self._last_forward), graph_task()
        if call.key is not None and call.forward != running.forward:
            self._enter_graph(running, call.forward)
        del self._open[running.depth :]  # of recomputation that was stopped early
        begin: list[UnitCall] = []
        each: UnitCall | None = call
        while each is not None and each.backward != running.number:
            begin.append(each)
            each = each.parent
        for each in reversed(begin):
            self.events += 1
            each.backward = running.number
            running.uses.append((each.unit, each.began, task))
            self._end_uses(running, each.returned or self.events, task)
            self._reach(running, plan.GRAD, each.unit)
            self.units[each.unit].show_unsharded()

    def _begin_backward(self, forward: Key) -> Pass:
        for unit in list(self._reducer.in_flight):  # of the micro-batch before
            self._reducer.drain(unit)
        self._backward = running = self._begin(forward._replace(is_backward=True))
        running.depth = len(self._open)
        running.gathered_around = frozenset(self._gathered if self._forward is not None else ())
        running.is_last = self.config.overlap_grad_reduce and (self.model_auto_sync or self.is_last_microbatch)
        on_backward_end(self.finish_backward)
        return running

    def _enter_graph(self, running: Pass, forward: int) -> None:
        """The backward has come to the graph of another forward.

        Raises:
            NotImplementedError: ranks run different units, so each has come to another place of the other forward.
        """
        recorded = self.programs.recorded.get(running.key._replace(is_backward=False))
        if running.forward and recorded is not None and not recorded.is_spmd:
            self._finish(running)  # so that no rank waits for one that has raised
            raise NotImplementedError(
                "ranks run different units in this model, and several of its forwards share one backward, in which "
                "ranks could wait for each other for ever; call backward for each forward's loss by itself."
            )
        running.forward = forward

    def _end_uses(self, running: Pass, since: int, task: int) -> None:
        """Ends the uses of calls that began after event `since`, or in a graph task inside `task`.

        Autograd runs nodes in the reverse of the order in which forward made them. So when the gradient of a call's
        output arrives, the backward of whatever began after that call had returned is over.
        """
        ended = [use for use in running.uses if use[1] > since or use[2] > task]
        if not ended:
            return
        running.uses = [use for use in running.uses if use not in ended]
        running.finished.update([number for number, _, _ in ended])
        left = [number for number, _, _ in running.uses]
        for number in dict.fromkeys(number for number, _, _ in ended):
            if number not in left:
                running.recomputed.discard(number)
            if not self._is_used(number):
                running.trace.append((plan.OVER, number))
                self._reshard_unused(number)

    @uncompiled
    def finish_backward(self) -> None:
        """The outermost backward is over: runs the rest of the program, or records it. **Collective**."""
        running = self._backward
        assert running is not None, "called at the end of a backward that has begun"
        running.trace += [(plan.OVER, number) for number in dict.fromkeys(use[0] for use in reversed(running.uses))]
        self._end_all_uses(running)
        self._finish(running)
        if running.program is None:
            self._reduce_the_rest(running)
            self._record(running)
        elif late := self.strays():
            raise RuntimeError(
                f"gradients of unit {late[0].label} came after their place in the program ({self._where(running)}). "
                "Call model.schedule.forget() on all ranks between steps, and run every unit in the first one."
            )
        self._end_backward(running)
        self.microbatch_count += 1
        if self.model_auto_sync and self._forward is None:  # a backward inside a forward leaves that its weights
            self.on_auto_sync()

    def end_interrupted_backward(self) -> None:
        """Reshards what a backward that raised has left behind, and forgets its gradients; nothing if none did."""
        if self._backward is None or in_backward():
            return
        running = self._backward
        self._reducer.drain_all()
        for main_grad in (group.main_grad for unit in self.units for group in unit.groups):
            if main_grad is not None:
                main_grad.discard()
        self._end_all_uses(running)
        self._finish(running)  # other ranks may have come farther
        self._reducer.drain_all()
        self._reshard_gathered(self.programs.resharded)
        self._end_backward(running)

    def _end_all_uses(self, running: Pass) -> None:
        running.uses.clear()
        running.recomputed.clear()
        del self._open[running.depth :]

    def _end_backward(self, running: Pass) -> None:
        if self.timeline.is_on:
            self.timeline.turn_back(None)
        self._backward = None
        self._reshard_all_unused()
        for number in sorted(running.gathered_around - self._gathered):  # the forward around it goes on where it was
            self._gather(number)

    def strays(self) -> list[Unit]:
        """Units with gradients that no reduction has taken, in the order of registration."""
        with without_overrides():
            found = [unit for unit in self.units for param in unit.trainable if param.grad is not None]
        return list(dict.fromkeys(found))

    # -- running a program ----------------------------------------------------------------------------------------

    def _reach(self, running: Pass, event: str, number: int) -> None:
        """The rank has come to an event of the pass: runs the operations in front of its marker. **Collective**."""
        token = (event, number)
        running.trace.append(token)
        program = running.program
        if program is not None:
            markers = program.markers.get(token, ())
            following = bisect.bisect_left(markers, running.pc)
            if following < len(markers):
                self._run(running, program, markers[following] + 1)
                return
            if self._is_ready(running, program, number):
                return
            self._leave_program(running, program)
        if event in plan.BEGINS:
            self._lockstep(running, number)

    def _run(self, running: Pass, program: Program, stop: int) -> None:
        """Runs the operations of the pass's program before program counter `stop`. **Collective**."""
        ops = program.ops
        while running.pc < stop:
            kind, number, _ = ops[running.pc]
            running.pc += 1
            unit = self.units[number]
            if kind == plan.GATHER:
                self._gather(number)
            elif kind == plan.WAIT:
                self._gatherer.wait_for(unit)
            elif kind == plan.RELEASE:
                self._gathered.discard(number)
                self._reshard_unused(number)
            elif kind == plan.DRAIN:
                self._reducer.drain(unit)
            elif kind == plan.REDUCE:
                self._reducer.reduce(unit)
            elif kind == plan.FINALIZE:
                self._finalize(unit)
            elif kind == plan.REFRESH:
                self._gatherer.refresh(unit)

    def _finish(self, running: Pass) -> None:
        """Runs the rest of a pass, for this rank and for others. **Collective**."""
        if running.program is None:
            self._lockstep(running, None)
        else:
            self._run(running, running.program, len(running.program.ops))

    def _is_ready(self, running: Pass, program: Program, number: int) -> bool:
        """A backward needs no operation for an event of the unit: it is gathered here, and its reduction is to come.

        If ranks differ, units that a rank leaves out at a checkpoint's end move the begin of recomputation, so that an
        event may come where no rank had it. Ranks that are alike record it.
        """
        unit = self.units[number]
        if program.is_spmd or not running.key.is_backward or unit.is_gathered != unit.gathers_weights:
            return False
        ahead = program.ops[running.pc :]
        is_ready = not unit.trainable or plan.Op(plan.REDUCE, number) in ahead
        if is_ready:
            self._gatherer.wait_for(unit)  # it may have been prefetched
        return is_ready

    def _leave_program(self, running: Pass, program: Program) -> None:
        """An event that the program does not have: the rest of the pass runs in lockstep, if ranks were alike.

        Raises:
            RuntimeError: they had differed when the program was recorded.
        """
        if not program.is_spmd:
            where = self._where(running)
            self._finish(running)  # so that no rank waits for this one
            raise RuntimeError(
                f"{where} is not in its program from there on, and ranks ran different units when it was recorded. "
                "Call model.schedule.forget() on all ranks between steps and run every unit in the first one, or give "
                "steps that run other units a model.schedule.phase()."
            )
        (furthest,) = self._consensus.largest([running.pc])
        self._run(running, program, furthest)
        running.reduced = {op.unit for op in program.ops[:furthest] if op.kind == plan.REDUCE}
        running.program = None
        self._reshard_gathered(self.programs.resharded)

    # -- gathering and resharding ---------------------------------------------------------------------------------

    def _gather(self, number: int, *, stays: bool = True) -> None:
        """An all-gather that all ranks make, whatever each of them holds. **Collective**.

        Args:
            number: of the unit; nothing happens if the programs so far have left it gathered.
            stays: a program will reshard it.
        """
        if number in self._gathered:
            return
        if stays:
            self._gathered.add(number)
        self._gatherer.gather(self.units[number])

    def _is_used(self, number: int) -> bool:
        """This rank is inside the unit, in forward or in backward."""
        running = self._backward
        if running is None:
            return number in [call.unit for call in self._open]
        if number in running.recomputed or number in [use[0] for use in running.uses]:
            return True
        # Not the calls of recomputation: one that is stopped early does not return.
        return running.depth > 0 and number in [call.unit for call in self._open[: running.depth]]

    def _reshard_unused(self, number: int) -> None:
        """Shows the unit's shards, and reshards it, as far as neither this rank nor a program needs more of it."""
        if self._is_used(number):
            return
        if number in self._gathered:
            self.units[number].show_sharded()
        else:
            self._gatherer.reshard(self.units[number])

    def _reshard_all_unused(self, kept: int = -1) -> None:
        """Reshards all units as `_reshard_unused` does, but for `kept`, which shows its full parameters."""
        for unit in self.units:
            if (unit.shows_unsharded or unit.is_gathered) and unit.number != kept:
                self._reshard_unused(unit.number)

    def _reshard_gathered(self, chosen: frozenset[int]) -> None:
        """Reshards those of the chosen units that programs have left gathered; this rank keeps what it uses."""
        for number in sorted(self._gathered & chosen):
            self._gathered.discard(number)
            self._reshard_unused(number)

    # -- passes that no program covers ----------------------------------------------------------------------------

    def _lockstep(self, running: Pass, wanted: int | None) -> None:
        """Gathers what ranks want next, the lowest unit first, until that is `wanted`. **Collective**.

        Args:
            running: the pass, on all ranks.
            wanted: the unit that this rank is about to use; None once its pass is over, until those of all ranks are.
        """
        none = len(self.units)
        while True:
            claims = self._claims(running) if running.key.is_backward else []
            lowest, *reducible = self._consensus.smallest([none if wanted is None else wanted, *claims])
            for number in reversed([number for number, is_agreed in enumerate(reducible) if is_agreed]):
                if number not in running.reduced:
                    self._reduce_in_lockstep(running, self.units[number])
            if lowest == none:
                return
            self._gather(lowest, stays=lowest not in self.programs.resharded)
            if lowest == wanted:
                self._gatherer.wait_for(self.units[wanted])
                return
            self._reshard_unused(lowest)

    def _claims(self, running: Pass) -> list[bool]:
        """By unit, True if this rank is sure that no more of its gradients will come in this backward."""
        claims = [False] * len(self.units)
        forward = self.programs.recorded.get(running.key._replace(is_backward=False))
        entered = forward.trace if forward is not None else ()
        for number, count in running.finished.items():
            unit = self.units[number]
            is_over = count >= entered.count((plan.ENTER, number)) and not self._is_used(number)
            claims[number] = is_over and bool(unit.trainable) and unit.has_all_grads()
        return claims

    def _reduce_in_lockstep(self, running: Pass, unit: Unit) -> None:
        running.reduced.add(unit.number)
        self._make_room(unit)
        self._reducer.reduce(unit)
        self._finalize(unit)

    def _reduce_the_rest(self, running: Pass) -> None:
        """Reduces what has not been, and what came in later parts on some rank; the root last. **Collective**."""
        trained = [unit for unit in reversed(self.units) if unit.trainable]
        strays = self.strays()
        late = self._consensus.largest([unit in strays for unit in trained])
        for unit, is_late in zip(trained, late, strict=True):
            if is_late or unit.number not in running.reduced:
                self._reduce_in_lockstep(running, unit)

    def _record(self, running: Pass) -> None:
        """The pass is over, in lockstep: makes its program; nothing but residents is left gathered. **Collective**."""
        self._gathered -= self.programs.resharded
        self.programs.record(running.key, tuple(running.trace))

    # -- reductions -----------------------------------------------------------------------------------------------

    def wgrad_out(self, unit: Unit, group: ParamGroup, slot: int) -> torch.Tensor | None:
        """Memory in which, in backward, the gradient of parameter `slot` of `group` may be computed; None: any."""
        if not unit.has_staged_grads:
            self._make_room(unit)
        return self._reducer.wgrad_out(unit, group, slot)

    def _make_room(self, unit: Unit) -> None:
        """Drains the reductions that must be over before the unit's gradients are staged: as programs do."""
        facts = self.programs.facts
        numel = facts[unit.number].staged_numel
        for oldest in list(self._reducer.in_flight) if numel else ():
            staging = (other for other in self.units if other is not unit and other.has_staged_grads)
            staged = [facts[other.number].staged_numel for other in (*self._reducer.in_flight, *staging)]
            if self.programs.in_flight.is_full(staged, numel):
                self._reducer.drain(oldest)

    def _finalize(self, unit: Unit) -> None:
        assert self._backward is not None, "gradients come in a backward"
        if self._backward.is_last:
            self._reducer.finalize(unit)

    def watch_own_grads(self, watcher: Callable[[ParamGroup], None]) -> None:
        """Shows `watcher` every group whose gradients are complete, before they are reduced, on the current stream."""
        self._reducer.before_collect = watcher

    def wait_for_reductions(self) -> None:
        """Makes the current stream wait for every reduction that has been started."""
        self._reducer.wait()

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
        self._reducer.drain_all()

    # -- between steps --------------------------------------------------------------------------------------------

    def install(self) -> None:
        """Makes every compute weight follow its main weight. **Collective** if a codec is, and once for residency."""
        self.reshard_all()
        for unit in self.units:
            for group in unit.groups:
                group.install()
        self._gatherer.wait_for_install()
        self._gathered = {unit.number for unit in self.units if not unit.needs_gather}
        self.generation, self.lost_weights = self.generation + 1, None
        if not any(key.is_backward for key in self.programs.recorded):
            return  # memory has not been used yet as it will be
        order = self.programs.forward_order()
        if self._decides_residency:
            self._decides_residency = False
            self.programs.keep_resident(int(_USABLE * self.device.free_nbytes()), [unit for unit in order if unit])
        if order != self._reported_order and self.on_order([self.units[number] for number in order]):
            self._reported_order = order

    def gather_ahead(self) -> None:
        """Starts the gathers that the next forward needs first. **Collective**."""
        self._gatherer.wait_for_compute()
        key = Key(0, torch.is_grad_enabled(), self._phase)
        program = self.programs.get(key)
        if program is None:
            self._gather(0)
        else:
            self._run(Pass(key, 0, program), program, program.begin)

    def gather_all(self) -> None:
        """Rebuilds every resting weight that is not current. **Collective**."""
        self._gatherer.wait_for_compute()
        for unit in self.units:
            if not unit.gathers_weights:
                self._gather(unit.number)

    def reshard_all(self, *, keeps_resident: bool = False) -> None:
        """Reshards every weight and shows sharded parameters everywhere; the current stream waits for every gather."""
        self._gathered -= self.programs.resharded if keeps_resident else self.programs.gathered
        for unit in self.units:
            self._gatherer.wait_for(unit)
        self._reshard_all_unused()
