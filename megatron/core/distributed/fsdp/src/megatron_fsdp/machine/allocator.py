"""Pools of temporary storage: gathered weights, and gradients on their way."""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Iterable
from contextlib import AbstractContextManager

import torch

from megatron_fsdp.machine.torch_compat import storage_id
from megatron_fsdp.machine.user_buffers import Memory
from megatron_fsdp.plan.double_buffer import PersistentBuffer

logger = logging.getLogger(__name__)


class StoragePool:
    """Storage that is needed only while a unit computes, from torch's caching allocator.

    A key has one tensor for ever: modules and autograd hold views of it, so its storage is emptied and refilled in
    place, never replaced.
    """

    def reserve(self, key: str, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """The 1-D tensor of `key`, without storage until `acquire`. Called at build, once per key."""
        tensor = torch.empty(numel, dtype=dtype, device=device)
        tensor.untyped_storage().resize_(0)
        return tensor

    def acquire(self, tensor: torch.Tensor, nbytes: int | None = None) -> None:
        """Gives a reserved tensor its storage, allocated on the current stream; contents are undefined.

        Args:
            nbytes: bytes to allocate, at least the tensor's; None: the tensor's.
        """
        tensor.untyped_storage().resize_(nbytes or tensor.nbytes)

    def release(self, tensor: torch.Tensor) -> None:
        """Takes the storage back, on the current stream: the caller has made it wait for the last reader."""
        # Autograd may hold views of this storage; emptying it frees the memory and keeps their identity for the next
        # gather.
        tensor.untyped_storage().resize_(0)

    def scratch(self, key: str, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A 1-D tensor for one communication, freed with its last reference; `key` names the communication."""
        return torch.empty(numel, dtype=dtype, device=device)

    def has_room(self, key: str) -> bool:
        """The persistent buffer of `key` is free, or there is none."""
        return True

    def lasting(self, key: str, nbytes: int) -> AbstractContextManager:
        """Inside, a buffer of `nbytes` is allocated that lasts and is itself communicated."""
        return contextlib.nullcontext()


class DoubleBufferPool(StoragePool):
    """Places storages in persistent buffers, in which they alternate.

    The buffer of a storage is always the same one, a function of the units (`plan/double_buffer.py`). Only the memory
    is shared, never the tensor: a view that autograd has saved is right again when its unit is gathered again. A buffer
    that is still occupied does no harm: the storage gets other memory, and `overflows` counts it. Buffers pass from one
    storage to the next on one stream, which has waited for the last reader.
    """

    def __init__(self, base: StoragePool, memory: Memory):
        self.base = base
        """Empties and refills storages."""
        self.memory = memory
        """Allocates the buffers."""
        self.buffers: dict[str, PersistentBuffer] = {}
        """By key; may be replaced while nothing is acquired."""
        self.overflows = 0
        """Storages that found their buffer occupied."""
        self.warns = False
        """The buffers follow the order in which units run, so that the next overflow is worth a warning."""
        self._keys: dict[int, str] = {}
        """Of reserved tensors, by storage."""
        self._occupants: dict[str, str | weakref.ref] = {}
        """By buffer name: a key, or a weak reference to a scratch tensor's storage."""

    @property
    def is_busy(self) -> bool:
        """A shared buffer is occupied."""
        return any(buffer.is_shared and not self._is_free(buffer) for buffer in self.buffers.values())

    def fill(self, keys: Iterable[str], device: torch.device) -> None:
        """Allocates the buffers of `keys`, on the current stream: the one on which they will be acquired."""
        for buffer in dict.fromkeys(self.buffers[key] for key in keys if key in self.buffers):
            with self.memory.region(buffer.name):
                torch.empty(buffer.nbytes, dtype=torch.uint8, device=device)

    def reserve(self, key: str, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """The 1-D tensor of `key`, without storage until `acquire`."""
        tensor = self.base.reserve(key, numel, dtype, device)
        self._keys[storage_id(tensor)] = key
        return tensor

    def acquire(self, tensor: torch.Tensor, nbytes: int | None = None) -> None:
        """Places the tensor in its buffer, if it has one that is free, else in other memory."""
        key = self._keys[storage_id(tensor)]
        buffer = self._free_buffer(key)
        if buffer is None:
            self.base.acquire(tensor, nbytes)
            return
        self._occupants[buffer.name] = key
        with self.memory.region(buffer.name):
            # Always the whole buffer: the region then has one block, which no smaller request can split.
            self.base.acquire(tensor, buffer.nbytes)

    def release(self, tensor: torch.Tensor) -> None:
        """Empties the storage and frees its buffer."""
        self.base.release(tensor)
        key = self._keys[storage_id(tensor)]
        buffer = self.buffers.get(key)
        if buffer is not None and self._occupants.get(buffer.name) == key:
            del self._occupants[buffer.name]

    def scratch(self, key: str, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A tensor in the buffer of `key`, which is occupied as long as any view of the tensor lives."""
        buffer = self._free_buffer(key)
        if buffer is None:
            return self.base.scratch(key, numel, dtype, device)
        with self.memory.region(buffer.name):
            whole = self.base.scratch(key, -(-buffer.nbytes // dtype.itemsize), dtype, device)
        self._occupants[buffer.name] = weakref.ref(whole.untyped_storage())
        return whole[:numel]

    def has_room(self, key: str) -> bool:
        """The persistent buffer of `key` is free, or there is none."""
        return key not in self.buffers or self._is_free(self.buffers[key])

    def lasting(self, key: str, nbytes: int) -> AbstractContextManager:
        """Inside, a buffer of `nbytes` is allocated that lasts and is itself communicated."""
        return self.memory.lasting(key, nbytes)

    def _free_buffer(self, key: str) -> PersistentBuffer | None:
        """The buffer of `key`; None if there is none, or if it is occupied."""
        buffer = self.buffers.get(key)
        if buffer is None or self._is_free(buffer):
            return buffer
        self.overflows += 1
        if self.warns:
            self.warns = False
            occupant = self._occupants[buffer.name]
            logger.warning(
                "%s finds its communication buffer taken by %s and gets memory of its own, now and whenever this "
                "happens: more units are gathered at a time than there are buffers. Recomputation over several units, "
                "or units that run in another order in every step do that.",
                key,
                occupant if isinstance(occupant, str) else "a gradient that is still on its way",
            )
        return None

    def _is_free(self, buffer: PersistentBuffer) -> bool:
        occupant = self._occupants.get(buffer.name)
        return occupant is None or (isinstance(occupant, weakref.ref) and occupant() is None)
