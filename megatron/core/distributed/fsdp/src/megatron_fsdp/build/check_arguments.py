"""Checks of a model and its options together, and the plan of its units, before anything is communicated."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from megatron_fsdp.build.build_units import plan_and_check
from megatron_fsdp.build.find_units import UnitPlan, resolve_unit_classes
from megatron_fsdp.config import EngineConfig
from megatron_fsdp.machine.device import default_device_type
from megatron_fsdp.machine.mesh import FSDPDistributedIndex
from megatron_fsdp.state.param_tags import is_expert_param


def plan_model(module: nn.Module, config: EngineConfig, *, has_expert_mesh: bool) -> list[UnitPlan]:
    """The units of `module`. Raises every mistake that shows without a mesh.

    Raises:
        ValueError, TypeError, ImportError, NotImplementedError: as `MegatronFSDP`.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"expected a torch.nn.Module to shard, got {type(module).__name__}.")
    if any(hasattr(param, "_megatron_fsdp_owner") for param in module.parameters()):
        raise ValueError("the module is sharded already; pass the original one.")
    _check_device(config)
    inside = resolve_unit_classes(config.fine_grained_recurse_module_types, "fine_grained_recurse_module_types")
    return plan_and_check(
        module,
        resolve_unit_classes(config.fsdp_unit_modules),
        tuple(config.root_params),
        from_meta=config.init_model_with_meta_device,
        has_expert_mesh=has_expert_mesh,
        fine_grained=(inside or (nn.Module,)) if config.megatron_fsdp_enable_fine_grained_param_gather else (),
    )


def _check_device(config: EngineConfig) -> None:
    device = config.device
    try:
        kind = torch.device(device).type if device is not None else default_device_type()
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"device is {device!r}, which torch does not know; expected cpu or cuda.") from error
    if kind not in ("cpu", default_device_type()):
        raise ValueError(
            f"device is {device!r}; expected one to compute on, which this machine has: cpu, or cuda where torch sees "
            "a GPU. Leave it out to take what there is."
        )
    if config.nccl_ub and kind != "cuda":
        raise ValueError(f"nccl_ub=True registers memory with NCCL, but the model computes on {kind}; leave it out.")
    if config.fsdp_copy_engine_gather and kind != "cuda":
        raise ValueError(
            "copy_engine_gather=True (fsdp_copy_engine_gather) has GPUs copy weights out of each other's memory, but "
            f"the model computes on {kind}; leave it out."
        )


def check_experts(plans: Sequence[UnitPlan], index: FSDPDistributedIndex) -> None:
    """Checks that a model whose user made a mesh for experts has some.

    Experts without their tag would take part in the dense collectives, and start from the first rank's.

    Raises:
        ValueError: no parameter is an expert's, though these would have other data-parallel ranks.
    """
    dense, experts = (index.get_dp_group(is_expert).size() for is_expert in (False, True))
    if dense == experts or any(is_expert_param(param.unsharded) for plan in plans for param in plan.params):
        return
    raise ValueError(
        f"expt_device_mesh spreads experts over {experts} data-parallel ranks and device_mesh everything else over "
        f"{dense}, but no parameter is an expert's; set param.allreduce = False on every parameter of the experts "
        "before sharding, or leave expt_device_mesh out for a model (or pipeline stage) without any."
    )
