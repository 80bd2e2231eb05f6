"""Flat buffers: which parameters of a unit share one, and the rank and offset of each element in it."""

from __future__ import annotations

import dataclasses
import heapq
import math
from collections.abc import Hashable, Sequence

#: Starts and shard sizes are multiples of this many elements where that costs next to nothing: 16 elements are 16 bytes
#: even for 1-byte formats, the alignment that vectorized copies, cuBLAS and NCCL want.
ALIGN = 16
#: A parameter is aligned only if the alignment step is at most this fraction of it.
ALIGN_COST = 1 / 32
#: A group is split when padding passes this fraction of its elements...
PADDING_BOUND = 0.05
#: ...and this many elements per shard: below it, splitting costs more in collectives than it saves in memory.
PADDING_SLACK = 1024


@dataclasses.dataclass(frozen=True)
class Slot:
    """One parameter's place in a flat buffer. All numbers are elements."""

    shape: tuple[int, ...]
    start: int

    @property
    def numel(self) -> int:
        """Elements of the parameter."""
        return math.prod(self.shape)

    @property
    def end(self) -> int:
        """First element behind the parameter."""
        return self.start + self.numel

    @property
    def row(self) -> int:
        """Elements of one dim-0 row (1 for 0-D and 1-D parameters)."""
        return max(1, math.prod(self.shape[1:]))

    @property
    def rows(self) -> int:
        """Length of dim 0 (1 for a 0-D parameter)."""
        return self.shape[0] if self.shape else 1


@dataclasses.dataclass(frozen=True)
class RowRange:
    """Rows [first, first + count) of a parameter, and where they start in the flat buffer."""

    first: int
    count: int
    start: int


