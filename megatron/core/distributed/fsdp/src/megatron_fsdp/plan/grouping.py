"""Grouping of parameters that share a buffer."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Sequence

from megatron_fsdp.plan.layout import Layout, plan_layout

#: A group is split when padding passes this fraction of its elements...
PADDING_BOUND = 0.05
#: ...and this many elements per shard: below it, splitting costs more in collectives than it saves in memory.
PADDING_SLACK = 1024


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
    """What grouping needs to know of one parameter."""

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


def plan_groups(
    specs: Sequence[ParamSpec], shards_of: dict[bool, int], bucket_numel: int | None = None
) -> tuple[GroupPlan, ...]:
    """Groups for one unit's parameters, in order of their first member.

    Args:
        specs: the unit's parameters, in registration order.
        shards_of: how many shards a buffer has, by `is_expert`.
        bucket_numel: if given, groups are also cut when they reach this many elements.
    """
    by_key: dict[GroupKey, list[int]] = {}
    for index, spec in enumerate(specs):
        by_key.setdefault(spec.key, []).append(index)
    groups: list[GroupPlan] = []
    for key, members in by_key.items():
        shard_count = 1 if key.is_replicated else shards_of[key.is_expert]
        for bucket in _buckets(specs, members, bucket_numel):
            groups += _plan_bucket(key, specs, bucket, shard_count)
    return tuple(sorted(groups, key=lambda group: group.members[0]))


def _plan_bucket(key: GroupKey, specs: Sequence[ParamSpec], bucket: list[int], shard_count: int) -> list[GroupPlan]:
    """`bucket` as groups, with row atoms for parameters whose blocks of rows would cost too much padding.

    Blocks do not scale for ever: with fewer blocks than ranks most of a buffer would be padding.
    """
    parts = _split_by_padding(specs, bucket, shard_count)
    costly = sorted(i for part in parts if _wasted(specs, part, shard_count) for i in part)
    relaxed = list(specs)
    for index in costly:
        relaxed[index] = dataclasses.replace(specs[index], atom_rows=1)
    fallback = _split_by_padding(relaxed, costly, shard_count) if costly else []
    parts = [part for part in parts if not _wasted(specs, part, shard_count)] + fallback
    return [
        GroupPlan(key, tuple(part), _layout(relaxed, part, shard_count), tuple(relaxed[i].whole_rows for i in part))
        for part in parts
    ]


def padding_is_acceptable(layout: Layout) -> bool:
    """True if the layout's padding is within the bound, or too small to matter."""
    padding = layout.size - layout.used
    return padding <= max(PADDING_BOUND * layout.used, PADDING_SLACK * layout.shard_count)


def _layout(specs: Sequence[ParamSpec], members: Sequence[int], shard_count: int) -> Layout:
    return plan_layout([specs[i].shape for i in members], shard_count, [specs[i].whole_rows for i in members])


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
        numel = 1
        for length in specs[index].shape:
            numel *= length
        filled += numel
    return buckets


def _split_by_padding(specs: Sequence[ParamSpec], members: list[int], shard_count: int) -> list[list[int]]:
    """`members` as few parts whose padding is acceptable; a part of one parameter is taken as it is.

    Padding comes from rows that do not divide each other, so parts grow parameter by parameter from the largest, and
    one that would spoil every part opens the next.
    """
    if padding_is_acceptable(_layout(specs, members, shard_count)):
        return [members]
    by_cost = sorted(members, key=lambda i: (-_layout(specs, [i], 1).used, i))
    parts: list[list[int]] = []
    for index in by_cost:
        for part in parts:
            grown = sorted([*part, index])
            apart = _wasted(specs, part, shard_count) + _wasted(specs, [index], shard_count)
            if _wasted(specs, grown, shard_count) <= apart:
                part[:] = grown
                break
        else:
            parts.append([index])
    return sorted(parts)


def _wasted(specs: Sequence[ParamSpec], members: Sequence[int], shard_count: int) -> int:
    layout = _layout(specs, members, shard_count)
    return 0 if padding_is_acceptable(layout) else layout.size - layout.used
