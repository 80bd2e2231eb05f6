"""When transitions run: streams, prefetch, in-flight limits, micro-batch state."""

from __future__ import annotations

import itertools
import logging
import weakref
from collections.abc import Callable, Sequence

from megatron_fsdp.config import EngineConfig
from megatron_fsdp.machine.collectives import GradScale
from megatron_fsdp.machine.device import Device
from megatron_fsdp.machine.torch_compat import in_backward, on_backward_end
from megatron_fsdp.runtime.backward_turns import BackwardTurns, Progress
from megatron_fsdp.runtime.calls import Call, recomputed_call
from megatron_fsdp.runtime.forward_turns import ForwardTurns
from megatron_fsdp.runtime.gatherer import Gatherer, Prefetch
from megatron_fsdp.runtime.inquiry import Forum, widest_axes
from megatron_fsdp.runtime.order import Order
from megatron_fsdp.runtime.reducer import Reducer
from megatron_fsdp.runtime.residency import Residency
from megatron_fsdp.runtime.unit import Phase, Unit
from megatron_fsdp.runtime.watch import Watch
from megatron_fsdp.state.param_group import ParamGroup

logger = logging.getLogger(__name__)


class Schedule:
    """Runs every unit's transitions at the right time; the same code on CUDA and CPU.

    All ranks communicate in one canonical order, `Order`, which does not depend on what a rank runs: a forward gathers
    turn by turn, a backward gathers and reduces in the mirrored order. A rank that reaches a unit first does everything
    that comes before it, with zero gradients for what it skipped. Unless they differed in the first forward, a rank may
    leave calls out but must make the others in the order of all, and gradients flow through a frozen unit on all or on
    none.
    """

    def __init__(self, units: list[Unit], config: EngineConfig, device: Device, scales: dict[bool, GradScale]):
        self.units = units
        self.root = next(unit for unit in units if unit.is_root)
        self.config = config
        self.device = device
        self.watch = Watch(device)
        self._reducer = Reducer(config, device, scales, self.watch)
        self.lend_gradient = self._reducer.lend
        """Called in backward by layers that can compute a gradient where it is reduced from."""
        self._gatherer = Gatherer(device, self.watch)
        self._prefetch = Prefetch.of(config)
        # Memory that goes when the model does must not be handed out again while another stream still uses it.
        weakref.finalize(self, device.join, (*self._reducer.streams, *self._gatherer.streams)).atexit = False
        others = [unit for unit in units if unit is not self.root]
        forum = Forum(others, widest_axes(units), device.torch_device)
        self._turns = ForwardTurns(forum, self.root, self._gatherer, self._prefetch)
        self._residency = Residency(forum, device, config.residency_nbytes)
        self._in_forward = False
        """The root's forward runs. Units may also be called outside it; then nothing is expected of the others."""
        self._lenders: dict[Unit, bool] = {}
        """Units that have returned views of their weights to a forward whose backward may come; False: none does."""
        self._awaited = 0
        """Backwards that forwards since the last install may bring."""
        self._in_backward = False
        self._back = BackwardTurns(self._gatherer, self._prefetch, self._lenders, self._turns.known)
        self._progress = Progress()
        self._cursor = 0
        """Steps of the order's backward that are behind the call whose turn it is."""
        self._reduced = 0
        """Units of the order that this backward has reduced."""
        self._is_ending = False
        """Autograd is through: every gradient is complete."""
        self._reduces_early = True
        """Gradients have been complete when their unit was left behind. If not, reductions wait for backward's end."""
        self.generation = 0
        """Counts installs: a backward belongs to the weights of its forward."""
        self.model_auto_sync = False
        self.is_last_microbatch = True
        self.microbatch_count = 0
        self._has_run = False
        """Some backward is over: memory has been used as it will be."""
        self.taken_by: str | None = None
        """What shows parameters of its own in place of the schedule's; until it ends, no forward can run."""
        self.before_forward: Callable[[], None] = lambda: None
        """Called when a forward of the whole model begins, before it communicates."""
        self.on_order: Callable[[Sequence[Unit]], bool] = lambda units: True
        """Called between steps with the order in which units were found to run, until it says that it has taken it."""
        self._followed: Order | None = None
        """The order that it has taken."""
        self.on_auto_sync = lambda: None
        """Called at the end of a backward when `model_auto_sync` is on."""

    @property
    def gather_stream(self) -> object:
        """Where gathered weights get their storage and give it back."""
        return self._gatherer.streams[0]

    # -- forward ------------------------------------------------------------------------------------------------

    def pre_forward(self, unit: Unit) -> None:
        """The unit's module is about to run. **Collective**."""
        self.end_interrupted_backward()
        call = None
        if unit.is_root:
            call = self._begin_forward()
            unit.note_call(call)
        elif self._in_forward:
            call = self._turns.reach(unit)
            unit.note_call(call)
        unit.open_calls.append(call)
        unit.enter(Phase.FORWARD)
        self._gatherer.make_readable(unit)
        if self._in_forward:
            self._turns.gather_ahead()

    def _begin_forward(self) -> Call:
        """A new forward of the whole model: gathers must see what the optimizer wrote on the current stream."""
        self._gatherer.follow()
        self._refresh_all()
        self._in_forward = True
        if self._awaited <= 0:  # or else an earlier forward's backward still reads what it was lent
            self._lenders.clear()
            self._awaited = 0
        for unit in self.units:
            unit.open_calls = []
        return self._turns.begin()

    def _refresh_all(self) -> None:
        """Starts what the last install left to the outer axis, of every unit in turn. **Collective**."""
        for unit in (self.root, *self._turns.coming):
            self._gatherer.refresh(unit)

    def post_forward(self, unit: Unit, call: Call | None, *, awaits_backward: bool, lends: bool) -> None:
        """The unit's module has run. The root stays gathered until its backward is over, if one may come.

        So does a unit that `lends` its weights: what it returned views them.
        """
        if call is not None:
            call.carries_grad = awaits_backward
            call.last = self._turns.latest
        if unit.is_root:
            self._end_forward()
            if awaits_backward:
                self._awaited += 1
                return
            for other in self.units:
                other.enter(Phase.RESTING)
                self._gatherer.release(other)
            for lender in [lender for lender, awaits in self._lenders.items() if not awaits]:
                del self._lenders[lender]
            return
        if lends and self._in_forward:
            self._lenders[unit] = awaits_backward or self._lenders.get(unit, False)
        else:
            unit.enter(Phase.RESTING)
            self._turns.leave(unit, None if call is None else call.turn)

    @property
    def is_running(self) -> bool:
        """A forward of the whole model, or a backward, is not over."""
        return self._in_forward or self._in_backward or in_backward()

    @property
    def in_forward(self) -> bool:
        """A forward of the whole model has begun and not ended."""
        return self._in_forward

    def forget_forward(self) -> None:
        """The forward of the whole model was interrupted; no more of it will come."""
        self._in_forward = False

    def _end_forward(self) -> None:
        if self._in_forward:
            self._turns.end()
            self._in_forward = False

    @property
    def _order(self) -> Order:
        """What the backward that runs follows."""
        return self._back.order

    # -- backward -----------------------------------------------------------------------------------------------

    def recompute_forward(self, unit: Unit) -> None:
        """The unit's module is about to run inside backward; it stays gathered for the backward that follows."""
        self._begin_backward()
        call = recomputed_call(unit, self._progress.node)
        self._follow(call)
        if call is not None and call.turn is not None:
            self._walk_back_before_recomputing(call)
        unit.open_calls.append(call)
        unit.enter(Phase.BACKWARD)
        self._gatherer.make_readable(unit)

    def _walk_back_before_recomputing(self, call: Call) -> None:
        """Ends what is over; if nothing before `call` is to come, its own backward is what follows. **Collective**.

        Recomputation over several calls repeats the first of them first: then those behind it are still to come, and
        without reentrance it begins in the middle of the last one's backward. Where ranks differ, the order knows.
        """
        entry = self._order.entry[call.turn]
        for number in range(self._cursor, entry if self._order.is_alike else 0):
            if self._progress.is_to_come(self._order.backward[number]):
                self._walk_back(number)
                return
        self._walk_back(entry + 1)

    def _begin_backward(self) -> None:
        """**Collective**, if some unit lends its weights."""
        if self._in_backward:
            return
        self._in_backward = True
        self._is_ending = False
        self._back.restart(self._turns.known)
        self._cursor = self._reduced = 0
        self._progress.begin()
        on_backward_end(self.finish_backward)
        for unit in self._lenders:  # others read their weights before their own turn comes
            self._gatherer.make_readable(unit)

    def pre_backward(self, unit: Unit, call: Call | None) -> None:
        """The gradient of the output of a unit's `call` is there. **Collective**."""
        self._begin_backward()
        unit.is_in_backward = True
        self._follow(call)
        if unit.is_root:
            self._walk_back(1)
        elif call is not None and call.turn is not None:
            self._walk_back(self._order.entry[call.turn] + 1)
        unit.enter(Phase.BACKWARD)
        self._gatherer.make_readable(unit)

    def _follow(self, call: Call | None) -> None:
        """Starts anew if `call` belongs to another forward: several may share one backward, if all ranks run the same.

        Raises:
            NotImplementedError: they do not, so that each has come to another place of the other forward.
        """
        if call is not None and self._progress.follow(call.forward):
            if self._cursor and not self._order.is_alike:
                self._walk_back(len(self._order.backward))  # so that no rank waits for one that has raised
                raise NotImplementedError(
                    "ranks run different units in this model, and several of its forwards share one backward, in which "
                    "ranks could wait for each other for ever; call backward for each forward's loss by itself."
                )
            self._cursor = 0
            self._back.restart(call.forward.order or self._turns.known)

    def _walk_back(self, stop: int) -> None:
        """Takes the steps of the order's backward before number `stop`. **Collective**."""
        while self._cursor < stop:
            step = self._order.backward[self._cursor]
            self._cursor += 1
            if step.is_entry:
                self._back.gather_before(self._cursor)
                self._back.gather_ahead(self._cursor)
                continue
            if step.releases and step.unit not in self._lenders:
                self._end_unit(step.unit)
            if step.reduces:
                self._reduce_through(self._order.exit_number[step.unit])

    def _end_unit(self, unit: Unit) -> None:
        if unit.phase is Phase.BACKWARD:
            unit.enter(Phase.RESTING)
        self._gatherer.release(unit)

    def _reduce_through(self, last: int) -> None:
        """Reduces units in order up to number `last`, but none before its gradients are complete. **Collective**."""
        while self._reduced <= last and not self._is_waiting(self._order.exits[self._reduced]):
            self._reduce(self._order.exits[self._reduced])
            self._reduced += 1

    def _is_waiting(self, unit: Unit) -> bool:
        if self._is_ending or not self._reduces_early:
            return not self._is_ending
        return self._order.is_alike and unit.awaits_grads()  # else only this rank may have to wait

    def _reduce(self, unit: Unit) -> None:
        finalizes = self.config.overlap_grad_reduce and (self.model_auto_sync or self.is_last_microbatch)
        self._reducer.reduce(unit, finalizes=finalizes)

    def finish_backward(self) -> None:
        """The outermost backward is over: completes what could not be completed unit by unit. **Collective**."""
        self._is_ending = True
        self._walk_back(len(self._order.backward))
        self._reduce_through(len(self._order.exits) - 1)
        if self._reduce_strays() and self._reduces_early:
            self._reduces_early = False
            logger.warning(
                "gradients of a unit came in several parts; from now on reductions wait for the end of each backward. "
                "Checkpoint with use_reentrant=False, or call backward for each forward."
            )
        self._end_backward()
        self.microbatch_count += 1
        self._has_run = True
        if self.model_auto_sync:
            self.on_auto_sync()

    def _reduce_strays(self) -> bool:
        """Reduces gradients that came after their unit's reduction; says if there were any. **Collective**."""
        units = self._turns.known.exits
        are_late = self._turns.agreed([unit.has_stray_grads() for unit in units])
        for unit in itertools.compress(units, are_late):
            self._reduce(unit)
        return any(are_late)

    def _end_backward(self) -> None:
        self.watch.turn_back(None)
        self._in_backward = False
        self._awaited -= 1
        for unit in self.units:
            if self._awaited > 0 and unit in self._lenders:  # another backward begins with its weights, on any rank
                unit.enter(Phase.RESTING)
                unit.show_sharded()
            else:
                self._end_unit(unit)
            unit.joins_backward |= unit.is_in_backward
            unit.is_in_backward = False

    def end_interrupted_backward(self) -> None:
        """Releases what a backward that raised has left behind, and forgets its gradients; nothing if none did."""
        if not self._in_backward or in_backward():
            return
        self._reducer.wait()
        for group in (group for unit in self.units for group in unit.groups if group.main_grad is not None):
            group.main_grad.discard()
        self._end_backward()

    def finalize_open(self) -> None:
        """Starts every reduction that was deferred to the end of the cycle. **Collective**."""
        for unit in self._turns.known.exits:
            self._reducer.finalize(unit)

    def finish_reductions(self) -> None:
        """Finalizes what is still open, and makes the current stream wait for every reduction. **Collective**."""
        self.end_interrupted_backward()
        self._reduce_strays()  # of a backward that went through no unit's output
        self.finalize_open()
        self._reducer.wait()

    # -- the rest of a step -------------------------------------------------------------------------------------

    def watch_own_grads(self, watcher: Callable[[ParamGroup], None]) -> None:
        """Shows `watcher` every group whose gradients are complete, before they are reduced, on the current stream."""
        self._reducer.before_collect = watcher

    def wait_for_reductions(self) -> None:
        """Makes the current stream wait for every reduction that has been started."""
        self._reducer.wait_without_forgetting()

    def install(self) -> None:
        """Makes every compute weight follow its main weight. **Collective** if a codec is, and once for residency."""
        self.rest()
        for unit in self.units:
            for group in unit.groups:
                group.install()
        self._gatherer.follow_install()
        self._awaited = 0
        self._lenders.clear()
        self.generation += 1
        if self._has_run:
            self._residency.decide()
        known = self._turns.known
        if self._has_run and known is not self._followed and self.on_order((self.root, *known.forward)):
            self._followed = known

    def gather_ahead(self) -> None:
        """Starts the gathers that the next forward needs first. **Collective**."""
        self._gatherer.follow()
        self._refresh_all()
        self._gatherer.gather(self.root)
        for unit in self._prefetch.pick(self._turns.coming):
            self._gatherer.gather(unit)
            unit.is_ahead = True

    def gather_all(self) -> None:
        """Rebuilds every resting weight that is not current. **Collective**."""
        self._gatherer.follow()
        for unit in self.units:
            if not unit.gathers_weights:
                self._gatherer.gather(unit)

    def release(self) -> None:
        """Releases gathered weights that are not resident, and shows sharded parameters everywhere."""
        for unit in self.units:
            self._end_unit(unit)

    def rest(self) -> None:
        """Lets every gathered weight go and shows sharded parameters everywhere."""
        self.release()
        for unit in self.units:
            self._gatherer.let_go(unit)
