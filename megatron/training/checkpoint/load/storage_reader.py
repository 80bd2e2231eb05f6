"""Reader and planner for torch's distributed checkpoint that read data alone, in several threads, each value once."""

import copy
import io
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.tensor import DTensor
from torch.futures import Future

from megatron.training.checkpoint.format.metadata import read_metadata
from megatron.training.checkpoint.format.thread_pool import even_parts, in_threads, thread_count


class SafeReader(FileSystemReader):
    """torch's reader, with an index that is read as data, once.

    Args:
        folder: the checkpoint.
        metadata: its index, if it has been read.
    """

    def __init__(self, folder: Path, metadata: Metadata | None = None):
        super().__init__(str(folder))
        self._folder, self._metadata = folder, metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The index of the checkpoint."""
        metadata = self._metadata or read_metadata(self._folder)
        metadata.storage_meta = getattr(metadata, "storage_meta", None) or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> "Future[None]":
        """Reads what is planned, large parts of it in several threads, each of which has one stored piece at a time."""
        sizes = {id(item): self.storage_data[item.storage_index].length for item in plan.items}
        parts = even_parts(plan.items, thread_count(sum(sizes.values())), lambda item: sizes[id(item)])
        read = super().read_data
        for done in in_threads(lambda items: read(replace(plan, items=items), planner), parts):
            done.wait()
        return done


class DataOnlyPlanner(DefaultLoadPlanner):
    """Reads a flat dict of tensors and plain values, and refuses values whose unpickling would run code."""

    def __init__(self):
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._read: dict[bytes, Any] = {}

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Takes over one value that is no tensor."""
        # Thousands of parameters have the same few options, and unpickling one takes a tenth of a millisecond.
        stored = value.getvalue()
        if stored not in self._read:
            self._read[stored] = torch.load(value, weights_only=True)
        self.original_state_dict[read_item.dest_index.fqn] = copy.deepcopy(self._read[stored])


def duplicate_reads(wanted: Mapping[str, Any], metadata: Metadata) -> dict[str, str]:
    """Of `wanted` names that are no shards, share a place and are of one form: each but the first -> the first."""
    places = {index.fqn: place for index, place in metadata.storage_data.items() if index.fqn in wanted}
    first: dict[Any, str] = {}
    same = {}
    for name, value in wanted.items():
        if not isinstance(value, DTensor):
            place = places[name]
            form = (value.dtype, value.shape) if isinstance(value, torch.Tensor) else None
            other = first.setdefault((place.relative_path, place.offset, place.length, form), name)
            if other is not name:
                same[name] = other
    return same
