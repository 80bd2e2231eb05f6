"""The whole model's state dict on one rank, parameter by parameter."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from megatron_fsdp.machine import collectives
from megatron_fsdp.machine.collectives import Axis
from megatron_fsdp.machine.mesh import FSDPDistributedIndex
from megatron_fsdp.plan.strategy import Placement
from megatron_fsdp.runtime.schedule import Schedule
from megatron_fsdp.state.flat_buffer import FlatBuffer, local_bounds


def full_state_dict(
    shards: OrderedDict[str, Any],
    schedule: Schedule,
    index: FSDPDistributedIndex,
    *,
    wrapper_prefix: str,
    dtype: torch.dtype | None,
) -> OrderedDict[str, Any]:
    """See `MegatronFSDP.full_state_dict`. **Collective**.

    Args:
        shards: the state dict of the sharded module, with everything in it.
        schedule: whose parameters stand in `shards`.
        index: meshes.
        wrapper_prefix: what wrappers between the sharded module and the user's add to names.
        dtype: of parameters in the result; None: that of their main weights.
    """
    _check_dtype(dtype)
    places = _places(schedule)
    _check_names(shards, places)
    _connect(schedule)
    is_first = all(axis.rank == 0 for axis in index.axes())
    whole: OrderedDict[str, Any] = OrderedDict()
    moved: dict[int, torch.Tensor | None] = {}
    for name, value in shards.items():
        if name in places:
            key, buffer, slot = places[name]
            if key not in moved:
                moved[key] = _on_first(buffer, slot, dtype)
            value = moved[key]
        elif isinstance(value, torch.Tensor) and is_first:
            value = value.detach().to("cpu", copy=True)
        if is_first:
            whole[name.removeprefix(wrapper_prefix)] = value
    if is_first and hasattr(shards, "_metadata"):
        metadata = {name.removeprefix(wrapper_prefix): entry for name, entry in shards._metadata.items()}
        whole._metadata = OrderedDict(metadata)
    return whole


def _check_dtype(dtype: torch.dtype | None) -> None:
    is_usable = isinstance(dtype, torch.dtype) and dtype.is_floating_point and dtype.itemsize > 1
    if dtype is not None and not is_usable:
        raise ValueError(
            f"full_state_dict(dtype={dtype!r}) would lose the weights; expected a torch floating-point dtype of 2 "
            "bytes or more, or None for the main weights' own. Quantize the result instead."
        )


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


def _places(schedule: Schedule) -> dict[str, tuple[int, FlatBuffer, int]]:
    """By name: the parameter's id, and where its main weight lies."""
    found = {}
    for unit in schedule.units:
        params = {id(param.unsharded): param for param in unit.params}
        for group in unit.groups:
            for slot, unsharded in enumerate(group.params):
                for fqn in params[id(unsharded)].fqns:
                    found[fqn] = (id(unsharded), group.main_weight_buffer, slot)
    return found


def _check_names(shards: OrderedDict[str, Any], places: dict[str, Any]) -> None:
    strange = [name for name, value in shards.items() if isinstance(value, DTensor) and name not in places]
    if strange:
        raise ValueError(
            f"the state dict holds {strange[0]!r}, a shard under a name that no parameter has; a hook of the model "
            "renames its entries. Rename them in the result of full_state_dict() instead."
        )


def _connect(schedule: Schedule) -> None:
    """Has every axis communicate once: NCCL must not begin with a message that some ranks take no part in."""
    axes = {id(axis.group): axis for unit in schedule.units for group in unit.groups for axis in group.spec.axes}
    for axis in axes.values():
        collectives.all_reduce(torch.zeros(1, device=schedule.device.torch_device), axis)


@torch.no_grad()
def _on_first(buffer: FlatBuffer, slot: int, dtype: torch.dtype | None) -> torch.Tensor | None:
    """Parameter `slot` in the first rank's CPU memory; None elsewhere. **Collective** over the buffer's axes."""
    view = buffer.view(slot).detach()
    local = view.to(dtype or view.dtype)
    for number, (axis, place) in enumerate(zip(buffer.axes, buffer.placement, strict=True)):  # outer first
        if place is Placement.SHARD and axis.size > 1:
            local = _collect(local, _rows_along(buffer, slot, number), axis)
        if axis.rank > 0:
            return None
    return local.to("cpu", copy=local.data_ptr() == view.data_ptr())


def _rows_along(buffer: FlatBuffer, slot: int, number: int) -> list[int]:
    """Rows that each rank of an axis (0: outer, 1: inner) brings, where the outer one is collected first."""
    axis, placement = buffer.axes[number], buffer.placement
    if number == 1:
        placement = placement._replace(outer=Placement.REPLICATE)
    rows = []
    for rank in range(axis.size):
        axes = list(buffer.axes)
        axes[number] = dataclasses.replace(axis, rank=rank)
        rows.append(buffer.layout.rows_on(slot, *local_bounds(buffer.layout, tuple(axes), placement)).count)
    return rows


def _collect(local: torch.Tensor, rows: list[int], axis: Axis) -> torch.Tensor:
    """All ranks' rows on the axis's first rank, in order; elsewhere `local`. **Collective** over `axis`."""
    if axis.rank == 0:
        whole = local.new_empty((sum(rows), *local.shape[1:]))
        pieces = whole.split(rows)
        pieces[0].copy_(local)
        ends = [(dist.irecv, piece, peer) for peer, piece in enumerate(pieces) if peer and piece.numel()]
    else:
        whole = local.contiguous()
        ends = [(dist.isend, whole, 0)] if whole.numel() else []
    # As bytes: backends know few dtypes.
    operations = [
        dist.P2POp(way, piece.view(-1).view(torch.uint8), group=axis.group, group_peer=peer)
        for way, piece, peer in ends
    ]
    for work in dist.batch_isend_irecv(operations) if operations else ():
        work.wait()
    return whole


def whole_shards(module: nn.Module, hooks: Any) -> OrderedDict[str, Any]:
    """The sharded module's state dict with the modules' extra state, which torch DCP cannot store."""
    before, hooks.preprocess = hooks.preprocess, False
    try:
        return nn.Module.state_dict(module)
    finally:
        hooks.preprocess = before
