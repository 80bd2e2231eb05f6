"""The place of a rank's shard in its global tensor, as metadata for torch's checkpointing.

A DTensor's spec names the cut dims but not the cut points: torch assumes those of `torch.chunk`. With any other rows
per rank `full_tensor()` and `torch.distributed.checkpoint` (DCP) are silently wrong, unless DCP is told each rank's
chunk. How DCP asks (torch 2.11 to 2.13: `checkpoint/planner_helpers.py`, `checkpoint/utils.py`, `tensor/_api.py`):

- save: the planner calls `obj.__create_write_items__(fqn, obj)` on every rank in the mesh. DTensor's method hands over
  to its `_local_tensor` if that has the attribute, else assumes `torch.chunk`. Items with one (fqn, offsets) index are
  written once, by the rank with the smallest plan; the rest must tile the tensor. A name that nobody writes does not
  exist on load, so a tensor without elements still needs one (empty) item.
- load: `obj.__create_chunk_list__()` gives the chunks to fill (`_local_tensor` is asked first, again); each is
  overlapped with the saved chunks. A chunk without elements costs an empty read at most.
- both find the memory with `obj.__get_tensor_shard__(index)`, which for a plain `_local_tensor` is `to_local()`: one
  chunk per rank needs no attribute for that.
- the parts of a gated layer's weight on a tensor-parallel rank, [gate_r; up_r], lie apart in [gate; up]: such a shard
  is several chunks. Its DTensor has a `__get_tensor_shard__` of its own, which finds the one that is asked for.
- asynchronous saving copies tensors with their attributes, and in process mode pickles them. Pickling keeps a DTensor's
  attributes but drops those of the plain tensor inside; so both carry the chunk, and it is a picklable object.
- `detach()`, `.data`, `nn.Parameter(...)` and arithmetic make new tensors *without* the attributes. So a chunk is
  attached to the tensors that stand in the state dict, when it is made.
"""

import functools
import itertools
import math
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NoReturn

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

from megatron_fsdp.machine.torch_compat import local_tensor, sharded_dim, split_factor

CREATE_CHUNK_LIST = "__create_chunk_list__"
CREATE_WRITE_ITEMS = "__create_write_items__"
GET_TENSOR_SHARD = "__get_tensor_shard__"


@dataclass(frozen=True)
class AttachedChunks:
    """One rank's chunks of a global tensor, as DCP asks for them. Picklable."""

    chunks: tuple[ChunkStorageMetadata, ...]
    """In the order in which they lie in the local tensor."""
    is_writer: bool
    """False on all but one rank of a set of replicas."""
    is_first: bool
    """This rank writes the item of a tensor that has no elements at all."""
    taken_name: str | None = None
    """A name that other ranks give to another tensor, so that this one must be saved under another."""

    def create_chunk_list(self) -> list[ChunkStorageMetadata]:
        """The chunks that DCP fills on load, empty ones included."""
        return list(self.chunks)

    def create_write_items(self, fqn: str, dtensor: DTensor) -> list[WriteItem]:
        """The chunks that DCP writes on save: no empty ones, and no replicas of another rank's.

        Raises:
            ValueError: `fqn` contains the name that is taken.
        """
        if self.taken_name is not None and f".{self.taken_name}." in f".{fqn}.":
            raise ValueError(
                f"{fqn} is the name of other experts on other ranks, and one would be written over the other. With "
                "expert parallelism, number experts globally in the keys of what you save and load."
            )
        properties, items = TensorProperties.create_from_tensor(local_tensor(dtensor)), []
        for chunk in self.chunks:
            if self.is_writer and (all(chunk.sizes) or (self.is_first and dtensor.numel() == 0)):
                data = TensorWriteData(chunk=chunk, properties=properties, size=dtensor.size())
                index = MetadataIndex(fqn, chunk.offsets)
                items.append(WriteItem(index=index, type=WriteItemType.SHARD, tensor_data=data))
        return items


class ShardMethod(functools.partial):
    """A method of one shard, with its local tensor bound; a deep copy or a pickled copy of the method raises."""

    def __reduce__(self) -> tuple:
        return functools.partial, (_refuse_copy,)


