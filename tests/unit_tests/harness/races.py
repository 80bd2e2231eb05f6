"""Finds races between streams on the CPU, where nothing really runs beside anything.

Streams and events become vector clocks. Every operation on a tensor is noted with the stream on which it was issued; an
access that nothing orders after an earlier, conflicting one is a race, and so is memory that goes back to the stream
that allocated it while another one may still be using it: the caching allocator would hand it out again at once.
"""

import bisect
import collections
import contextlib
import dataclasses
import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

#: Arguments that a collective only reads; the others it writes.
_READ_BY = {"_allgather_base_": (1,)}


class FakeStream:
    """A stream as a vector clock: which points of all streams come before what is issued next."""

    def __init__(self, name: str):
        self.name = name
        self.clock: collections.Counter = collections.Counter()

    def tick(self) -> "Stamp":
        """The point of the operation that is issued now."""
        self.clock[self.name] += 1
        return Stamp(self.name, self.clock[self.name])

    def is_after(self, stamp: "Stamp") -> bool:
        return self.clock[stamp.stream] >= stamp.time

    def wait_stream(self, other: "FakeStream") -> None:
        self.clock |= other.clock

    def wait_event(self, event: "FakeEvent") -> None:
        self.clock |= event.clock


@dataclasses.dataclass(frozen=True)
class Stamp:
    stream: str
    time: int


class FakeEvent:
    """A point in a stream."""

    def __init__(self, races: "Races"):
        self._races = races
        self.clock = races.current.clock.copy()

    def wait(self, stream: FakeStream | None = None) -> None:
        (stream or self._races.current).wait_event(self)


@dataclasses.dataclass
class Block:
    """Allocated memory, and who has used it last."""

    start: int
    nbytes: int
    stream: FakeStream
    writes: dict["Access", Stamp] = dataclasses.field(default_factory=dict)
    reads: dict["Access", Stamp] = dataclasses.field(default_factory=dict)
    label: str = ""


class Access(NamedTuple):
    """Bytes that a stream has used; two streams may use different ones of one block."""

    stream: str
    first: int
    stop: int

    @classmethod
    def of(cls, tensor: torch.Tensor, stream: str) -> "Access":
        """All bytes between the first and the last element."""
        span = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
        nbytes = (span + 1) * tensor.element_size() if tensor.numel() else 0
        return cls(stream, tensor.data_ptr(), tensor.data_ptr() + nbytes)

    def overlaps(self, other: "Access") -> bool:
        return self.first < other.stop and other.first < self.stop


