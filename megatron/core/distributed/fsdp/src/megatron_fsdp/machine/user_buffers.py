"""Memory of communication buffers: anywhere, in regions of its own, or registered with NCCL."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist

from megatron_fsdp.config import EngineConfig
from megatron_fsdp.machine.torch_compat import nccl_backend

logger = logging.getLogger(__name__)

#: torch's caching allocator takes 20 MiB from the device for what is between 1 and 10 MiB (torch 2.0 to 2.13).
_LEAST_LASTING_NBYTES = 10 * 2**20
#: NCCL has symmetric windows from this version on (its release notes).
_FIRST_WITH_WINDOWS = (2, 27)


class Memory:
    """torch's allocator as it is; all there is on the CPU."""

    is_registered = False
    """`register` has been called."""

    def region(self, name: str) -> AbstractContextManager:
        """Inside, this thread allocates from the region `name`, and what is freed in it stays in it."""
        return contextlib.nullcontext()

    def lasting(self, name: str, nbytes: int) -> AbstractContextManager:
        """Inside, this thread allocates a buffer of `nbytes` that lasts as long as the model."""
        return contextlib.nullcontext()

    def register(self) -> None:
        """Makes what has been allocated known to the communicators. **Collective**, and only once."""
        self.is_registered = True


class RegionMemory(Memory):
    """Memory of the current CUDA device in regions, each a pool of its own in torch's caching allocator.

    A region that is always asked for the same size on one stream has one block, which is never split, never given to
    other users and not returned to the device by `empty_cache()`.
    """

    def __init__(self) -> None:
        self._pools: dict[str, torch.cuda.MemPool] = {}

    def region(self, name: str) -> AbstractContextManager:
        """The pool of this name."""
        if name not in self._pools:
            self._pools[name] = self._new_pool()
        return torch.cuda.use_mem_pool(self._pools[name])

    def _new_pool(self) -> torch.cuda.MemPool:
        return torch.cuda.MemPool()


class UserBuffers(RegionMemory):
    """Regions of memory that NCCL has allocated and that its communicators know.

    Every region is registered with every communicator. A region holds one buffer, so that a buffer begins where its
    registration does, on every rank: symmetric windows need that.
    """

    def __init__(self, device: torch.device, groups: Sequence[dist.ProcessGroup], *, symmetric: bool):
        super().__init__()
        self._device = device
        self._groups = groups
        self._symmetric = symmetric
        self.registrations = 0
        """Regions times communicators that have been registered."""
        self.windows = 0
        """Registrations among them that are symmetric windows."""

    def lasting(self, name: str, nbytes: int) -> AbstractContextManager:
        """A region, unless the buffer is so small that a region would waste more than it holds."""
        return self.region(f"lasting {name}") if nbytes >= _LEAST_LASTING_NBYTES else contextlib.nullcontext()

    def _new_pool(self) -> torch.cuda.MemPool:
        return torch.cuda.MemPool(nccl_backend(self._groups[0], self._device).mem_allocator)

    def register(self) -> None:
        """Registers all regions, as windows where NCCL can. **Collective** over every communicator in turn.

        What these regions take from the device later, say for another stream, torch registers as it is allocated.
        """
        super().register()
        as_windows = self._symmetric and torch.cuda.nccl.version() >= _FIRST_WITH_WINDOWS
        for group in self._groups:
            # A communicator is made by its first collective, and can be registered with only then.
            dist.all_reduce(torch.zeros(1, device=self._device), group=group)
        torch.cuda.synchronize(self._device)
        windows = [
            _register(nccl_backend(group, self._device), pool, as_window=as_windows)
            for group in self._groups
            for pool in self._pools.values()
        ]
        self.registrations, self.windows = len(windows), sum(windows)
        if dist.get_rank() == 0:
            logger.info(
                "registered %d communication buffers with %d communicators of NCCL %s, %d of %d as symmetric windows",
                len(self._pools),
                len(self._groups),
                ".".join(map(str, torch.cuda.nccl.version())),
                self.windows,
                self.registrations,
            )


def _register(backend: Any, pool: torch.cuda.MemPool, *, as_window: bool) -> bool:
    """Registers a pool's segments, those to come too. **Collective** if `as_window`. True if they became windows."""
    try:
        backend.register_mem_pool(pool, symm=as_window)
    except dist.DistBackendError:
        if not as_window:
            raise
        backend.register_mem_pool(pool)  # only local registration is known here, and then on every rank
        return False
    return as_window


def memory_for(config: EngineConfig, groups: Sequence[dist.ProcessGroup], device: torch.device) -> Memory:
    """Memory for persistent buffers on `device`, to be registered with the communicators of `groups` or not at all."""
    if config.nccl_ub and groups:
        return UserBuffers(device, groups, symmetric=not config.disable_symmetric_registration)
    return RegionMemory() if device.type == "cuda" else Memory()