def _refuse_copy(*_: object, **__: object) -> NoReturn:
    raise RuntimeError(
        "this shard was copied away from its model and cannot be gathered, nor be saved in several pieces; gather the "
        "model's own, and save the model's own state dict, synchronously."
    )


def attach_chunk_metadata(
    dtensor: DTensor, offsets: Sequence[int], sizes: Sequence[int], taken_name: str | None = None
) -> None:
    """Tells DCP that this rank's local tensor is the chunk (`offsets`, `sizes`) of the global tensor. No communication.

    Call it on every rank of the mesh or on none, empty shards included (some size is 0, the offset anything in bounds).
    Of ranks that differ only in coordinates of Replicate axes the one at coordinate 0 writes; all of them read.
    Saving it under `taken_name`, in whatever surroundings, is an error.
    Raises ValueError if the chunk is not the local tensor's shape or reaches outside the global tensor.
    """
    shape, local_shape = tuple(dtensor.shape), tuple(local_tensor(dtensor).shape)
    offsets, sizes = tuple(map(int, offsets)), tuple(map(int, sizes))
    if sizes != local_shape:
        raise ValueError(f"Expected the sizes of a chunk to be its local shape {local_shape}; got {sizes}.")
    is_inside = all(0 <= low <= low + size <= high for low, size, high in zip(offsets, sizes, shape, strict=False))
    if len(offsets) != len(shape) or not is_inside:
        raise ValueError(f"The chunk at {offsets} of sizes {sizes} is outside the global shape {shape}.")
    attach_chunks(dtensor, [chunk_at(offsets, sizes)], taken_name)


def attach_chunks(
    dtensor: DTensor, chunks: Sequence[ChunkStorageMetadata], taken_name: str | None = None, dim: int = 0
) -> dict[str, Callable[..., object]]:
    """As `attach_chunk_metadata`, unchecked, of any number of chunks, which lie one behind the other along `dim`.

    Returns:
        The attributes that were set. Those of a single chunk are those of any tensor that lies alike.
    """
    cut_axes, coordinate = cutting_axes(dtensor), dtensor.device_mesh.get_coordinate() or ()
    is_writer = all(axis in cut_axes or at == 0 for axis, at in enumerate(coordinate))
    attached = AttachedChunks(tuple(chunks), is_writer, not any(coordinate), taken_name)
    methods: dict[str, Callable[..., object]] = {
        CREATE_CHUNK_LIST: attached.create_chunk_list,
        CREATE_WRITE_ITEMS: attached.create_write_items,
    }
    vars(local_tensor(dtensor)).update(methods)
    if len(chunks) > 1:
        methods[GET_TENSOR_SHARD] = ShardMethod(_shard_at, local_tensor(dtensor), attached.chunks, dim)
    vars(dtensor).update(methods)
    return methods


def _shard_at(
    local: torch.Tensor, chunks: Sequence[ChunkStorageMetadata], dim: int, index: MetadataIndex
) -> torch.Tensor:
    """The memory of the chunk that `index` names."""
    offsets: list[torch.Size | None] = [chunk.offsets for chunk in chunks]
    return split_chunks(local.detach(), chunks, dim)[offsets.index(index.offset)]


def split_chunks(local: torch.Tensor, chunks: Sequence[ChunkStorageMetadata], dim: int) -> Sequence[torch.Tensor]:
    """The part of each chunk in the local tensor. Shares memory."""
    return [local] if len(chunks) == 1 else local.split([chunk.sizes[dim] for chunk in chunks], dim)


def chunk_at(offsets: Sequence[int], sizes: Sequence[int]) -> ChunkStorageMetadata:
    """A chunk of a global tensor."""
    return ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))


def attached_chunk(dtensor: DTensor) -> ChunkStorageMetadata | None:
    """This rank's chunk as attached; None if nothing is. ValueError if the local tensor is made of several chunks."""
    if not any(CREATE_CHUNK_LIST in vars(owner) for owner in (dtensor, local_tensor(dtensor))):
        return None
    chunks = dtensor.__create_chunk_list__()
    if len(chunks) != 1:
        raise ValueError(f"Expected exactly one chunk of the DTensor on every rank; this rank has {len(chunks)}.")
    return chunks[0]


