"""A storage pool that counts what is alive: units that are gathered, and gradient buffers."""

import contextlib
import weakref
from collections.abc import Iterator
from unittest import mock

from megatron_fsdp.machine.allocator import StoragePool


class CountingPool(StoragePool):
    """Counts what is alive: gathered units by name, and communication buffers."""

    latest: "CountingPool"

    def __init__(self) -> None:
        CountingPool.latest = self
        self.names: dict[int, str] = {}
        self.gathered: set[str] = set()
        self.most_gathered = 0
        self.scratches: weakref.WeakSet = weakref.WeakSet()
        self.most_scratches = 0

    def reserve(self, key, *args):
        tensor = super().reserve(key, *args)
        self.names[id(tensor)] = key.partition(":")[0]
        return tensor

    def acquire(self, tensor, nbytes=None):
        super().acquire(tensor, nbytes)
        self.gathered.add(self.names[id(tensor)])
        self.most_gathered = max(self.most_gathered, len(self.gathered - {"root"}))

    def release(self, tensor):
        super().release(tensor)
        self.gathered.discard(self.names[id(tensor)])

    def scratch(self, *args):
        tensor = super().scratch(*args)
        self.scratches.add(tensor)
        self.most_scratches = max(self.most_scratches, len(self.scratches))
        return tensor


@contextlib.contextmanager
def counted_pool() -> Iterator[None]:
    from megatron_fsdp import MegatronFSDP

    with mock.patch.object(MegatronFSDP, "pool_class", CountingPool):
        yield
