"""Public helpers for DTensors whose ranks hold any number of rows: chunk metadata, full tensors, splits.

`dtensor/chunk_metadata.py` says why torch alone is not enough, and what the metadata is for. The engine knows its
layout and attaches it without communication; functions here that communicate are for DTensors of unknown origin.
"""

import hashlib
import itertools
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from megatron_fsdp.dtensor.chunk_metadata import (
    attach_chunk_metadata,
    attached_chunk,
    chunk_at,
    cuts_of,
    cutting_axes,
    gather_chunks,
    narrow,
    part_of,
)
from megatron_fsdp.machine.torch_compat import all_gather_single, local_tensor

__all__ = [
    "attach_chunk_metadata",
    "filter_unflattened_state_dict",
    "gather_and_compute_chunk_metadata",
    "gather_uneven_dtensor_to_full_tensor",
    "get_unflattened_state_dict",
    "preprocess_state_dict_for_uneven_dtensor",
    "redistribute_uneven_dtensor_to_replicated",
    "split_dtensor",
    "uneven_dtensor_to_full_tensor",
    "update_uneven_dtensor_chunk_metadata",
    "validate_uneven_dtensor",
]


def gather_and_compute_chunk_metadata(dtensor: DTensor) -> ChunkStorageMetadata:
    """This rank's offsets and sizes in the global tensor, from all ranks' local shapes. **Collective** over its mesh.

    Raises ValueError for placements other than Shard and Replicate, and if the shapes do not add up to the global one.
    """
    return _compute_chunks({"dtensor": _checked(dtensor)})["dtensor"]


def update_uneven_dtensor_chunk_metadata(dtensor: DTensor) -> None:
    """Makes torch's checkpointing save and load the rows that this rank really has. **Collective** over its mesh."""
    chunk = gather_and_compute_chunk_metadata(dtensor)
    attach_chunk_metadata(dtensor, chunk.offsets, chunk.sizes)


def validate_uneven_dtensor(dtensor: DTensor) -> None:
    """Raises AssertionError unless the ranks' chunks tile the global tensor. **Collective** over its sharding axes.

    Uses the attached chunk, or torch's assumption where nothing is attached.
    """
    chunk = attached_chunk(_checked(dtensor)) or dtensor.__create_chunk_list__()[0]
    if tuple(chunk.sizes) != tuple(local_tensor(dtensor).shape):
        # A chunk that reaches outside makes the check below fail on all ranks together.
        chunk = chunk_at([0] * dtensor.ndim, [size + 1 for size in dtensor.shape])
    _check_cover(dtensor, chunk, AssertionError)


def filter_unflattened_state_dict(
    state_dict: Any,
    key_chain: Sequence[Any] | None = None,
    visit_condition: Callable[[Any], bool] = lambda x: False,
) -> list[list[Any]]:
    """Paths (lists of keys and list indices, each after `key_chain`) to the values that satisfy `visit_condition`.

    A value that satisfies it is not searched further.
    """
    if isinstance(state_dict, Mapping):
        entries: Any = state_dict.items()
    elif isinstance(state_dict, (list, tuple)):
        entries = enumerate(state_dict)
    else:
        return []
    found: list[list[Any]] = []
    for key, value in entries:
        chain = [*(key_chain or ()), key]
        if visit_condition(value):
            found.append(chain)
        else:
            found.extend(filter_unflattened_state_dict(value, chain, visit_condition))
    return found


def get_unflattened_state_dict(state_dict: Any, key_chain: Sequence[Any] | None = None) -> Any:
    """The value at the end of a path of keys. KeyError if a key on the way is absent."""
    value = state_dict
    for depth, key in enumerate(key_chain or ()):
        try:
            value = value[key]
        except (KeyError, IndexError, TypeError) as error:
            raise KeyError(f"No key {key!r} at depth {depth} of the path {list(key_chain or ())}.") from error
    return value


def preprocess_state_dict_for_uneven_dtensor(state_dict: dict) -> dict:
    """The same dict, its DTensors at any depth ready for torch's checkpointing. **Collective** over their meshes.

    All ranks of a mesh must hold the same DTensor keys (empty shards included). One exchange serves all of them.
    """
    paths = filter_unflattened_state_dict(state_dict, visit_condition=lambda value: isinstance(value, DTensor))
    # Insertion order may differ between ranks, collectives may not.
    paths.sort(key=lambda path: tuple(map(str, path)))
    dtensors = {str(path): get_unflattened_state_dict(state_dict, path) for path in paths}
    # A rank outside a tensor's mesh has no part in it, neither here nor in DCP.
    dtensors = {name: value for name, value in dtensors.items() if value.device_mesh.get_coordinate() is not None}
    for name, chunk in _compute_chunks(dtensors).items():
        attach_chunk_metadata(dtensors[name], chunk.offsets, chunk.sizes)
    return state_dict


