"""All-gathers and reshards of units, beside the compute stream."""

from __future__ import annotations

from megatron_fsdp.machine.device import Device, Event
from megatron_fsdp.runtime.timeline import Kind, Watch
from megatron_fsdp.runtime.unit import Unit


class Gatherer:
    """Gathers and releases units, in the order in which it is called; the same order on every rank.

    Gathers over the inner axis and those over the outer axis run on a stream each. What an optimizer step left to the
    outer axis (`refresh`) needs no storage of its own, so it may run as far ahead as the order of units is known.
    """

    def __init__(self, device: Device, watch: Watch):
        self._device = device
        self._watch = watch
        self._stream = device.new_stream(high_priority=True)
        self._outer_stream = device.new_stream(high_priority=True)
        self._installed: Event | None = None
        """Compute weights were written on the current stream; the next gather waits for it."""

    @property
    def streams(self) -> tuple[object, object]:
        """The streams of the inner and the outer axis."""
        return self._stream, self._outer_stream

    def follow(self) -> None:
        """Gathers from now on see what has been issued on the current stream."""
        current = self._device.current_stream()
        for stream in self.streams:
            stream.wait_stream(current)

    def follow_install(self) -> None:
        """Gathers from now on see the compute weights that have just been written on the current stream."""
        self._installed = self._device.record_event()

    def refresh(self, unit: Unit) -> None:
        """Starts what the last install left to the outer axis, if anything. **Collective**."""
        if not unit.needs_refresh:
            return
        if self._installed is not None:
            self._see_install()
        with self._device.use(self._outer_stream):
            with self._watch.communicates(Kind.OUTER, unit):
                for group in unit.groups:
                    if group.plan.refreshes_along_outer:
                        group.refresh()
            unit.refresh_event = self._device.record_event()

    def gather(self, unit: Unit) -> None:
        """Starts the all-gather of `unit`. **Collective**, whatever is readable here."""
        if unit.is_gathered:  # perhaps nowhere else
            self._rejoin(unit)
        else:
            self._gather(unit)

    def _rejoin(self, unit: Unit) -> None:
        """Writes the same values to where they are; whoever reads them is made to wait."""
        self.wait_for(unit)
        self._stream.wait_stream(self._device.current_stream())
        self._gather(unit, again=True)
        self.wait_for(unit)

    def _gather(self, unit: Unit, *, again: bool = False) -> None:
        if unit.refreshes:
            self.refresh(unit)
        if self._installed is not None:
            self._see_install()
        with self._device.use(self._stream):
            if unit.refresh_event is not None:
                unit.refresh_event.wait()
                unit.refresh_event = None
            with self._watch.communicates(Kind.GATHER, unit):
                for group in unit.groups:
                    group.unshard(again=again)
            unit.gather_event = self._device.record_event()
        unit.is_gathered = unit.gathers_weights

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
        with self._watch.waits(Kind.GATHER, unit):
            for event in (unit.refresh_event, unit.gather_event):
                if event is not None:
                    event.wait()
        unit.refresh_event = unit.gather_event = None

    def _see_install(self) -> None:
        for stream in self.streams:
            with self._device.use(stream):
                self._installed.wait()
        self._installed = None
