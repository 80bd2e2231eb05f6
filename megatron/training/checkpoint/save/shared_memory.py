"""A copy of what a rank saves, in host memory that another process sees, so that training may go on at once."""

import errno
import io
import math
import mmap
import os
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem

_ALIGNMENT = 64


@dataclass(frozen=True, kw_only=True)
class StagedTensor:
    """Place of a tensor's elements, one after the other, in shared memory."""

    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, kw_only=True)
class Staged:
    """The plan and values that one rank writes, but for the elements of its tensors, which are in shared memory."""

    folder: Path
    plan: SavePlan
    tensors: Mapping[MetadataIndex, StagedTensor]
    texts: Mapping[MetadataIndex, bytes]
    """Values that are no tensors, as torch pickled them."""
    memory_nbytes: int


class SharedMemory:
    """Memory behind a file descriptor, which ends with the last process that has it, however that ends."""

    def __init__(self, descriptor: int | None = None) -> None:
        """`descriptor` None: new and empty, else that of another process."""
        self.descriptor = _new_file() if descriptor is None else descriptor
        self._map: mmap.mmap | None = None
        self._pinned: torch.Tensor | None = None

    def reserve(self, nbytes: int, *, pinned: bool) -> None:
        """Makes room, and lets a GPU copy to it if it is `pinned`. Raises OSError if there is no memory."""
        if nbytes <= self._size():
            return
        self._unpin()
        # The kernel would give it, and end some process once it is used.
        if nbytes - self._size() > (available := available_nbytes()):
            raise OSError(errno.ENOMEM, f"--async-save needs {nbytes} bytes of host memory, {available} are left")
        os.ftruncate(self.descriptor, nbytes)
        self.attach(nbytes)
        if pinned:
            self._pinned = torch.frombuffer(self._map, dtype=torch.uint8)
            _succeeded(torch.cuda.cudart().cudaHostRegister(self._pinned.data_ptr(), nbytes, 0))

    def attach(self, nbytes: int) -> None:
        """Sees the first `nbytes` that another process has reserved."""
        if nbytes > self._size():
            self._map = mmap.mmap(self.descriptor, nbytes)

    def view(self, staged: StagedTensor) -> torch.Tensor:
        """A tensor's place; its storage is no larger than itself, as torch saves whole storages."""
        numel = math.prod(staged.shape)
        if numel == 0:
            return torch.empty(staged.shape, dtype=staged.dtype)
        whole = torch.frombuffer(self._map, dtype=staged.dtype, count=numel, offset=staged.offset)
        return whole.view(staged.shape)

    def close(self) -> None:
        """Frees it here."""
        self._unpin()
        self._map = None
        os.close(self.descriptor)

    def _size(self) -> int:
        return 0 if self._map is None else len(self._map)

    def _unpin(self) -> None:
        if self._pinned is not None:
            _succeeded(torch.cuda.cudart().cudaHostUnregister(self._pinned.data_ptr()))
            self._pinned = None


class StagedValues:
    """Stands in for a planner where there is no model: finds the values of a plan in what was staged."""

    def __init__(self, staged: Staged, memory: SharedMemory) -> None:
        self._staged, self._memory = staged, memory

    def resolve_data(self, item: WriteItem) -> torch.Tensor | io.BytesIO:
        """The value of one item."""
        if item.index in self._staged.texts:
            return io.BytesIO(self._staged.texts[item.index])
        return self._memory.view(self._staged.tensors[item.index])


def stage(folder: Path, plan: SavePlan, planner: SavePlanner, memory: SharedMemory) -> Staged:
    """Copies all values of this rank's plan; when it returns they may change. Raises OSError without memory."""
    values = {item.index: planner.resolve_data(item) for item in plan.items}
    tensors, end, on_gpu = {}, 0, False
    for index, value in values.items():
        if isinstance(value, torch.Tensor):
            tensors[index] = StagedTensor(offset=end, shape=tuple(value.shape), dtype=value.dtype)
            end += -(-value.nbytes // _ALIGNMENT) * _ALIGNMENT
            on_gpu |= value.is_cuda
    memory.reserve(end, pinned=on_gpu)
    with torch.no_grad():
        for index, place in tensors.items():
            memory.view(place).copy_(values[index], non_blocking=True)
    if on_gpu:
        torch.cuda.current_stream().synchronize()
    return Staged(
        folder=folder,
        plan=replace(plan, planner_data=None),
        tensors=tensors,
        texts={index: value.getvalue() for index, value in values.items() if isinstance(value, io.BytesIO)},
        memory_nbytes=end,
    )


def available_nbytes() -> int:
    """Host memory that processes may still take, as far as the system says."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return sys.maxsize
    kibibytes = next((line.split()[1] for line in lines if line.startswith("MemAvailable:")), None)
    return sys.maxsize if kibibytes is None else int(kibibytes) << 10


def _new_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("checkpoint")
    with tempfile.TemporaryFile() as file:  # It has no name, and so ends with its descriptors.
        return os.dup(file.fileno())


def _succeeded(code: object) -> None:
    if int(code) != 0:
        raise OSError(f"host memory cannot be pinned (CUDA error {int(code)}); leave --async-save out")
