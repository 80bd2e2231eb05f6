"""Reductions of units' gradients to their owners, beside backward on streams of their own."""

from __future__ import annotations

import collections
import contextlib
import functools
from collections.abc import Callable, Iterator

import torch

from megatron_fsdp.machine.collectives import GradScale
from megatron_fsdp.machine.device import Device, Event
from megatron_fsdp.runtime.timeline import Kind, Watch
from megatron_fsdp.runtime.unit import Unit
from megatron_fsdp.state.flat_buffer import FlatBuffer
from megatron_fsdp.state.main_grad import GradState
from megatron_fsdp.state.param_group import ParamGroup

#: Low-precision copies that the outer axis may still be reading while the inner axis goes on.
_MOST_CROSSING = 2


class Reducer:
    """Reduces and finalizes the gradients of units, in the order in which it is called.

    Reductions over the inner axis and those over the outer axis run on a stream each, so that an inner one need not
    wait for the outer one of the unit before.
    """

    def __init__(self, device: Device, scales: dict[bool, GradScale], watch: Watch):
        self._device = device
        self._watch = watch
        self._scales = scales
        """Gradient scale by `is_expert`."""
        self._stream = device.new_stream(high_priority=True)
        self._outer_stream = device.new_stream(high_priority=True)
        self._in_flight: dict[Unit, list[tuple[FlatBuffer, Event]]] = {}
        """Staged gradients, allocated on the compute stream, until that has waited for their reduction."""
        self._crossing: collections.deque[tuple[torch.Tensor, Event]] = collections.deque()
        """Memory of the inner axis' stream, kept until that has waited for the outer axis' to have read it."""
        self._lends_to: Unit | None = None
        """Unit whose gradients have last been computed in the place that they are reduced from."""
        self.before_collect: Callable[[ParamGroup], None] | None = None
        """Shown every group whose gradients of this backward are complete and still this rank's own."""

    @property
    def streams(self) -> tuple[object, object]:
        """The streams of the inner and the outer axis."""
        return self._stream, self._outer_stream

    @property
    def in_flight(self) -> list[Unit]:
        """Units with staged gradients on their way, the oldest first."""
        return list(self._in_flight)

    def drain(self, unit: Unit) -> None:
        """Makes the compute stream wait for the reduction of `unit`; its staged gradients can be freed then."""
        for _, done in self._in_flight.pop(unit, ()):
            with self._watch.waits(Kind.REDUCE):
                done.wait()

    @torch.no_grad()
    def reduce(self, unit: Unit) -> None:
        """Starts the reduction of the unit's gradients of this backward, which are complete. **Collective**."""
        unit.align_grads()
        for group in unit.groups:
            if group.main_grad is None:
                continue
            if group.plan.reduces_each_microbatch:
                self._make_room(group)
            elif group.main_grad.state is not GradState.ACCUMULATING:  # about to be opened on this stream
                self._wait()
            if self.before_collect is not None:
                self.before_collect(group)
            group.main_grad.note_dropped()
            if group.main_grad.dropped and not group.main_grad.is_current:  # `collect` moves what reductions wrote
                self._wait()
            staged = group.main_grad.collect()
            if staged is not None:
                self._issue(unit, group, staged)

    def lend(self, unit: Unit, group: ParamGroup, slot: int) -> torch.Tensor | None:
        """Memory in which the gradient of parameter `slot` of the unit's `group` may be computed; None: its own.

        So it is while another unit's gradients are still being computed: where several forwards share a backward.
        """
        if unit is not self._lends_to and self._lends_to is not None and self._lends_to.has_staged_grads:
            return None
        if not group.main_grad.is_staged:
            self._make_room(group)
        self._lends_to = unit
        return group.main_grad.wgrad_out(slot)

    @torch.no_grad()
    def finalize(self, unit: Unit) -> None:
        """Starts what is left of the unit's reductions at the end of a cycle. **Collective**."""
        for group in unit.groups:
            if group.main_grad is None or group.main_grad.state is not GradState.ACCUMULATING:
                continue
            if group.plan.accumulates_final_values:  # what has been reduced is what it should be
                group.main_grad.finalize(self._scales[group.spec.is_expert])
            else:
                self._finalize(unit, group)

    def wait(self) -> None:
        """Makes the current stream wait for every reduction."""
        self._wait()
        self._in_flight.clear()
        # The next allocation on the inner axis' stream waits for the current stream first.
        self._crossing.clear()

    def wait_without_forgetting(self) -> None:
        """Makes the current stream wait for every reduction; buffers on their way stay counted."""
        self._wait()

    def _wait(self) -> None:
        current = self._device.current_stream()
        with self._watch.waits(Kind.REDUCE):
            for stream in self.streams:
                current.wait_stream(stream)

    def _issue(self, unit: Unit, group: ParamGroup, staged: FlatBuffer) -> None:
        ready = self._device.record_event()
        with self._device.use(self._stream):
            ready.wait()
            if group.main_grad.state is GradState.FINAL:  # about to be opened again on this stream
                self._stream.wait_stream(self._outer_stream)
            with self._watch.communicates(Kind.REDUCE, unit):
                group.main_grad.reduce(staged, self._scales[group.spec.is_expert])
            self._in_flight.setdefault(unit, []).append((staged, self._device.record_event()))

    def _finalize(self, unit: Unit, group: ParamGroup) -> None:
        ready = self._device.record_event()
        with self._device.use(self._stream):
            ready.wait()
            scale = self._scales[group.spec.is_expert]
            with self._watch.communicates(Kind.REDUCE, unit):
                crossing = group.main_grad.finalize(scale, functools.partial(self._along_outer, unit))
            if crossing is not None:
                self._keep_while_crossing(crossing)

    @contextlib.contextmanager
    def _along_outer(self, unit: Unit) -> Iterator[None]:
        """Goes on, after what is on the inner axis' stream, on the outer axis' stream."""
        ready = self._device.record_event()
        with self._device.use(self._outer_stream):
            ready.wait()
            with self._watch.communicates(Kind.OUTER, unit):
                yield

    def _keep_while_crossing(self, tensor: torch.Tensor) -> None:
        with self._device.use(self._outer_stream):
            self._crossing.append((tensor, self._device.record_event()))
        while len(self._crossing) > _MOST_CROSSING:
            _, read = self._crossing.popleft()
            read.wait()

    def _make_room(self, group: ParamGroup) -> None:
        """Waits for older reductions until the slot of the group's staged gradients is free."""
        while self._in_flight and not group.main_grad.has_room:
            self.drain(next(iter(self._in_flight)))
