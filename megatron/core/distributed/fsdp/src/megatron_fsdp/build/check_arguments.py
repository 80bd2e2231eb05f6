"""Checks of the arguments of `MegatronFSDP`, before anything is communicated."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from megatron_fsdp.build.build_units import plan_and_check
from megatron_fsdp.build.find_units import UnitPlan, resolve_unit_classes
from megatron_fsdp.config import (
    DistributedDataParallelConfig,
    EngineConfig,
    MixedPrecisionPolicy,
    check_switches,
    default_config,
    resolve,
)
from megatron_fsdp.machine.device import default_device_type
from megatron_fsdp.machine.mesh import FSDPDistributedIndex
from megatron_fsdp.state.param_tags import is_expert_param

#: Constructor options whose feature is not there, and the reason.
_NOT_YET = {
    "keep_fp8_transpose_cache": "the TransformerEngine weight codec is missing",
}
#: Constructor options that are fields of the configuration too; either means both.
_ALSO_CONFIGURED = (
    "nccl_ub",
    "fsdp_double_buffer",
    "fsdp_db_use_persist_buf_on_alloc_fail",
    "disable_symmetric_registration",
)
#: Constructor options that are True or False.
_SWITCHES = (
    *_NOT_YET,
    *_ALSO_CONFIGURED,
    "disable_bucketing",
    "calculate_per_token_loss",
    "init_model_with_meta_device",
    "sync_model_each_microbatch",
    "enable_fine_grained_param_gather_hook",
    "enable_fine_grained_param_gather_backward_hook",
    "report_nan_in_param_grad",
)
#: Either means both: what is gathered by itself in forward is gathered, and reduced, by itself in backward.
_FINE_GRAINED = ("enable_fine_grained_param_gather_hook", "enable_fine_grained_param_gather_backward_hook")
_RECURSE = "fine_grained_recurse_module_types"


@dataclasses.dataclass(frozen=True)
class CheckedArguments:
    """Facts that follow from a model and its options, before any mesh is needed."""

    config: EngineConfig
    plans: list[UnitPlan]


def check_arguments(
    module: nn.Module,
    ddp_config: DistributedDataParallelConfig | None,
    precision: MixedPrecisionPolicy,
    options: Mapping[str, Any],
    *,
    has_expert_mesh: bool,
) -> CheckedArguments:
    """Raises every mistake in the arguments of `MegatronFSDP` (`options`: those by name) but those in its meshes.

    Raises:
        ValueError, TypeError, ImportError, NotImplementedError: as `MegatronFSDP`.
    """
    check_switches({option: options.get(option, False) for option in _SWITCHES})
    for option, reason in _NOT_YET.items():
        if options.get(option):
            raise NotImplementedError(f"{option}={options[option]!r} is not supported yet: {reason}.")
    if not isinstance(module, nn.Module):
        raise TypeError(f"expected a torch.nn.Module to shard, got {type(module).__name__}.")
    if any(hasattr(param, "_megatron_fsdp_owner") for param in module.parameters()):
        raise ValueError("the module is sharded already; pass the original one.")
    given: dict[str, Any] = {option: True for option in _ALSO_CONFIGURED if options.get(option)}
    config = resolve(
        dataclasses.replace(ddp_config or default_config(), **given),
        precision,
        calculate_per_token_loss=options.get("calculate_per_token_loss", False),
        disable_bucketing=options.get("disable_bucketing", False),
        report_nan_in_param_grad=options.get("report_nan_in_param_grad", False),
        is_fine_grained=any(options.get(option) for option in _FINE_GRAINED),
    )
    _check_device(config, options.get("device"))
    inside = options.get(_RECURSE)
    if inside is not None and not config.is_fine_grained:
        raise ValueError(f"{_RECURSE} needs {_FINE_GRAINED[0]}=True.")
    plans = plan_and_check(
        module,
        resolve_unit_classes(options.get("fsdp_unit_modules")),
        tuple(options.get("root_params", ())),
        from_meta=options.get("init_model_with_meta_device", False),
        has_expert_mesh=has_expert_mesh,
        fine_grained=resolve_unit_classes(inside or [nn.Module], _RECURSE) if config.is_fine_grained else (),
    )
    return CheckedArguments(config, plans)


def _check_device(config: EngineConfig, device: torch.device | str | None) -> None:
    try:
        kind = torch.device(device).type if device is not None else default_device_type()
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"device is {device!r}, which torch does not know; expected cpu or cuda.") from error
    if kind not in ("cpu", default_device_type()):
        raise ValueError(
            f"device is {device!r}; expected one to compute on, which this machine has: cpu, or cuda where torch sees "
            "a GPU. Leave it out to take what there is."
        )
    if config.buffers.is_registered and kind != "cuda":
        raise ValueError(f"nccl_ub=True registers memory with NCCL, but the model computes on {kind}; leave it out.")
    if config.gathers_by_copies and kind != "cuda":
        raise ValueError(
            f"copy_engine_gather=True (fsdp_copy_engine_gather) has GPUs copy weights out of each other's memory, but "
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
