"""Values of a checkpoint by name, read only when asked for; needs no process group and no device.

A source is a dict from flattened names to entries (tensors) and plain values.
"""

import argparse
import io
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, ChunkStorageMetadata, Metadata, MetadataIndex

from megatron.training.checkpoint.format.flatten import flattened
from megatron.training.checkpoint.format.metadata import METADATA, read_metadata, read_value, stored_bytes
from megatron.training.checkpoint.format.paths import TRACKER, folder_to_load
from megatron.training.checkpoint.format.safe_unpickle import plain_arguments

ARGUMENTS = "args"


@dataclass(frozen=True)
class Entry:
    """A stored tensor."""

    shape: torch.Size
    dtype: torch.dtype
    read: Callable[[], torch.Tensor]
    """Gives its elements, on the CPU; each call reads them anew."""

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return math.prod(self.shape) * self.dtype.itemsize

    def rows(self, first: int, count: int) -> "Entry":
        """Rows [first, first + count)."""
        shape = torch.Size([count, *self.shape[1:]])
        return Entry(shape, self.dtype, lambda: self.read().narrow(0, first, count))


Source = Mapping[str, Any]


def open_source(path: Path, step: int | None = None) -> Source:
    """The checkpoint at `path`: a folder of one, the folder above with its latest (or that of `step`), or a file.

    Raises:
        ValueError: there is none, or it is damaged.
    """
    return read_file(path) if path.is_file() else read_folder(checkpoint_folder(path, step))


def checkpoint_folder(path: Path, step: int | None = None) -> Path:
    """The folder with the index. ValueError if there is none."""
    if (path / METADATA).exists() and step is None:
        return path
    if (path / TRACKER).exists() or step is not None:
        return folder_to_load(path, step)
    raise ValueError(
        f"{path} is no checkpoint: neither a file nor a folder with {METADATA} or {TRACKER}"
        if path.exists()
        else f"{path} does not exist"
    )


def read_folder(folder: Path) -> Source:
    """The values of the distributed checkpoint in `folder`."""
    metadata = read_metadata(folder)
    source: dict[str, Any] = {}
    for name, there in metadata.state_dict_metadata.items():
        if name == ARGUMENTS:
            saved = plain_arguments(stored_bytes(folder, metadata, MetadataIndex(name)))
            source[name] = argparse.Namespace(**saved)
        elif isinstance(there, BytesStorageMetadata):
            source[name] = read_value(folder, metadata, name)
        else:
            source[name] = Entry(there.size, there.properties.dtype, _reader(folder, metadata, name))
    return source


def _reader(folder: Path, metadata: Metadata, name: str) -> Callable[[], torch.Tensor]:
    return lambda: _read_tensor(folder, metadata, name)


def _read_tensor(folder: Path, metadata: Metadata, name: str) -> torch.Tensor:
    there = metadata.state_dict_metadata[name]
    parts = ((chunk, _read_chunk(folder, metadata, name, chunk)) for chunk in there.chunks)
    if len(there.chunks) == 1:
        return next(parts)[1].reshape(there.size)
    whole = torch.empty(there.size, dtype=there.properties.dtype)
    for chunk, part in parts:
        box = tuple(slice(low, low + size) for low, size in zip(chunk.offsets, chunk.sizes, strict=True))
        whole[box] = part
    return whole


def _read_chunk(folder: Path, metadata: Metadata, name: str, chunk: ChunkStorageMetadata) -> torch.Tensor:
    index = MetadataIndex(name, chunk.offsets)
    # Some writers leave out the offsets of a tensor that is whole.
    index = index if index in metadata.storage_data else MetadataIndex(index.fqn)
    try:
        stored = stored_bytes(folder, metadata, index)
        part = torch.load(io.BytesIO(stored), weights_only=True, map_location="cpu")
    except Exception as error:  # noqa: BLE001  (damaged bytes can raise anything)
        raise ValueError(f"{name} in {folder} cannot be read ({error!r})") from error
    dtype = metadata.state_dict_metadata[name].properties.dtype
    if not isinstance(part, torch.Tensor) or part.shape != chunk.sizes or part.dtype != dtype:
        raise ValueError(f"{name} in {folder} is not what {METADATA} says: {tuple(chunk.sizes)} {dtype}")
    return part


def read_file(path: Path) -> Source:
    """The values in a file of `torch.save`: a nested dict of tensors and plain values, or a bare state dict.

    Raises ValueError for a file that is damaged, or holds more than data.
    """
    try:
        with torch.serialization.safe_globals([argparse.Namespace]):
            values = torch.load(path, mmap=True, weights_only=True, map_location="cpu")
    except Exception as error:  # noqa: BLE001  (damaged bytes can raise anything)
        raise ValueError(f"{path} cannot be read as tensors and plain values ({error!r})") from error
    if not isinstance(values, Mapping):
        raise ValueError(f"{path} holds no dict but {type(values).__name__}")
    if values and all(isinstance(value, torch.Tensor) for value in values.values()):
        values = {"model": values}
    arguments = values.get(ARGUMENTS)
    flat = flattened(_named({name: value for name, value in values.items() if name != ARGUMENTS}))
    source = {name: _entry(value) if isinstance(value, torch.Tensor) else value for name, value in flat.items()}
    if arguments is None:
        return source
    return {**source, ARGUMENTS: argparse.Namespace(**(arguments if isinstance(arguments, dict) else vars(arguments)))}


def _named(value: Any) -> Any:
    """`value` with text for keys (torch's optimizers number parameters), and with dicts for lists that hold tensors."""
    if isinstance(value, Mapping):
        return {str(key): _named(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)) and _holds_tensors(value):
        return {str(number): _named(item) for number, item in enumerate(value)}
    return value


def _holds_tensors(value: Any) -> bool:
    if isinstance(value, (Mapping, list, tuple)):
        return any(map(_holds_tensors, value.values() if isinstance(value, Mapping) else value))
    return isinstance(value, torch.Tensor)


def _entry(tensor: torch.Tensor) -> Entry:
    return Entry(tensor.shape, tensor.dtype, lambda: tensor.detach())
