"""Summary of what was built, in one table: units, groups, padding, bytes per rank, tags."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from megatron_fsdp.build.storage import storage_needs
from megatron_fsdp.config import EngineConfig
from megatron_fsdp.machine.allocator import DoubleBufferPool, StoragePool
from megatron_fsdp.plan.double_buffer import PersistentBuffer
from megatron_fsdp.plan.strategy import NO_SHARD
from megatron_fsdp.runtime.schedule import Schedule
from megatron_fsdp.runtime.unit import Unit
from megatron_fsdp.state.param_group import ParamGroup

_MIB = 2**20


def build_summary(schedule: Schedule, config: EngineConfig, pool: StoragePool) -> str:
    """The table that rank 0 logs after construction. Bytes are this rank's, optimizer state not counted."""
    rows = [_row(unit) for unit in schedule.units]
    groups = [group for unit in schedule.units for group in unit.groups]
    used = sum(group.layout.used for group in groups)
    padding = sum(group.layout.size - group.layout.used for group in groups)
    persistent = sum(group.persistent_nbytes for group in groups)
    accumulated = sum(group.grad_nbytes for group in groups)
    units = [unit for unit in schedule.units if not unit.is_root]
    gathered = sorted((unit.gathered_nbytes for unit in units), reverse=True)
    root = sum(group.gathered_nbytes for group in schedule.root.groups)
    weights = root + sum(gathered[:1]) + _ahead_nbytes(config, groups, gathered[1:])
    staged = sorted((_staged_nbytes(unit) for unit in schedule.units), reverse=True)
    grads = sum(staged[: config.reductions_in_flight])
    if config.reduction_numel is not None and not config.buffers.has_slots:
        grads = min(
            sum(staged), max(staged[0], _nbytes(config.reduction_numel, [group.spec.comm_dtype for group in groups]))
        )
    head = (
        f"megatron_fsdp: {config.strategy_label}, {used:,} parameters in {len(schedule.units)} units and "
        f"{len(groups)} groups, {padding / max(used, 1):.2%} padding; "
        f"per rank {persistent / _MIB:.1f} MiB persistent, {accumulated / _MIB:.1f} MiB of gradients from backward to "
        f"zero_grad, at most {weights / _MIB:.1f} MiB of gathered weights "
        f"and {grads / _MIB:.1f} MiB of gradients on their way "
        f"(recomputation over k units keeps k of them gathered)."
        f"{_resident(schedule, config)}{_slots(schedule, pool)}{_offered(groups)}"
    )
    columns = ("unit", "groups", "parameters", "padding", "MiB persistent", "MiB gathered", "tags")
    return "\n".join([head, _line(columns), *(_line(row) for row in _folded(rows))])


def _resident(schedule: Schedule, config: EngineConfig) -> str:
    """What stays gathered through a step."""
    if config.residency_nbytes is None:
        return " What the first step leaves free will keep units gathered through a step."
    resident = schedule.resident
    if not resident:
        return ""
    nbytes = sum(unit.gathered_nbytes for unit in resident)
    return f" {len(resident)} units stay gathered through a step, with {nbytes / _MIB:.1f} MiB more."


def _slots(schedule: Schedule, pool: StoragePool) -> str:
    """What slots there are, if any were asked for."""
    if not isinstance(pool, DoubleBufferPool):
        return ""
    shared = {buffer for buffer in pool.buffers.values() if buffer.is_shared}
    own = set(pool.buffers.values()) - shared
    needs = [need for unit in schedule.units for need in storage_needs(unit)]
    alternating = [key for key, _ in needs if pool.buffers.get(key) in shared]
    loose = sum(nbytes for key, nbytes in needs if key not in pool.buffers)
    return (
        f" Of {len(needs)} communication buffers {len(alternating)} take turns in {len(shared)} slots of "
        f"{_mib(shared)} MiB together, {len(own)} keep {_mib(own)} MiB of their own, the others, "
        f"{loose / _MIB:.1f} MiB, come and go"
        f"{'; registered with NCCL' if pool.memory.is_registered else ''}."
    )


def _offered(groups: list[ParamGroup]) -> str:
    """What peers read, if they do."""
    nbytes = sum(peers.nbytes for peers in {group.spec.peers for group in groups} if peers is not None)
    if not nbytes:
        return ""
    return (
        f" Weights are gathered by copies out of {nbytes / _MIB:.1f} MiB of symmetric memory on each rank, which torch "
        "does not count as allocated."
    )


def _mib(buffers: Iterable[PersistentBuffer]) -> str:
    return f"{sum(buffer.nbytes for buffer in buffers) / _MIB:.1f}"


def _ahead_nbytes(config: EngineConfig, groups: list[ParamGroup], gathered: list[int]) -> int:
    """The most that is gathered ahead of the unit that computes; `gathered` are the other units' bytes, falling."""
    if not config.overlap_param_gather:
        return 0
    if config.prefetch_numel is None or config.buffers.has_slots:
        return sum(gathered[: config.prefetch_depth])
    return min(sum(gathered), _nbytes(config.prefetch_numel, [group.model_weight_buffer.dtype for group in groups]))


def _nbytes(numel: int, dtypes: Iterable[torch.dtype]) -> int:
    """Bytes of `numel` elements of the largest dtype."""
    return numel * max(dtype.itemsize for dtype in dtypes)


def _staged_nbytes(unit: Unit) -> int:
    return sum(group.main_grad.staged_nbytes for group in unit.groups if group.main_grad is not None)


def _row(unit: Unit) -> tuple[str, ...]:
    module = unit.module()
    used = sum(group.layout.used for group in unit.groups)
    size = sum(group.layout.size for group in unit.groups)
    tags = set()
    for group in unit.groups:
        spec = group.spec
        tags.add(str(spec.params[0].dtype).removeprefix("torch."))
        claims = {NO_SHARD: spec.is_replicated, "frozen": not spec.requires_grad, "expert": spec.is_expert}
        tags.update(tag for tag, is_true in claims.items() if is_true)
    return (
        f"{unit.label} {type(module).__name__}",
        str(len(unit.groups)),
        f"{used:,}",
        f"{(size - used) / max(used, 1):.2%}",
        f"{sum(group.persistent_nbytes for group in unit.groups) / _MIB:.1f}",
        f"{unit.gathered_nbytes / _MIB:.1f}",
        ",".join(sorted(tags)),
    )


def _folded(rows: list[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Runs of units of one class that differ only in name as one row."""
    folded: list[tuple[str, ...]] = []
    count = 1
    for row, following in zip(rows, [*rows[1:], None], strict=True):
        if following is not None and _kind(following) == _kind(row):
            count += 1
            continue
        folded.append((f"{row[0]}" + (f" (last of {count} alike)" if count > 1 else ""), *row[1:]))
        count = 1
    return folded


def _kind(row: tuple[str, ...]) -> tuple[str, ...]:
    """What a row says apart from the unit's name."""
    return row[0].rpartition(" ")[2], *row[1:]


def _line(cells: tuple[str, ...]) -> str:
    widths = (48, 7, 16, 9, 15, 13, 0)
    return "  " + " ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip()
