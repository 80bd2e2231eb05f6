"""`fully_shard`, `fully_shard_model`: from a user's arguments to a sharded model and its optimizer."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from megatron_fsdp.build.check_arguments import check_experts, plan_model
from megatron_fsdp.config import (
    DEFAULT_POLICY,
    EngineConfig,
    MixedPrecisionPolicy,
    ShardingStrategy,
    shards_anything,
    strategy_name,
)
from megatron_fsdp.dtensor.shard_spec import spec_of
from megatron_fsdp.machine.device import default_device_type, join_device
from megatron_fsdp.machine.mesh import FSDPDistributedIndex
from megatron_fsdp.megatron_fsdp import MegatronFSDP
from megatron_fsdp.optim.kinds import check_fits, check_reads_grads, params_of
from megatron_fsdp.optim.local_step import shard_state
from megatron_fsdp.optim.optimizer import fully_shard_optimizer
from megatron_fsdp.plan.strategy import OUTER_STRATEGIES

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
        fsdp_unit_modules: classes or import paths of modules that are units, all-gathered and resharded as one; None:
            the whole model is one unit.
        zero_dp_strategy: no_shard (0), optim (1), optim_grads (2) or optim_grads_params (3).
        outer_dp_sharding_strategy: no_shard (0) or, with strategy 3 inside, optim (1).
        device: the device to compute on; None: the current CUDA device, or the CPU where there is none.
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
        NotImplementedError: an option whose feature does not exist yet.
    """
    config = EngineConfig(
        data_parallel_sharding_strategy=strategy_name(zero_dp_strategy, "zero_dp_strategy"),
        outer_dp_sharding_strategy=strategy_name(
            outer_dp_sharding_strategy, "outer_dp_sharding_strategy", OUTER_STRATEGIES
        ),
        fsdp_unit_modules=fsdp_unit_modules,
        device=device,
        init_model_with_meta_device=init_model_with_meta_device,
        mixed_precision_policy=mixed_precision_policy,
        overlap_grad_reduce=overlap_grad_reduce,
        overlap_param_gather=overlap_param_gather,
        sync_model_each_microbatch=sync_model_each_microbatch,
        preproc_state_dict_for_dcp_ckpt=preproc_state_dict_for_dcp_ckpt,
        report_nan_in_param_grad=report_nan_in_param_grad,
        average_in_collective=average_in_collective,
        disable_bucketing=disable_bucketing,
        calculate_per_token_loss=calculate_per_token_loss,
        keep_fp8_transpose_cache=keep_fp8_transpose_cache,
        nccl_ub=nccl_ub,
        fsdp_double_buffer=fsdp_double_buffer,
        fsdp_db_use_persist_buf_on_alloc_fail=fsdp_db_use_persist_buf_on_alloc_fail,
        disable_symmetric_registration=disable_symmetric_registration,
        megatron_fsdp_enable_fine_grained_param_gather=enable_fine_grained_param_gather,
        megatron_fsdp_use_decoupled_grad=use_decoupled_grad,
        megatron_fsdp_cuda_graph_mode=cuda_graph_mode,
        megatron_fsdp_max_pool_double_buffer=maxpool_double_buffer,
        root_params=root_params,
        fsdp_residency_bytes=residency_bytes,
        fsdp_copy_engine_gather=copy_engine_gather,
    )
    # Making a mesh communicates, so whatever can be wrong without one is found first.
    plans = plan_model(module, config, has_expert_mesh=expt_device_mesh is not None)
    if device_mesh is None:
        of_a_mesh = {
            "dp_outer_dim": dp_outer_dim,
            "hybrid_fsdp_group": hybrid_fsdp_group,
            "hybrid_fsdp_expt_group": hybrid_fsdp_expt_group,
            "expt_device_mesh": expt_device_mesh,
            "fsdp_group_ag": fsdp_group_ag,
            "expt_fsdp_group_ag": expt_fsdp_group_ag,
        }
        for name in (name for name, given in of_a_mesh.items() if given is not None):
            raise ValueError(f"{name} is given without device_mesh; pass the mesh that it belongs to.")
    if config.shards_outer_axis and dp_outer_dim is None:
        raise ValueError(
            "outer_dp_sharding_strategy shards an outer axis; pass device_mesh, dp_outer_dim and hybrid_fsdp_group."
        )
    if device_mesh is None:
        dp_shard_dim, tp_dim = dp_shard_dim or "fsdp", tp_dim or "tp"
        device_mesh = _mesh_of_all_ranks(dp_shard_dim, tp_dim)
        # On one communicator gathers and reductions run in launch order: a prefetch could not overtake a reduction.
        fsdp_group_ag = dist.new_group(backend=dist.get_backend())
    index = FSDPDistributedIndex(
        device_mesh=device_mesh,
        dp_shard_dim=dp_shard_dim,
        dp_outer_dim=dp_outer_dim,
        tp_dim=tp_dim,
        hybrid_fsdp_group=hybrid_fsdp_group,
        hybrid_fsdp_expt_group=hybrid_fsdp_expt_group,
        hsdp_outer_dp_shard=config.shards_outer_axis,
        expt_device_mesh=expt_device_mesh,
        fsdp_group_ag=fsdp_group_ag,
        expt_fsdp_group_ag=expt_fsdp_group_ag,
    )
    if expt_device_mesh is not None:
        check_experts(plans, index)
    return MegatronFSDP.of_plans(module, index, config, plans)


