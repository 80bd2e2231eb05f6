"""Assignment of storages to memory: two slots for units that fit them, a place of their own for others."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence

#: A unit computes while its neighbour is gathered, or reduces while its neighbour computes.
SLOTS = 2


@dataclasses.dataclass(frozen=True)
class PoolSlot:
    """A piece of memory of fixed size that is lent to one storage at a time."""

    name: str
    nbytes: int
    is_shared: bool = True
    """Several storages take turns in it."""


@dataclasses.dataclass(frozen=True)
class Footprint:
    """The storages that one unit needs at the same time."""

    needs: tuple[tuple[str, int], ...]
    """(key, bytes) of each."""
    takes_turns: bool = True
    """The unit is done before the next but one begins; False for a unit inside of which others run."""

    @property
    def sizes(self) -> tuple[int, ...]:
        """Bytes of each storage, falling."""
        return tuple(nbytes for _, nbytes in self.by_size)

    @property
    def by_size(self) -> list[tuple[str, int]]:
        """What it needs, largest first."""
        return sorted(self.needs, key=lambda need: -need[1])


def assign_slots(
    kind: str, footprints: Sequence[Footprint], *, only_alike: bool, keeps_misfits: bool
) -> dict[str, PoolSlot]:
    """Slots by key; what is not in it has none. A function of the units alone, so that all ranks come to the same.

    Args:
        kind: begins the slots' names.
        footprints: of the units, in the order in which they run.
        only_alike: the units of the most frequent footprint share slots; False: all do, in slots as large as the
            largest needs them.
        keeps_misfits: what does not fit has a slot of its own.
    """
    fitting = [footprint for footprint in footprints if footprint.takes_turns and footprint.needs]
    if only_alike:
        count = collections.Counter(footprint.sizes for footprint in fitting)
        chosen = max(count, key=lambda sizes: (count[sizes], sum(sizes), sizes), default=())
        fitting = [footprint for footprint in fitting if footprint.sizes == chosen]
    most: collections.defaultdict[int, int] = collections.defaultdict(int)
    for footprint in fitting:
        for place, nbytes in enumerate(footprint.sizes):
            most[place] = max(most[place], nbytes)
    slots = {
        key: PoolSlot(f"{kind} {number % SLOTS}.{place}", most[place])
        for number, footprint in enumerate(fitting)
        for place, (key, _) in enumerate(footprint.by_size)
    }
    if keeps_misfits:
        needs = [need for footprint in footprints for need in footprint.needs]
        slots.update(
            (key, PoolSlot(f"own {key}", nbytes, is_shared=False)) for key, nbytes in needs if key not in slots
        )
    return slots
