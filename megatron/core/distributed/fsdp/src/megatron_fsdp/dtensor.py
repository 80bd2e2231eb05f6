"""A group's shards as DTensors."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor import Placement as TensorPlacement

from megatron_fsdp.dtensor_chunks import attach_chunk_metadata
from megatron_fsdp.dtensor_gather import gather_rows
from megatron_fsdp.machine.mesh import FSDPDistributedIndex
from megatron_fsdp.machine.torch_compat import strided_shard
from megatron_fsdp.plan.strategy import Placement
from megatron_fsdp.runtime.unit import ManagedParam
from megatron_fsdp.state.flat_buffer import FlatBuffer, piece_bounds
from megatron_fsdp.state.param_group import ParamGroup
from megatron_fsdp.state.param_tags import copy_tags


class ShardSpec:
    """How one parameter, its gradient and its optimizer state lie over the data-parallel mesh."""

    def __init__(self, group: ParamGroup, slot: int, mesh: DeviceMesh):
        # Weak: tensors carry this object, and a tensor must not keep its group's buffers alive.
        self._group = weakref.ref(group)
        self._layout = group.layout
        self._axes = group.facts.axes
        self._placement = group.plan.main_weight
        self.slot = slot
        self.mesh = mesh
        self.shape = torch.Size(group.layout.slots[slot].shape)
        self.placements = _placements(self._placement[-mesh.ndim :], self._axes[1].size)
        rows = group.main_weight_buffer.rows(slot)
        self.first_row, self.row_count = rows.first, rows.count
        self.local_shape = (rows.count, *self.shape[1:]) if self.shape else self.shape
        self.taken_name: str | None = None
        """This parameter's name, where it is that of another parameter on other ranks."""

    def __deepcopy__(self, memo: dict) -> ShardSpec:
        return self  # it describes a place; copies of tensors share it

    @property
    def is_sharded(self) -> bool:
        """The tensor is split over ranks."""
        return Placement.SHARD in self._placement

    @property
    def flat_slice(self) -> slice:
        """This rank's elements of the flattened parameter."""
        row = self._layout.slots[self.slot].row
        return slice(self.first_row * row, (self.first_row + self.row_count) * row)

    def wrap(self, local: torch.Tensor) -> DTensor:
        """`local` (this rank's rows) as a DTensor whose `full_tensor` is right on uneven shards. Shares its memory."""
        local = _with_own_storage(local)
        stride = torch.empty(self.shape, device="meta").stride()
        layout = {"shape": self.shape, "stride": stride}
        return self.mark(DTensor.from_local(local, self.mesh, self.placements, run_check=False, **layout))

    def mark(self, dtensor: DTensor, *, for_checkpoint: bool = True) -> DTensor:
        """Gives a DTensor of this shape and placement the right `full_tensor` and torch DCP's chunk; returns it."""
        dtensor.full_tensor = _FullTensor(self, weakref.ref(dtensor))
        dtensor.redistribute = _Redistribute(self, weakref.ref(dtensor))
        if for_checkpoint:
            offsets = (self.first_row, *(0 for _ in self.shape[1:])) if self.shape else ()
            attach_chunk_metadata(dtensor, offsets, self.local_shape, self.taken_name)
        return dtensor

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
        return full[self.first_row : self.first_row + self.row_count] if self.shape else full

    def gather(self, local: torch.Tensor) -> torch.Tensor:
        """The full tensor from every rank's rows. **Collective** over the axes that shard."""
        for axis, place in zip(self._axes, self._placement, strict=True):  # towards REPLICATE, outer first
            if place is Placement.SHARD and axis.size > 1:
                local = gather_rows(local, self._rows_along(axis), axis.group)
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
            counts.append(self._layout.rows_on(self.slot, *piece_bounds(self._layout, moved, placement)).count)
        return counts


def _with_own_storage(view: torch.Tensor) -> torch.Tensor:
    """The contiguous `view` as a tensor whose storage is just its memory.

    torch (2.11 to 2.13) neither deep-copies nor stages a DTensor whose local tensor begins inside its storage, and
    copies the whole storage of one that does not fill it.
    """
    storage, nbytes = view.untyped_storage(), view.numel() * view.element_size()
    if storage.nbytes() == nbytes:
        return view
    first = view.storage_offset() * view.element_size()
    piece = storage[first : first + nbytes] if nbytes else torch.UntypedStorage(0, device=view.device)
    return torch.empty(0, dtype=view.dtype, device=view.device).set_(piece, 0, view.shape, view.stride())


