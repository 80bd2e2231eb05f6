"""Overlap report: time of communication and computation by unit, and how much of the former is exposed."""

from __future__ import annotations

import collections
import dataclasses
import re
import weakref
from collections.abc import Iterable
from types import TracebackType

from megatron_fsdp.machine.device import PeakMemory
from megatron_fsdp.runtime.schedule import Schedule
from megatron_fsdp.runtime.timeline import Kind, Spent

_MIB = 2**20
_OUTSIDE = "(outside units)"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Times:
    """What one unit, or all, took on this rank, in ms. Streams run side by side: only compute and exposed add up."""

    label: str
    """The unit's name; with a `*` for numbers where several are one row."""
    count: int = 1
    """Units in this row."""
    compute_ms: float = 0.0
    """Of the compute stream, waits excluded. In backward, what runs until the next unit's belongs to the last one."""
    gather_ms: float = 0.0
    reduce_ms: float = 0.0
    outer_ms: float = 0.0
    """Gathers and reductions over the outer axis."""
    exposed_ms: float = 0.0
    """The compute stream waited for communication; without streams of its own (CPU), all of that."""

    @property
    def communication_ms(self) -> float:
        """On all streams together."""
        return self.gather_ms + self.reduce_ms + self.outer_ms

    def __add__(self, other: Times) -> Times:
        """Both as one row, under this one's name."""
        values = dataclasses.asdict(self) | {
            field.name: getattr(self, field.name) + getattr(other, field.name)
            for field in dataclasses.fields(self)
            if field.name != "label"
        }
        return Times(**values)


class OverlapReport:
    """Times what is issued inside its context on this rank; `str()` of it afterwards is a table with a row per unit.

    On leaving the context the host waits for the device once. If the block raises, there are no figures. **Not
    collective**: ranks may look at different steps.

    Raises:
        RuntimeError: another report of this model is open, or the model is gone; or, on reading, this one is not over.
    """

    def __init__(self, schedule: Schedule):
        self._seen = weakref.ref(schedule)  # figures that somebody keeps must not keep a model's memory
        self._schedule: Schedule | None = None
        """Inside the context."""
        self._rows: tuple[Times, ...] | None = None
        self.peak_memory: PeakMemory | None = None
        """The device's, at the end of the context; None on the CPU."""

    def __enter__(self) -> OverlapReport:
        schedule = self._seen()
        if schedule is None:
            raise RuntimeError("the model of this overlap report is gone; ask another one for a report.")
        if schedule.watch.is_on:
            raise RuntimeError("another overlap report of this model is open; end it first.")
        self._rows = None
        self._schedule = schedule
        schedule.watch.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        schedule, self._schedule = self._schedule, None
        if kind is not None:
            schedule.watch.forget()
            return
        spent = schedule.watch.stop()
        self._rows = rows_of(spent, [unit.label for unit in schedule.units])
        self.peak_memory = schedule.device.peak_memory()

    @property
    def rows(self) -> tuple[Times, ...]:
        """One for each unit, in the order of registration, and one for what ran outside all of them."""
        if self._rows is None:
            raise RuntimeError("an overlap report has figures once its `with` block has ended without an error.")
        return self._rows

    @property
    def total(self) -> Times:
        """All rows as one; its compute and exposed time are together the time from the beginning to the end."""
        return sum(self.rows, Times(label="total", count=0))

    def short(self) -> str:
        """As `str()`, units whose names differ only in numbers in one row."""
        return _table(folded(self.rows), self.total, self.peak_memory)

    def __str__(self) -> str:
        return _table(self.rows, self.total, self.peak_memory)


def rows_of(spent: Spent, labels: Iterable[str]) -> tuple[Times, ...]:
    """One row for each of `labels`, and one for what was spent for no unit."""
    sums: dict[str, dict[str, float]] = {label: collections.defaultdict(float) for label in (*labels, _OUTSIDE)}
    for (unit, kind), time_ms in spent.busy.items():
        sums[_OUTSIDE if unit is None else unit.label][f"{kind.value}_ms"] += time_ms
    for (unit, _), time_ms in spent.exposed.items():
        sums[_OUTSIDE if unit is None else unit.label]["exposed_ms"] += time_ms
    return tuple(Times(label=label, **times) for label, times in sums.items())


def folded(rows: Iterable[Times]) -> list[Times]:
    """Rows whose names differ only in numbers, as one."""
    together: dict[str, Times] = {}
    for row in rows:
        label = re.sub(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.|$)", "*", row.label)
        together[label] = together[label] + row if label in together else dataclasses.replace(row, label=label)
    return list(together.values())


def _table(rows: Iterable[Times], total: Times, memory: PeakMemory | None) -> str:
    time_ms = total.compute_ms + total.exposed_ms
    head = (
        f"{time_ms:.1f} ms: {total.compute_ms:.1f} compute, {total.exposed_ms:.1f} exposed communication "
        f"({total.exposed_ms / time_ms:.1%}); {total.communication_ms:.1f} ms of communication"
    )
    if total.communication_ms:
        head += f", {1 - min(total.exposed_ms / total.communication_ms, 1):.0%} of it hidden"
    if memory is not None:
        head += f"; peak memory {memory.allocated / _MIB:.0f} MiB allocated, {memory.reserved / _MIB:.0f} MiB reserved"
    names = [f"{row.label} x{row.count}" if row.count > 1 else row.label for row in (*rows, total)]
    names[-1] = total.label
    width = max(map(len, names))
    columns = " ".join(f"{name:>9}" for name in (*(kind.value for kind in Kind), "exposed"))
    lines = [f"{name:<{width}} {_figures(row)}" for name, row in zip(names, (*rows, total), strict=True)]
    return "\n".join([head, f"{'ms':<{width}} {columns}", *lines])


def _figures(row: Times) -> str:
    values = (row.compute_ms, row.gather_ms, row.reduce_ms, row.outer_ms, row.exposed_ms)
    return " ".join(f"{value:9.2f}" for value in values)