@torch.no_grad()
def uneven_dtensor_to_full_tensor(dtensor: DTensor) -> torch.Tensor:
    """The global tensor, new memory on every rank, on the local tensor's device. **Collective** over its mesh.

    Uses attached chunks without asking for shapes; attach them on all ranks or on none. Raises TypeError for anything
    but a DTensor, ValueError unless every rank has exactly one chunk and they tile the tensor.
    """
    local = local_tensor(_checked(dtensor))
    mesh, axes = dtensor.device_mesh, cutting_axes(dtensor)
    chunk = attached_chunk(dtensor) or gather_and_compute_chunk_metadata(dtensor)
    _check_cover(dtensor, chunk, ValueError)
    # Shards may have been moved to the host while the mesh's backend only serves its devices.
    part, groups = local.to(mesh.device_type), map(mesh.get_group, axes)
    return gather_chunks([chunk], [part], dtensor.shape, groups).to(local.device)


def redistribute_uneven_dtensor_to_replicated(dtensor: DTensor) -> DTensor:
    """A Replicate copy on the same mesh. **Collective**; raises like `uneven_dtensor_to_full_tensor`."""
    full = uneven_dtensor_to_full_tensor(dtensor)
    mesh = dtensor.device_mesh
    return DTensor.from_local(full, mesh, [Replicate()] * mesh.ndim, run_check=False)


def gather_uneven_dtensor_to_full_tensor(dtensor: DTensor) -> DTensor:
    """Deprecated name of `redistribute_uneven_dtensor_to_replicated`. **Collective**."""
    warnings.warn(
        "gather_uneven_dtensor_to_full_tensor is deprecated: use redistribute_uneven_dtensor_to_replicated for a "
        "DTensor, uneven_dtensor_to_full_tensor for a plain tensor.",
        DeprecationWarning,
        stacklevel=2,
    )
    return redistribute_uneven_dtensor_to_replicated(dtensor)


@torch.no_grad()
def split_dtensor(
    dtensor: DTensor,
    split_size_or_sections: int | Sequence[int],
    dim: int = 0,
    update_uneven_dtensor_chunk_meta: bool = False,
) -> list[DTensor]:
    """Pieces of the global tensor along `dim`, like `torch.split`, each rank keeping what it has. Shares storage.

    No elements move, so pieces are uneven and often empty. Their chunks are attached whenever this rank's own is known:
    it is attached to `dtensor`, or is asked for (**collective** then) because `dim` is sharded or the last argument
    says so. Raises what `torch.split` does.
    """
    local = local_tensor(_checked(dtensor))
    wholes = torch.empty(dtensor.shape, device="meta").split(split_size_or_sections, dim)
    dim, chunk = dim % dtensor.ndim, attached_chunk(dtensor)
    if chunk is None and (dim in cuts_of(dtensor) or update_uneven_dtensor_chunk_meta):
        chunk = gather_and_compute_chunk_metadata(dtensor)
    pieces, start = [], 0
    for whole in wholes:
        part, offset = narrow(local, chunk.offsets[dim] if chunk else 0, dim, start, whole.shape[dim])
        offsets = [*chunk.offsets[:dim], offset, *chunk.offsets[dim + 1 :]] if chunk else None
        pieces.append(part_of(dtensor, part, whole.shape, offsets))
        start += whole.shape[dim]
    return pieces


