"""The place of a rank's shard in its global tensor, as metadata for torch's checkpointing.

A DTensor's spec names the cut dims but not the cut points: torch assumes those of `torch.chunk`. With any other rows
per rank `full_tensor()` and `torch.distributed.checkpoint` (DCP) are silently wrong, unless DCP is told each rank's
chunk. How DCP asks (torch 2.11 to 2.13: `checkpoint/planner_helpers.py`, `checkpoint/utils.py`, `tensor/_api.py`):

- save: the planner calls `obj.__create_write_items__(fqn, obj)` on every rank in the mesh. DTensor's method hands over
  to its `_local_tensor` if that has the attribute, else assumes `torch.chunk`. Items with one (fqn, offsets) index are
  written once, by the rank with the smallest plan; the rest must tile the tensor. A name that nobody writes does not
  exist on load, so a tensor without elements still needs one (empty) item.
- load: `obj.__create_chunk_list__()` gives the boxes to fill (again `_local_tensor` is asked first); each is overlapped
  with the saved boxes. A box without elements costs an empty read at most.
- both find the memory with `obj.__get_tensor_shard__(index)`, which for a plain `_local_tensor` is `to_local()`: one
  chunk per rank needs no attribute for that.
- the parts of a gated layer's weight on a tensor-parallel rank, [gate_r; up_r], lie apart in [gate; up]: such a shard
  is several boxes. Its DTensor has a `__get_tensor_shard__` of its own, which finds the one that is asked for.
- asynchronous saving copies tensors with their attributes, and in process mode pickles them. Pickling keeps a DTensor's
  attributes but drops those of the plain tensor inside; so both carry the chunk, and it is a picklable object.
- `detach()`, `.data`, `nn.Parameter(...)` and arithmetic make new tensors *without* the attributes. So a chunk is
  attached to the tensors that stand in the state dict, when it is made.
"""

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from megatron_fsdp.machine.torch_compat import local_tensor, sharded_dim, split_factor

CREATE_CHUNK_LIST = "__create_chunk_list__"
CREATE_WRITE_ITEMS = "__create_write_items__"
GET_TENSOR_SHARD = "__get_tensor_shard__"


class Cut(NamedTuple):
    """One tensor dim and the mesh axes that cut it, the coarsest cut first."""

    dim: int
    axes: tuple[int, ...]


class Box(NamedTuple):
    """A part of a local tensor that is also a box of the global one."""

    local: tuple[int, ...]
    """First index in the local tensor, per dim."""
    offsets: tuple[int, ...]
    """First index in the global tensor, per dim."""
    sizes: tuple[int, ...]

    def along(self, dim: int, local: int, offset: int, size: int) -> "Box":
        """The same but in one dim."""
        values = zip(self, (local, offset, size), strict=True)
        return Box(*((*old[:dim], new, *old[dim + 1 :]) for old, new in values))


@dataclass(frozen=True)
class AttachedChunk:
    """One rank's box of a global tensor, in the form in which DCP asks for it."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    is_writer: bool
    """False on all but one rank of a set of replicas."""
    is_first: bool
    """True if this rank stands for a tensor that has no elements at all."""
    taken_name: str | None = None
    """A name that other ranks give to another tensor, so that this one must be saved under another."""

    @property
    def metadata(self) -> ChunkStorageMetadata:
        """The box as torch spells it."""
        return ChunkStorageMetadata(offsets=torch.Size(self.offsets), sizes=torch.Size(self.sizes))

    def create_chunk_list(self) -> list[ChunkStorageMetadata]:
        """Chunks that DCP fills on load: this rank's box, also when it is empty."""
        return [self.metadata]

    def create_write_items(self, fqn: str, dtensor: DTensor) -> list[WriteItem]:
        """Items that DCP writes on save: none for an empty box or a replica of another rank's.

        Raises:
            ValueError: `fqn` contains the name that is taken.
        """
        if self.taken_name is not None and f".{self.taken_name}." in f".{fqn}.":
            raise ValueError(
                f"{fqn} is the name of other experts on other ranks, and one would be written over the other. With "
                "expert parallelism, number experts globally in the keys of what you save and load."
            )
        has_elements = all(self.sizes)
        if not self.is_writer or not (has_elements or (self.is_first and dtensor.numel() == 0)):
            return []
        chunk = self.metadata
        properties = TensorProperties.create_from_tensor(local_tensor(dtensor))
        data = TensorWriteData(chunk=chunk, properties=properties, size=dtensor.size())
        return [WriteItem(index=MetadataIndex(fqn, chunk.offsets), type=WriteItemType.SHARD, tensor_data=data)]

    def __deepcopy__(self, memo: dict) -> "AttachedChunk":
        return self


