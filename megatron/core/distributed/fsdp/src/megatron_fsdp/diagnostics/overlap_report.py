"""Overlap report: time of communication and computation by unit, and how much of the former is exposed."""

from __future__ import annotations

import collections
import dataclasses
import re
import weakref
from collections.abc import Iterable, Sequence

from megatron_fsdp.machine.device import PeakMemory
from megatron_fsdp.runtime.schedule import Schedule
from megatron_fsdp.runtime.timeline import Kind

_MIB = 2**20
_OUTSIDE = "(outside units)"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Times:
    """Times of one unit, or of all, on this rank, in ms. Streams run side by side: only compute and exposed add up."""

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
        names = [field.name for field in dataclasses.fields(self) if field.name != "label"]
        return dataclasses.replace(self, **{name: getattr(self, name) + getattr(other, name) for name in names})


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
        if schedule.timeline.is_on:
            raise RuntimeError("another overlap report of this model is open; end it first.")
        self._rows = None
        self._schedule = schedule
        schedule.timeline.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        schedule, self._schedule = self._schedule, None
        assert schedule is not None, "entered"
        if kind is not None:
            schedule.timeline.discard()
            return
        spent = schedule.timeline.stop()
        sums: dict[str, collections.defaultdict[str, float]] = {
            label: collections.defaultdict(float) for label in (*(unit.label for unit in schedule.units), _OUTSIDE)
        }
        for (unit, work), time_ms in spent.busy.items():
            sums[unit.label if unit is not None else _OUTSIDE][f"{work.value}_ms"] += time_ms
        for (unit, _work), time_ms in spent.exposed.items():
            sums[unit.label if unit is not None else _OUTSIDE]["exposed_ms"] += time_ms
        # mypy takes what is unpacked for the label too.
        self._rows = tuple(Times(label=label, **times) for label, times in sums.items())  # type: ignore[arg-type]
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
        return self._table(folded(self.rows))

    def __str__(self) -> str:
        return self._table(self.rows)

    def _table(self, rows: Iterable[Times]) -> str:
        total, memory = self.total, self.peak_memory
        time_ms = total.compute_ms + total.exposed_ms
        head = (
            f"{time_ms:.1f} ms: {total.compute_ms:.1f} compute, {total.exposed_ms:.1f} exposed communication "
            f"({total.exposed_ms / time_ms:.1%}); {total.communication_ms:.1f} ms of communication"
        )
        if total.communication_ms:
            head += f", {1 - min(total.exposed_ms / total.communication_ms, 1):.0%} of it hidden"
        if memory is not None:
            head += (
                f"; peak memory {memory.allocated / _MIB:.0f} MiB allocated, {memory.reserved / _MIB:.0f} MiB reserved"
            )
        columns = (*(kind.value for kind in Kind), "exposed")
        lines = [
            (
                f"{row.label} x{row.count}" if row.count > 1 and row is not total else row.label,
                *(f"{getattr(row, f'{column}_ms'):.2f}" for column in columns),
            )
            for row in (*rows, total)
        ]
        return f"{head}\n{table([('ms', *columns), *lines])}"


def folded(rows: Iterable[Times]) -> list[Times]:
    """Rows whose names differ only in numbers, as one."""
    together: dict[str, Times] = {}
    for row in rows:
        label = re.sub(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.|$)", "*", row.label)
        together[label] = together[label] + row if label in together else dataclasses.replace(row, label=label)
    return list(together.values())


def table(rows: Sequence[Sequence[str]]) -> str:
    """Lines of aligned cells, the first column to the left, the others to the right; `rows` begin with the header."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows)