def _compute_chunks(dtensors: Mapping[str, DTensor]) -> dict[str, ChunkStorageMetadata]:
    """This rank's chunks, worked out from every rank's local shapes. **Collective** over each tensor's mesh.

    All ranks of a mesh must pass the same tensors in the same order; names are there to check that. Per mesh it costs
    two all-gathers on each axis, whatever the number of tensors. Raises ValueError, on all ranks of a mesh, if their
    lists differ or the local shapes do not add up to the global ones.
    """
    by_mesh: dict[DeviceMesh, dict[str, dict[int, list[int]]]] = {}
    for name, dtensor in dtensors.items():
        by_mesh.setdefault(dtensor.device_mesh, {})[name] = cuts_of(dtensor)
    chunks = {}
    for mesh, cuts in by_mesh.items():
        described = repr([(name, tuple(dtensors[name].shape), sorted(each.items())) for name, each in cuts.items()])
        digest = int.from_bytes(hashlib.sha256(described.encode()).digest()[:7], "big")
        if len(_gather([digest], mesh, range(mesh.ndim)).unique()) > 1:
            raise ValueError(
                f"Ranks of one mesh {mesh} hold different DTensors (names, global shapes and placements must agree): "
                f"this rank has {len(cuts)}, the first ones {list(cuts)[:5]}. Give every rank the same keys, with "
                "empty shards where it owns nothing."
            )
        shapes = [local_tensor(dtensors[name]).shape for name in cuts]
        extents = iter(_gather(list(itertools.chain(*shapes)), mesh, range(mesh.ndim)).unbind(-1))
        for name, its_cuts in cuts.items():
            offsets = _offsets(dtensors[name], its_cuts, list(itertools.islice(extents, dtensors[name].ndim)))
            if offsets is None:
                raise ValueError(
                    f"The local shapes of {name} do not add up to the global one, {tuple(dtensors[name].shape)}, or "
                    "differ from it in a dim that no mesh axis cuts; this rank's is "
                    f"{tuple(local_tensor(dtensors[name]).shape)}. Pass the true shape= and stride= to "
                    "DTensor.from_local."
                )
            chunks[name] = chunk_at(offsets, local_tensor(dtensors[name]).shape)
    return chunks


def _offsets(dtensor: DTensor, cuts: dict[int, list[int]], extents: Sequence[torch.Tensor]) -> list[int] | None:
    """The offsets of this rank's chunk, from all ranks' local `extents` in every dim, each of the mesh's shape.

    None if they do not add up to the global ones; all ranks see that alike.
    """
    coordinate, offsets = tuple(dtensor.device_mesh.get_coordinate() or ()), []
    for dim, extent in enumerate(extents):
        start = torch.zeros_like(extent)
        for axis in reversed(cuts.get(dim, ())):  # the finest cut first
            start = start + extent.cumsum(axis) - extent
            extent = extent.sum(axis, keepdim=True).expand_as(extent)
        if (extent != dtensor.shape[dim]).any():
            return None
        offsets.append(int(start[coordinate]))
    return offsets


def _check_cover(dtensor: DTensor, chunk: ChunkStorageMetadata, error: type[Exception]) -> None:
    """Raises `error`, on all ranks that cut the tensor, unless their chunks tile it. **Collective** over those axes."""
    shape = torch.tensor(tuple(dtensor.shape), dtype=torch.int64)
    table = _gather([*chunk.offsets, *chunk.sizes], dtensor.device_mesh, cutting_axes(dtensor))[None].flatten(0, -2)
    starts, sizes = table.chunk(2, dim=-1)
    is_outside = bool(((starts < 0) | (sizes < 0) | (starts + sizes > shape)).any())
    filled = sizes.prod(dim=1) > 0
    starts, ends = starts[filled], (starts + sizes)[filled]
    meets = ((starts[:, None] < ends[None]) & (starts[None] < ends[:, None])).all(dim=-1)
    is_whole = int((ends - starts).prod(dim=1).sum()) == dtensor.numel()
    if is_outside or int(meets.sum()) > len(starts) or not is_whole:
        raise error(
            f"Chunks of the tensor of shape {tuple(dtensor.shape)} overlap, reach outside it, or leave it uncovered in "
            f"part; (*offsets, *sizes) of the first ranks: {table[:8].tolist()}."
        )


def _gather(numbers: Sequence[int], mesh: DeviceMesh, axes: Sequence[int]) -> torch.Tensor:
    """Every rank's numbers, shape (*sizes of the axes, count), in CPU memory. **Collective** over each axis."""
    stacked = torch.tensor(numbers, dtype=torch.int64, device=mesh.device_type)
    for axis in reversed(axes):
        out = stacked.new_empty(mesh.size(axis), *stacked.shape)
        all_gather_single(out, stacked.unsqueeze(0), group=mesh.get_group(axis))
        stacked = out
    return stacked.cpu()


def _checked(dtensor: Any) -> DTensor:
    if not isinstance(dtensor, DTensor):
        raise TypeError(f"Expected a DTensor; got {type(dtensor).__name__}.")
    return dtensor
