"""From a module to units with sharded parameters, in one pass."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Collection, Mapping

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parameter import is_lazy

from megatron_fsdp.config import EngineConfig
from megatron_fsdp.machine.allocator import StoragePool
from megatron_fsdp.machine.collectives import GradScale
from megatron_fsdp.machine.device import Device
from megatron_fsdp.machine.mesh import FSDPDistributedIndex
from megatron_fsdp.machine.copy_engine import PeerGather
from megatron_fsdp.plan.layout import GroupKey, GroupPlan, ParamSpec, plan_groups
from megatron_fsdp.plan.strategy import NO_SHARD, StrategyPlan, plan_for
from megatron_fsdp.build.find_units import UnitPlan, plan_units
from megatron_fsdp.build.meta_init import check_resettable, materialize, materialize_buffers
from megatron_fsdp.build.copy_engine_setup import make_peers, open_peers
from megatron_fsdp.runtime.unit import Unit
from megatron_fsdp.state.codec import codec_for
from megatron_fsdp.state.group_spec import GroupSpec
from megatron_fsdp.state.param_group import ParamGroup
from megatron_fsdp.state.param_tags import has_single_owner, is_expert_param, is_no_shard
from megatron_fsdp.state.tensor_parallel import local_part


@dataclasses.dataclass(frozen=True, kw_only=True)
class BuildRequest:
    """What to build units from."""

    module: nn.Module
    index: FSDPDistributedIndex
    config: EngineConfig
    pool: StoragePool
    device: torch.device
    from_meta: bool
    peers: Mapping[bool, PeerGather] = dataclasses.field(default_factory=dict)
    """By `is_expert`, what gathers over the inner axis where collectives do not."""


def plan_and_check(
    module: nn.Module,
    unit_classes: tuple[type, ...],
    root_params: Collection[nn.Parameter] = (),
    *,
    from_meta: bool = False,
    has_expert_mesh: bool = False,
    fine_grained: tuple[type, ...] = (),
) -> list[UnitPlan]:
    """Units and their parameters. Raises every mistake that the model's shape shows, before anything is communicated.

    Raises:
        ValueError: see `plan_units` and `check_resettable`; a meta tensor without meta initialisation; expert
            parameters without an expert mesh; a parameter that no codec handles, that a lazy module has not made yet,
            or whose elements share memory.
        NotImplementedError: an embedding that changes its weight in forward, or whose gradient is sparse.
    """
    _check_initialized(module)
    plans = plan_units(module, unit_classes, root_params, fine_grained)
    _check_embeddings(module)
    params = [param for plan in plans for param in plan.params]
    if not params:
        raise ValueError(f"{type(module).__name__} has no parameters; there is nothing to shard.")
    on_meta = [param.fqn for param in params if param.unsharded.is_meta]
    on_meta += [name for name, buffer in module.named_buffers() if buffer.is_meta]
    if on_meta and not from_meta:
        raise ValueError(
            f"{on_meta[0]} is on the meta device; pass init_model_with_meta_device=True, or initialise the model first."
        )
    if from_meta:
        check_resettable(module)
    experts = [param.fqn for param in params if is_expert_param(param.unsharded)]
    if experts and not has_expert_mesh:
        raise ValueError(f"{experts[0]} is an expert parameter (allreduce=False); pass expt_device_mesh.")
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
    return plans


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
    """Some element of a strided `tensor` lies where another one does."""
    if tensor.layout is not torch.strided or tensor.numel() == 0:
        return False
    steps = [(size, stride) for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]
    span = 1 + sum((size - 1) * stride for size, stride in steps)
    return span < tensor.numel() or any(stride == 0 for _, stride in steps)


def build_units(request: BuildRequest, plans: list[UnitPlan]) -> list[Unit]:
    """Shards units one after the other, so that at most one is whole beside what the caller holds. **Collective**.

    Raises:
        ValueError: ranks are to read each other's memory and cannot; on every data-parallel rank.
    """
    peers = make_peers(request.config, request.index, Device(request.device))
    request = dataclasses.replace(request, peers=peers)
    units = []
    for position, plan in enumerate(plans):
        if request.from_meta:
            materialize(plan, request.device)
        groups = [_make_group(plan, request, number, group) for number, group in enumerate(_plan_groups(plan, request))]
        for group in groups:
            group.load_initial(_Source(request, group.spec.is_expert))
        units.append(Unit(position, plan.fqn, plan.module, groups, plan.params, is_root=plan.is_root))
    if request.from_meta:
        materialize_buffers(request.module, request.device)
    _agree_on_buffers(request)
    open_peers([group for unit in units for group in unit.groups], request.index)
    return units


def grad_scales(index: FSDPDistributedIndex, config: EngineConfig) -> dict[bool, GradScale]:
    """How gradients are averaged, by `is_expert`; experts too are averaged over the dense data-parallel ranks."""
    if config.calculate_per_token_loss:
        scale = GradScale(1.0, average=False)
        return {False: scale, True: scale}
    size = index.get_dp_group().size()
    if not config.average_in_collective:
        scale = GradScale(1.0 / size, average=False, fused=config.gradient_reduce_div_fusion)
        return {False: scale, True: scale}
    experts = index.get_dp_group(is_expert_parallel=True) if index.expt_fsdp_group is not None else None
    expert_factor = experts.size() / size if experts is not None else 1.0
    return {False: GradScale(1.0, average=True), True: GradScale(expert_factor, average=True)}


def _plan_groups(plan: UnitPlan, request: BuildRequest) -> tuple[GroupPlan, ...]:
    specs = []
    for param in plan.params:
        codec = codec_for(param.unsharded)
        key = GroupKey(
            codec=(type(codec).__name__, codec.storage_dtype(param.unsharded)),
            dtype=param.unsharded.dtype,
            requires_grad=param.unsharded.requires_grad,
            is_expert=is_expert_param(param.unsharded),
            is_replicated=is_no_shard(param.unsharded) or param.unsharded.dim() == 0,
        )
        shape = tuple(local_part(param.unsharded).shape)
        specs.append(ParamSpec(shape, key, codec.atom_rows(param.unsharded), has_single_owner(param.unsharded)))
    shards = {is_expert: _shard_count(request, is_expert) for is_expert in {spec.key.is_expert for spec in specs}}
    return plan_groups(specs, shards, request.config.bucket_numel if plan.is_root else None)


def _strategy(request: BuildRequest, is_expert: bool, is_replicated: bool = False) -> StrategyPlan:
    outer, inner = request.index.axes(is_expert)
    config = request.config
    return plan_for(
        NO_SHARD if is_replicated else config.inner_strategy,
        NO_SHARD if is_replicated else config.outer_strategy,
        inner_size=inner.size,
        outer_size=outer.size,
    )


def _shard_count(request: BuildRequest, is_expert: bool) -> int:
    """Into how many pieces the finest buffer is cut."""
    axes = request.index.axes(is_expert)
    plan = _strategy(request, is_expert)
    count = 1
    for position, axis in enumerate(axes):
        if any(pair[position].value == "S" for pair in (plan.weight, plan.main_grad, plan.main_weight)):
            count *= axis.size
    return count


def _make_group(plan: UnitPlan, request: BuildRequest, number: int, group: GroupPlan) -> ParamGroup:
    params = tuple(plan.params[i].unsharded for i in group.members)
    codec = codec_for(params[0])
    precision = request.config.precision
    main_grads_dtype = precision.main_grads_dtype or params[0].dtype
    is_frozen = not group.key.requires_grad
    # A frozen weight is never updated: a second copy in another dtype would be memory for nothing.
    main_dtype = params[0].dtype if is_frozen else precision.main_params_dtype or params[0].dtype
    strategy = _strategy(request, group.key.is_expert, group.key.is_replicated)
    if is_frozen and codec.storage_dtype(params[0]) == main_dtype:
        strategy = strategy.without_optimizer()
    spec = GroupSpec(
        name=f"{plan.fqn or 'root'}:{number}",
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
        peers=request.peers.get(group.key.is_expert),
    )
    return ParamGroup(spec, request.pool)


@dataclasses.dataclass(frozen=True)
class _Source:
    """Where initial values come from: the first data-parallel rank, so that no two ranks or strategies can differ."""

    request: BuildRequest
    is_expert: bool

    def __call__(self, full: torch.Tensor) -> torch.Tensor:
        """`full` on the engine's device with the first rank's values. **Collective**."""
        full = full.to(self.request.device)
        _broadcast(full, self.request.index.get_dp_group(self.is_expert))
        return full


@torch.no_grad()
def _agree_on_buffers(request: BuildRequest) -> None:
    experts = _modules_of_experts(request.module)
    for module in request.module.modules():
        for name, buffer in module._buffers.items():
            if buffer is None:
                continue
            # Expanded buffers show one element in several places, and cannot be written to.
            moved = buffer.to(request.device).contiguous()
            module._buffers[name] = moved
            _broadcast(local_part(moved), request.index.get_dp_group(is_expert_parallel=module in experts))


def _modules_of_experts(root: nn.Module) -> set[nn.Module]:
    """Modules whose buffers are experts', and so differ between expert-parallel ranks.

    Buffers have no tag: they are experts' where all parameters in their module are, or, if it has none, all those in
    the nearest module around it that has some.
    """
    found: set[nn.Module] = set()

    def visit(module: nn.Module, is_inside: bool) -> None:
        params = list(module.parameters())
        is_inside = all(map(is_expert_param, params)) if params else is_inside
        if is_inside:
            found.add(module)
        for child in module.children():
            visit(child, is_inside)

    visit(root, False)
    return found


def _broadcast(tensor: torch.Tensor, group: dist.ProcessGroup) -> None:
    if group.size() == 1 or tensor.numel() == 0:
        return
    dense = tensor.contiguous()
    # As bytes: backends know few dtypes (gloo neither float8 nor 16-bit integers).
    dist.broadcast(dense.view(-1).view(torch.uint8), group=group, group_src=0)
    if dense.data_ptr() != tensor.data_ptr():
        tensor.copy_(dense)
