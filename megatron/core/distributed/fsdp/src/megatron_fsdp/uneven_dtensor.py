"""Public helpers for DTensors whose ranks hold any number of rows: chunk metadata, full tensors, splits.

`dtensor/chunk_metadata.py` tells why torch alone is not enough, and what the metadata is for. The engine knows its
layout and calls `attach_chunk_metadata`; the functions here that communicate are for DTensors of unknown origin.
"""

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from torch.distributed.tensor import DTensor, Replicate

from megatron_fsdp.dtensor.chunk_metadata import attach_chunk_metadata, attached_chunk, cuts_of, cutting_axes
from megatron_fsdp.dtensor.uneven_gather import check_cover, compute_chunks, gather_rows, sum_into_place
from megatron_fsdp.machine.torch_compat import local_tensor

__all__ = [
    "attach_chunk_metadata",
    "filter_unflattened_state_dict",
    "gather_and_compute_chunk_metadata",
    "gather_rows",
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
    return compute_chunks([_checked(dtensor)], ["dtensor"])[0]


def update_uneven_dtensor_chunk_metadata(dtensor: DTensor) -> None:
    """Makes torch's checkpointing save and load the rows that this rank really has. **Collective** over its mesh."""
    chunk = gather_and_compute_chunk_metadata(dtensor)
    attach_chunk_metadata(dtensor, chunk.offsets, chunk.sizes)


def validate_uneven_dtensor(dtensor: DTensor) -> None:
    """Raises AssertionError unless the ranks' chunks tile the global tensor. **Collective** over its sharding axes.

    Uses the attached chunk, or torch's assumption where nothing is attached. Does nothing on a fake backend.
    """
    _checked(dtensor)
    chunk = attached_chunk(dtensor) or dtensor.__create_chunk_list__()[0]
    if tuple(chunk.sizes) != tuple(local_tensor(dtensor).shape):
        # A chunk that reaches outside makes the check below fail on all ranks together.
        chunk = ChunkStorageMetadata(torch.Size([0] * dtensor.ndim), torch.Size([size + 1 for size in dtensor.shape]))
    check_cover(dtensor, chunk, AssertionError)


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
    entries = [(str(path), get_unflattened_state_dict(state_dict, path)) for path in paths]
    # A rank outside a tensor's mesh has no part in it, neither here nor in DCP.
    entries = [(name, dtensor) for name, dtensor in entries if dtensor.device_mesh.get_coordinate() is not None]
    dtensors = [dtensor for _, dtensor in entries]
    for dtensor, chunk in zip(dtensors, compute_chunks(dtensors, [name for name, _ in entries]), strict=True):
        attach_chunk_metadata(dtensor, chunk.offsets, chunk.sizes)
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
    check_cover(dtensor, chunk, ValueError)
    groups = [mesh.get_group(axis) for axis in axes]
    # Shards may have been moved to the host while the mesh's backend only serves its devices.
    return sum_into_place(local.to(mesh.device_type), chunk, dtensor.shape, groups).to(local.device)


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
    says so.
    """
    local = local_tensor(_checked(dtensor))
    dim = _checked_dim(dim, dtensor.ndim)
    chunk = attached_chunk(dtensor)
    is_cut = any(cut.dim == dim for cut in cuts_of(dtensor))
    if chunk is None and (is_cut or update_uneven_dtensor_chunk_meta):
        chunk = gather_and_compute_chunk_metadata(dtensor)
    first = chunk.offsets[dim] if chunk is not None else 0
    last = first + local.shape[dim]
    pieces, start = [], 0
    for size in _sections(split_size_or_sections, dtensor.shape[dim]):
        # This rank's part of the piece; empty, but within the piece, if the two do not meet.
        low, high = (min(max(at, start), start + size) for at in (first, last))
        part = local.narrow(dim, min(max(start - first, 0), local.shape[dim]), high - low)
        shape = torch.Size([*dtensor.shape[:dim], size, *dtensor.shape[dim + 1 :]])
        stride = torch.empty(shape, device="meta").stride()
        piece = DTensor.from_local(
            part, dtensor.device_mesh, dtensor.placements, run_check=False, shape=shape, stride=stride
        )
        if chunk is not None:
            offsets = [*chunk.offsets[:dim], low - start, *chunk.offsets[dim + 1 :]]
            attach_chunk_metadata(piece, offsets, part.shape)
        pieces.append(piece)
        start += size
    return pieces


def _sections(split_size_or_sections: int | Sequence[int], extent: int) -> list[int]:
    """The pieces' sizes along the split dim, as `torch.split` would make them."""
    if not isinstance(split_size_or_sections, int):
        sections = list(split_size_or_sections)
        if sum(sections) != extent or min(sections, default=0) < 0:
            raise ValueError(f"Expected split sections that sum to {extent}; got {sections}.")
        return sections
    if split_size_or_sections <= 0:
        raise ValueError(f"Expected a positive split size; got {split_size_or_sections}.")
    size = split_size_or_sections
    return [min(size, extent - start) for start in range(0, extent, size)] or [0]


def _checked(dtensor: Any) -> DTensor:
    if not isinstance(dtensor, DTensor):
        raise TypeError(f"Expected a DTensor; got {type(dtensor).__name__}.")
    return dtensor


def _checked_dim(dim: int, ndim: int) -> int:
    if not -ndim <= dim < ndim:
        raise IndexError(f"Expected a dim in [{-ndim}, {ndim}); got {dim}.")
    return dim % ndim