@dataclass(frozen=True)
class _AttachedBoxes:
    """Several boxes of one rank, in the form in which DCP asks for them."""

    boxes: tuple[Box, ...]
    chunks: tuple[AttachedChunk, ...]
    owner: Callable[[], DTensor | None]
    """Weak; a copy of the tensor has memory of its own, which this would not find."""

    def create_chunk_list(self) -> list[ChunkStorageMetadata]:
        """Chunks that DCP fills on load."""
        return [chunk.metadata for chunk in self.chunks]

    def create_write_items(self, fqn: str, dtensor: DTensor) -> list[WriteItem]:
        """Items that DCP writes on save."""
        return [item for chunk in self.chunks for item in chunk.create_write_items(fqn, dtensor)]

    def get_tensor_shard(self, index: MetadataIndex) -> torch.Tensor:
        """The memory of one box. RuntimeError on a copy of the tensor that this was attached to."""
        owner = self.owner()
        if owner is None:
            raise RuntimeError(
                f"{index.fqn} is several pieces of its global tensor (partition_stride above 1), and this is a copy, "
                "which has lost its place in checkpoints; save the model's own state dict, synchronously."
            )
        local = local_tensor(owner).detach()
        for box in self.boxes:
            if index.offset is None or tuple(index.offset) == box.offsets:
                return local[tuple(slice(at, at + size) for at, size in zip(box.local, box.sizes, strict=True))]
        raise ValueError(
            f"{index} is none of this rank's pieces, which begin at {[box.offsets for box in self.boxes]}."
        )

    def __reduce__(self) -> tuple:
        return _AttachedBoxes, (self.boxes, self.chunks, _nobody)

    def __deepcopy__(self, memo: dict) -> "_AttachedBoxes":
        return _AttachedBoxes(self.boxes, self.chunks, _nobody)


def _nobody() -> None:
    return None


def attach_boxes(
    dtensor: DTensor, boxes: Sequence[Box], taken_name: str | None = None
) -> dict[str, Callable[..., object]] | None:
    """`attach_chunk_metadata` for a local tensor that is any number of boxes. No communication; raises like it.

    Returns:
        The attributes that it has set, which are those of any tensor that lies alike; None if they are this tensor's.
    """
    if len(boxes) == 1:
        attach_chunk_metadata(dtensor, boxes[0].offsets, boxes[0].sizes, taken_name)
        return {name: vars(dtensor)[name] for name in (CREATE_CHUNK_LIST, CREATE_WRITE_ITEMS)}
    roles = _roles(dtensor)
    chunks = tuple(AttachedChunk(box.offsets, box.sizes, *roles, taken_name) for box in boxes)
    attached = _AttachedBoxes(tuple(boxes), chunks, weakref.ref(dtensor))
    for owner in (local_tensor(dtensor), dtensor):
        setattr(owner, CREATE_CHUNK_LIST, attached.create_chunk_list)
        setattr(owner, CREATE_WRITE_ITEMS, attached.create_write_items)
        setattr(owner, GET_TENSOR_SHARD, attached.get_tensor_shard)
    return None


def attach_chunk_metadata(
    dtensor: DTensor, offsets: Sequence[int], sizes: Sequence[int], taken_name: str | None = None
) -> None:
    """Tells DCP that this rank's local tensor is the box (`offsets`, `sizes`) of the global tensor. No communication.

    Call it on every rank of the mesh or on none, empty shards included (some size is 0, the offset anything in bounds).
    Of ranks that differ only in coordinates of Replicate axes the one at coordinate 0 writes; all of them read.
    Saving it under `taken_name`, in whatever surroundings, is an error.
    Raises ValueError if the box is not the local tensor's shape or reaches outside the global tensor.
    """
    local = local_tensor(dtensor)
    offsets, sizes = tuple(map(int, offsets)), tuple(map(int, sizes))
    if sizes != tuple(local.shape):
        raise ValueError(f"Expected the sizes of a chunk to be its local shape {tuple(local.shape)}; got {sizes}.")
    if not is_inside(offsets, sizes, tuple(dtensor.shape)):
        raise ValueError(f"The chunk at {offsets} of sizes {sizes} is outside the global shape {tuple(dtensor.shape)}.")
    chunk = AttachedChunk(offsets, sizes, *_roles(dtensor), taken_name)
    for owner in (local, dtensor):
        setattr(owner, CREATE_CHUNK_LIST, chunk.create_chunk_list)
        setattr(owner, CREATE_WRITE_ITEMS, chunk.create_write_items)


