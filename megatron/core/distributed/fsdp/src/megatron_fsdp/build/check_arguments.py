"""Checks of a model and its options, and the plan of its units, before anything is communicated."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from megatron_fsdp.build.find_units import UnitPlan, plan_units, resolve_unit_classes
from megatron_fsdp.build.meta_init import check_resettable
from megatron_fsdp.config import EngineConfig
from megatron_fsdp.machine.device import default_device_type
from megatron_fsdp.machine.mesh import FSDPDistributedIndex
from megatron_fsdp.runtime.unit import ManagedParam
from megatron_fsdp.state.codec import codec_for
from megatron_fsdp.state.param_tags import OWNER_TAG, is_expert_param
from megatron_fsdp.state.tensor_parallel import local_part


def plan_model(module: nn.Module, config: EngineConfig, *, has_expert_mesh: bool) -> list[UnitPlan]:
    """The units of `module` and their parameters. Raises every mistake that shows without a mesh.

    Raises:
        ValueError: the module is sharded already, has no parameters, or one that cannot be sharded; a tensor is on the
            meta device without meta initialisation; there are experts without an expert mesh; and as `plan_units` and
            `check_resettable`.
        TypeError, ImportError: as `resolve_unit_classes`; and `module` is not a module.
        NotImplementedError: an embedding changes its weight in forward, or has a sparse gradient.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"expected a torch.nn.Module to shard, got {type(module).__name__}.")
    if any(hasattr(param, OWNER_TAG) for param in module.parameters()):
        raise ValueError("the module is sharded already; pass the original one.")
    _check_device(config)
    _check_initialized(module)
    inside = resolve_unit_classes(config.fine_grained_recurse_module_types, "fine_grained_recurse_module_types")
    plans = plan_units(
        module,
        resolve_unit_classes(config.fsdp_unit_modules),
        tuple(config.root_params),
        (inside or (nn.Module,)) if config.megatron_fsdp_enable_fine_grained_param_gather else (),
    )
    _check_embeddings(module)
    params = [param for plan in plans for param in plan.params]
    if not params:
        raise ValueError(f"{type(module).__name__} has no parameters; there is nothing to shard.")
    tensors = itertools.chain(((param.fqn, param.unsharded) for param in params), module.named_buffers())
    on_meta = next((name for name, tensor in tensors if tensor.is_meta), None)
    if on_meta is not None and not config.init_model_with_meta_device:
        raise ValueError(
            f"{on_meta} is on the meta device; pass init_model_with_meta_device=True, or initialise the model first."
        )
    if config.init_model_with_meta_device:
        check_resettable(module)
    experts = [param.fqn for param in params if is_expert_param(param.unsharded)]
    if experts and not has_expert_mesh:
        raise ValueError(f"{experts[0]} is an expert parameter (allreduce=False); pass expt_device_mesh.")
    _check_params(params)
    return plans


def _check_params(params: Iterable[ManagedParam]) -> None:
    for param in params:
        codec_for(param.unsharded)
        if not param.unsharded.is_floating_point():
            raise ValueError(f"{param.fqn} has dtype {param.unsharded.dtype}; parameters must be floating-point.")
        if _shares_memory(local_part(param.unsharded)):
            raise ValueError(
                f"{param.fqn} has shape {tuple(param.unsharded.shape)} and strides {param.unsharded.stride()}, so that "
                "elements share memory (an expand()ed view?) and would part once they are sharded; make them elements "
                "of their own with .clone(memory_format=torch.contiguous_format), or keep the small parameter and "
                "expand it in forward."
            )


def _check_initialized(module: nn.Module) -> None:
    """Checks that lazy modules have made their tensors.

    Raises:
        ValueError: one has not.
    """
    for name, tensor in itertools.chain(module.named_parameters(), module.named_buffers()):
        if is_lazy(tensor):
            raise ValueError(
                f"{name} is not initialised: its lazy module makes it in the first forward. Run one forward on every "
                "rank before sharding, or use the module that is not lazy."
            )


def _check_embeddings(module: nn.Module) -> None:
    """Checks that embeddings neither change their weight in forward nor give it a sparse gradient.

    Raises:
        NotImplementedError: one does.
    """
    for name, child in module.named_modules():
        if not isinstance(child, (nn.Embedding, nn.EmbeddingBag)):
            continue
        label = name or "the model"
        if child.max_norm is not None:
            raise NotImplementedError(
                f"{label} is an embedding with max_norm, which changes its weight in forward; the change would be lost "
                "on a sharded weight. Leave max_norm out."
            )
        if child.sparse and child.weight.requires_grad:
            raise NotImplementedError(
                f"{label} is an embedding with sparse=True, whose weight has a sparse gradient; gradients are reduced "
                "and sharded as dense ones. Leave sparse out, or freeze the weight."
            )


def _shares_memory(tensor: torch.Tensor) -> bool:
    """True if two elements of a strided `tensor` have one place in memory."""
    if tensor.layout is not torch.strided or tensor.numel() == 0:
        return False
    steps = [(size, stride) for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]
    span = 1 + sum((size - 1) * stride for size, stride in steps)
    return span < tensor.numel() or any(stride == 0 for _, stride in steps)


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
