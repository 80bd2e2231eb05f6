"""A group's shards as DTensors."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor import Placement as TensorPlacement

from megatron_fsdp.dtensor.chunk_metadata import Box, attach_boxes
from megatron_fsdp.dtensor.uneven_gather import gather_rows
from megatron_fsdp.machine.mesh import FSDPDistributedIndex
from megatron_fsdp.machine.torch_compat import dtensor_over, dtensor_spec, local_tensor, strided_shard
from megatron_fsdp.plan.strategy import Placement
from megatron_fsdp.runtime.unit import ManagedParam
from megatron_fsdp.state.flat_buffer import FlatSpan, local_bounds
from megatron_fsdp.state.param_group import ParamGroup
from megatron_fsdp.state.param_tags import copy_tags
from megatron_fsdp.state.tensor_parallel import TpPartition, TpRange


class ShardSpec:
    """Layout of one parameter, its gradient and its optimizer state over the data- and tensor-parallel mesh.

    Tensor-parallel ranks cut first: each holds an even part of the parameter, whose rows the data-parallel axes then
    cut, unevenly. The global shape is that of the whole parameter.
    """

    def __init__(self, group: ParamGroup, slot: int, index: FSDPDistributedIndex):
        # Weak: tensors carry this object, and a tensor must not keep its group's buffers alive.
        self._group = weakref.ref(group)
        self._layout = group.layout
        self._axes = group.spec.axes
        self._placement = group.plan.main_weight
        self.slot = slot
        is_expert = group.spec.is_expert
        self.mesh, dp_ndim, tp_group = _mesh_of(index, is_expert)
        self.cut_over_tp = TpPartition.of(group.params[slot], tp_group)
        self._part_shape = torch.Size(group.layout.slots[slot].shape)
        """Of what this tensor-parallel rank has."""
        self.shape = self.cut_over_tp.whole_shape(self._part_shape)
        self.placements = _placements(self._placement[-dp_ndim:], self._axes[1].size, self.cut_over_tp)
        rows = group.main_weight_buffer.rows(slot)
        self.first_row, self.row_count = rows.first, rows.count
        self.local_shape = (rows.count, *self._part_shape[1:]) if self.shape else self.shape
        self.taken_name: str | None = None
        """This parameter's name, where it is that of another parameter on other ranks."""
        self._spec_in = functools.cache(functools.partial(dtensor_spec, self.mesh, self.placements, self.shape))
        """From a dtype to torch's own description of tensors that lie so."""
        self._chunk: dict[str, object] | None = None
        """Attributes that torch DCP reads, known from the first tensor; None where each has its own."""

    def __deepcopy__(self, memo: dict) -> ShardSpec:
        return self  # it describes a place; copies of tensors share it

    @property
    def is_sharded(self) -> bool:
        """The tensor is split over ranks."""
        return Placement.SHARD in self._placement or self.cut_over_tp.is_cut

    @property
    def flat_slice(self) -> slice:
        """This rank's elements of the flattened parameter (of its tensor-parallel part)."""
        row = self._layout.slots[self.slot].row
        return slice(self.first_row * row, (self.first_row + self.row_count) * row)

    def wrap(self, local: torch.Tensor) -> DTensor:
        """`local` (this rank's rows) as a DTensor whose `full_tensor` is right on uneven shards. Shares its memory."""
        return self.mark(dtensor_over(FlatSpan.of(local.shape, 0).alone(local), self._spec_in(local.dtype)))

    def wrap_grad(self, data: torch.Tensor, span: FlatSpan) -> DTensor:
        """As `wrap`, of this rank's rows at `span` of a gradient buffer. Of all parameters in each step, so in 4 us."""
        local = span.alone(data)
        made = dtensor_over(local, self._spec_in(local.dtype))
        made.full_tensor, made.redistribute = _FullTensor(self, None, local), _Redistribute(self, None, local)
        self._attach_chunk(made)
        return made

    def mark(self, dtensor: DTensor, *, for_checkpoint: bool = True, keeps_memory: bool = False) -> DTensor:
        """Gives a DTensor of this shape and placement the right `full_tensor` and torch DCP's chunk; returns it.

        With `keeps_memory` its `full_tensor`, once looked up, works when the DTensor itself is gone, as it is in
        `model.state_dict()[name].full_tensor()`.
        """
        kept = dtensor.to_local().detach() if keeps_memory else None
        dtensor.full_tensor = _FullTensor(self, weakref.ref(dtensor), kept)
        dtensor.redistribute = _Redistribute(self, weakref.ref(dtensor))
        if for_checkpoint:
            self._attach_chunk(dtensor)
        return dtensor

    def _attach_chunk(self, dtensor: DTensor) -> None:
        if self._chunk is None:
            self._chunk = attach_boxes(dtensor, self._boxes(), self.taken_name)
        else:
            vars(dtensor).update(self._chunk)
            vars(local_tensor(dtensor)).update(self._chunk)

    def _boxes(self) -> list[Box]:
        """Boxes of this rank's elements in the global tensor."""
        starts = [0] * len(self.shape)
        if self.shape:
            starts[0] = self.first_row
        cut = self.cut_over_tp
        whole = Box((0,) * len(starts), tuple(starts), tuple(self.local_shape))
        if not cut.is_cut:
            return [whole]
        low, length = starts[cut.dim], self._part_shape[cut.dim]
        found = list(cut.ranges(low, low + self.local_shape[cut.dim], length))
        found = found or [TpRange(0, cut.rank * length + low, 0)]
        return [whole.along(cut.dim, *stretch) for stretch in found]

    @property
    def part_rows(self) -> int:
        """Rows of this tensor-parallel rank's part; 1 for a parameter without rows."""
        return self._part_shape[0] if self.shape else 1

    def rows_of_parts(self, dtensor: DTensor, first: int, count: int) -> DTensor:
        """Rows [first, first + count) of every tensor-parallel rank's part, as a tensor of its own for torch DCP.

        Shares the memory of `dtensor`, which lies like this parameter. torch's `full_tensor` is wrong on the result.
        """
        cut, local = self.cut_over_tp, dtensor.to_local().detach()
        last = self.first_row + self.row_count
        low, high = (min(max(at, first), first + count) - first for at in (self.first_row, last))
        start = min(max(first - self.first_row, 0), self.row_count)
        rows = local.narrow(0, start, high - low)
        rows = FlatSpan.of(rows.shape, 0).alone(rows)
        shape, offsets = [count, *self._part_shape[1:]], [low] + [0] * (len(self.shape) - 1)
        if cut.is_cut:
            assert cut.dim == 0 or cut.blocks == 1, "blocks of another dim than the rows lie apart"
            offsets[cut.dim] += cut.rank * shape[cut.dim]
            shape[cut.dim] *= cut.size
        stride = torch.empty(shape, device="meta").stride()
        layout = {"shape": torch.Size(shape), "stride": stride}
        piece = DTensor.from_local(rows, self.mesh, self.placements, run_check=False, **layout)
        attach_boxes(piece, [Box((0,) * len(shape), tuple(offsets), tuple(rows.shape))], self.taken_name)
        return piece

    def fits(self, tensor: object) -> bool:
        """True if `tensor` is a DTensor that lies like this parameter."""
        if not isinstance(tensor, DTensor) or tensor.shape != self.shape:
            return False
        return tensor.placements == self.placements and tensor.to_local().shape == self.local_shape

    def take(self, value: torch.Tensor, name: str, dtype: torch.dtype | None = None) -> DTensor:
        """This parameter's shard out of `value`: a shard like it, or a full or replicated tensor, which is copied.

        The copy is of `dtype`, if one is given.

        Raises:
            ValueError: `value` is spread over ranks in another way; `name` is what to call it.
        """
        if self.fits(value):
            return value
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
        for axis, place in zip(self._axes, self._placement, strict=True):  # towards REPLICATE, outer first
            if place is Placement.SHARD and axis.size > 1:
                local = gather_rows(local, self._rows_along(axis), axis.group)
        cut = self.cut_over_tp
        if cut.is_cut:
            part = local.movedim(cut.dim, 0).contiguous()
            local = cut.join(gather_rows(part, [part.shape[0]] * cut.size, cut.group))
        return local

    def _rows_along(self, axis) -> list[int]:
        """Rows that each rank of `axis` contributes when it is gathered (outer first, then inner)."""
        outer, inner = self._axes
        counts = []
        for rank in range(axis.size):
            moved = tuple(_moved(a, rank) if a is axis else a for a in self._axes)
            placement = self._placement
            if axis is inner:  # the outer axis is whole by then
                placement = placement._replace(outer=Placement.REPLICATE)
            counts.append(self._layout.rows_on(self.slot, *local_bounds(self._layout, moved, placement)).count)
        return counts


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


