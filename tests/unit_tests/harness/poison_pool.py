"""A storage pool that fills with NaN what it hands out and takes back, so that no stale read goes unnoticed."""

from typing import Any

import torch

from megatron_fsdp.machine.allocator import StoragePool


class PoisonPool(StoragePool):
    """Never frees memory, only poisons it."""

    def reserve(self, key: str, *args: Any) -> torch.Tensor:
        """A tensor whose storage stays, poisoned."""
        return self.scratch(key, *args)

    def acquire(self, tensor: torch.Tensor, nbytes: int | None = None) -> None:
        """Poisons the storage."""
        _poison(tensor)

    def release(self, tensor: torch.Tensor) -> None:
        """Poisons the storage."""
        _poison(tensor)

    def scratch(self, key: str, *args: Any) -> torch.Tensor:
        """A fresh poisoned tensor."""
        return _poison(super().scratch(key, *args))


def _poison(tensor: torch.Tensor) -> torch.Tensor:
    # 0x7f is NaN in both 8-bit floating-point formats of the OCP specification (e4m3fn, e5m2).
    return tensor.fill_(float("nan") if tensor.is_floating_point() else 0x7F)
