"""A group's shards as DTensors."""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable, Sequence
from typing import TypeGuard

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor import Placement as TensorPlacement

from megatron_fsdp.dtensor.chunk_metadata import (
    ShardMethod,
    attach_chunks,
    chunk_at,
    gather_chunks,
    narrow,
    part_of,
    split_chunks,
)
from megatron_fsdp.machine.mesh import FSDPDistributedIndex
from megatron_fsdp.machine.torch_compat import dtensor_over, dtensor_spec, local_tensor, strided_shard, waited
from megatron_fsdp.plan.strategy import Placement
from megatron_fsdp.runtime.unit import ManagedParam
from megatron_fsdp.state.flat_buffer import FlatSpan, local_bounds
from megatron_fsdp.state.param_group import ParamGroup
from megatron_fsdp.state.param_tags import SPEC_TAG, copy_tags
from megatron_fsdp.state.tensor_parallel import TpPartition, TpRange


class ShardSpec:
    """Layout of one parameter, its gradient and its optimizer state over the data- and tensor-parallel mesh.

    Tensor-parallel ranks cut first: each holds an even part of the parameter, whose rows the data-parallel axes then
    cut, unevenly. The global shape is that of the whole parameter.
    """

    def __init__(self, group: ParamGroup, slot: int, index: FSDPDistributedIndex, taken_name: str | None = None):
        # Tensors carry this object, so it must not keep the group's buffers alive.
        self._layout, self._axes, self._placement = group.layout, group.spec.axes, group.plan.main_weight
        self._slot, self._taken_name = slot, taken_name
        self.mesh, dp_ndim, tp_group = _mesh_of(index, group.spec.is_expert)
        self.cut_over_tp = TpPartition.of(group.params[slot], tp_group)
        self._part_shape = torch.Size(group.layout.slots[slot].shape)
        """Of this tensor-parallel rank's part."""
        self.shape = self.cut_over_tp.whole_shape(self._part_shape)
        self.placements = _placements(self._placement[-dp_ndim:], self._axes[1].size, self.cut_over_tp)
        rows = group.main_weight_buffer.rows(slot)
        self.first_row, self.row_count = rows.first, rows.count
        self.local_shape = (rows.count, *self._part_shape[1:]) if self.shape else self.shape
        self._chunks = self._own_chunks()
        """This rank's elements of the global tensor, in the order in which they lie in the local one."""
        self._spec_in = functools.cache(functools.partial(dtensor_spec, self.mesh, self.placements, self.shape))
        """From a dtype to torch's own description of tensors that lie so."""
        self._dcp_methods: dict[str, Callable[..., object]] = {}
        """Attributes for torch DCP, the same for all tensors of a single chunk; those of several hold their tensor."""

    def __deepcopy__(self, memo: dict) -> ShardSpec:
        return self  # it describes a place; copies of tensors share it

    @property
    def is_sharded(self) -> bool:
        """The tensor is split over ranks."""
        return Placement.SHARD in self._placement or self.cut_over_tp.is_cut

    @property
    def owners(self) -> dict[tuple[int, int], int]:
        """(start, stop) of the flattened parameter (its tensor-parallel part) -> the first rank that holds it."""
        outer, inner = self._axes
        found: dict[tuple[int, int], int] = {}
        # A dimension alone may list its ranks in any order; groups have them in ascending order.
        ranks = self.mesh.mesh.view(outer.size, inner.size).sort(0).values.sort(1).values
        for number, rank in enumerate(ranks.flatten().tolist()):
            at = divmod(number, inner.size)
            axes = (dataclasses.replace(outer, rank=at[0]), dataclasses.replace(inner, rank=at[1]))
            rows = self._layout.rows_on(self._slot, *local_bounds(self._layout, axes, self._placement))
            found.setdefault(self._flat(rows.first, rows.count), rank)
        return found

    @property
    def flat_slice(self) -> slice:
        """This rank's elements of the flattened parameter (of its tensor-parallel part)."""
        return slice(*self._flat(self.first_row, self.row_count))

    def _flat(self, first_row: int, row_count: int) -> tuple[int, int]:
        row = self._layout.slots[self._slot].row
        return first_row * row, (first_row + row_count) * row

    def wrap(self, data: torch.Tensor, span: FlatSpan | None = None) -> DTensor:
        """This rank's rows, which lie at `span` of contiguous `data` (None: all of it), as a marked DTensor.

        Shares its memory. Steps do this to the gradients of all parameters, so it takes 4 us.
        """
        local = (span or FlatSpan.of(data.shape, 0)).alone(data)
        return self.mark(dtensor_over(local, self._spec_in(local.dtype)))

    def mark(self, dtensor: DTensor, *, for_checkpoint: bool = True) -> DTensor:
        """Gives a DTensor of this shape and placement the right `full_tensor` and torch DCP's chunks; returns it.

        The methods still work when the DTensor itself is gone, as in `model.state_dict()[name].full_tensor()`.
        """
        local = local_tensor(dtensor)
        dtensor.full_tensor = ShardMethod(_full_tensor, self, local)
        dtensor.redistribute = ShardMethod(_redistribute, self, local)
        if for_checkpoint and self._dcp_methods:
            vars(dtensor).update(self._dcp_methods)
            vars(local).update(self._dcp_methods)
        elif for_checkpoint:
            methods = attach_chunks(dtensor, self._chunks, self._taken_name, self.cut_over_tp.dim or 0)
            self._dcp_methods = methods if len(self._chunks) == 1 else {}
        return dtensor

    def _own_chunks(self) -> list[ChunkStorageMetadata]:
        offsets, sizes, cut = [0] * len(self.shape), list(self.local_shape), self.cut_over_tp
        if self.shape:
            offsets[0] = self.first_row
        if (dim := cut.cut_dim) is None:
            return [chunk_at(offsets, sizes)]
        low, length = offsets[dim], self._part_shape[dim]
        found = list(cut.ranges(low, low + sizes[dim], length)) or [TpRange(0, cut.rank * length + low, 0)]
        return [
            chunk_at([*offsets[:dim], whole, *offsets[dim + 1 :]], [*sizes[:dim], count, *sizes[dim + 1 :]])
            for _, whole, count in found
        ]

    @property
    def part_rows(self) -> int:
        """Rows of this tensor-parallel rank's part; 1 for a parameter without rows."""
        return self._part_shape[0] if self.shape else 1

    def rows_of_parts(self, dtensor: DTensor, first: int, count: int) -> DTensor:
        """Rows [first, first + count) of every tensor-parallel rank's part, as a tensor of its own for torch DCP.

        Shares the memory of `dtensor`, which lies like this parameter. torch's `full_tensor` is wrong on the result.
        """
        cut, local = self.cut_over_tp, dtensor.to_local().detach()
        rows, offset = narrow(local, self.first_row, 0, first, count)
        shape, offsets = [count, *self._part_shape[1:]], [offset] + [0] * (len(self.shape) - 1)
        if (dim := cut.cut_dim) is not None:
            assert dim == 0 or cut.blocks == 1, "blocks of another dim than the rows lie apart"
            offsets[dim] += cut.rank * shape[dim]
            shape[dim] *= cut.size
        return part_of(dtensor, FlatSpan.of(rows.shape, 0).alone(rows), shape, offsets, self._taken_name)

    def fits(self, tensor: object) -> TypeGuard[DTensor]:
        """True if `tensor` is a DTensor that lies like this parameter."""
        if not isinstance(tensor, DTensor) or tensor.shape != self.shape:
            return False
        return tensor.placements == self.placements and tensor.to_local().shape == self.local_shape

    def take(self, value: torch.Tensor, name: str, dtype: torch.dtype | None = None) -> DTensor:
        """This parameter's marked shard out of `value`: a shard like it, or a full or replicated tensor.

        A shard is returned itself, others are copied, to `dtype` if one is given.

        Raises:
            ValueError: `value` is spread over ranks in another way; `name` is what to call it.
        """
        if self.fits(value):
            return self.mark(value)
        if isinstance(value, DTensor):
            if not all(placement.is_replicate() for placement in value.placements):
                raise ValueError(
                    f"{name} of shape {tuple(value.shape)} has {tuple(value.to_local().shape)} here as "
                    f"{value.placements}, but this model keeps {tuple(self.local_shape)} as {self.placements}; "
                    "give full tensors, or load through torch.distributed.checkpoint."
                )
            value = value.to_local()
        return self.wrap(self.cut(value).detach().to(self.mesh.device_type, dtype or value.dtype, copy=True))

    def cut(self, full: torch.Tensor) -> torch.Tensor:
        """This rank's rows of a full tensor."""
        part = self.cut_over_tp.take(full)
        return part[self.first_row : self.first_row + self.row_count] if self.shape else part

    def gather(self, local: torch.Tensor) -> torch.Tensor:
        """The full tensor from every rank's rows. **Collective** over the axes that shard."""
        axes = zip(self._axes, self._placement, strict=True)
        groups = [axis.group for axis, place in axes if place is Placement.SHARD and axis.group is not None]
        if self.cut_over_tp.is_cut and self.cut_over_tp.group is not None:
            groups.append(self.cut_over_tp.group)
        parts = split_chunks(local, self._chunks, self.cut_over_tp.dim or 0)
        return gather_chunks(self._chunks, parts, self.shape, groups)


