"""`fully_shard`, `fully_shard_model`: normalize arguments, build a mesh where none is given."""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import os
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from megatron_fsdp.build.check_arguments import check_arguments, check_experts
from megatron_fsdp.config import (
    DEFAULT_POLICY,
    DistributedDataParallelConfig,
    MixedPrecisionPolicy,
    ShardingStrategy,
    check_switches,
    strategy_name,
)
from megatron_fsdp.machine.device import default_device_type, join_device
from megatron_fsdp.machine.mesh import FSDPDistributedIndex
from megatron_fsdp.megatron_fsdp import MegatronFSDP
from megatron_fsdp.optim.kinds import check_before_sharding
from megatron_fsdp.optim.optimizer import fully_shard_optimizer
from megatron_fsdp.optim.state import shard_state
from megatron_fsdp.plan.strategy import NO_SHARD, OUTER_STRATEGIES

__all__ = ["ShardingStrategy", "fully_shard", "fully_shard_model", "fully_shard_optimizer"]


def fully_shard_model(
    module: torch.nn.Module,
    device_mesh: DeviceMesh | None = None,
    dp_shard_dim: str | None = None,
    dp_outer_dim: str | None = None,
    tp_dim: str | None = None,
    hybrid_fsdp_group: dist.ProcessGroup | None = None,
    hybrid_fsdp_expt_group: dist.ProcessGroup | None = None,
    expt_device_mesh: DeviceMesh | None = None,
    fsdp_group_ag: dist.ProcessGroup | None = None,
    expt_fsdp_group_ag: dist.ProcessGroup | None = None,
    fsdp_unit_modules: Sequence[type] | Sequence[str] | None = None,
    zero_dp_strategy: str | int = 3,
    outer_dp_sharding_strategy: str | int = 0,
    device: torch.device | None = None,
    init_model_with_meta_device: bool = False,
    mixed_precision_policy: MixedPrecisionPolicy = DEFAULT_POLICY,
    overlap_grad_reduce: bool = True,
    overlap_param_gather: bool = True,
    sync_model_each_microbatch: bool = True,
    preproc_state_dict_for_dcp_ckpt: bool = True,
    report_nan_in_param_grad: bool = False,
    average_in_collective: bool = False,
    disable_bucketing: bool = False,
    calculate_per_token_loss: bool = False,
    keep_fp8_transpose_cache: bool = False,
    nccl_ub: bool = False,
    fsdp_double_buffer: bool = False,
    fsdp_db_use_persist_buf_on_alloc_fail: bool = False,
    disable_symmetric_registration: bool = False,
    enable_fine_grained_param_gather: bool = False,
    use_decoupled_grad: bool = False,
    cuda_graph_mode: bool = False,
    maxpool_double_buffer: bool = False,
    *,
    root_params: Collection[torch.nn.Parameter] = (),
    residency_bytes: int | str = 0,
    copy_engine_gather: bool = False,
) -> MegatronFSDP:
    """Shards `module` over the data-parallel ranks, from the first one's values. **Collective**, with equal arguments.

    Args:
        module: the model; reachable afterwards as `.module`.
        device_mesh, dp_shard_dim, dp_outer_dim, tp_dim, hybrid_fsdp_group, hybrid_fsdp_expt_group, expt_device_mesh,
            fsdp_group_ag, expt_fsdp_group_ag: see `FSDPDistributedIndex`; no mesh: all ranks in one dimension.
        fsdp_unit_modules: classes or import paths of what is gathered and released as one; None: the whole model.
        zero_dp_strategy: no_shard (0), optim (1), optim_grads (2) or optim_grads_params (3).
        outer_dp_sharding_strategy: no_shard (0) or, with strategy 3 inside, optim (1).
        device: where to compute; None: the current CUDA device, or the CPU where there is none.
        init_model_with_meta_device: the model is on the meta device; initialise it unit by unit.
        mixed_precision_policy: dtypes of main weights, gradients and reductions.
        sync_model_each_microbatch: gradients are reduced and attached at the end of every backward.
        preproc_state_dict_for_dcp_ckpt: prepare `state_dict()` for torch DCP.
        report_nan_in_param_grad: raise on every rank when a gradient is not finite; names parameter, unit and ranks.
        disable_bucketing, calculate_per_token_loss: see `MegatronFSDP`.
        overlap_grad_reduce, overlap_param_gather, average_in_collective, keep_fp8_transpose_cache, nccl_ub,
            fsdp_double_buffer, fsdp_db_use_persist_buf_on_alloc_fail, disable_symmetric_registration,
            enable_fine_grained_param_gather, use_decoupled_grad, cuda_graph_mode, maxpool_double_buffer: see
            `DistributedDataParallelConfig`.
        root_params: parameters of `module` that are read outside the forward of the unit that owns them, as in
            `F.linear(x, self.embedding.weight)`; they stay gathered while the model computes.
        residency_bytes: `fsdp_residency_bytes` of `DistributedDataParallelConfig`.
        copy_engine_gather: `fsdp_copy_engine_gather` of `DistributedDataParallelConfig`.

    Raises:
        ValueError, TypeError, ImportError: a mistake in the arguments, on every rank before anything is communicated.
        NotImplementedError: an option whose feature is not there yet.
    """
    given = dict(locals())
    check_switches({name: given[name] for name, kind in fully_shard_model.__annotations__.items() if kind == "bool"})
    config = _config_of(given)
    options = {option: given[name] for name, option in _MODEL_OPTIONS.items()}
    # Making a mesh communicates, so whatever can be wrong without one is found first.
    has_expert_mesh = expt_device_mesh is not None
    checked = check_arguments(module, config, mixed_precision_policy, options, has_expert_mesh=has_expert_mesh)
    mesh = MeshArguments(**{field.name: given[field.name] for field in dataclasses.fields(MeshArguments)})
    index = _make_index(mesh, outer_shards=config.outer_dp_sharding_strategy != NO_SHARD)
    if has_expert_mesh:
        check_experts(checked.plans, index)
    model = MegatronFSDP(module, index, config, mixed_precision_policy, **options)
    model.state_dict_hooks.preprocess = preproc_state_dict_for_dcp_ckpt
    return model


