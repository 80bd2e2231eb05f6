"""The pool that a model's units take storage from, and the slots that they share in it."""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence

import torch
import torch.distributed as dist

from megatron_fsdp.config import BufferPolicy, EngineConfig
from megatron_fsdp.machine.allocator import SlotPool, StoragePool
from megatron_fsdp.machine.mesh import FSDPDistributedIndex
from megatron_fsdp.machine.user_buffers import Memory, OrdinaryMemory, RegionMemory, UserBuffers
from megatron_fsdp.plan.double_buffer import Footprint, PoolSlot, assign_slots
from megatron_fsdp.runtime.schedule import Schedule
from megatron_fsdp.runtime.unit import Unit, contains

logger = logging.getLogger(__name__)


def make_pool(
    base: StoragePool, config: EngineConfig, index: FSDPDistributedIndex, device: torch.device
) -> StoragePool:
    """The pool to build units from: `base`, or one with slots on top of it."""
    return SlotPool(base, memory_for(config.buffers, index, device)) if config.buffers.has_slots else base


def memory_for(policy: BufferPolicy, index: FSDPDistributedIndex, device: torch.device) -> Memory:
    """Where the slots of a model on `device` lie."""
    groups = _communicators(index)
    if policy.is_registered and groups:
        return UserBuffers(device, groups, symmetric=policy.is_symmetric)
    return RegionMemory(device) if device.type == "cuda" else OrdinaryMemory()


def _communicators(index: FSDPDistributedIndex) -> list[dist.ProcessGroup]:
    """Every group over which weights are gathered or gradients reduced, once; alike on all ranks."""
    axes = [axis for is_expert in (False, True) for axis in reversed(index.axes(is_expert))]
    groups = [group for axis in axes for group in (axis.group, axis.gather_group) if group is not None]
    return list({id(group): group for group in groups}.values())


def prepare(pool: StoragePool, schedule: Schedule) -> None:
    """Gives the built units their slots, with memory, and registers that. **Collective** if it is registered now."""
    if not isinstance(pool, SlotPool):
        return
    policy = schedule.config.buffers
    pool.arrange(plan_slots(schedule.units, policy))
    schedule.on_order = functools.partial(_follow, pool, policy, schedule.units)
    if not pool.slots and not policy.is_registered and dist.get_rank() == 0:
        logger.warning(
            "double buffers have no effect: no unit's weights or gradients come and go. Use them with "
            "zero_dp_strategy 2 or 3, and name the modules that are units."
        )
    device = schedule.device
    with device.use(schedule.gather_stream):
        pool.fill([key for unit in schedule.units for key, _ in _weights(unit)], device.torch_device)
    pool.fill([key for unit in schedule.units for key, _ in _grads(unit)], device.torch_device)
    if policy.is_registered:
        _fill_lasting(schedule.units)
    if policy.is_registered and not policy.registers_late:
        pool.register()


def _follow(pool: SlotPool, policy: BufferPolicy, units: Sequence[Unit], order: Sequence[Unit]) -> bool:
    """Deals the same slots anew, so that neighbours in `order` have different ones; False if one is taken."""
    if pool.is_busy:
        return False
    pool.arrange(plan_slots(list(dict.fromkeys((*order, *units))), policy))
    pool.warns = True
    return True


def _fill_lasting(units: list[Unit]) -> None:
    """Has memory for gradients that are reduced where they accumulate, so that it can be registered with the rest."""
    for group in (group for unit in units for group in unit.groups):
        if group.main_grad is not None and group.plan.defers_reduction:
            group.main_grad.allocate()
            group.main_grad.buffer.free()


def plan_slots(units: list[Unit], policy: BufferPolicy) -> dict[str, PoolSlot]:
    """Slots by key, of gathered weights and of gradients on their way."""
    within = {unit for unit in units for other in units if other is not unit and contains(unit, other)}
    weights = [Footprint(_weights(unit), takes_turns=unit not in within) for unit in units]
    grads = [Footprint(_grads(unit)) for unit in reversed(units)]
    kinds = {"weights": weights, "gradients": grads}
    slots: dict[str, PoolSlot] = {}
    for kind, footprints in kinds.items():
        slots |= assign_slots(kind, footprints, only_alike=policy.only_alike, keeps_misfits=policy.keeps_misfits)
    return slots


def storage_needs(unit: Unit) -> tuple[tuple[str, int], ...]:
    """(key, bytes) of everything that the unit takes from the pool for a while."""
    return (*_weights(unit), *_grads(unit))


def _weights(unit: Unit) -> tuple[tuple[str, int], ...]:
    return tuple((group.key, group.gathered_nbytes) for group in unit.groups if group.gathered_nbytes)


def _grads(unit: Unit) -> tuple[tuple[str, int], ...]:
    grads = [group.main_grad for group in unit.groups if group.main_grad is not None]
    return tuple((grad.staging_key, grad.staged_nbytes) for grad in grads if grad.staged_nbytes)


def register_late(pool: StoragePool, policy: BufferPolicy) -> None:
    """Registers communication buffers, once. **Collective**.

    Raises:
        RuntimeError: they are not to be registered, or not by hand, or have been.
    """
    if not (policy.is_registered and policy.registers_late):
        raise RuntimeError("manual_buffer_registration() needs nccl_ub=True and fsdp_manual_registration=True.")
    if pool.is_registered:
        raise RuntimeError("the communication buffers are registered already; call manual_buffer_registration() once.")
    pool.register()
