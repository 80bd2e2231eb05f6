"""Timing of a step: moments on the streams, recorded while an overlap report is open.

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
    """The work of a stream."""

    COMPUTE = "compute"
    GATHER = "gather"
    REDUCE = "reduce"
    OUTER = "outer"


@dataclasses.dataclass(frozen=True)
class StreamTimes:
    """Times in ms by kind of work and unit; the unit is None for work outside all units."""

    busy: dict[tuple[Unit | None, Kind], float]
    """Some stream worked."""
    exposed: dict[tuple[Unit | None, Kind], float]
    """The compute stream did not compute: it waited for another stream, or communicated itself."""


_NOTHING = contextlib.nullcontext()


class Timeline:
    """Moments of the schedule; a call and a comparison each while no report is open."""

    def __init__(self, device: Device):
        self._device = device
        self.is_on = False
        self._units: list[Unit] = []
        """The units that compute, each inside the one before it."""
        self._compute: list[tuple[Unit | None, Kind, TimedEvent]] = []
        """The work of the compute stream from each moment on."""
        self._beside: list[tuple[Unit, Kind, TimedEvent, TimedEvent]] = []
        """Spans of work on other streams."""

    def start(self) -> None:
        """Records moments from now on."""
        self.discard()
        self.is_on = True
        self._turn_to(None)

    def stop(self) -> StreamTimes:
        """All times since `start`; the host waits for the device."""
        self._turn_to(None)
        self._device.synchronize()
        busy: dict[tuple[Unit | None, Kind], float] = collections.defaultdict(float)
        exposed: dict[tuple[Unit | None, Kind], float] = collections.defaultdict(float)
        for served, kind, start, end in self._beside:
            busy[served, kind] += start.elapsed_time(end)
        for (unit, kind, start), (_, _, end) in itertools.pairwise(self._compute):
            time_ms = start.elapsed_time(end)
            if kind is not Kind.COMPUTE:
                exposed[unit, kind] += time_ms
            if kind is Kind.COMPUTE or not self._device.has_streams:
                busy[unit, kind] += time_ms
        self.discard()
        return StreamTimes(busy, exposed)

    def discard(self) -> None:
        """Records nothing any more, and forgets what was recorded."""
        self.is_on = False
        self._units, self._compute, self._beside = [], [], []

    def communicates(self, kind: Kind, unit: Unit) -> AbstractContextManager[None]:
        """Inside, the current stream, which is not the compute stream, gathers or reduces for `unit`."""
        if not self.is_on:
            return _NOTHING
        return self._span(kind, unit) if self._device.has_streams else self._wait(kind, unit)

    def waits(self, kind: Kind, unit: Unit | None = None) -> AbstractContextManager[None]:
        """Inside, the compute stream waits for `kind` of `unit`; None: for the sake of the one that computes."""
        return self._wait(kind, unit) if self.is_on else _NOTHING

    def enter(self, unit: Unit) -> None:
        """The unit computes its forward from now on."""
        if unit.is_root:  # an earlier forward may have been broken off
            self._units.clear()
        self._units.append(unit)
        self._turn_to(unit)

    def leave(self) -> None:
        """The forward of the unit that was entered last is over."""
        if self._units:
            self._units.pop()
        self._turn_to(self._units[-1] if self._units else None)

    def turn_back(self, unit: Unit | None) -> None:
        """Backward has come to the unit, or with None to its end. It does not say when it leaves a unit."""
        self._units = [] if unit is None else [unit]
        self._turn_to(unit)

    @contextlib.contextmanager
    def _span(self, kind: Kind, unit: Unit) -> Iterator[None]:
        start = self._device.record_timed_event()
        yield
        self._beside.append((unit, kind, start, self._device.record_timed_event()))

    @contextlib.contextmanager
    def _wait(self, kind: Kind, unit: Unit | None) -> Iterator[None]:
        unit_before, kind_before, _ = self._compute[-1]
        self._turn_to(unit or (self._units[-1] if self._units else None), kind)
        yield
        self._turn_to(unit_before, kind_before)

    def _turn_to(self, unit: Unit | None, kind: Kind = Kind.COMPUTE) -> None:
        self._compute.append((unit, kind, self._device.record_timed_event()))