#: Arguments of `fully_shard_model` -> fields of `DistributedDataParallelConfig`.
_CONFIG_FIELDS = {
    "overlap_grad_reduce": "overlap_grad_reduce",
    "overlap_param_gather": "overlap_param_gather",
    "average_in_collective": "average_in_collective",
    "keep_fp8_transpose_cache": "keep_fp8_transpose_cache",
    "nccl_ub": "nccl_ub",
    "fsdp_double_buffer": "fsdp_double_buffer",
    "fsdp_db_use_persist_buf_on_alloc_fail": "fsdp_db_use_persist_buf_on_alloc_fail",
    "disable_symmetric_registration": "disable_symmetric_registration",
    "use_decoupled_grad": "megatron_fsdp_use_decoupled_grad",
    "cuda_graph_mode": "megatron_fsdp_cuda_graph_mode",
    "maxpool_double_buffer": "megatron_fsdp_max_pool_double_buffer",
    "residency_bytes": "fsdp_residency_bytes",
    "copy_engine_gather": "fsdp_copy_engine_gather",
}
#: Arguments of `fully_shard_model` -> arguments of `MegatronFSDP`.
_MODEL_OPTIONS = {
    "fsdp_unit_modules": "fsdp_unit_modules",
    "disable_bucketing": "disable_bucketing",
    "device": "device",
    "calculate_per_token_loss": "calculate_per_token_loss",
    "init_model_with_meta_device": "init_model_with_meta_device",
    "sync_model_each_microbatch": "sync_model_each_microbatch",
    "enable_fine_grained_param_gather": "enable_fine_grained_param_gather_hook",
    "report_nan_in_param_grad": "report_nan_in_param_grad",
    "root_params": "root_params",
}


