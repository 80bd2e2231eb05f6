"""The index of a checkpoint (`.metadata`), read as data and checked; and the values that it says the place of."""

import io
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from megatron.training.checkpoint.format.safe_unpickle import load_index, plain_arguments

METADATA = ".metadata"


def read_metadata(folder: Path) -> Metadata:
    """The index of a checkpoint: names, shapes, and where the bytes are.

    Raises:
        ValueError: it is damaged, or names what an index does not consist of, or files outside the folder.
        OSError: it cannot be read.
    """
    with open(folder / METADATA, "rb") as stream:
        try:
            metadata = load_index(stream)
        except Exception as error:  # noqa: BLE001  (damaged bytes can raise anything)
            raise ValueError(f"{METADATA} cannot be read ({error!r})") from error
    _check_index(metadata)
    return metadata


def stored_bytes(folder: Path, metadata: Metadata, index: MetadataIndex) -> bytes:
    """The bytes of one tensor's chunk or one value, as `torch.save` wrote them."""
    place = metadata.storage_data[index]
    with open(folder / place.relative_path, "rb") as stream:
        stream.seek(place.offset)
        return stream.read(place.length)


def read_value(folder: Path, metadata: Metadata, name: str) -> Any:
    """A stored value that is no tensor. ValueError if it is damaged, or more than plain data."""
    try:
        return torch.load(io.BytesIO(stored_bytes(folder, metadata, MetadataIndex(name))), weights_only=True)
    except Exception as error:  # noqa: BLE001  (damaged bytes can raise anything)
        raise ValueError(f"{name} cannot be read ({error!r})") from error


def read_arguments(folder: Path, metadata: Metadata) -> dict[str, Any]:
    """The plain values among the arguments of the run that saved; empty if there are no arguments."""
    if "args" not in metadata.state_dict_metadata:
        return {}
    return plain_arguments(stored_bytes(folder, metadata, MetadataIndex("args")))


def _check_index(index: object) -> None:
    """Raises ValueError if anything that reads the index could fail or go astray."""
    if not isinstance(index, Metadata):
        raise ValueError(f"{METADATA} is no index of a checkpoint but {type(index).__name__}")
    try:
        problem = next(_problems(index), None)
    except (AttributeError, TypeError, ValueError) as error:  # Unpickled without their fields, or with others'.
        problem = f"is damaged ({error})"
    if problem is not None:
        raise ValueError(f"{METADATA} {problem}")


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