def _roles(dtensor: DTensor) -> tuple[bool, bool]:
    """Roles of this rank: it writes its replicas' box; it is the first of all ranks."""
    cut_axes = {axis for cut in cuts_of(dtensor) for axis in cut.axes}
    coordinate = dtensor.device_mesh.get_coordinate() or ()
    return all(axis in cut_axes or at == 0 for axis, at in enumerate(coordinate)), not any(coordinate)


def attached_chunk(dtensor: DTensor) -> ChunkStorageMetadata | None:
    """This rank's box as attached; None if nothing is. ValueError if the local tensor is made of several boxes."""
    for owner in (local_tensor(dtensor), vars(dtensor).get(CREATE_CHUNK_LIST)):
        create = getattr(owner, CREATE_CHUNK_LIST, None) if isinstance(owner, torch.Tensor) else owner
        if create is None:
            continue
        chunks = create()
        if len(chunks) != 1:
            raise ValueError(f"Expected exactly one chunk of the DTensor on every rank; this rank has {len(chunks)}.")
        return chunks[0]
    return None


def with_rows(dtensor: DTensor, rows: int) -> DTensor:
    """A rank's part of the first `rows` rows of a tensor whose chunk is attached; more rows than it has are nobody's.

    Shares memory; for torch's checkpointing only. ValueError if the local tensor is made of several boxes.
    """
    chunk, local = attached_chunk(dtensor), local_tensor(dtensor).detach()
    first = min(chunk.offsets[0], rows)
    part = local[: min(max(rows - chunk.offsets[0], 0), local.shape[0])]
    shape = torch.Size([rows, *dtensor.shape[1:]])
    layout = {"shape": shape, "stride": torch.empty(shape, device="meta").stride()}
    made = DTensor.from_local(part, dtensor.device_mesh, dtensor.placements, run_check=False, **layout)
    attach_chunk_metadata(made, (first, *chunk.offsets[1:]), part.shape)
    return made


def is_inside(offsets: Sequence[int], sizes: Sequence[int], shape: Sequence[int]) -> bool:
    """True if the box lies within a tensor of this shape."""
    if not len(offsets) == len(sizes) == len(shape):
        return False
    return all(0 <= low <= low + size <= high for low, size, high in zip(offsets, sizes, shape, strict=True))


def cuts_of(dtensor: DTensor) -> list[Cut]:
    """Mesh axes that cut each tensor dim, in dim order.

    Plain Shards on one dim cut in mesh order. A strided one (split factor f) is cut after axes to its right whose sizes
    multiply to f: that is how (outer, inner) is written when inner cuts first. A mesh may say it outright, with an
    attribute `_shard_order`: all its axes (names or indices), the coarsest cut first. ValueError for placements that
    say neither Shard nor Replicate, and for split factors that no order explains.
    """
    mesh = dtensor.device_mesh
    axes_by_dim: dict[int, list[int]] = {}
    for axis in reversed(range(mesh.ndim)):
        placement = dtensor.placements[axis]
        if placement.is_replicate():
            continue
        dim = sharded_dim(placement)
        if dim is None:
            raise ValueError(f"Expected Shard or Replicate placements; got {placement} on mesh axis {axis}.")
        axes = axes_by_dim.setdefault(dim % dtensor.ndim, [])
        axes.insert(_cut_position(mesh, axes, split_factor(placement)), axis)
    declared = getattr(mesh, "_shard_order", None)
    if declared is not None:
        names = mesh.mesh_dim_names or ()
        rank_of = {(names.index(axis) if isinstance(axis, str) else axis): i for i, axis in enumerate(declared)}
        axes_by_dim = {dim: sorted(axes, key=rank_of.__getitem__) for dim, axes in axes_by_dim.items()}
    return [Cut(dim, tuple(axes)) for dim, axes in sorted(axes_by_dim.items())]


def _cut_position(mesh: DeviceMesh, later_axes: list[int], factor: int) -> int:
    """Number of `later_axes` (coarsest first) that cut before an axis with this split factor."""
    pieces = 1
    for position, axis in enumerate(later_axes):
        if pieces == factor:
            return position
        pieces *= mesh.size(axis)
    if pieces != factor:
        sizes = [mesh.size(axis) for axis in later_axes]
        raise ValueError(
            f"No cut order explains a strided Shard of split factor {factor} before axes of sizes {sizes}."
        )
    return len(later_axes)


def cutting_axes(dtensor: DTensor) -> list[int]:
    """The mesh axes whose placement is a Shard, in mesh order."""
    return sorted(axis for cut in cuts_of(dtensor) for axis in cut.axes)