def _config_of(given: Mapping[str, Any]) -> DistributedDataParallelConfig:
    """The options among the arguments of `fully_shard_model`.

    Raises:
        TypeError: the mixed-precision policy is none.
        ValueError: a strategy is none, or meta initialisation is asked for where nothing is sharded.
    """
    inner = strategy_name(given["zero_dp_strategy"], "zero_dp_strategy")
    outer = strategy_name(given["outer_dp_sharding_strategy"], "outer_dp_sharding_strategy", OUTER_STRATEGIES)
    policy = given["mixed_precision_policy"]
    if not isinstance(policy, MixedPrecisionPolicy):
        raise TypeError(f"mixed_precision_policy is {policy!r}; expected a MixedPrecisionPolicy.")
    if given["init_model_with_meta_device"] and inner == NO_SHARD:
        raise ValueError(
            f"init_model_with_meta_device=True is for models that do not fit on one device, but zero_dp_strategy="
            f"{inner!r} keeps the whole model on each; choose a strategy that shards, or initialise the model first."
        )
    return DistributedDataParallelConfig(
        data_parallel_sharding_strategy=inner,
        outer_dp_sharding_strategy=outer,
        **{f"megatron_fsdp_{name}": dtype for name, dtype in dataclasses.asdict(policy).items()},
        **{field: given[name] for name, field in _CONFIG_FIELDS.items()},
    )


@dataclasses.dataclass(frozen=True)
class MeshArguments:
    """The arguments of `FSDPDistributedIndex` that `fully_shard_model` takes."""

    device_mesh: DeviceMesh | None
    dp_shard_dim: str | None
    dp_outer_dim: str | None
    tp_dim: str | None
    hybrid_fsdp_group: dist.ProcessGroup | None
    hybrid_fsdp_expt_group: dist.ProcessGroup | None
    expt_device_mesh: DeviceMesh | None
    fsdp_group_ag: dist.ProcessGroup | None
    expt_fsdp_group_ag: dist.ProcessGroup | None


def _make_index(given: MeshArguments, *, outer_shards: bool) -> FSDPDistributedIndex:
    """The index of the given mesh, or of a new mesh over all ranks. **Collective** if it is new.

    Raises:
        ValueError: arguments that belong to a mesh without one, or what the index raises.
        RuntimeError: there is no mesh to be made, because torch.distributed is not initialised.
    """
    if given.device_mesh is None:
        for field in dataclasses.fields(given):
            # The dimensions of a new mesh may be named; everything else describes a mesh that exists.
            if field.name not in ("dp_shard_dim", "tp_dim") and getattr(given, field.name) is not None:
                raise ValueError(f"{field.name} is given without device_mesh; pass the mesh that it belongs to.")
    if outer_shards and given.dp_outer_dim is None:
        raise ValueError(
            "outer_dp_sharding_strategy shards an outer axis; pass device_mesh, dp_outer_dim and hybrid_fsdp_group."
        )
    if given.device_mesh is None:
        given = _default_mesh(given)
    arguments = {field.name: getattr(given, field.name) for field in dataclasses.fields(given)}
    return FSDPDistributedIndex(**arguments, hsdp_outer_dp_shard=outer_shards)


