"""From a module to units with sharded parameters, in one pass."""

from __future__ import annotations

import dataclasses
import functools
import math

import torch
import torch.distributed as dist
from torch import nn

from megatron_fsdp.build.find_units import UnitPlan
from megatron_fsdp.build.meta_init import materialize, materialize_buffers
from megatron_fsdp.config import EngineConfig
from megatron_fsdp.machine.allocator import StoragePool
from megatron_fsdp.machine.collectives import NO_SCALE, GradScale
from megatron_fsdp.machine.copy_engine import PeerGather, peer_gathers
from megatron_fsdp.machine.device import Device
from megatron_fsdp.machine.mesh import FSDPDistributedIndex
from megatron_fsdp.plan.layout import GroupKey, GroupPlan, ParamSpec, plan_groups
from megatron_fsdp.plan.strategy import NO_SHARD, StrategyPlan, plan_for
from megatron_fsdp.runtime.unit import Unit
from megatron_fsdp.state.codec import codec_for
from megatron_fsdp.state.group_spec import GroupSpec
from megatron_fsdp.state.param_group import ParamGroup
from megatron_fsdp.state.param_tags import has_single_owner, is_expert_param, is_no_shard
from megatron_fsdp.state.tensor_parallel import local_part


@dataclasses.dataclass(frozen=True)
class BuildRequest:
    """Arguments of `build_units` that all units share."""

    module: nn.Module
    index: FSDPDistributedIndex
    config: EngineConfig
    pool: StoragePool
    device: torch.device


def build_units(request: BuildRequest, plans: list[UnitPlan]) -> list[Unit]:
    """Shards units one after the other, so that at most one is whole beside what the caller holds. **Collective**.

    Raises:
        ValueError: ranks are to read each other's memory and cannot; on every data-parallel rank.
    """
    peers = peer_gathers(request.index, Device(request.device)) if request.config.fsdp_copy_engine_gather else {}
    units = []
    for position, plan in enumerate(plans):
        if request.config.init_model_with_meta_device:
            materialize(plan, request.device)
        groups = [
            _make_group(plan, request, f"{plan.fqn or 'root'}:{number}", group, peers)
            for number, group in enumerate(_plan_groups(plan, request))
        ]
        for group in groups:
            dp_group = request.index.get_dp_group(group.spec.is_expert)
            group.load_initial(functools.partial(_first_rank_values, dp_group, request.device))
        units.append(Unit(position, plan.fqn, plan.module, groups, plan.params))
    if request.config.init_model_with_meta_device:
        materialize_buffers(request.module, request.device)
    _broadcast_buffers(request)
    groups = [group for unit in units for group in unit.groups]
    for is_expert, gather in peers.items():
        sent_nbytes = max((group.sent_nbytes for group in groups if group.spec.peers is gather), default=0)
        gather.allocate(sent_nbytes, request.index.get_dp_group(is_expert))
    return units


def grad_scales(index: FSDPDistributedIndex, config: EngineConfig) -> dict[bool, GradScale]:
    """Scaling of averaged gradients, by `is_expert`; experts too are averaged over the dense data-parallel ranks."""
    size = index.get_dp_group().size()
    if config.calculate_per_token_loss:
        dense = experts = NO_SCALE
    elif config.average_in_collective:
        expert_size = index.get_dp_group(is_expert_parallel=True).size() if index.expt_fsdp_group is not None else size
        dense, experts = GradScale(1.0, average=True), GradScale(expert_size / size, average=True)
    else:
        dense = experts = GradScale(1.0 / size, average=False, fused=config.gradient_reduce_div_fusion)
    return {False: dense, True: experts}


def _plan_groups(plan: UnitPlan, request: BuildRequest) -> tuple[GroupPlan, ...]:
    specs = []
    for param in (param.unsharded for param in plan.params):
        codec = codec_for(param)
        key = GroupKey(
            codec=(type(codec).__name__, codec.storage_dtype(param)),
            dtype=param.dtype,
            requires_grad=param.requires_grad,
            is_expert=is_expert_param(param),
            is_replicated=is_no_shard(param) or param.dim() == 0,
        )
        specs.append(ParamSpec(tuple(local_part(param).shape), key, codec.atom_rows(param), has_single_owner(param)))
    shards = {is_expert: _shard_count(request, is_expert) for is_expert in {spec.key.is_expert for spec in specs}}
    is_cut = plan.is_root and not request.config.disable_bucketing
    return plan_groups(specs, shards, request.config.bucket_size if is_cut else None)