def _mesh_of(index: FSDPDistributedIndex, is_expert: bool) -> tuple[DeviceMesh, int, dist.ProcessGroup | None]:
    """The mesh of a parameter's DTensor, how many of its axes are data-parallel, and the tensor-parallel ranks.

    One tensor-parallel rank is no axis.
    """
    mesh, tp_group = index.dp_mesh(is_expert), tensor_parallel_group(index, is_expert)
    if tp_group is None:
        return mesh, mesh.ndim, None
    dims = (index.dp_outer_dim, index.dp_shard_dim, index.tp_dim)[-mesh.ndim - 1 :]
    return index.get_submesh(dims, is_expert), mesh.ndim, tp_group


def tensor_parallel_group(index: FSDPDistributedIndex, is_expert: bool = False) -> dist.ProcessGroup | None:
    """The tensor-parallel ranks, if there are several."""
    mesh = index.get_submesh(index.tp_dim, is_expert) if index.tp_dim is not None else None
    return mesh.get_group() if mesh is not None and mesh.size() > 1 else None


def _placements(pairs: Sequence[Placement], inner_size: int, cut: TpPartition) -> tuple[TensorPlacement, ...]:
    """torch's placements, from the right: each axis that cuts rows cuts what axes to its right have cut."""
    tp = () if cut.group is None else (Replicate() if cut.dim is None else Shard(cut.dim),)
    pieces = cut.size if cut.is_cut and cut.dim == 0 else 1
    found: list[TensorPlacement] = []
    for place, size in zip(reversed(pairs), (inner_size, 1), strict=False):
        if place is Placement.SHARD:
            found.insert(0, strided_shard(0, pieces) if pieces > 1 else Shard(0))
            pieces *= size
        else:
            found.insert(0, Replicate())
    return *found, *tp