def part_of(
    dtensor: DTensor,
    local: torch.Tensor,
    shape: Sequence[int],
    offsets: Sequence[int] | None,
    taken_name: str | None = None,
) -> DTensor:
    """`local`, a part of this rank's elements, as a DTensor of `shape` that is cut like `dtensor`. Shares memory.

    For torch's checkpointing, if the part lies at `offsets`: torch's own `full_tensor` is wrong on it.
    """
    size, mesh, placements = torch.Size(shape), dtensor.device_mesh, dtensor.placements
    stride = torch.empty(size, device="meta").stride()
    part = DTensor.from_local(local, mesh, placements, run_check=False, shape=size, stride=stride)
    if offsets is not None:
        attach_chunk_metadata(part, offsets, local.shape, taken_name)
    return part


def narrow(local: torch.Tensor, at: int, dim: int, first: int, count: int) -> tuple[torch.Tensor, int]:
    """This rank's part of indices [first, first + count) of `dim`, and its offset among them. Shares memory.

    `local` begins at index `at`. The part may be empty; its offset is within the indices nevertheless.
    """
    low, high = (min(max(end - at, 0), local.shape[dim]) for end in (first, first + count))
    return local.narrow(dim, low, high - low), min(max(at - first, 0), count)


def with_rows(dtensor: DTensor, rows: int) -> DTensor:
    """The first `rows` rows of a tensor whose chunk is attached; more rows than the tensor has are no rank's.

    Shares memory; for torch's checkpointing only. ValueError if the local tensor is made of several chunks.
    """
    chunk = attached_chunk(dtensor)
    assert chunk is not None, "the caller has attached it"
    first, *rest = chunk.offsets
    local, offset = narrow(local_tensor(dtensor).detach(), first, 0, 0, rows)
    return part_of(dtensor, local, (rows, *dtensor.shape[1:]), (offset, *rest))


@torch.no_grad()
def gather_chunks(
    chunks: Sequence[ChunkStorageMetadata],
    parts: Sequence[torch.Tensor],
    shape: Sequence[int],
    groups: Iterable[dist.ProcessGroup],
) -> torch.Tensor:
    """The full tensor, of which each rank has `parts` at `chunks`; bit-exact. **Collective** over each group in turn.

    Bytes of disjoint chunks are added to zeros: no memory is needed beside the result, however uneven the chunks are.
    """
    dtype, itemsize = parts[0].dtype, parts[0].element_size()
    as_bytes = parts[0].new_zeros(math.prod(shape) * itemsize, dtype=torch.uint8)
    full = as_bytes.view(dtype).view(torch.Size(shape))
    # Not every backend copies one-byte floats; their bytes are as good.
    window = full.view(torch.uint8) if itemsize == 1 else full
    for chunk, part in zip(chunks, parts, strict=True):
        window[tuple(map(slice, chunk.offsets, map(operator.add, chunk.offsets, chunk.sizes)))] = part.view(
            window.dtype
        )
    for group in groups:
        if as_bytes.numel() and group.size() > 1:
            dist.all_reduce(as_bytes, group=group)
    return full


def cuts_of(dtensor: DTensor) -> dict[int, list[int]]:
    """Tensor dim -> the mesh axes that cut it, the coarsest cut first.

    Plain Shards on one dim cut in mesh order. A strided one (split factor f) is cut after axes to its right whose sizes
    multiply to f: that is how (outer, inner) is written when inner cuts first. ValueError for placements that say
    neither Shard nor Replicate, and for split factors that no order explains.
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
        later, factor = axes_by_dim.setdefault(dim % dtensor.ndim, []), split_factor(placement)
        pieces = [1, *itertools.accumulate((mesh.size(other) for other in later), operator.mul)]
        if factor not in pieces:
            raise ValueError(f"No cut order explains a Shard of split factor {factor} before cuts into {pieces[1:]}.")
        later.insert(pieces.index(factor), axis)
    return axes_by_dim


def cutting_axes(dtensor: DTensor) -> list[int]:
    """The mesh axes whose placement is a Shard, in mesh order."""
    return sorted(itertools.chain(*cuts_of(dtensor).values()))