def _shard_count(request: BuildRequest, is_expert: bool) -> int:
    """Pieces into which the finest buffer is cut."""
    plan = _strategy(request, is_expert)
    sizes = [axis.size for axis in request.index.axes(is_expert)]
    return math.prod(size for position, size in enumerate(sizes) if plan.shards_along(position))


def _strategy(request: BuildRequest, is_expert: bool, is_replicated: bool = False) -> StrategyPlan:
    outer, inner = request.index.axes(is_expert)
    config = request.config
    names = (config.data_parallel_sharding_strategy, config.outer_dp_sharding_strategy)
    return plan_for(*((NO_SHARD,) * 2 if is_replicated else names), inner_size=inner.size, outer_size=outer.size)


def _make_group(
    plan: UnitPlan, request: BuildRequest, name: str, group: GroupPlan, peers: dict[bool, PeerGather]
) -> ParamGroup:
    params = tuple(plan.params[i].unsharded for i in group.members)
    codec = codec_for(params[0])
    precision = request.config.mixed_precision_policy
    main_grads_dtype = precision.main_grads_dtype or params[0].dtype
    is_frozen = not group.key.requires_grad
    # A frozen weight is never updated: a second copy in another dtype would be memory for nothing.
    main_dtype = params[0].dtype if is_frozen else precision.main_params_dtype or params[0].dtype
    strategy = _strategy(request, group.key.is_expert, group.key.is_replicated)
    if is_frozen and codec.is_cast and codec.storage_dtype(params[0]) == main_dtype:
        strategy = strategy.without_optimizer()
    spec = GroupSpec(
        name=name,
        params=params,
        fqns=tuple(plan.params[i].fqn for i in group.members),
        layout=group.layout,
        atom_rows=group.atom_rows,
        plan=strategy,
        axes=request.index.axes(group.key.is_expert),
        codec=codec,
        main_dtype=main_dtype,
        grad_dtype=main_grads_dtype,
        comm_dtype=precision.grad_comm_dtype or main_grads_dtype,
        requires_grad=group.key.requires_grad,
        is_expert=group.key.is_expert,
        is_replicated=group.key.is_replicated,
        device=request.device,
        peers=peers.get(group.key.is_expert),
    )
    return ParamGroup(spec, request.pool)


@torch.no_grad()
def _broadcast_buffers(request: BuildRequest) -> None:
    """Moves buffers to the device and gives them the first rank's values, experts' theirs. **Collective**.

    Buffers have no tag: they are experts' where all parameters in their module are, or, if it has none, all those in
    the nearest module around it that has some.
    """
    has_experts: dict[nn.Module, bool] = {}
    for module in request.module.modules():
        params = list(module.parameters())
        if params:
            has_experts[module] = all(map(is_expert_param, params))
        is_expert = has_experts.setdefault(module, False)
        for child in module.children():
            has_experts.setdefault(child, is_expert)
        for name, buffer in list(module.named_buffers(recurse=False, remove_duplicate=False)):
            # Expanded buffers show one element in several places, and cannot be written to.
            moved = buffer.to(request.device).contiguous()
            setattr(module, name, moved)
            _first_rank_values(request.index.get_dp_group(is_expert), request.device, local_part(moved))


def _first_rank_values(group: dist.ProcessGroup, device: torch.device, tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` on `device`, with the values of the group's first rank: no two ranks can differ. **Collective**."""
    tensor = tensor.to(device)
    if group.size() > 1 and tensor.numel():
        dense = tensor.contiguous()
        # As bytes: backends know few dtypes (gloo neither float8 nor 16-bit integers).
        dist.broadcast(dense.view(-1).view(torch.uint8), group=group, group_src=0)
        if dense.data_ptr() != tensor.data_ptr():
            tensor.copy_(dense)
    return tensor
