"""Whether the index of a checkpoint, once it is unpickled, is one: its parts are there, of their types, and agree."""

import math
from collections.abc import Iterator
from pathlib import Path

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)


def check_index(index: object, name: str) -> None:
    """Raises ValueError, calling the index `name`, if anything that reads it could fail or go astray."""
    if not isinstance(index, Metadata):
        raise ValueError(f"{name} is no index of a checkpoint but {type(index).__name__}")
    try:
        problem = next(_problems(index), None)
    except (AttributeError, TypeError, ValueError) as error:  # Unpickled without their fields, or with others'.
        problem = f"is damaged ({error})"
    if problem is not None:
        raise ValueError(f"{name} {problem}")


def _problems(index: Metadata) -> Iterator[str]:
    for piece in index.storage_data.values():
        if Path(piece.relative_path).name != piece.relative_path or piece.relative_path == "..":
            yield f"names the file {piece.relative_path!r}, which is not in the checkpoint"
        if min(piece.offset, piece.length) < 0:
            yield f"is damaged ({piece.relative_path} is read before its beginning)"
    stored = {(key.fqn, key.offset) for key in index.storage_data}
    for name, entry in index.state_dict_metadata.items():
        if not isinstance(entry, BytesStorageMetadata) and (problem := _problem_of_tensor(entry)):
            yield f"is damaged ({name} {problem})"
        places = [MetadataIndex(name, chunk.offsets) for chunk in getattr(entry, "chunks", ())] or [MetadataIndex(name)]
        # Some writers leave out the offsets of a tensor that is whole.
        if any((at.fqn, at.offset) not in stored and (name, None) not in stored for at in places):
            yield f"is damaged (nothing says where {name} is)"


def _problem_of_tensor(entry: TensorStorageMetadata) -> str | None:
    if not isinstance(entry, TensorStorageMetadata) or not isinstance(entry.properties.dtype, torch.dtype):
        return "is neither a tensor nor a value"
    if any(not isinstance(chunk, ChunkStorageMetadata) or not _lies_in(chunk, entry.size) for chunk in entry.chunks):
        return "has a chunk outside of its shape"
    if len({chunk.offsets for chunk in entry.chunks if math.prod(chunk.sizes)}) < sum(
        bool(math.prod(chunk.sizes)) for chunk in entry.chunks
    ) or sum(math.prod(chunk.sizes) for chunk in entry.chunks) != math.prod(entry.size):
        return f"has chunks that do not make up its shape {tuple(entry.size)}"
    return None


def _lies_in(chunk: ChunkStorageMetadata, shape: torch.Size) -> bool:
    box = zip(chunk.offsets, chunk.sizes, shape, strict=True)  # ValueError if their dimensions differ.
    return all(0 <= low <= low + size <= most for low, size, most in box)