def _moved(axis, rank: int):
    return type(axis)(axis.group, axis.gather_group, rank, axis.size)


class _FullTensor(NamedTuple):
    """`full_tensor` of one DTensor in place of torch's, which assumes the rows of `torch.chunk`: wrong here."""

    spec: ShardSpec
    dtensor: weakref.ref[DTensor] | None
    kept: torch.Tensor | None = None
    """This rank's rows; None if they may move to other memory."""

    def __reduce__(self) -> tuple:
        # A pickled shard (asynchronous checkpoints send them to another process) has left its process groups behind.
        return _Detached, ()

    def __call__(self, *, grad_placements: object = None) -> torch.Tensor:
        """The full tensor on every rank. **Collective** over the tensor's mesh; not differentiable."""
        if grad_placements is not None:
            raise NotImplementedError("full_tensor of a shard is not differentiable; leave grad_placements out.")
        with torch.no_grad():
            local = self.dtensor().to_local().detach() if self.kept is None else self.kept
            return self.spec.gather(local) if self.spec.is_sharded else local.clone()


class _Redistribute(NamedTuple):
    """`redistribute` of one DTensor in place of torch's; torch's checkpoint helpers call it to gather."""

    spec: ShardSpec
    dtensor: weakref.ref[DTensor] | None
    kept: torch.Tensor | None = None

    def __reduce__(self) -> tuple:
        return _Detached, ()

    def __call__(
        self,
        device_mesh: DeviceMesh | None = None,
        placements: Sequence[TensorPlacement] | None = None,
        *,
        async_op: bool = False,
    ) -> DTensor:
        """A replicated copy, finished when this returns. **Collective** over the tensor's mesh.

        Raises:
            NotImplementedError: other placements, or another mesh.
        """
        spec = self.spec
        if device_mesh not in (None, spec.mesh) or not all(isinstance(place, Replicate) for place in placements or ()):
            raise NotImplementedError(f"a shard of a sharded model can be redistributed to Replicate, not {placements}")
        if placements is None:
            return self.dtensor() if self.kept is None else spec.wrap(self.kept)
        return DTensor.from_local(_FullTensor(*self)(), spec.mesh, [Replicate()] * spec.mesh.ndim, run_check=False)


class _Detached:
    """A method of a shard that was pickled or copied away from its model."""

    def __call__(self, *_: object, **__: object) -> torch.Tensor:
        """Raises RuntimeError."""
        raise RuntimeError("this shard was copied away from its model and cannot be gathered; gather the model's own.")


def make_sharded_param(param: ManagedParam, group: ParamGroup, slot: int, index: FSDPDistributedIndex) -> nn.Parameter:
    """The Parameter that users and optimizers hold: a DTensor over this rank's rows of the main weight."""
    spec = ShardSpec(group, slot, index)
    if group.spec.is_expert and not index.holds_first_experts:
        spec.taken_name = param.fqn
    sharded = nn.Parameter(spec.wrap(group.main_weight_buffer.view(slot)), requires_grad=param.unsharded.requires_grad)
    spec.mark(sharded)
    copy_tags(param.unsharded, sharded)
    sharded.megatron_fsdp_slice = spec.flat_slice
    sharded.megatron_fsdp_dist_index = index
    sharded.megatron_fsdp_spec = spec
    return sharded