def _join_launcher() -> None:
    """Initialises torch.distributed among the processes that torchrun started, as torch's meshes do. **Collective**.

    Raises:
        RuntimeError: no launcher has said who the others are.
    """
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        raise RuntimeError(
            "torch.distributed is not initialised; launch with torchrun, or call init_process_group() first."
        )
    join_device(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group("nccl" if default_device_type() == "cuda" else "gloo")


def _default_mesh(given: MeshArguments) -> MeshArguments:
    """A mesh of all ranks in one dimension, beside a tensor-parallel one of size 1. **Collective**."""
    if not dist.is_initialized():
        _join_launcher()
    dims = (given.dp_shard_dim or "fsdp", given.tp_dim or "tp")
    if dims[0] == dims[1]:
        raise ValueError(f"dp_shard_dim and tp_dim are both {dims[0]!r}; give them different names.")
    return dataclasses.replace(
        given,
        device_mesh=init_device_mesh(default_device_type(), (dist.get_world_size(), 1), mesh_dim_names=dims),
        dp_shard_dim=dims[0],
        tp_dim=dims[1],
        # On one communicator gathers and reductions run in launch order: a prefetch could not overtake a reduction.
        fsdp_group_ag=dist.new_group(backend=dist.get_backend()),
    )


def fully_shard(
    module: torch.nn.Module, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any
) -> tuple[MegatronFSDP, torch.optim.Optimizer]:
    """Shards a model and the optimizer made from its parameters; arguments as `fully_shard_model`. **Collective**.

    The optimizer keeps its parameter groups with their own options; state it has is sharded with its parameters.

    Returns:
        The sharded model and the same optimizer object.

    Raises:
        TypeError: `optimizer` is no torch optimizer.
        ValueError: the optimizer holds parameters that are not of `module`; and what `fully_shard_model` raises.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"expected a torch.optim.Optimizer to shard, got {type(optimizer).__name__}.")
    held = [param for group in optimizer.param_groups for param in group["params"]]
    own = {id(param) for param in module.parameters()}
    foreign = [param for param in held if id(param) not in own]
    if foreign or not held:
        first = f" (the first has shape {tuple(foreign[0].shape)})" if foreign else ""
        raise ValueError(
            f"of the optimizer's {len(held)} parameters {len(foreign)} are not of this {type(module).__name__}{first}; "
            "build it from module.parameters()."
        )
    arguments = _bound(module, *args, **kwargs)
    strategy = strategy_name(arguments.get("zero_dp_strategy", 3), "zero_dp_strategy")
    if strategy != NO_SHARD and not (dist.is_initialized() and dist.get_world_size() == 1):
        check_before_sharding(optimizer)
    before = dict(module.named_parameters())
    model = fully_shard_model(module, *args, **kwargs)
    after = {fqn: param.sharded for param in model.param_and_grad_buffer.managed_params for fqn in param.fqns}
    sharded = {id(param): after[name] for name, param in before.items()}
    for group in optimizer.param_groups:
        group["params"] = [sharded[id(param)] for param in group["params"]]
    for param in list(optimizer.state):
        replacement = sharded[id(param)]
        # The optimizer now works in the main weight's dtype, so what was in the model's follows.
        state = shard_state(replacement.megatron_fsdp_spec, optimizer.state.pop(param), replacement.dtype)
        optimizer.state[replacement] = state
    preprocess = model.state_dict_hooks.preprocess
    return model, fully_shard_optimizer(optimizer, preproc_state_dict_for_dcp_ckpt=preprocess)


def _bound(*args: Any, **kwargs: Any) -> dict[str, Any]:
    """The arguments that are given to `fully_shard_model`, by name.

    Raises:
        TypeError: it does not take them.
    """
    signature = inspect.signature(fully_shard_model)
    for name in (name for name in kwargs if name not in signature.parameters):
        close = difflib.get_close_matches(name, signature.parameters, n=1)
        hint = f"did you mean {close[0]}?" if close else "see help(fully_shard)."
        raise TypeError(f"fully_shard() got an unexpected keyword argument {name!r}; {hint}")
    return signature.bind(*args, **kwargs).arguments


def _adopt_signature(function: Any) -> None:
    """`fully_shard` shows every argument of `fully_shard_model` by name."""
    model_params = list(inspect.signature(fully_shard_model).parameters.values())
    signature = inspect.signature(function)
    function.__signature__ = signature.replace(parameters=[*list(signature.parameters.values())[:2], *model_params[1:]])


_adopt_signature(fully_shard)