def _full_tensor(spec: ShardSpec, local: torch.Tensor, *, grad_placements: object = None) -> torch.Tensor:
    """The full tensor on every rank. **Collective** over the tensor's mesh; not differentiable.

    `full_tensor` of one DTensor in place of torch's, which assumes the rows of `torch.chunk`: wrong here.
    """
    if grad_placements is not None:
        raise NotImplementedError("full_tensor of a shard is not differentiable; leave grad_placements out.")
    return spec.gather(waited(local))


def _redistribute(
    spec: ShardSpec,
    local: torch.Tensor,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[TensorPlacement] | None = None,
    *,
    async_op: bool = False,
) -> DTensor:
    """A replicated copy, finished when this returns. **Collective** over the tensor's mesh.

    `redistribute` of one DTensor in place of torch's; torch's checkpoint helpers call it to gather.

    Raises:
        NotImplementedError: other placements, or another mesh.
    """
    if device_mesh not in (None, spec.mesh) or not all(isinstance(place, Replicate) for place in placements or ()):
        raise NotImplementedError(f"a shard of a sharded model can be redistributed to Replicate, not {placements}")
    if placements is None:
        return spec.wrap(local)
    return DTensor.from_local(_full_tensor(spec, local), spec.mesh, [Replicate()] * spec.mesh.ndim, run_check=False)


def make_sharded_param(param: ManagedParam, group: ParamGroup, slot: int, index: FSDPDistributedIndex) -> nn.Parameter:
    """The Parameter that users and optimizers hold: a DTensor over this rank's rows of the main weight."""
    is_named_elsewhere = group.spec.is_expert and not index.holds_first_experts
    spec = ShardSpec(group, slot, index, param.fqn if is_named_elsewhere else None)
    main = group.main_weight_buffer
    sharded = nn.Parameter(spec.wrap(main.data, main.span(slot)), requires_grad=param.unsharded.requires_grad)
    assert isinstance(sharded, DTensor), "nn.Parameter keeps the subclass"
    spec.mark(sharded)
    copy_tags(param.unsharded, sharded)
    tags = {"megatron_fsdp_slice": spec.flat_slice, "megatron_fsdp_dist_index": index, SPEC_TAG: spec}
    vars(sharded).update(tags)
    return sharded


#: The layout of a sharded parameter.
spec_of: Callable[[torch.Tensor], ShardSpec] = operator.attrgetter("megatron_fsdp_spec")  # SPEC_TAG