def _mesh_of_all_ranks(dp_shard_dim: str, tp_dim: str) -> DeviceMesh:
    """A new mesh of all ranks in one dimension, beside a tensor-parallel one of size 1. **Collective**.

    Initialises torch.distributed among the processes that torchrun started, as torch's meshes do.

    Raises:
        ValueError: the dimensions have one name.
        RuntimeError: torch.distributed is not initialised, and no launcher's environment names the other ranks.
    """
    if not dist.is_initialized():
        if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
            raise RuntimeError(
                "torch.distributed is not initialised; launch with torchrun, or call init_process_group() first."
            )
        join_device(int(os.environ.get("LOCAL_RANK", "0")))
        dist.init_process_group("nccl" if default_device_type() == "cuda" else "gloo")
    if dp_shard_dim == tp_dim:
        raise ValueError(f"dp_shard_dim and tp_dim are both {tp_dim!r}; give them different names.")
    dims = (dp_shard_dim, tp_dim)
    return init_device_mesh(default_device_type(), (dist.get_world_size(), 1), mesh_dim_names=dims)


def fully_shard(
    module: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
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
) -> tuple[MegatronFSDP, torch.optim.Optimizer]:
    """Shards a model and the optimizer made from its parameters. **Collective**.

    The optimizer keeps its parameter groups with their own options; state it has is sharded with its parameters.

    Args:
        module: the model; it is changed in place.
        optimizer: made from `module.parameters()`; it is changed in place.
        Others: as `fully_shard_model` documents them.

    Returns:
        The sharded model and the same optimizer object.

    Raises:
        TypeError: `optimizer` is not a torch optimizer.
        ValueError: the optimizer holds parameters that are not of `module`; and what `fully_shard_model` raises.
    """
    _check_optimizer(optimizer, module)
    check_reads_grads(optimizer, are_decoupled=use_decoupled_grad)
    is_alone = dist.is_initialized() and dist.get_world_size() == 1
    if shards_anything(zero_dp_strategy, "zero_dp_strategy") and not is_alone:
        check_fits(optimizer)
    before = dict(module.named_parameters())
    model = fully_shard_model(
        module,
        device_mesh=device_mesh,
        dp_shard_dim=dp_shard_dim,
        dp_outer_dim=dp_outer_dim,
        tp_dim=tp_dim,
        hybrid_fsdp_group=hybrid_fsdp_group,
        hybrid_fsdp_expt_group=hybrid_fsdp_expt_group,
        expt_device_mesh=expt_device_mesh,
        fsdp_group_ag=fsdp_group_ag,
        expt_fsdp_group_ag=expt_fsdp_group_ag,
        fsdp_unit_modules=fsdp_unit_modules,
        zero_dp_strategy=zero_dp_strategy,
        outer_dp_sharding_strategy=outer_dp_sharding_strategy,
        device=device,
        init_model_with_meta_device=init_model_with_meta_device,
        mixed_precision_policy=mixed_precision_policy,
        overlap_grad_reduce=overlap_grad_reduce,
        overlap_param_gather=overlap_param_gather,
        sync_model_each_microbatch=sync_model_each_microbatch,
        preproc_state_dict_for_dcp_ckpt=preproc_state_dict_for_dcp_ckpt,
        report_nan_in_param_grad=report_nan_in_param_grad,
        average_in_collective=average_in_collective,
        disable_bucketing=disable_bucketing,
        calculate_per_token_loss=calculate_per_token_loss,
        keep_fp8_transpose_cache=keep_fp8_transpose_cache,
        nccl_ub=nccl_ub,
        fsdp_double_buffer=fsdp_double_buffer,
        fsdp_db_use_persist_buf_on_alloc_fail=fsdp_db_use_persist_buf_on_alloc_fail,
        disable_symmetric_registration=disable_symmetric_registration,
        enable_fine_grained_param_gather=enable_fine_grained_param_gather,
        use_decoupled_grad=use_decoupled_grad,
        cuda_graph_mode=cuda_graph_mode,
        maxpool_double_buffer=maxpool_double_buffer,
        root_params=root_params,
        residency_bytes=residency_bytes,
        copy_engine_gather=copy_engine_gather,
    )
    after = {fqn: param.sharded for param in model.param_and_grad_buffer.managed_params for fqn in param.fqns}
    sharded = {id(param): after[name] for name, param in before.items()}
    for group in optimizer.param_groups:
        group["params"] = [sharded[id(param)] for param in group["params"]]
    for param in list(optimizer.state):
        replacement = sharded[id(param)]
        # The optimizer now works in the main weight's dtype, so what was in the model's follows.
        state = shard_state(spec_of(replacement), optimizer.state.pop(param), replacement.dtype)
        optimizer.state[replacement] = state
    return model, fully_shard_optimizer(optimizer, preproc_state_dict_for_dcp_ckpt=preproc_state_dict_for_dcp_ckpt)


def _check_optimizer(optimizer: torch.optim.Optimizer, module: torch.nn.Module) -> None:
    """Checks that `optimizer` holds parameters of `module`, and no others.

    Raises:
        TypeError: it is not a torch optimizer.
        ValueError: it holds other parameters, or none.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"expected a torch.optim.Optimizer to shard, got {type(optimizer).__name__}.")
    held, own = params_of(optimizer), {id(param) for param in module.parameters()}
    foreign = [param for param in held if id(param) not in own]
    if foreign or not held:
        first = f" (the first has shape {tuple(foreign[0].shape)})" if foreign else ""
        raise ValueError(
            f"of the optimizer's {len(held)} parameters {len(foreign)} are not of this {type(module).__name__}{first}; "
            "build it from module.parameters()."
        )
