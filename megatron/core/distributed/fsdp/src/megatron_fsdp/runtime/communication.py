"""All-gathers and reductions of units, on streams beside the compute stream: the bodies of a program's operations."""

from __future__ import annotations

import collections
import contextlib
import functools
from collections.abc import Callable, Iterator

import torch

from megatron_fsdp.machine.collectives import GradScale
from megatron_fsdp.machine.device import Device, Event
from megatron_fsdp.runtime.timeline import Kind, Timeline
from megatron_fsdp.runtime.unit import Unit
from megatron_fsdp.state.flat_buffer import FlatBuffer
from megatron_fsdp.state.main_grad import GradState, MainGrad
from megatron_fsdp.state.param_group import ParamGroup

#: Low-precision copies that the outer axis may still be reading while the inner axis goes on.
_MOST_CROSSING = 2


class Gatherer:
    """Gathers and reshards units, in the order in which it is called; the same order on every rank.

    Gathers over the inner axis and those over the outer axis run on a stream each. What an optimizer step left to the
    outer axis (`refresh`) needs no storage of its own, so it may run as far ahead as the order of units is known.
    """

    def __init__(self, device: Device, timeline: Timeline):
        self._device = device
        self._timeline = timeline
        self._stream = device.new_stream(high_priority=True)
        self._outer_stream = device.new_stream(high_priority=True)
        self.streams = (self._stream, self._outer_stream)
        """The streams of the inner and the outer axis."""
        self._installed: Event | None = None
        """Compute weights were written on the current stream; the next gather waits for it."""

    def wait_for_compute(self) -> None:
        """Makes gathers from now on wait for the work issued on the current stream."""
        current = self._device.current_stream()
        for stream in self.streams:
            stream.wait_stream(current)

    def wait_for_install(self) -> None:
        """Makes gathers from now on wait for the compute weights that have just been written on the current stream."""
        self._installed = self._device.record_event()

    def refresh(self, unit: Unit) -> None:
        """Starts what the last install left to the outer axis, if anything. **Collective**."""
        stale = [group for group in unit.refreshing if not group.is_fresh]
        if not stale:
            return
        if self._installed is not None:
            self._see_install(self._installed)
        with self._device.use(self._outer_stream):
            with self._timeline.communicates(Kind.OUTER, unit):
                for group in stale:
                    group.refresh()
            unit.refresh_event = self._device.record_event()

    def gather(self, unit: Unit) -> None:
        """Starts the all-gather of `unit`. **Collective**, whatever is readable here.

        Where it is gathered on this rank, and perhaps nowhere else, the same values are written to where they are;
        whoever reads them is made to wait.
        """
        again = unit.is_gathered
        if again:
            self.wait_for(unit)
            self._stream.wait_stream(self._device.current_stream())
        if unit.refreshing:
            self.refresh(unit)
        if self._installed is not None:
            self._see_install(self._installed)
        with self._device.use(self._stream):
            if unit.refresh_event is not None:
                unit.refresh_event.wait()
                unit.refresh_event = None
            with self._timeline.communicates(Kind.GATHER, unit):
                for group in unit.groups:
                    group.unshard(again=again)
            unit.gather_event = self._device.record_event()
        unit.is_gathered = unit.gathers_weights
        if again:
            self.wait_for(unit)

    def reshard(self, unit: Unit) -> None:
        """Frees the gathered weights of `unit` once the work issued so far has read them."""
        unit.show_sharded()
        if not unit.is_gathered:
            return
        unit.is_gathered = False
        self.wait_for(unit)  # it may have been prefetched and never used
        done = self._device.record_event()
        with self._device.use(self._stream):
            # Storage goes back to the gather stream's pool: the next gather must not overwrite what is being read.
            done.wait()
            for group in unit.groups:
                group.reshard()

    def wait_for(self, unit: Unit) -> None:
        """Makes the compute stream wait for the gathers of `unit`."""
        if unit.refresh_event is None and unit.gather_event is None:
            return
        with self._timeline.waits(Kind.GATHER, unit):
            for event in (unit.refresh_event, unit.gather_event):
                if event is not None:
                    event.wait()
        unit.refresh_event = unit.gather_event = None

    def _see_install(self, installed: Event) -> None:
        for stream in self.streams:
            with self._device.use(stream):
                installed.wait()
        self._installed = None


