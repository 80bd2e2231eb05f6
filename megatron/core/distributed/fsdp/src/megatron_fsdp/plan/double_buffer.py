"""Assignment of storages to double buffers: neighbouring units alternate between two."""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Sequence

#: Buffers of a kind: a unit computes while its neighbour is gathered, or reduces while its neighbour computes.
BUFFERS = 2

#: (key, bytes) of the storages that one unit needs at the same time.
Needs = tuple[tuple[str, int], ...]


@dataclasses.dataclass(frozen=True)
class PersistentBuffer:
    """Memory of fixed size that one storage uses at a time."""

    name: str
    nbytes: int
    is_shared: bool = True
    """Several storages alternate in it."""


def assign_buffers(kind: str, needs: Sequence[Needs], *, only_alike: bool) -> dict[str, PersistentBuffer]:
    """Double buffers by key; a key that is missing has none. All ranks get the same, a function of the units alone.

    Args:
        kind: begins the buffers' names.
        needs: of the units that may alternate, in the order in which they run.
        only_alike: the units of the most frequent sizes share buffers; False: all units do, in buffers as large as
            the largest unit needs.
    """
    units = [sorted(each, key=lambda need: -need[1]) for each in needs if each]
    sizes = [tuple(nbytes for _, nbytes in unit) for unit in units]
    if only_alike:
        count = collections.Counter(sizes)
        chosen = max(count, key=lambda size: (count[size], sum(size), size), default=())
        units = [unit for unit, size in zip(units, sizes, strict=True) if size == chosen]
        sizes = [chosen]
    largest = [max(column) for column in itertools.zip_longest(*sizes, fillvalue=0)]
    return {
        key: PersistentBuffer(f"{kind} {number % BUFFERS}.{place}", largest[place])
        for number, unit in enumerate(units)
        for place, (key, _) in enumerate(unit)
    }