class Races(TorchDispatchMode):
    """Inside, operations are watched; `found` says which of them race."""

    def __init__(self) -> None:
        super().__init__()
        self.compute = self.current = FakeStream("compute")
        self.streams = [self.compute]
        self._open: list[FakeStream] = []
        self.found: list[str] = []
        self._is_watching = True
        self._blocks: dict[int, Block] = {}
        self._starts: list[int] = []
        self._freed: dict[str, list[Block]] = collections.defaultdict(list)

    # -- memory --

    def _block(self, storage: torch.UntypedStorage) -> Block | None:
        """The block that a storage lies in; a new one if it has not been seen."""
        pointer, nbytes = storage.data_ptr(), storage.nbytes()
        if not nbytes:
            return None
        index = bisect.bisect_right(self._starts, pointer) - 1
        if index >= 0:
            block = self._blocks[self._starts[index]]
            if pointer + nbytes <= block.start + block.nbytes:
                return block
        block = self.allocate(pointer, nbytes)
        weakref.finalize(storage, self._free_if_same, pointer, block)
        return block

    def allocate(self, pointer: int, nbytes: int) -> Block:
        """Memory that the current stream takes; what was freed on that stream may be it."""
        for block in self._freed.pop(self.current.name, []):
            for stamp in (*block.writes.values(), *block.reads.values()):
                if not self.current.is_after(stamp):
                    self.found.append(f"{block.label} freed to {self.current.name} while {stamp.stream} may use it")
        block = Block(pointer, nbytes, self.current)
        if pointer not in self._blocks:
            bisect.insort(self._starts, pointer)
        self._blocks[pointer] = block
        return block

    def _free_if_same(self, pointer: int, block: Block) -> None:
        if self._blocks.get(pointer) is block:
            self.free(pointer)

    def free(self, pointer: int) -> None:
        """Memory that goes back to the stream that took it."""
        block = self._blocks.pop(pointer, None)
        if block is not None:
            self._starts.remove(pointer)
            self._freed[block.stream.name].append(block)

    # -- accesses --

    def access(self, tensor: torch.Tensor, what: str, *, writes: bool) -> None:
        """The current stream reads or writes `tensor` now."""
        block = self._block(tensor.untyped_storage())
        if block is None:
            return
        own = Access.of(tensor, self.current.name)
        earlier = block.writes.items() if not writes else (*block.writes.items(), *block.reads.items())
        for other, stamp in earlier:
            if not self.current.is_after(stamp) and own.overlaps(other):
                kind = "writes" if writes else "reads"
                self.found.append(
                    f"{what} on {self.current.name} {kind} what {stamp.stream} may be using: {block.label}"
                )
        (block.writes if writes else block.reads)[own] = self.current.tick()
        block.label = block.label or f"{tensor.numel()} x {tensor.dtype} of {what}"

    @contextlib.contextmanager
    def unwatched(self) -> Iterator[None]:
        self._is_watching = False
        try:
            yield
        finally:
            self._is_watching = True

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if not self._is_watching:
            return func(*args, **(kwargs or {}))
        name = func.name().partition("::")[2]
        if func.namespace == "c10d":
            tensors = [arg for arg in args if isinstance(arg, (torch.Tensor, list, tuple))]
            for position, argument in enumerate(tensors):
                for tensor in _plain(argument):
                    self.access(tensor, name, writes=position not in _READ_BY.get(name.partition(".")[0], ()))
            return func(*args, **(kwargs or {}))
        for spec, argument in zip(func._schema.arguments, args):  # noqa: B905 (defaults may be left out)
            if spec.alias_info is None or spec.alias_info.is_write:
                for tensor in _plain(argument):
                    self.access(tensor, name, writes=spec.alias_info is not None)
        result = func(*args, **(kwargs or {}))
        if not any(spec.alias_info is not None for spec in func._schema.arguments):
            for tensor in _plain(result):
                self.access(tensor, name, writes=True)
        return result

    # -- the engine's device --

    def new_stream(self, *_: Any, **__: Any) -> FakeStream:
        self.streams.append(FakeStream(f"stream {len(self.streams)}"))
        return self.streams[-1]

    @contextlib.contextmanager
    def use(self, stream: FakeStream) -> Iterator[None]:
        assert stream not in self._open, "torch.Stream cannot be entered while it is open (torch 2.11)"
        before, self.current = self.current, stream
        self._open.append(stream)
        try:
            yield
        finally:
            self.current = before
            self._open.remove(stream)


def _plain(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(value) if type(leaf) in (torch.Tensor, torch.nn.Parameter)]


@contextlib.contextmanager
def races_watched() -> Iterator[Races]:
    """Models built inside run on fake streams, with everything they do watched."""
    from megatron_fsdp.machine.allocator import StoragePool
    from megatron_fsdp.machine.device import Device

    races = Races()
    reserve, acquire, release = StoragePool.reserve, StoragePool.acquire, StoragePool.release

    def watched_reserve(pool: StoragePool, *args: Any) -> torch.Tensor:
        with races.unwatched():  # what it allocates is gone again before anything uses it
            return reserve(pool, *args)

    def watched_acquire(pool: StoragePool, tensor: torch.Tensor, *args: Any) -> None:
        acquire(pool, tensor, *args)
        if tensor.untyped_storage().nbytes():
            races.allocate(tensor.data_ptr(), tensor.untyped_storage().nbytes()).label = "gathered weights"

    def watched_release(pool: StoragePool, tensor: torch.Tensor) -> None:
        races.free(tensor.data_ptr())
        release(pool, tensor)

    with contextlib.ExitStack() as stack:
        for target, name, replacement in (
            (Device, "new_stream", races.new_stream),
            (Device, "current_stream", lambda device: races.current),
            (Device, "use", lambda device, stream: races.use(stream)),
            (Device, "record_event", lambda device: FakeEvent(races)),
            (StoragePool, "reserve", watched_reserve),
            (StoragePool, "acquire", watched_acquire),
            (StoragePool, "release", watched_release),
        ):
            stack.enter_context(mock.patch.object(target, name, replacement))
        stack.enter_context(races)
        yield races
