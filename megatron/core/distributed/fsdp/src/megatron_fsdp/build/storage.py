"""The pool that a model's units take storage from, and the double buffers in it."""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence

import torch
import torch.distributed as dist

from megatron_fsdp.config import EngineConfig
from megatron_fsdp.machine.allocator import DoubleBufferPool, StoragePool
from megatron_fsdp.machine.mesh import FSDPDistributedIndex
from megatron_fsdp.machine.user_buffers import memory_for
from megatron_fsdp.plan.double_buffer import Needs, PersistentBuffer, assign_buffers
from megatron_fsdp.plan.strategy import strategies_that
from megatron_fsdp.runtime.schedule import Schedule
from megatron_fsdp.runtime.unit import Unit, contains

logger = logging.getLogger(__name__)


def make_pool(
    base: StoragePool, config: EngineConfig, index: FSDPDistributedIndex, device: torch.device
) -> StoragePool:
    """The pool to build units from: `base`, or one with double buffers on top of it."""
    if not config.fsdp_double_buffer:
        return base
    return DoubleBufferPool(base, memory_for(config, index.communicators(), device))


def prepare(pool: StoragePool, schedule: Schedule) -> None:
    """Assigns double buffers to the built units and allocates them. **Collective** if they are registered now."""
    if not isinstance(pool, DoubleBufferPool):
        return
    config, units, device = schedule.config, schedule.units, schedule.device
    pool.buffers = plan_buffers(units, config)
    schedule.on_order = functools.partial(_rearrange, pool, config, units)
    if not pool.buffers and not config.nccl_ub and dist.get_rank() == 0:
        logger.warning(
            "double buffers have no effect: no unit's weights or gradients come and go. Use them with zero_dp_strategy="
            "%s, and name the modules that are units.",
            strategies_that(lambda plan: plan.gathers_weights or plan.reduces_each_microbatch),
        )
    with device.use(schedule.gather_stream):
        pool.fill([key for unit in units for key, _ in _weights(unit)], device.torch_device)
    pool.fill([key for unit in units for key, _ in _grads(unit)], device.torch_device)
    if not config.nccl_ub:
        return
    for group in (group for unit in units for group in unit.groups):
        # Gradients that are reduced where they accumulate are registered with the rest, so their memory must exist.
        if group.main_grad is not None and group.plan.defers_reduction:
            group.main_grad.allocate()
            group.main_grad.buffer.free()
    if not config.fsdp_manual_registration:
        pool.memory.register()


def _rearrange(pool: DoubleBufferPool, config: EngineConfig, units: Sequence[Unit], order: Sequence[Unit]) -> bool:
    """Reassigns the same buffers so that neighbours in `order` have different ones; False if one is occupied."""
    if pool.is_busy:
        return False
    pool.buffers = plan_buffers(list(dict.fromkeys((*order, *units))), config)
    pool.warns = True
    return True


def plan_buffers(units: Sequence[Unit], config: EngineConfig) -> dict[str, PersistentBuffer]:
    """Persistent buffers by key, of gathered weights and of staged gradients, for units that run in this order."""
    # A unit around others is not done before the next but one begins.
    leaves = [unit for unit in units if not any(contains(unit, other) for other in units if other is not unit)]
    only_alike = not config.megatron_fsdp_max_pool_double_buffer
    buffers = assign_buffers("weights", [_weights(unit) for unit in leaves], only_alike=only_alike)
    grads = [_grads(unit) for unit in reversed(units)]
    buffers |= assign_buffers("gradients", grads, only_alike=only_alike)
    if config.fsdp_db_use_persist_buf_on_alloc_fail:
        for key, nbytes in (need for unit in units for need in storage_needs(unit)):
            buffers.setdefault(key, PersistentBuffer(f"own {key}", nbytes, is_shared=False))
    return buffers


def storage_needs(unit: Unit) -> Needs:
    """(key, bytes) of everything that the unit takes from the pool for a while."""
    return (*_weights(unit), *_grads(unit))


def _weights(unit: Unit) -> Needs:
    return tuple((group.weight_key, group.gathered_nbytes) for group in unit.groups if group.gathered_nbytes)


def _grads(unit: Unit) -> Needs:
    grads = [group.main_grad for group in unit.groups if group.main_grad is not None]
    return tuple((grad.staging_key, grad.staged_nbytes) for grad in grads if grad.staged_nbytes)


def register_late(pool: StoragePool, config: EngineConfig) -> None:
    """Registers communication buffers, once. **Collective**.

    Raises:
        RuntimeError: they are not to be registered, or not by hand, or have been.
    """
    if not (config.fsdp_manual_registration and isinstance(pool, DoubleBufferPool)):
        raise RuntimeError("manual_buffer_registration() needs nccl_ub=True and fsdp_manual_registration=True.")
    if pool.memory.is_registered:
        raise RuntimeError("the communication buffers are registered already; call manual_buffer_registration() once.")
    pool.memory.register()
