"""Allocators of temporary storage."""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Protocol

import torch

from megatron_fsdp.machine.torch_compat import storage_id
from megatron_fsdp.machine.user_buffers import Memory
from megatron_fsdp.plan.double_buffer import PoolSlot

logger = logging.getLogger(__name__)


class StoragePool(Protocol):
    """Storage for what lives only while a unit computes.

    The tensor of one key is one object for ever: modules and autograd hold views of it, so its storage is emptied and
    refilled in place, never replaced.
    """

    def reserve(self, key: str, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """The 1-D tensor of `key`, without storage until `acquire`. Called at build, once per key."""

    def acquire(self, tensor: torch.Tensor, nbytes: int | None = None) -> None:
        """Gives a reserved tensor its storage, allocated on the current stream; contents are undefined.

        Args:
            nbytes: bytes to allocate, at least the tensor's; None: those.
        """

    def release(self, tensor: torch.Tensor) -> None:
        """Takes the storage back, on the current stream: the caller has made it wait for the last reader."""

    def scratch(self, key: str, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A 1-D tensor for one communication, freed with its last reference; `key` says which one."""

    def has_room(self, key: str) -> bool:
        """The storage of `key` can be had where it belongs."""

    def lasting(self, key: str, nbytes: int) -> AbstractContextManager:
        """Inside, a buffer of `nbytes` is allocated that lasts and is itself communicated."""


class ResizePool:
    """Allocates on demand from torch's caching allocator by resizing storages between nothing and their full size."""

    def reserve(self, key: str, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """The 1-D tensor of `key`, without storage until `acquire`."""
        tensor = torch.empty(numel, dtype=dtype, device=device)
        tensor.untyped_storage().resize_(0)
        return tensor

    def acquire(self, tensor: torch.Tensor, nbytes: int | None = None) -> None:
        """Allocates on the current stream."""
        tensor.untyped_storage().resize_(nbytes or tensor.numel() * tensor.element_size())

    def release(self, tensor: torch.Tensor) -> None:
        """Frees on the current stream."""
        # Autograd may hold views of this storage; emptying it frees the memory and keeps their identity for the next
        # gather.
        tensor.untyped_storage().resize_(0)

    def scratch(self, key: str, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A fresh tensor."""
        return torch.empty(numel, dtype=dtype, device=device)

    def has_room(self, key: str) -> bool:
        """Always."""
        return True

    def lasting(self, key: str, nbytes: int) -> AbstractContextManager:
        """Nothing special."""
        return contextlib.nullcontext()


class SlotPool:
    """Lends the memory of fixed slots to storages that take turns in it.

    The slot of a storage is always the same one, a function of the units (`plan/double_buffer.py`), but its tensor
    is its own: what a slot lends is the memory under a storage. So a view that autograd has saved is right again when its unit is
    gathered again, and a slot that is still taken does no harm: the storage gets memory elsewhere, and `overflows`
    counts it. Slots are handed from one storage to the next on one stream, which has waited for the last reader.
    """

    def __init__(self, base: StoragePool, memory: Memory):
        self.base = base
        """Empties and refills storages."""
        self.memory = memory
        """Where slots lie."""
        self.slots: dict[str, PoolSlot] = {}
        """By key; none before `arrange`."""
        self.is_registered = False
        """The communicators know the memory."""
        self.overflows = 0
        """Storages that found their slot taken."""
        self.warns = False
        """The slots follow the order in which units run, so that an overflow is news."""
        self._keys: dict[int, str] = {}
        """Of reserved tensors, by storage."""
        self._tenants: dict[str, str | weakref.ref] = {}
        """Who has a slot, by its name: a key, or a storage that lives."""

    def arrange(self, slots: Mapping[str, PoolSlot]) -> None:
        """Gives storages their slots; nothing is acquired when it is called."""
        self.slots = dict(slots)

    @property
    def is_busy(self) -> bool:
        """Somebody has a slot that several share."""
        shared = {slot.name: slot for slot in self.slots.values() if slot.is_shared}
        return not all(self._is_free(slot) for slot in shared.values())

    def fill(self, keys: Iterable[str], device: torch.device) -> None:
        """Allocates the slots of `keys`, on the current stream: the one on which they will be acquired."""
        for slot in dict.fromkeys(self.slots[key] for key in keys if key in self.slots):
            with self.memory.region(slot.name):
                torch.empty(slot.nbytes, dtype=torch.uint8, device=device)

    def register(self) -> None:
        """Makes the communicators know what has been allocated. **Collective**."""
        self.memory.register()
        self.is_registered = True

    def reserve(self, key: str, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """The 1-D tensor of `key`, without storage until `acquire`."""
        tensor = self.base.reserve(key, numel, dtype, device)
        self._keys[storage_id(tensor)] = key
        return tensor

    def acquire(self, tensor: torch.Tensor, nbytes: int | None = None) -> None:
        """Lends the tensor's slot, if it has one and nobody else has that."""
        key = self._keys[storage_id(tensor)]
        slot = self._free_slot(key)
        if slot is None:
            self.base.acquire(tensor, nbytes)
            return
        self._tenants[slot.name] = key
        with self.memory.region(slot.name):
            # Always the whole slot: the region then has one block, which no smaller request can split.
            self.base.acquire(tensor, slot.nbytes)

    def release(self, tensor: torch.Tensor) -> None:
        """Gives the slot back."""
        self.base.release(tensor)
        key = self._keys[storage_id(tensor)]
        slot = self.slots.get(key)
        if slot is not None and self._tenants.get(slot.name) == key:
            del self._tenants[slot.name]

    def scratch(self, key: str, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A tensor in the slot of `key`, which is taken as long as any view of the tensor lives."""
        slot = self._free_slot(key)
        if slot is None:
            return self.base.scratch(key, numel, dtype, device)
        with self.memory.region(slot.name):
            whole = self.base.scratch(key, -(-slot.nbytes // dtype.itemsize), dtype, device)
        self._tenants[slot.name] = weakref.ref(whole.untyped_storage())
        return whole[:numel]

    def has_room(self, key: str) -> bool:
        """Nobody has its slot."""
        return key not in self.slots or self._is_free(self.slots[key])

    def lasting(self, key: str, nbytes: int) -> AbstractContextManager:
        """As the memory has it."""
        return self.memory.lasting(key, nbytes)

    def _free_slot(self, key: str) -> PoolSlot | None:
        slot = self.slots.get(key)
        if slot is None or self._is_free(slot):
            return slot
        self.overflows += 1
        if self.warns:
            self.warns = False
            tenant = self._tenants[slot.name]
            logger.warning(
                "%s finds its communication buffer taken by %s and gets memory of its own, now and whenever this "
                "happens: more units are gathered at a time than there are buffers. Recomputation over several units, "
                "weights that a unit lends to others, or units that run in another order in every step do that.",
                key,
                tenant if isinstance(tenant, str) else "a gradient that is still on its way",
            )
        return None

    def _is_free(self, slot: PoolSlot) -> bool:
        tenant = self._tenants.get(slot.name)
        return tenant is None or (isinstance(tenant, weakref.ref) and tenant() is None)


class PoisonPool(ResizePool):
    """Never frees: fills with NaN what is handed out and what is given back, so that no stale read goes unnoticed."""

    def reserve(self, key: str, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A tensor whose storage stays, poisoned."""
        tensor = torch.empty(numel, dtype=dtype, device=device)
        _poison(tensor)
        return tensor

    def acquire(self, tensor: torch.Tensor, nbytes: int | None = None) -> None:
        """Poisons the storage."""
        _poison(tensor)

    def release(self, tensor: torch.Tensor) -> None:
        """Poisons the storage."""
        _poison(tensor)

    def scratch(self, key: str, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A fresh poisoned tensor."""
        tensor = torch.empty(numel, dtype=dtype, device=device)
        _poison(tensor)
        return tensor


def _poison(tensor: torch.Tensor) -> None:
    if tensor.is_floating_point():
        tensor.fill_(float("nan"))
    else:
        # 0x7f is NaN in both 8-bit floating-point formats of the OCP specification (e4m3fn, e5m2).
        tensor.fill_(0x7F)