@dataclasses.dataclass(frozen=True)
class Layout:
    """Placement of parameters in one flat buffer that is cut into equal shards. Pure arithmetic, hashable."""

    slots: tuple[Slot, ...]
    size: int
    """Elements including padding; divisible by `shard_count`."""
    shard_count: int

    @property
    def shard_size(self) -> int:
        """Elements of one shard."""
        return self.size // self.shard_count

    @property
    def used(self) -> int:
        """Elements that belong to a parameter."""
        return sum(slot.numel for slot in self.slots)

    def rows_on(self, slot: int, lo: int, hi: int) -> RowRange:
        """Rows of parameter `slot` inside the elements [lo, hi), which begin and end between two rows."""
        place = self.slots[slot]
        if place.numel == 0:
            # No element decides who owns rows of zero elements: the first shard does.
            return RowRange(0, place.rows if lo == 0 else 0, place.start)
        first, last = max(place.start, lo), min(place.end, hi)
        if first >= last:
            return RowRange(0 if hi <= place.start else place.rows, 0, min(max(lo, place.start), place.end))
        return RowRange((first - place.start) // place.row, (last - first) // place.row, first)


def plan_layout(shapes: Sequence[tuple[int, ...]], shard_count: int, atom_rows: Sequence[int] | None = None) -> Layout:
    """The smallest buffer found for `shapes` in which no shard boundary cuts an atom.

    Shards are equal, so that one collective moves the buffer. A parameter cut by at most one boundary only needs its
    start shifted; one that may be cut by more needs a shard size divisible by its atom. Deterministic: the same
    arguments give the same layout.

    Args:
        shapes: parameter shapes; slots keep this order.
        shard_count: ranks that share the buffer.
        atom_rows: per parameter, how many dim-0 rows must stay on one rank; 1 when omitted. The parameter's whole
            length keeps it on one rank.
    """
    atom_rows = [1] * len(shapes) if atom_rows is None else list(atom_rows)
    pieces = [_Piece.of(i, tuple(shape), rows) for i, (shape, rows) in enumerate(zip(shapes, atom_rows, strict=True))]
    by_atom = sorted(pieces, key=lambda piece: (-piece.atom, piece.index))
    by_numel = sorted(pieces, key=lambda piece: (-piece.numel, piece.index))
    packed = [_pack(order, shard_count) for order in (pieces, by_atom, by_numel)]
    shard_size, starts = min([*packed, _balance(by_numel, shard_count)], key=lambda found: found[0])
    slots = tuple(Slot(tuple(shape), starts[i]) for i, shape in enumerate(shapes))
    return Layout(slots, shard_size * shard_count, shard_count)


@dataclasses.dataclass(frozen=True)
class _Piece:
    """One parameter as packing sees it, in elements."""

    index: int
    numel: int
    atom: int
    """Elements that must not be cut."""
    align: int

    @classmethod
    def of(cls, index: int, shape: tuple[int, ...], atom_rows: int) -> _Piece:
        numel = math.prod(shape)
        atom = max(1, math.prod(shape[1:])) * max(1, atom_rows)
        align = ALIGN if math.lcm(atom, ALIGN) <= numel * ALIGN_COST else 1
        return cls(index, numel, atom, align)


def _pack(pieces: Sequence[_Piece], shard_count: int) -> tuple[int, dict[int, int]]:
    """Shard size in elements and the start of every piece, for this order of pieces."""
    total = sum(piece.numel for piece in pieces)
    size = max(1, -(-total // shard_count))
    while True:
        granule = math.lcm(*(piece.atom for piece in pieces if piece.numel > size))
        aligned = math.lcm(granule, ALIGN)
        exact, size = -(-size // granule) * granule, -(-size // aligned) * aligned
        if size - exact > exact * ALIGN_COST:
            size = exact
        starts = _place(pieces, size, shard_count)
        if starts is not None:
            return size, starts
        # Steps of half a percent bound both the search (a few hundred tries) and what it can waste.
        size += max(1, size // 200)


def _balance(pieces: Sequence[_Piece], shard_count: int) -> tuple[int, dict[int, int]]:
    """Shard size and starts with every piece whole on one rank, each given to the rank that holds least.

    Largest first, this is at most a third larger than the best assignment: what many whole matrices need.
    """
    loads = [(0, shard) for shard in range(shard_count)]
    places: dict[int, tuple[int, int]] = {}
    for piece in pieces:
        load, shard = heapq.heappop(loads)
        offset = -(-load // piece.align) * piece.align
        places[piece.index] = shard, offset
        heapq.heappush(loads, (offset + piece.numel, shard))
    size = max(1, *(load for load, _ in loads))
    aligned = -(-size // ALIGN) * ALIGN
    if aligned - size <= size * ALIGN_COST:
        size = aligned
    return size, {index: shard * size + offset for index, (shard, offset) in places.items()}


def _place(pieces: Sequence[_Piece], size: int, shard_count: int) -> dict[int, int] | None:
    """Starts of the pieces packed one after the other into shards of `size` elements, or None if they do not fit."""
    starts: dict[int, int] = {}
    offset = 0
    for piece in pieces:
        start = -(-offset // piece.align) * piece.align
        boundary = (start // size + 1) * size
        if start + piece.numel > boundary:
            if size % piece.atom and piece.numel > size:
                return None
            step = math.lcm(piece.atom, piece.align)
            if step > piece.numel or boundary % piece.align:
                step = piece.atom
            start += (boundary - start) % step
        starts[piece.index] = start
        offset = start + piece.numel
    return starts if offset <= size * shard_count else None


@dataclasses.dataclass(frozen=True)
class GroupKey:
    """Parameters with equal keys may share a buffer."""

    codec: Hashable
    """Codec and storage format of the compute weights."""
    dtype: Hashable
    """Compute dtype, which is also the dtype of gradients from autograd."""
    requires_grad: bool
    is_expert: bool
    """Lives on the expert mesh."""
    is_replicated: bool
    """Marked by `fsdp_no_shard`, or 0-D: kept whole on every rank."""


@dataclasses.dataclass(frozen=True)
class ParamSpec:
    """One parameter as grouping sees it."""

    shape: tuple[int, ...]
    key: GroupKey
    atom_rows: int = 1
    """Rows that the weight's format wants on one rank; given up where that would cost too much padding."""
    has_single_owner: bool = False
    """All rows stay on one rank, whatever the padding."""

    @property
    def whole_rows(self) -> int:
        """Rows that no shard boundary may cut."""
        return max(1, self.shape[0]) if self.has_single_owner and self.shape else self.atom_rows


@dataclasses.dataclass(frozen=True)
class GroupPlan:
    """Parameters (indices into the unit's list, in order) that share one layout."""

    key: GroupKey
    members: tuple[int, ...]
    layout: Layout
    atom_rows: tuple[int, ...]
    """By member, rows that no shard boundary cuts: what its spec asks for, or 1 where that was given up."""

    @property
    def wasted(self) -> int:
        """Elements of padding, 0 if these are acceptable."""
        return 0 if padding_is_acceptable(self.layout) else self.layout.size - self.layout.used


def padding_is_acceptable(layout: Layout) -> bool:
    """True if the layout's padding is within the bound, or too small to matter."""
    padding = layout.size - layout.used
    return padding <= max(PADDING_BOUND * layout.used, PADDING_SLACK * layout.shard_count)


def plan_groups(
    specs: Sequence[ParamSpec], shards_of: dict[bool, int], bucket_numel: int | None = None
) -> tuple[GroupPlan, ...]:
    """Groups for one unit's parameters, in order of their first member.

    Args:
        specs: the unit's parameters, in registration order.
        shards_of: shards of a buffer, by `is_expert`.
        bucket_numel: if given, groups are also cut when they reach this many elements.
    """
    by_key: dict[GroupKey, list[int]] = {}
    for index, spec in enumerate(specs):
        by_key.setdefault(spec.key, []).append(index)
    groups: list[GroupPlan] = []
    for key, members in by_key.items():
        shard_count = 1 if key.is_replicated else shards_of[key.is_expert]
        for bucket in _buckets(specs, members, bucket_numel):
            groups += _plan_bucket(specs, bucket, shard_count)
    return tuple(sorted(groups, key=lambda group: group.members))


def _buckets(specs: Sequence[ParamSpec], members: list[int], bucket_numel: int | None) -> list[list[int]]:
    """`members` cut into runs of at least `bucket_numel` elements (the last one may be shorter)."""
    if bucket_numel is None:
        return [members]
    buckets: list[list[int]] = [[]]
    filled = 0
    for index in members:
        if filled >= bucket_numel:
            buckets.append([])
            filled = 0
        buckets[-1].append(index)
        filled += math.prod(specs[index].shape)
    return buckets


def _plan_bucket(specs: Sequence[ParamSpec], bucket: Sequence[int], shard_count: int) -> list[GroupPlan]:
    """`bucket` as groups, with row atoms for parameters whose blocks of rows would cost too much padding.

    Blocks do not scale for ever: with fewer blocks than ranks most of a buffer would be padding.
    """
    groups = _split_by_padding(specs, bucket, shard_count)
    costly = sorted(index for group in groups if group.wasted for index in group.members)
    if not costly:
        return groups
    by_rows = [dataclasses.replace(spec, atom_rows=1) for spec in specs]
    return [group for group in groups if not group.wasted] + _split_by_padding(by_rows, costly, shard_count)


def _split_by_padding(specs: Sequence[ParamSpec], members: Sequence[int], shard_count: int) -> list[GroupPlan]:
    """`members` as few groups whose padding is acceptable; a group of one parameter is taken as it is.

    Padding comes from rows that do not divide each other, so groups grow parameter by parameter from the largest, and
    one that would spoil every group opens the next.
    """
    whole = _plan_group(specs, members, shard_count)
    if not whole.wasted:
        return [whole]
    alone = [_plan_group(specs, [index], shard_count) for index in members]
    groups: list[GroupPlan] = []
    for one in sorted(alone, key=lambda group: (-group.layout.used, group.members)):
        for place, group in enumerate(groups):
            grown = _plan_group(specs, sorted(group.members + one.members), shard_count)
            if grown.wasted <= group.wasted + one.wasted:
                groups[place] = grown
                break
        else:
            groups.append(one)
    return groups


def _plan_group(specs: Sequence[ParamSpec], members: Sequence[int], shard_count: int) -> GroupPlan:
    rows = tuple(specs[index].whole_rows for index in members)
    layout = plan_layout([specs[index].shape for index in members], shard_count, rows)
    return GroupPlan(specs[members[0]].key, tuple(members), layout, rows)