def _placements(pairs: Sequence[Placement], inner_size: int) -> tuple[TensorPlacement, ...]:
    """torch's placements. Shards are inner-major, so an outer axis that shards cuts what the inner one has cut."""
    if len(pairs) == 2 and pairs[0] is Placement.SHARD:
        return strided_shard(0, inner_size), Shard(0)
    return tuple(Shard(0) if place is Placement.SHARD else Replicate() for place in pairs)


def _moved(axis, rank: int):
    return type(axis)(axis.group, axis.gather_group, rank, axis.size)


class _Override:
    """A method of one DTensor in place of torch's, which assumes the shards of `torch.chunk` and is silently wrong."""

    def __init__(self, spec: ShardSpec, dtensor: weakref.ref[DTensor]):
        self._spec = spec
        self._dtensor = dtensor

    def __reduce__(self) -> tuple:
        # A pickled shard (asynchronous checkpoints send them to another process) has left its process groups behind.
        return _Detached, ()


class _FullTensor(_Override):
    """`full_tensor`."""

    def __call__(self, *, grad_placements: object = None) -> torch.Tensor:
        """The full tensor on every rank. **Collective** over the data-parallel mesh; not differentiable."""
        if grad_placements is not None:
            raise NotImplementedError("full_tensor of a shard is not differentiable; leave grad_placements out.")
        with torch.no_grad():
            local = self._dtensor().to_local().detach()
            return self._spec.gather(local) if self._spec.is_sharded else local.clone()


class _Redistribute(_Override):
    """`redistribute`, which torch's checkpoint helpers call to gather."""

    def __call__(
        self,
        device_mesh: DeviceMesh | None = None,
        placements: Sequence[TensorPlacement] | None = None,
        *,
        async_op: bool = False,
    ) -> DTensor:
        """A replicated copy, finished when this returns. **Collective** over the data-parallel mesh.

        Raises:
            NotImplementedError: other placements, or another mesh.
        """
        dtensor, spec = self._dtensor(), self._spec
        if device_mesh not in (None, spec.mesh) or not all(isinstance(place, Replicate) for place in placements or ()):
            raise NotImplementedError(f"a shard of a sharded model can be redistributed to Replicate, not {placements}")
        if placements is None:
            return dtensor
        return DTensor.from_local(dtensor.full_tensor(), spec.mesh, [Replicate()] * spec.mesh.ndim, run_check=False)


class _Detached:
    """A method of a shard that was pickled or copied away from its model."""

    def __call__(self, *_: object, **__: object) -> torch.Tensor:
        """Raises RuntimeError."""
        raise RuntimeError("this shard was copied away from its model and cannot be gathered; gather the model's own.")


def make_sharded_param(param: ManagedParam, group: ParamGroup, slot: int, index: FSDPDistributedIndex) -> nn.Parameter:
    """The Parameter that users and optimizers hold: a DTensor over this rank's rows of the main weight."""
    spec = ShardSpec(group, slot, index.dp_mesh(group.facts.is_expert))
    if group.facts.is_expert and not index.holds_first_experts:
        spec.taken_name = param.fqn
    sharded = nn.Parameter(spec.wrap(group.main_weight_buffer.view(slot)), requires_grad=param.raw.requires_grad)
    spec.mark(sharded)
    copy_tags(param.raw, sharded)
    sharded.megatron_fsdp_slice = spec.flat_slice
    sharded.megatron_fsdp_dist_index = index
    sharded.megatron_fsdp_spec = spec
    return sharded


def grad_of(sharded: nn.Parameter, final: FlatBuffer, dtype: torch.dtype | None) -> DTensor:
    """The finalized gradient of a sharded parameter; every rank has one, perhaps of zero rows.

    Shares the buffer's storage where `dtype` (None: any) is the buffer's.
    """
    spec: ShardSpec = sharded.megatron_fsdp_spec
    view = final.view(spec.slot)
    return spec.wrap(view if dtype is None else view.to(dtype))
