"""Full parameters: all of them in the modules for a while, or the whole state dict on the first rank."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from megatron_fsdp.dtensor.shard_spec import ShardSpec, spec_of
from megatron_fsdp.machine.mesh import FSDPDistributedIndex
from megatron_fsdp.machine.torch_compat import local_tensor
from megatron_fsdp.plan.strategy import REPLICATED
from megatron_fsdp.runtime.schedule import Schedule
from megatron_fsdp.runtime.unit import ManagedParam
from megatron_fsdp.state.flat_buffer import FlatBuffer
from megatron_fsdp.state.param_group import ParamGroup
from megatron_fsdp.state.param_tags import OWNER_TAG, copy_tags
from megatron_fsdp.state.tensor_parallel import in_form_of, local_part


@contextlib.contextmanager
def full_params(schedule: Schedule, *, writeback: bool) -> Iterator[None]:
    """See `MegatronFSDP.full_params`. **Collective**."""
    schedule.check_idle("full_params()")
    schedule.reshard_all()
    params = {id(param.unsharded): param for unit in schedule.units for param in unit.params}
    shown: list[tuple[ManagedParam, nn.Parameter]] = []
    schedule.blocked_by = "full_params()"
    try:
        for group in (group for unit in schedule.units for group in unit.groups):
            for unsharded, whole in zip(group.params, _gather(group), strict=True):
                param = params[id(unsharded)]
                full = nn.Parameter(in_form_of(unsharded, whole), requires_grad=unsharded.requires_grad)
                copy_tags(unsharded, full)
                vars(full)[OWNER_TAG] = vars(param.sharded)[OWNER_TAG]
                for place in param.places:
                    place.hold(full)
                shown.append((param, full))
        yield
        if writeback:
            _write_back(shown)
    finally:
        for param in params.values():
            for place in param.places:
                place.hold(param.sharded)
        schedule.blocked_by = None
    if writeback:
        schedule.install()


@torch.no_grad()
def _gather(group: ParamGroup) -> list[torch.Tensor]:
    """The whole main weights of a group. **Collective**."""
    main = group.main_weight_buffer
    full = FlatBuffer(group.layout, main.axes, REPLICATED, main.data.new_empty(group.layout.size))
    if main.is_data_distributed:
        full.gather_from(main)
    else:
        full.data.copy_(main.data)
    return [full.view(slot) for slot in range(len(group.params))]


@torch.no_grad()
def _write_back(shown: list[tuple[ManagedParam, nn.Parameter]]) -> None:
    """Copies this rank's rows of every full parameter into its main weight; all of them or none.

    Raises:
        ValueError: a parameter has been replaced or has another shape or dtype.
    """
    for param, full in shown:
        if not all(place.holds(full) for place in param.places):
            raise ValueError(
                f"{param.fqn} was replaced inside full_params(); write into it instead, e.g. with copy_(). Nothing "
                "has been written back."
            )
        if full.shape != param.unsharded.shape or full.dtype != param.sharded.dtype:
            raise ValueError(
                f"{param.fqn} has become {tuple(full.shape)} of {full.dtype} inside full_params(), expected "
                f"{tuple(param.unsharded.shape)} of {param.sharded.dtype}; keep its shape and dtype. Nothing has been "
                "written back."
            )
    for param, full in shown:
        rows = local_part(full).reshape(-1)[spec_of(param.sharded).flat_slice]
        local_tensor(param.sharded).view(-1).copy_(rows)


def full_state_dict(
    shards: dict[str, Any],
    specs: Mapping[str, ShardSpec],
    index: FSDPDistributedIndex,
    *,
    wrapper_prefix: str,
    dtype: torch.dtype | None,
) -> OrderedDict[str, Any]:
    """See `MegatronFSDP.full_state_dict`. **Collective**.

    Args:
        shards: the state dict of the sharded module, with everything in it.
        specs: by name, how each parameter lies.
        index: meshes.
        wrapper_prefix: the part that wrappers between the sharded module and the user's add to names.
        dtype: of parameters in the result; None: that of their main weights.
    """
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point and dtype.itemsize > 1):
        raise ValueError(
            f"full_state_dict(dtype={dtype!r}) would lose the weights; expected a torch floating-point dtype of 2 "
            "bytes or more, or None for the main weights' own. Quantize the result instead."
        )
    strange = [name for name, value in shards.items() if isinstance(value, DTensor) and name not in specs]
    if strange:
        raise ValueError(
            f"the state dict holds {strange[0]!r}, a shard under a name that no parameter has; a hook of the model "
            "renames its entries. Rename them in the result of full_state_dict() instead."
        )
    group = index.get_dp_group()
    # NCCL must not begin with a message that some ranks take no part in.
    dist.all_reduce(torch.zeros(1, device=index.device_mesh.device_type), group=group)
    first = int(index.dp_mesh().mesh.min())
    is_first = dist.get_rank() == first
    whole: OrderedDict[str, Any] = OrderedDict()
    moved: dict[ShardSpec, torch.Tensor | None] = {}
    for name, value in shards.items():
        if isinstance(value, DTensor):
            spec = specs[name]
            if spec not in moved:
                moved[spec] = _on_rank(first, local_tensor(value).detach().to(dtype or value.dtype), spec, group)
            value = moved[spec]
        elif isinstance(value, torch.Tensor) and is_first:
            value = value.detach().to("cpu", copy=True)
        if is_first:
            whole[name.removeprefix(wrapper_prefix)] = value
    if is_first and hasattr(shards, "_metadata"):
        metadata = {name.removeprefix(wrapper_prefix): entry for name, entry in shards._metadata.items()}
        vars(whole)["_metadata"] = OrderedDict(metadata)  # torch's own place for it
    return whole


def check_is_whole(index: FSDPDistributedIndex) -> None:
    """Checks that the data-parallel ranks together hold the whole model.

    Raises:
        NotImplementedError: there are tensor-parallel or expert-parallel ranks.
    """
    is_split = index.tp_dim is not None and index.get_submesh(index.tp_dim).size() > 1
    if index.expt_fsdp_group is not None:
        dense, experts = (dist.get_process_group_ranks(index.get_dp_group(is_expert)) for is_expert in (False, True))
        is_split = is_split or dense != experts
    if is_split:
        raise NotImplementedError(
            "full_state_dict() puts the model together from its data-parallel ranks, but tensor-parallel or "
            "expert-parallel ranks hold other parts of it; save model.state_dict() with torch.distributed.checkpoint."
        )


def _on_rank(first: int, local: torch.Tensor, spec: ShardSpec, group: dist.ProcessGroup) -> torch.Tensor | None:
    """The full parameter in the CPU memory of rank `first`; None elsewhere. **Collective** over `group`."""
    me, owners, mine = dist.get_rank(), spec.owners, local.view(-1)
    if me == first:
        full = mine.new_empty(spec.shape)
        pieces = {rank: full.view(-1)[start:stop] for (start, stop), rank in owners.items() if stop > start}
        if me in pieces:
            pieces.pop(me).copy_(mine)
        way: Callable[..., dist.Work | None] = dist.irecv
        ends = [(piece, rank) for rank, piece in pieces.items()]
    else:
        way, ends = dist.isend, [(mine, first)] if me in owners.values() and mine.numel() else []
    # As bytes: backends know few dtypes.
    operations = [dist.P2POp(way, data.view(torch.uint8), rank, group) for data, rank in ends]
    for work in dist.batch_isend_irecv(operations) if operations else ():
        work.wait()
    return full.to("cpu") if me == first else None
