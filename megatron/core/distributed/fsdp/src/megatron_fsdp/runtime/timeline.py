"""Timing of a step: moments on the streams, noted while somebody asks for them.

The compute stream does one thing at a time: it computes for a unit, or waits for a gather or a reduction.
Gathers and reductions beside it are spans of their own. A device without streams communicates in the compute stream's
place: all of it is exposed.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import enum
import itertools
from collections.abc import Iterator
from contextlib import AbstractContextManager

from megatron_fsdp.machine.device import Device, TimedEvent
from megatron_fsdp.runtime.unit import Unit


class Kind(enum.Enum):
    """Work of a stream."""

    COMPUTE = "compute"
    GATHER = "gather"
    REDUCE = "reduce"
    OUTER = "outer"


#: A unit, or None for what is done for none, and what is done.
Doing = tuple[Unit | None, Kind]


@dataclasses.dataclass(frozen=True)
class Spent:
    """Times in ms, summed up by unit and kind of work."""

    busy: dict[Doing, float]
    """Some stream worked."""
    exposed: dict[Doing, float]
    """The compute stream did not compute: it waited for another stream, or communicated itself."""


_NOTHING = contextlib.nullcontext()


class Watch:
    """Recorder of the schedule's moments; a call and a comparison each while nobody asks for them."""

    def __init__(self, device: Device):
        self._device = device
        self.is_on = False
        self._units: list[Unit] = []
        """The units that compute, each inside the one before it."""
        self._lane: list[tuple[Unit | None, Kind, TimedEvent]] = []
        """Work of the compute stream from each moment on."""
        self._beside: list[tuple[Unit, Kind, TimedEvent, TimedEvent]] = []

    def start(self) -> None:
        """Notes moments from now on."""
        self.is_on = True
        self._units.clear()
        self._turn_to(None)

    def stop(self) -> Spent:
        """All that has been spent since `start`; the host waits for the device."""
        self._turn_to(None)
        self._device.synchronize()
        busy, exposed = collections.defaultdict(float), collections.defaultdict(float)
        for unit, kind, start, end in self._beside:
            busy[unit, kind] += start.elapsed_time(end)
        for (unit, kind, start), (_, _, end) in itertools.pairwise(self._lane):
            time_ms = start.elapsed_time(end)
            if kind is not Kind.COMPUTE:
                exposed[unit, kind] += time_ms
            if kind is Kind.COMPUTE or not self._device.has_streams:
                busy[unit, kind] += time_ms
        self.forget()
        return Spent(busy, exposed)

    def forget(self) -> None:
        """Notes nothing any more."""
        self.is_on = False
        self._lane, self._beside = [], []

    def communicates(self, kind: Kind, unit: Unit) -> AbstractContextManager[None]:
        """Inside, the current stream, which is not the compute stream, gathers or reduces for `unit`."""
        return self._communicate(kind, unit) if self.is_on else _NOTHING

    def waits(self, kind: Kind, unit: Unit | None = None) -> AbstractContextManager[None]:
        """Inside, the compute stream waits for `kind` of `unit`; None: for the sake of the one that computes."""
        return self._wait(kind, unit) if self.is_on else _NOTHING

    def enter(self, unit: Unit) -> None:
        """The unit computes its forward from now on."""
        if not self.is_on:
            return
        if unit.is_root:  # an earlier forward may have been broken off
            self._units.clear()
        self._units.append(unit)
        self._turn_to(unit)

    def leave(self) -> None:
        """The forward of the unit that was entered last is over."""
        if not self.is_on:
            return
        if self._units:
            self._units.pop()
        self._turn_to(self._computing)

    def turn_back(self, unit: Unit | None) -> None:
        """Backward has come to the unit, or with None to its end. It does not say when it leaves a unit."""
        if not self.is_on:
            return
        self._units = [] if unit is None else [unit]
        self._turn_to(unit)

    @property
    def _computing(self) -> Unit | None:
        return self._units[-1] if self._units else None

    @contextlib.contextmanager
    def _communicate(self, kind: Kind, unit: Unit) -> Iterator[None]:
        if not self._device.has_streams:
            with self._wait(kind, unit):
                yield
            return
        start = self._device.record_timed_event()
        yield
        self._beside.append((unit, kind, start, self._device.record_timed_event()))

    @contextlib.contextmanager
    def _wait(self, kind: Kind, unit: Unit | None) -> Iterator[None]:
        unit_before, kind_before, _ = self._lane[-1]
        self._turn_to(unit or self._computing, kind)
        yield
        self._turn_to(unit_before, kind_before)

    def _turn_to(self, unit: Unit | None, kind: Kind = Kind.COMPUTE) -> None:
        self._lane.append((unit, kind, self._device.record_timed_event()))
