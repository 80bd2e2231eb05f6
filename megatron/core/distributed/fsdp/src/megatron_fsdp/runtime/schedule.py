"""When transitions run: streams, prefetch, in-flight limits, micro-batch state."""

from __future__ import annotations

import collections

import torch

from megatron_fsdp.config import EngineConfig
from megatron_fsdp.machine.collectives import GradScale
from megatron_fsdp.machine.device import Device, Event
from megatron_fsdp.machine.torch_compat import on_backward_end
from megatron_fsdp.runtime.unit import Phase, Unit
from megatron_fsdp.state.main_grad import GradState
from megatron_fsdp.state.param_group import ParamGroup


class Schedule:
    """Runs every unit's transitions at the right time; the same code on CUDA and CPU.

    Each communicator sees one canonical order on all ranks: gathers follow execution, reductions the reverse of the
    units' order, whatever order gradients arrive in. What a rank does in a step never depends on its data.
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
        self._forward_order = [unit for unit in units if unit is not self.root]
        self._reduce_queue = [*reversed(self._forward_order), self.root]
        self._reduce_next = 0
        self._in_flight: collections.deque[tuple[object, Event]] = collections.deque()
        self._installed: Event | None = None
        """Compute weights were written on the current stream; the next gather waits for it."""
        self._in_backward = False
        self.model_auto_sync = False
        self.is_last_microbatch = True
        self.microbatch_count = 0
        self._observed: list[Unit] | None = []
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

    def _prefetch(self, order: list[Unit], unit: Unit) -> None:
        if not self.config.overlap_param_gather:
            return
        try:
            position = order.index(unit)
        except ValueError:  # the root: what comes next is the first unit
            position = -1
        for following in order[position + 1 : position + 1 + self.config.prefetch_depth]:
            self._gather(following)

    # -- forward ------------------------------------------------------------------------------------------------

    def pre_forward(self, unit: Unit) -> None:
        """The unit's module is about to run. **Collective**."""
        if unit.is_root:
            self._begin_forward()
        unit.calls += 1
        if unit.calls > 1:
            unit.is_called_repeatedly = True
        unit.enter(Phase.FORWARD)
        self._make_readable(unit)
        if self._observed is not None and not unit.is_root and unit not in self._observed:
            self._observed.append(unit)
        self._prefetch(self._forward_order, unit)

    def _begin_forward(self) -> None:
        """A new forward of the whole model: gathers must see what the optimizer wrote on the current stream."""
        if self._in_backward:  # the last one raised before its end
            self._abandon_backward()
        self._gather_stream.wait_stream(self.device.current_stream())
        for unit in self.units:
            unit.calls = 0

    def post_forward(self, unit: Unit, *, awaits_backward: bool) -> None:
        """The unit's module has run. The root stays gathered until its backward is over, if one may come."""
        if unit.is_root and awaits_backward:
            return
        unit.enter(Phase.RESTING)
        self._release(unit)

    def recompute_forward(self, unit: Unit) -> None:
        """The unit's module is about to run inside backward; it stays gathered for the backward that follows."""
        self._begin_backward(unit)
        unit.enter(Phase.BACKWARD)
        self._make_readable(unit)

    # -- backward -----------------------------------------------------------------------------------------------

    def _begin_backward(self, unit: Unit) -> None:
        if self._in_backward:
            return
        self._in_backward = True
        on_backward_end(self.finish_backward)
        self._agree_on_order()

    def pre_backward(self, unit: Unit) -> None:
        """The gradient of the unit's output is there. **Collective**."""
        self._begin_backward(unit)
        unit.enter(Phase.BACKWARD)
        self._make_readable(unit)
        self._prefetch([u for u in reversed(self._forward_order) if not u.is_reduced and u.calls], unit)

    def grad_ready(self, unit: Unit) -> None:
        """One trainable parameter of `unit` has its gradient. **Collective** when it was the last one."""
        self._begin_backward(unit)
        unit.pending -= 1
        if unit.pending == 0 and not unit.is_called_repeatedly:
            self._backward_done(unit)

    def inputs_ready(self, unit: Unit) -> None:
        """The gradients of the unit's inputs are there: nothing reads its weights any more, if it was called once."""
        if not unit.is_called_repeatedly and not unit.is_root and (not unit.trainable or unit.is_ready):
            self._end_unit(unit)

    def _backward_done(self, unit: Unit) -> None:
        unit.is_ready = True
        while self._reduce_next < len(self._reduce_queue) and self._is_passable(self._reduce_queue[self._reduce_next]):
            self._reduce(self._reduce_queue[self._reduce_next])
            self._reduce_next += 1
        # A frozen weight is still read for the gradient of the unit's input after all trained ones are complete.
        if not unit.has_frozen and not unit.is_root:
            self._end_unit(unit)

    @staticmethod
    def _is_passable(unit: Unit) -> bool:
        return unit.is_ready or not unit.trainable

    def _end_unit(self, unit: Unit) -> None:
        if unit.phase is Phase.BACKWARD:
            unit.enter(Phase.RESTING)
        self._release(unit)

    def finish_backward(self) -> None:
        """The outermost backward is over: completes what could not be completed unit by unit. **Collective**."""
        for unit in self._reduce_queue:
            if not unit.is_reduced:
                self._reduce(unit)
            elif unit.has_stray_grads():
                # Its gradients came in several parts without it having been called several times.
                unit.is_called_repeatedly = True
                self._reduce(unit)
        for unit in self.units:
            self._end_unit(unit)
            unit.calls = 0
            unit.begin_backward_accounting()
        self._reduce_next = 0
        self._in_backward = False
        self.microbatch_count += 1
        if self.model_auto_sync:
            self.on_auto_sync()

    def _abandon_backward(self) -> None:
        """Forgets a backward that was interrupted by an exception, and its gradients."""
        self._in_backward = False
        self._reduce_next = 0
        self._in_flight.clear()
        for unit in self.units:
            for raw in unit.trainable:
                raw.grad = None
            self._end_unit(unit)
            unit.begin_backward_accounting()

    # -- reductions ---------------------------------------------------------------------------------------------

    def _reduce(self, unit: Unit) -> None:
        """Hands the unit's gradients of this backward to the reduction. **Collective**."""
        unit.is_reduced = True
        finalize_now = self.config.overlap_grad_reduce and (self.model_auto_sync or self.is_last_microbatch)
        for group in unit.groups:
            if group.main_grad is None:
                continue
            if group.plan.reduces_each_microbatch:
                self._make_room()
            elif group.main_grad.state is GradState.FINAL:  # about to be reopened on this stream
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
        for unit in self._reduce_queue:
            for group in unit.groups:
                if group.main_grad is not None and group.main_grad.state is GradState.ACCUMULATING:
                    self._on_reduce_stream(group, None, finalize_now=True)

    def finish_reductions(self) -> None:
        """Finalizes what is still open, and makes the current stream wait for every reduction. **Collective**."""
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
        for unit in self._forward_order[: self.config.prefetch_depth]:
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
        """After the first forward: if units ran in another order than they are registered, all ranks adopt rank 0's.

        **Collective** once. Prefetch and reduction follow this order; any order that all ranks share is correct.
        """
        if self._observed is None:
            return
        observed, self._observed = self._observed, None
        order = observed + [unit for unit in self._forward_order if unit not in observed]
        index = [self._forward_order.index(unit) for unit in order]
        agreed = self._broadcast_order(index)
        self._forward_order = [self._forward_order[i] for i in agreed]
        self._reduce_queue = [*reversed(self._forward_order), self.root]

    def _broadcast_order(self, index: list[int]) -> list[int]:
        axes = next(group.facts.axes for unit in self.units for group in unit.groups)  # the root may own nothing
        order = torch.tensor(index, dtype=torch.int64, device=self.device.torch_device)
        for axis in reversed(axes):
            if axis.size > 1 and order.numel():
                torch.distributed.broadcast(order, group=axis.group, group_src=0)
        return order.tolist()
