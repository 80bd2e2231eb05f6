"""Memory that all gloo ranks of a pool can read, so that gathers by copies run on the CPU as they do between GPUs."""

import contextlib
import os
import tempfile
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from megatron_fsdp.machine.collectives import Axis
from megatron_fsdp.machine.device import Device


class FileMemory:
    """A mapped file of each rank; poisoned, so that what is read before it was written is seen."""

    def __init__(self, nbytes: int, axis: Axis, device: Device):
        self._group = axis.group
        handle, path = tempfile.mkstemp(prefix="peer_memory_")
        os.close(handle)
        paths = [path] * axis.size
        dist.all_gather_object(paths, path, group=self._group)
        own = torch.from_file(path, shared=True, size=nbytes, dtype=torch.uint8).fill_(0x7F)
        dist.barrier(self._group)
        self._all = [torch.from_file(path, shared=True, size=nbytes, dtype=torch.uint8) for path in paths]
        self._all[axis.rank] = own
        dist.barrier(self._group)
        os.unlink(path)

    def of(self, rank: int) -> torch.Tensor:
        """The bytes of this rank."""
        return self._all[rank]

    def barrier(self) -> None:
        """All ranks have come here."""
        dist.barrier(self._group)


@contextlib.contextmanager
def peer_files(memory: Any = FileMemory) -> Iterator[None]:
    """Models built inside may gather by copies on the CPU."""
    with (
        mock.patch("megatron_fsdp.build.check_arguments._check_device", lambda *_: None),
        mock.patch("megatron_fsdp.machine.copy_engine.SymmetricMemory", memory),
    ):
        yield