class Reducer:
    """Reduces and finalizes the gradients of units, in the order in which it is called.

    Reductions over the inner axis and those over the outer axis run on a stream each, so that an inner one need not
    wait for the outer one of the unit before.
    """

    def __init__(self, device: Device, timeline: Timeline, scales: dict[bool, GradScale]):
        self._device = device
        self._timeline = timeline
        self._scales = scales
        """Gradient scale by `is_expert`."""
        self._stream = device.new_stream(high_priority=True)
        self._outer_stream = device.new_stream(high_priority=True)
        self.streams = (self._stream, self._outer_stream)
        """The streams of the inner and the outer axis."""
        self.in_flight: dict[Unit, list[tuple[FlatBuffer, Event]]] = {}
        """Staged gradients, allocated on the compute stream, until it has waited for their reduction; oldest first."""
        self._crossing: collections.deque[tuple[torch.Tensor, Event]] = collections.deque()
        """Memory of the inner axis' stream, kept until that has waited for the outer axis' to have read it."""
        self._staging: Unit | None = None
        """The unit whose gradients were last computed in their staging memory."""
        self.before_collect: Callable[[ParamGroup], None] | None = None
        """Called with every group whose gradients of this backward are complete and still this rank's own."""

    def drain(self, unit: Unit) -> None:
        """Makes the compute stream wait for the reduction of `unit`; its staged gradients can be freed then."""
        for _, done in self.in_flight.pop(unit, ()):
            with self._timeline.waits(Kind.REDUCE):
                done.wait()

    @torch.no_grad()
    def reduce(self, unit: Unit) -> None:
        """Starts the reduction of the unit's gradients of this backward, which are complete. **Collective**."""
        unit.align_grads()
        for group in unit.groups:
            if group.main_grad is None:
                continue
            if group.plan.reduces_each_microbatch:
                self._make_room(group.main_grad)
            elif group.main_grad.state is not GradState.ACCUMULATING:  # about to be opened on this stream
                self.wait()
            if self.before_collect is not None:
                self.before_collect(group)
            group.main_grad.note_dropped()
            if group.main_grad.dropped and not group.main_grad.is_current:  # `collect` moves what reductions wrote
                self.wait()
            staged = group.main_grad.collect()
            if staged is None:
                continue
            ready = self._device.record_event()
            with self._device.use(self._stream):
                ready.wait()
                if group.main_grad.state is GradState.FINAL:  # about to be opened again on this stream
                    self._stream.wait_stream(self._outer_stream)
                with self._timeline.communicates(Kind.REDUCE, unit):
                    group.main_grad.reduce(staged, self._scales[group.spec.is_expert])
                self.in_flight.setdefault(unit, []).append((staged, self._device.record_event()))

    def wgrad_out(self, unit: Unit, group: ParamGroup, slot: int) -> torch.Tensor | None:
        """Staging memory in which the gradient of parameter `slot` of the unit's `group` may be computed.

        None, for memory of its own, while another unit's gradients are being computed in theirs: where several forwards
        share a backward.
        """
        if unit is not self._staging and self._staging is not None and self._staging.has_staged_grads:
            return None
        assert group.main_grad is not None, "a trainable group"
        if group.main_grad.staged is None:
            self._make_room(group.main_grad)
        self._staging = unit
        return group.main_grad.wgrad_out(slot)

    @torch.no_grad()
    def finalize(self, unit: Unit) -> None:
        """Starts what is left of the unit's reductions at the end of a cycle. **Collective**."""
        for group in unit.groups:
            if group.main_grad is None or group.main_grad.state is not GradState.ACCUMULATING:
                continue
            scale = self._scales[group.spec.is_expert]
            if group.plan.accumulates_final_values:  # what has been reduced is what it should be
                group.main_grad.finalize(scale)
                continue
            ready = self._device.record_event()
            with self._device.use(self._stream):
                ready.wait()
                with self._timeline.communicates(Kind.REDUCE, unit):
                    crossing = group.main_grad.finalize(scale, functools.partial(self._along_outer, unit))
                if crossing is not None:
                    self._keep_while_crossing(crossing)

    def wait(self) -> None:
        """Makes the current stream wait for every reduction; staged gradients stay in flight."""
        current = self._device.current_stream()
        with self._timeline.waits(Kind.REDUCE):
            for stream in self.streams:
                current.wait_stream(stream)

    def drain_all(self) -> None:
        """Makes the compute stream, which is the current one, wait for every reduction."""
        self.wait()
        self.in_flight.clear()
        # The next allocation on the inner axis' stream waits for the current stream first.
        self._crossing.clear()

    @contextlib.contextmanager
    def _along_outer(self, unit: Unit) -> Iterator[None]:
        """Goes on, after what is on the inner axis' stream, on the outer axis' stream."""
        ready = self._device.record_event()
        with self._device.use(self._outer_stream):
            ready.wait()
            with self._timeline.communicates(Kind.OUTER, unit):
                yield

    def _keep_while_crossing(self, tensor: torch.Tensor) -> None:
        with self._device.use(self._outer_stream):
            self._crossing.append((tensor, self._device.record_event()))
        while len(self._crossing) > _MOST_CROSSING:
            _, read = self._crossing.popleft()
            read.wait()

    def _make_room(self, main_grad: MainGrad) -> None:
        """Drains older reductions until the slot of the group's staged gradients is free."""
        while self.in_flight and not main_grad.has_room:
            self.drain(next(iter(self.in_flight)))
