"""Where temporary storage comes from."""

from __future__ import annotations

from typing import Protocol

import torch


class StoragePool(Protocol):
    """Storage for what lives only while a unit computes.

    The tensor of one key is one object for ever: modules and autograd hold views of it, so its storage is emptied and
    refilled in place, never replaced.
    """

    def reserve(self, key: str, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """The 1-D tensor of `key`, without storage until `acquire`. Called at build, once per key."""

    def acquire(self, tensor: torch.Tensor) -> None:
        """Gives a reserved tensor its storage, allocated on the current stream; contents are undefined."""

    def release(self, tensor: torch.Tensor) -> None:
        """Takes the storage back, on the current stream: the caller has made it wait for the last reader."""

    def scratch(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A 1-D tensor for one communication, freed with its last reference."""


class ResizePool:
    """Allocates on demand from torch's caching allocator by resizing storages between nothing and their full size."""

    def reserve(self, key: str, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """The 1-D tensor of `key`, without storage until `acquire`."""
        tensor = torch.empty(numel, dtype=dtype, device=device)
        tensor.untyped_storage().resize_(0)
        return tensor

    def acquire(self, tensor: torch.Tensor) -> None:
        """Allocates on the current stream."""
        tensor.untyped_storage().resize_(tensor.numel() * tensor.element_size())

    def release(self, tensor: torch.Tensor) -> None:
        """Frees on the current stream."""
        # Autograd may hold views of this storage; emptying it frees the memory and keeps their identity for the next
        # gather.
        tensor.untyped_storage().resize_(0)

    def scratch(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A fresh tensor."""
        return torch.empty(numel, dtype=dtype, device=device)


class PoisonPool(ResizePool):
    """Never frees: fills with NaN what is handed out and what is given back, so that no stale read goes unnoticed."""

    def reserve(self, key: str, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A tensor whose storage stays, poisoned."""
        tensor = torch.empty(numel, dtype=dtype, device=device)
        _poison(tensor)
        return tensor

    def acquire(self, tensor: torch.Tensor) -> None:
        """Poisons the storage."""
        _poison(tensor)

    def release(self, tensor: torch.Tensor) -> None:
        """Poisons the storage."""
        _poison(tensor)

    def scratch(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
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
