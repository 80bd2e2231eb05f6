"""Where a step's time goes: moments on the streams, noted while somebody asks for them.

The compute stream does one thing at a time: it computes for a unit, or waits for a gather or a reduction.
Gathers and reductions beside it are spans of their own. A device without streams communicates in the compute stream's
place: all of it is exposed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import itertools
from collections.abc import Iterator
from contextlib import AbstractContextManager

from megatron_fsdp.machine.device import Device, Moment
from megatron_fsdp.runtime.unit import Unit


class Kind(enum.Enum):
    """What a stream does."""

    COMPUTE = "compute"
    GATHER = "gather"
    REDUCE = "reduce"
    OUTER = "outer"


@dataclasses.dataclass(frozen=True)
class Doing:
    """What the compute stream does, for which unit; None: for none."""

    unit: Unit | None
    kind: Kind = Kind.COMPUTE


@dataclasses.dataclass(frozen=True)
class Spent:
    """Time, in ms, that was spent on one kind of work for one unit."""

    doing: Doing
    time_ms: float
    is_busy: bool
    """Some stream worked; False: the compute stream waited for another one."""
    is_exposed: bool
    """The compute stream did not compute."""


_NOTHING = contextlib.nullcontext()


class Watch:
    """What the schedule tells of its moments; a call and a comparison each while nobody asks for them."""

    def __init__(self, device: Device):
        self._device = device
        self.is_on = False
        self._units: list[Unit] = []
        """The units that compute, each inside the one before it."""
        self._lane: list[tuple[Doing, Moment]] = []
        """What the compute stream does from each moment on."""
        self._beside: list[tuple[Doing, Moment, Moment]] = []

    def start(self) -> None:
        """Notes moments from now on."""
        self.is_on = True
        self._units.clear()
        self._turn_to(Doing(None))

    def stop(self) -> list[Spent]:
        """All that has been spent since `start`; the host waits for the device."""
        self._turn_to(Doing(None))
        self._device.synchronize()
        spent = [
            Spent(doing, end.ms_since(start), is_busy=True, is_exposed=False) for doing, start, end in self._beside
        ]
        for (doing, start), (_, end) in itertools.pairwise(self._lane):
            computes = doing.kind is Kind.COMPUTE
            is_busy = computes or not self._device.has_streams
            spent.append(Spent(doing, end.ms_since(start), is_busy=is_busy, is_exposed=not computes))
        self.forget()
        return spent

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
        self._turn_to(Doing(unit))

    def leave(self) -> None:
        """The forward of the unit that was entered last is over."""
        if not self.is_on:
            return
        if self._units:
            self._units.pop()
        self._turn_to(Doing(self._computing))

    def turn_back(self, unit: Unit | None) -> None:
        """Backward has come to the unit, or with None to its end. It does not say when it leaves a unit."""
        if not self.is_on:
            return
        self._units = [] if unit is None else [unit]
        self._turn_to(Doing(unit))

    @property
    def _computing(self) -> Unit | None:
        return self._units[-1] if self._units else None

    @contextlib.contextmanager
    def _communicate(self, kind: Kind, unit: Unit) -> Iterator[None]:
        if not self._device.has_streams:
            with self._wait(kind, unit):
                yield
            return
        start = self._device.record_moment()
        yield
        self._beside.append((Doing(unit, kind), start, self._device.record_moment()))

    @contextlib.contextmanager
    def _wait(self, kind: Kind, unit: Unit | None) -> Iterator[None]:
        before, _ = self._lane[-1]
        self._turn_to(Doing(unit or self._computing, kind))
        yield
        self._turn_to(before)

    def _turn_to(self, doing: Doing) -> None:
        self._lane.append((doing, self._device.record_moment()))
