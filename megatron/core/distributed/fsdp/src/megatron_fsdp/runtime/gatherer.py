"""Brings the weights of units together before they are used and lets them go afterwards, beside the compute stream."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from megatron_fsdp.config import EngineConfig
from megatron_fsdp.machine.device import Device, Event
from megatron_fsdp.plan.slots import SLOTS
from megatron_fsdp.runtime.unit import Unit
from megatron_fsdp.runtime.watch import Kind, Watch


@dataclasses.dataclass(frozen=True)
class Prefetch:
    """How far gathers run ahead of the unit that computes."""

    depth: int
    """Units, where `numel` does not decide."""
    numel: int | None
    """Elements that may be gathered ahead, however many units they are; a unit that would pass it is not prefetched."""
    most: int | None = None
    """Units, whatever else decides: they have no more buffers."""

    @classmethod
    def of(cls, config: EngineConfig) -> Prefetch:
        """What the options ask for; nothing without overlap."""
        if not config.overlap_param_gather:
            return cls(0, None)
        most = SLOTS - 1 if config.buffers.has_slots else None
        return cls(config.prefetch_depth, config.prefetch_numel, most)

    def pick(self, coming: Iterable[Unit]) -> list[Unit]:
        """Those of the `coming` units, in their order, that are gathered now."""
        picked: list[Unit] = []
        numel = 0
        for unit in coming:
            numel += unit.gathered_numel
            if len(picked) >= self.depth if self.numel is None else numel > self.numel:
                break
            if self.most is not None and len(picked) >= self.most:
                break
            picked.append(unit)
        return picked


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
        self._see_install()
        with self._device.use(self._outer_stream):
            with self._watch.communicates(Kind.OUTER, unit):
                for group in unit.groups:
                    if group.plan.refreshes_along_outer:
                        group.refresh()
            unit.refresh_event = self._device.record_event()

    def take_turn(self, unit: Unit) -> None:
        """Takes part in a gather that all ranks make, readable though the unit may be here alone. **Collective**."""
        if unit.is_ahead and not unit.needs_gather:
            unit.is_ahead = False
            return
        if unit.gathers_weights and unit.is_unsharded and not unit.is_resident:
            self._gather_again(unit)
        else:
            self.gather(unit)

    def gather(self, unit: Unit) -> None:
        """Starts the gather of `unit` unless it is readable or on its way. **Collective**."""
        if unit.needs_gather:
            self._gather(unit, again=False)

    def _gather_again(self, unit: Unit) -> None:
        """Writes the same values to where they are; whoever reads them is made to wait."""
        self._wait_for(unit)
        self._stream.wait_stream(self._device.current_stream())
        self._gather(unit, again=True)
        self._wait_for(unit)

    def _gather(self, unit: Unit, *, again: bool) -> None:
        self.refresh(unit)
        self._see_install()
        with self._device.use(self._stream):
            if unit.refresh_event is not None:
                unit.refresh_event.wait()
                unit.refresh_event = None
            with self._watch.communicates(Kind.GATHER, unit):
                for group in unit.groups:
                    group.unshard(again=again)
            unit.gather_event = self._device.record_event()

    def make_readable(self, unit: Unit) -> None:
        """Gathers `unit` if need be, and makes the current stream wait for it. **Collective**."""
        self.gather(unit)
        self._wait_for(unit)
        unit.show_raw()

    def keep(self, unit: Unit) -> None:
        """Lets `unit`, on all ranks, be gathered for its next turn already."""
        unit.show_sharded()
        unit.is_ahead = True

    def release(self, unit: Unit) -> None:
        """Frees the gathered weights of `unit` once the work issued so far has read them, unless it is resident."""
        if unit.is_resident:
            unit.show_sharded()
        else:
            self.let_go(unit)

    def let_go(self, unit: Unit) -> None:
        """Frees the gathered weights of `unit` once the work issued so far has read them."""
        unit.show_sharded()
        unit.is_ahead = False
        if not unit.holds_gathered:
            return
        self._wait_for(unit)  # it may have been prefetched and never used
        done = self._device.record_event()
        with self._device.use(self._stream):
            # Storage goes back to the gather stream's pool: the next gather must not overwrite what is being read.
            done.wait()
            for group in unit.groups:
                group.reshard()

    def _wait_for(self, unit: Unit) -> None:
        if unit.refresh_event is None and unit.gather_event is None:
            return
        with self._watch.waits(Kind.GATHER, unit):
            for event in (unit.refresh_event, unit.gather_event):
                if event is not None:
                    event.wait()
        unit.refresh_event = unit.gather_event = None

    def _see_install(self) -> None:
        if self._installed is None:
            return
        for stream in self.streams:
            with self._device.use(stream):
                self._installed.wait()
        self._installed = None
