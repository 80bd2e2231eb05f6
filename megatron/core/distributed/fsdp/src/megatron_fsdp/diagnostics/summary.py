"""Summary of a sharded model in one table: units, groups, padding, bytes per rank, tags."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from torch import nn

from megatron_fsdp.build.find_units import LARGE_LEFTOVER_NUMEL, repeated_layer
from megatron_fsdp.build.storage import storage_needs
from megatron_fsdp.config import REDUCTIONS_IN_FLIGHT, UNITS_AHEAD, EngineConfig
from megatron_fsdp.diagnostics.overlap_report import table
from megatron_fsdp.machine.allocator import DoubleBufferPool, StoragePool
from megatron_fsdp.plan.strategy import NO_SHARD
from megatron_fsdp.runtime.schedule import Schedule
from megatron_fsdp.runtime.unit import Unit
from megatron_fsdp.state.param_group import ParamGroup

_COLUMNS = ("unit", "groups", "parameters", "padding", "MiB persistent", "MiB gathered", "tags")


def build_summary(schedule: Schedule, config: EngineConfig, pool: StoragePool) -> str:
    """The table that rank 0 logs after construction. Bytes are this rank's, optimizer state not counted."""
    groups = [group for unit in schedule.units for group in unit.groups]
    head = (
        f"megatron_fsdp: {config.strategy_label}, {_used(groups):,} parameters in {len(schedule.units)} units and "
        f"{len(groups)} groups, {_padding(groups)} padding; "
        f"per rank {_mib(sum(group.persistent_nbytes for group in groups))} MiB persistent, "
        f"{_mib(sum(group.grad_nbytes for group in groups))} MiB of gradients from backward to zero_grad, "
        f"at most {_mib(_gathered_nbytes(schedule, config, groups))} MiB of gathered weights "
        f"and {_mib(_staged_nbytes(schedule, config, groups))} MiB of gradients on their way "
        f"(recomputation over k units keeps k of them gathered)."
    )
    if config.fsdp_residency_bytes == "auto":
        head += " What the first step leaves free will keep units gathered through a step."
    elif resident := schedule.resident:
        nbytes = sum(unit.gathered_nbytes for unit in resident)
        head += f" {len(resident)} units stay gathered through a step, with {_mib(nbytes)} MiB more."
    if isinstance(pool, DoubleBufferPool):
        head += _slots(schedule, pool)
    if nbytes := sum(peers.nbytes for peers in {group.spec.peers for group in groups} if peers is not None):
        head += (
            f" Weights are gathered by copies out of {_mib(nbytes)} MiB of symmetric memory on each rank, which torch "
            "does not count as allocated."
        )
    rows: list[tuple[str, ...]] = [_COLUMNS]
    for (kind, *cells), alike in itertools.groupby(schedule.units, key=_cells):  # runs that differ only in name
        units = list(alike)
        note = f" (last of {len(units)} alike)" if len(units) > 1 else ""
        rows.append((f"{units[-1].label} {kind}{note}", *cells))
    return f"{head}\n{table(rows)}"


def one_unit_warning(module: nn.Module, schedule: Schedule) -> str | None:
    """The advice to name units, for a large `module` with repeated layers that is gathered whole; None for others."""
    root, *others = schedule.units
    numel = _used(root.groups)
    if others or schedule.config.fsdp_unit_modules or not root.gathers_weights or numel < LARGE_LEFTOVER_NUMEL:
        return None
    layer = repeated_layer(module)
    if layer is None:
        return None
    return (
        f"fsdp_unit_modules is not given: all {numel:,} parameters are gathered at once; name the class of the "
        f"repeated layer, e.g. fsdp_unit_modules=[{layer.__name__}]"
    )


def _cells(unit: Unit) -> tuple[str, ...]:
    """The class of the unit's module, and the unit's row of the table behind the name."""
    tags = set()
    for spec in (group.spec for group in unit.groups):
        tags.add(str(spec.params[0].dtype).removeprefix("torch."))
        claims = {NO_SHARD: spec.is_replicated, "frozen": not spec.requires_grad, "expert": spec.is_expert}
        tags.update(tag for tag, is_true in claims.items() if is_true)
    return (
        type(unit.module()).__name__,
        str(len(unit.groups)),
        f"{_used(unit.groups):,}",
        _padding(unit.groups),
        _mib(sum(group.persistent_nbytes for group in unit.groups)),
        _mib(unit.gathered_nbytes),
        ",".join(sorted(tags)),
    )


def _used(groups: Sequence[ParamGroup]) -> int:
    return sum(group.layout.used for group in groups)


def _padding(groups: Sequence[ParamGroup]) -> str:
    used = _used(groups)
    return f"{(sum(group.layout.size for group in groups) - used) / max(used, 1):.2%}"


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:.1f}"


def _gathered_nbytes(schedule: Schedule, config: EngineConfig, groups: Sequence[ParamGroup]) -> int:
    """The most that is gathered at once: the root, the largest other unit, and the units prefetched beside it."""
    root, *others = (facts.nbytes for facts in schedule.programs.facts)
    others.sort(reverse=True)
    prefetched = sum(others[1 : 1 + UNITS_AHEAD])
    if config.suggested_communication_unit_size is not None and not config.fsdp_double_buffer:
        itemsize = max(group.model_weight_buffer.dtype.itemsize for group in groups)
        prefetched = min(sum(others[1:]), config.suggested_communication_unit_size * itemsize)
    return root + sum(others[:1]) + (prefetched if config.overlap_param_gather else 0)


def _staged_nbytes(schedule: Schedule, config: EngineConfig, groups: Sequence[ParamGroup]) -> int:
    """The most that gradients on their way take at once."""
    staged = sorted((facts.staged_nbytes for facts in schedule.programs.facts), reverse=True)
    if config.suggested_communication_unit_size is None or config.fsdp_double_buffer:
        return sum(staged[:REDUCTIONS_IN_FLIGHT])
    itemsize = max(group.spec.comm_dtype.itemsize for group in groups)
    return min(sum(staged), max(staged[0], config.suggested_communication_unit_size * itemsize))


def _slots(schedule: Schedule, pool: DoubleBufferPool) -> str:
    """The slots of the pool, and the buffers that have none."""
    needs = [(pool.buffers.get(key), nbytes) for unit in schedule.units for key, nbytes in storage_needs(unit)]
    sharing = [slot for slot, _ in needs if slot is not None and slot.is_shared]
    shared, own = set(sharing), {slot for slot in pool.buffers.values() if not slot.is_shared}
    loose = sum(nbytes for slot, nbytes in needs if slot is None)
    return (
        f" Of {len(needs)} communication buffers {len(sharing)} alternate in {len(shared)} double buffers of "
        f"{_mib(sum(slot.nbytes for slot in shared))} MiB together, {len(own)} keep "
        f"{_mib(sum(slot.nbytes for slot in own))} MiB of their own, the others, {_mib(loose)} MiB, come and go"
        f"{'; registered with NCCL' if pool.memory.is_registered else ''}."
    )
