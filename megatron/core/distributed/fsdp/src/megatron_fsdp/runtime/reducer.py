"""Takes gradients to their owners: beside backward, on a stream of its own, with few buffers on their way."""

from __future__ import annotations

import collections
from collections.abc import Callable

from megatron_fsdp.config import EngineConfig
from megatron_fsdp.machine.collectives import GradScale
from megatron_fsdp.machine.device import Device, Event
from megatron_fsdp.runtime.unit import Unit
from megatron_fsdp.state.flat_buffer import FlatBuffer
from megatron_fsdp.state.main_grad import GradState
from megatron_fsdp.state.param_group import ParamGroup


class Reducer:
    """Reduces and finalizes the gradients of units, in the order in which it is called."""

    def __init__(self, config: EngineConfig, device: Device, scales: dict[bool, GradScale]):
        self._device = device
        self._scales = scales
        """Gradient scale by `is_expert`."""
        self._most_in_flight = config.reductions_in_flight
        self._stream = device.new_stream(high_priority=True)
        self._in_flight: collections.deque[tuple[FlatBuffer, Event]] = collections.deque()
        self.before_collect: Callable[[ParamGroup], None] | None = None
        """Shown every group whose gradients of this backward are complete and still this rank's own."""

    def reduce(self, unit: Unit, *, finalizes: bool) -> None:
        """Starts the reduction of the unit's gradients of this backward. **Collective**.

        Args:
            unit: whose gradients are complete.
            finalizes: this is the last backward of its cycle, so deferred reductions start too.
        """
        for group in unit.groups:
            if group.main_grad is None:
                continue
            if group.plan.reduces_each_microbatch:
                self._make_room()
            elif group.main_grad.state is not GradState.ACCUMULATING:  # about to be opened on this stream
                self._device.current_stream().wait_stream(self._stream)
            if self.before_collect is not None:
                self.before_collect(group)
            staged = group.main_grad.collect()
            if staged is not None or finalizes:
                self._issue(group, staged, finalizes=finalizes)

    def finalize(self, unit: Unit) -> None:
        """Starts the reductions of the unit that were deferred to the end of the cycle. **Collective**."""
        for group in unit.groups:
            if group.main_grad is not None and group.main_grad.state is GradState.ACCUMULATING:
                self._issue(group, None, finalizes=True)

    def wait(self) -> None:
        """Makes the current stream wait for every reduction."""
        self._device.current_stream().wait_stream(self._stream)
        self._in_flight.clear()

    def wait_without_forgetting(self) -> None:
        """Makes the current stream wait for every reduction; buffers on their way stay counted."""
        self._device.current_stream().wait_stream(self._stream)

    def _issue(self, group: ParamGroup, staged: FlatBuffer | None, *, finalizes: bool) -> None:
        ready = self._device.record_event()
        with self._device.use(self._stream):
            ready.wait()
            scale = self._scales[group.facts.is_expert]
            if staged is not None:
                group.main_grad.reduce(staged, scale)
            if finalizes:
                group.main_grad.finalize(scale)
            if staged is not None:
                self._in_flight.append((staged, self._device.record_event()))

    def _make_room(self) -> None:
        """Bounds the unreduced gradients alive: the oldest buffer goes back to the stream that allocated it."""
        while len(self._in_flight) >= self._most_in_flight:
            _, done = self._in_flight.popleft()
            done.wait()
