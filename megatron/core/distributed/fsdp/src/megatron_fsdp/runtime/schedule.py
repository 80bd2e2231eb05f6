"""When transitions run: streams, prefetch, in-flight limits, micro-batch state."""

from __future__ import annotations

import collections
import logging

import torch

from megatron_fsdp.config import EngineConfig
from megatron_fsdp.machine.collectives import GradScale, all_gather
from megatron_fsdp.machine.device import Device, Event
from megatron_fsdp.machine.torch_compat import on_backward_end
from megatron_fsdp.runtime.order import Order, Step
from megatron_fsdp.runtime.unit import Phase, Unit
from megatron_fsdp.state.main_grad import GradState
from megatron_fsdp.state.param_group import ParamGroup

logger = logging.getLogger(__name__)


class Schedule:
    """Runs every unit's transitions at the right time; the same code on CUDA and CPU.

    All ranks communicate in one canonical order, `Order`, which does not depend on what a rank runs: a forward gathers
    every unit in turn, a backward gathers and reduces them in turn. A rank that reaches a unit first does everything
    that comes before it, with zero gradients for what it skipped. A rank may leave units out, but must run the others
    in the order of all, and as often as the others do; gradients flow through a frozen unit on all ranks or on none.
    """

    def __init__(self, units: list[Unit], config: EngineConfig, device: Device, scales: dict[bool, GradScale]):
        self.units = units
        self.root = next(unit for unit in units if unit.is_root)
        self.config = config
        self.device = device
        self._scales = scales
        """Gradient scale by `is_expert`."""
        self._gather_stream = device.new_stream(high_priority=True)
        self._reduce_stream = device.new_stream(high_priority=True)
        self._depth = config.prefetch_depth if config.overlap_param_gather else 0
        self._order = Order([unit for unit in units if unit is not self.root], self.root)
        self._in_forward = False
        """The root's forward runs. Units may also be called outside it; then nothing is expected of the others."""
        self._gathered = 0
        """Units of the order that this forward has gathered once."""
        self._passed = 0
        """Units of the order that this forward has left behind."""
        self._in_flight: collections.deque[tuple[object, Event]] = collections.deque()
        self._installed: Event | None = None
        """Compute weights were written on the current stream; the next gather waits for it."""
        self._lenders: dict[Unit, None] = {}
        """Units that have returned views of their weights."""
        self._in_backward = False
        self._cursor = 0
        """Steps of the order's backward that have been taken."""
        self._is_predictable = True
        """Backwards have kept to the order so far. If not, all of one is reduced at its end."""
        self.model_auto_sync = False
        self.is_last_microbatch = True
        self.microbatch_count = 0
        self._observed: dict[Unit, None] | None = {}
        """Units in the order of their first calls, until the ranks have agreed on one."""
        self.on_auto_sync = lambda: None
        """Called at the end of a backward when `model_auto_sync` is on."""

    # -- gathers ------------------------------------------------------------------------------------------------

    def _gather(self, unit: Unit) -> None:
        """Starts the gather of `unit` unless it is readable or on its way. **Collective**."""
        if not unit.needs_gather:
            return
        with self.device.use(self._gather_stream):
            if self._installed is not None:
                self._installed.wait()
                self._installed = None
            for group in unit.groups:
                group.unshard()
            unit.gather_event = self.device.record_event()

    def _make_readable(self, unit: Unit) -> None:
        """Gathers `unit` if need be, and makes the current stream wait for it. **Collective**."""
        self._gather(unit)
        if unit.gather_event is not None:
            unit.gather_event.wait()
            unit.gather_event = None
        unit.show_raw()

    def _release(self, unit: Unit) -> None:
        """Frees the gathered weights of `unit` once the work issued so far has read them."""
        unit.show_sharded()
        if not any(group.is_unsharded and group.plan.gathers_weights for group in unit.groups):
            return
        if unit.gather_event is not None:  # prefetched and never used
            unit.gather_event.wait()
            unit.gather_event = None
        done = self.device.record_event()
        with self.device.use(self._gather_stream):
            # Storage goes back to the gather stream's pool; the next gather there must not overwrite what is being read.
            done.wait()
            for group in unit.groups:
                group.reshard()

    # -- forward ------------------------------------------------------------------------------------------------

    def pre_forward(self, unit: Unit) -> None:
        """The unit's module is about to run. **Collective**."""
        if self._in_backward:  # the last one raised before its end
            self._abandon_backward()
        if unit.is_root:
            self._begin_forward()
        elif self._in_forward:
            unit.calls += 1
            if self._observed is not None:
                self._observed.setdefault(unit)
            self._walk_to(self._order.forward_index[unit])
        unit.enter(Phase.FORWARD)
        self._make_readable(unit)
        if self._in_forward:
            self._gather_first((0 if unit.is_root else self._order.forward_index[unit] + 1) + self._depth)

    def _begin_forward(self) -> None:
        """A new forward of the whole model: gathers must see what the optimizer wrote on the current stream."""
        self._gather_stream.wait_stream(self.device.current_stream())
        self._in_forward = True
        self._gathered = self._passed = 0
        for unit in self.units:
            unit.calls = 0

    def _gather_first(self, count: int) -> None:
        """Gathers the first `count` units of the order, each once in a forward. **Collective**."""
        while self._gathered < min(count, len(self._order.forward)):
            self._gather(self._order.forward[self._gathered])
            self._gathered += 1

    def _walk_to(self, index: int) -> None:
        """Takes part in what comes before unit number `index`, and releases what was not used. **Collective**."""
        while self._passed < index:
            self._gather_first(self._passed + 1 + self._depth)
            unit = self._order.forward[self._passed]
            if unit.phase is Phase.RESTING:  # or else it contains the one that is reached
                self._release(unit)
            self._passed += 1
        self._gather_first(index + 1)

    def post_forward(self, unit: Unit, *, awaits_backward: bool, lends: bool) -> None:
        """The unit's module has run. The root stays gathered until its backward is over, if one may come.

        So does a unit that `lends` its weights: what it returned views them.
        """
        if unit.is_root:
            self._end_forward()
            if awaits_backward:
                return
            for other in self.units:
                other.enter(Phase.RESTING)
                self._release(other)
        elif lends and self._in_forward:
            self._lenders[unit] = None
        else:
            unit.enter(Phase.RESTING)
            self._release(unit)

    def _end_forward(self) -> None:
        if self._in_forward:
            self._walk_to(len(self._order.forward))
            self._in_forward = False
            self._agree_on_order()

    # -- backward -----------------------------------------------------------------------------------------------

    def recompute_forward(self, unit: Unit) -> None:
        """The unit's module is about to run inside backward; it stays gathered for the backward that follows."""
        self._begin_backward()
        if self._is_predictable and unit.backwards + 1 >= unit.calls:
            self._walk_back_before_recomputing(unit)
        unit.enter(Phase.BACKWARD)
        self._make_readable(unit)

    def _walk_back_before_recomputing(self, unit: Unit) -> None:
        """Ends what is over; if nothing before `unit` is still to come, its own backward is what follows. **Collective**.

        Recomputation over several units runs the first of them first: then those behind it are still to come.
        """
        entry = self._order.entry[unit]
        for number in range(self._cursor, entry):
            if not self._is_over(self._order.backward[number]):
                self._walk_back(number)
                return
        self._walk_back(entry + 1)

    @staticmethod
    def _is_over(step: Step) -> bool:
        unit = step.unit
        if unit.is_expected_in_backward:
            return False
        # Recomputation without reentrance begins in the middle of the last unit's backward.
        return step.is_entry or not unit.backwards or unit.has_all_grads()

    def _begin_backward(self) -> None:
        """**Collective**, if some unit lends its weights."""
        if not self._in_backward:
            self._in_backward = True
            self._cursor = 0
            on_backward_end(self.finish_backward)
            for unit in self._lenders:  # others read their weights before their own turn comes
                self._make_readable(unit)

    def pre_backward(self, unit: Unit) -> None:
        """The gradient of the unit's output is there. **Collective**."""
        self._begin_backward()
        unit.joins_backward = True
        unit.backwards += 1
        # Of a unit that was called several times, the first call's backward comes last.
        if self._is_predictable and unit.backwards >= unit.calls:
            self._walk_back(self._order.entry[unit] + 1)
        unit.enter(Phase.BACKWARD)
        self._make_readable(unit)

    def _walk_back(self, stop: int) -> None:
        """Takes the steps of the order's backward before number `stop`. **Collective**."""
        while self._cursor < stop:
            step = self._order.backward[self._cursor]
            self._cursor += 1
            unit = step.unit
            if not unit.joins_backward:
                continue
            if step.is_entry:
                self._gather(unit)
                for following in self._order.entries_after(unit, self._depth):
                    self._gather(following)
            else:
                self._reduce(unit)
                if unit not in self._lenders:
                    self._end_unit(unit)

    def _end_unit(self, unit: Unit) -> None:
        if unit.phase is Phase.BACKWARD:
            unit.enter(Phase.RESTING)
        self._release(unit)

    def finish_backward(self) -> None:
        """The outermost backward is over: completes what could not be completed unit by unit. **Collective**."""
        self._walk_back(len(self._order.backward))
        if self._reduce_strays() and self._is_predictable:
            self._is_predictable = False
            logger.warning(
                "gradients arrive in an order that changes; from now on each backward is reduced at its end. "
                "Run units in the same order in every forward, and a forward and its backward in turn."
            )
        self._end_backward()
        self.microbatch_count += 1
        if self.model_auto_sync:
            self.on_auto_sync()

    def _reduce_strays(self) -> bool:
        """Reduces gradients that came after their unit's reduction; says if there were any. **Collective**."""
        late = [unit for unit in self._order.exits if unit.has_stray_grads()]
        for unit in late:
            self._reduce(unit)
        return bool(late)

    def _end_backward(self) -> None:
        self._in_backward = False
        for unit in self.units:
            self._end_unit(unit)
            unit.backwards = 0

    def _abandon_backward(self) -> None:
        """Forgets a backward that was interrupted by an exception, and its gradients."""
        self.device.current_stream().wait_stream(self._reduce_stream)
        self._in_flight.clear()
        for unit in self.units:
            for group in unit.groups:
                if group.main_grad is not None:
                    group.main_grad.discard()
        self._end_backward()

    # -- reductions ---------------------------------------------------------------------------------------------

    def _reduce(self, unit: Unit) -> None:
        """Hands the unit's gradients of this backward to the reduction. **Collective**."""
        finalize_now = self.config.overlap_grad_reduce and (self.model_auto_sync or self.is_last_microbatch)
        for group in unit.groups:
            if group.main_grad is None:
                continue
            if group.plan.reduces_each_microbatch:
                self._make_room()
            elif group.main_grad.state is not GradState.ACCUMULATING:  # about to be opened on this stream
                self.device.current_stream().wait_stream(self._reduce_stream)
            staged = group.main_grad.collect()
            if staged is None and not finalize_now:
                continue
            self._on_reduce_stream(group, staged, finalize_now)

    def _on_reduce_stream(self, group: ParamGroup, staged, finalize_now: bool) -> None:
        ready = self.device.record_event()
        with self.device.use(self._reduce_stream):
            ready.wait()
            scale = self._scales[group.facts.is_expert]
            if staged is not None:
                group.main_grad.reduce(staged, scale)
            if finalize_now:
                group.main_grad.finalize(scale)
            if staged is not None:
                self._in_flight.append((staged, self.device.record_event()))

    def _make_room(self) -> None:
        """Bounds the unreduced gradients alive: the oldest buffer goes back to the stream that allocated it."""
        while len(self._in_flight) >= self.config.reductions_in_flight:
            _, done = self._in_flight.popleft()
            done.wait()

    def finalize_open(self) -> None:
        """Starts every reduction that was deferred to the end of the cycle. **Collective**."""
        for unit in self._order.exits:
            for group in unit.groups:
                if group.main_grad is not None and group.main_grad.state is GradState.ACCUMULATING:
                    self._on_reduce_stream(group, None, finalize_now=True)

    def finish_reductions(self) -> None:
        """Finalizes what is still open, and makes the current stream wait for every reduction. **Collective**."""
        if self._in_backward:  # the last one raised before its end
            self._abandon_backward()
        self._reduce_strays()  # of a backward that went through no unit's output
        self.finalize_open()
        self.device.current_stream().wait_stream(self._reduce_stream)
        self._in_flight.clear()

    # -- the rest of a step -------------------------------------------------------------------------------------

    def install(self) -> None:
        """Makes every compute weight follow its main weight. **Collective** if a codec is."""
        for unit in self.units:
            self._end_unit(unit)
            for group in unit.groups:
                group.install()
        self._installed = self.device.record_event()

    def gather_ahead(self) -> None:
        """Starts the gathers that the next forward needs first. **Collective**."""
        self._gather_stream.wait_stream(self.device.current_stream())
        self._gather(self.root)
        for unit in self._order.forward[: self._depth]:
            self._gather(unit)

    def gather_all(self) -> None:
        """Rebuilds every resting weight that is not current. **Collective**."""
        self._gather_stream.wait_stream(self.device.current_stream())
        for unit in self.units:
            if not any(group.plan.gathers_weights for group in unit.groups):
                self._gather(unit)

    def rest(self) -> None:
        """Releases every gathered weight and shows sharded parameters everywhere."""
        for unit in self.units:
            self._end_unit(unit)

    def _agree_on_order(self) -> None:
        """After the first forward: if units ran in another order than they are registered, all ranks adopt that one.

        **Collective** once. Any order that all ranks share is correct; this one is also fast.
        """
        if self._observed is None:
            return
        static = self._order.forward
        ran = [self._order.forward_index[unit] for unit in self._observed]
        self._observed = None
        if len(static) < 2:
            return
        agreed = self._longest(ran)
        for index in range(len(static)):
            if index not in agreed:  # skipped by all: its place is behind the unit before it
                agreed.insert(agreed.index(index - 1) + 1 if index else 0, index)
        self._order = Order([static[index] for index in agreed], self.root)

    def _longest(self, ran: list[int]) -> list[int]:
        """The longest of all ranks' lists, the first rank's among equals. **Collective**."""
        facts = [group.facts for unit in self.units for group in unit.groups]
        axes = min(facts, key=lambda fact: fact.is_expert).axes  # those of experts need not reach all ranks
        count = len(self._order.forward)
        mine = torch.tensor([len(ran), *ran, *[0] * (count - len(ran))], dtype=torch.int64, device=self.device.torch_device)
        for axis in axes:
            table = mine.repeat(axis.size)
            all_gather(table, mine, axis)
            rows = table.view(axis.size, count + 1)
            mine = rows[int(rows[:, 0].argmax())].clone()
        length, *agreed = mine.tolist()
        return agreed[:length]
