"""The only place that knows CUDA from CPU: streams, events, memory."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Sequence
from typing import Protocol

import torch


class Event(Protocol):
    """A point in a stream's work."""

    def record(self, stream: object | None = None) -> None: ...
    def wait(self, stream: object | None = None) -> None: ...


class NullEvent:
    """The CPU's event: work is finished when its call returns. (`torch.cpu.Event` lacks `elapsed_time`.)"""

    def record(self, stream: object | None = None) -> None:
        """Does nothing."""

    def wait(self, stream: object | None = None) -> None:
        """Does nothing."""


class Moment(Protocol):
    """When a stream came to a point in its work."""

    def ms_since(self, earlier: Moment) -> float: ...


@dataclasses.dataclass(frozen=True)
class HostMoment:
    """The CPU's moment: it is over when it is noted."""

    time_s: float

    def ms_since(self, earlier: HostMoment) -> float:
        """Milliseconds between the two."""
        return (self.time_s - earlier.time_s) * 1000


@dataclasses.dataclass(frozen=True)
class CudaMoment:
    """An event with a clock; to be read once the device has come to it."""

    event: torch.Event

    def ms_since(self, earlier: CudaMoment) -> float:
        """Milliseconds between the two."""
        return earlier.event.elapsed_time(self.event)


@dataclasses.dataclass(frozen=True)
class PeakMemory:
    """The most memory, in bytes, that torch has had on the device since the process began or the peaks were reset."""

    allocated: int
    """Held by tensors."""
    reserved: int
    """Taken from the device."""


class NullStream:
    """The CPU's stream: work runs where it is issued."""

    def wait_stream(self, stream: object) -> None:
        """Does nothing."""

    def wait_event(self, event: object) -> None:
        """Does nothing."""


class Device:
    """Streams, events and memory of one device; the same calls on CUDA and CPU."""

    def __init__(self, device: torch.device):
        self.torch_device = device
        self.is_cuda = device.type == "cuda"

    @classmethod
    def current(cls) -> Device:
        """The current CUDA device if there is one, else the CPU."""
        if torch.cuda.is_available():
            return cls(torch.device("cuda", torch.cuda.current_device()))
        return cls(torch.device("cpu"))

    @property
    def has_streams(self) -> bool:
        """Work on a stream runs beside that of other streams."""
        return self.is_cuda

    def new_stream(self, *, high_priority: bool = False) -> torch.cuda.Stream | NullStream:
        """A stream beside the compute stream."""
        if not self.is_cuda:
            return NullStream()
        return torch.cuda.Stream(self.torch_device, priority=-1 if high_priority else 0)

    def current_stream(self) -> torch.cuda.Stream | NullStream:
        """The stream on which the caller's work is issued."""
        return torch.cuda.current_stream(self.torch_device) if self.is_cuda else NullStream()

    def use(self, stream: object) -> contextlib.AbstractContextManager:
        """Issues work, and allocates, on `stream` inside the context."""
        # The stream itself, in native code: `torch.cuda.stream()` takes 5 microseconds of Python, several times a unit.
        # It must not be entered again while it is open (torch 2.11).
        return stream if self.is_cuda else contextlib.nullcontext()

    def join(self, streams: Sequence[object]) -> None:
        """Makes the current stream and `streams` wait for each other."""
        current = self.current_stream()
        for stream in streams:
            current.wait_stream(stream)
        for stream in streams:
            stream.wait_stream(current)

    @property
    def number(self) -> int | None:
        """What this process calls its CUDA device; None on the CPU."""
        if not self.is_cuda:
            return None
        return torch.cuda.current_device() if self.torch_device.index is None else self.torch_device.index

    def reads(self, number: int) -> bool:
        """The CUDA device that this process calls `number`, another one than this, lets this one read its memory."""
        return number < torch.cuda.device_count() and torch.cuda.can_device_access_peer(self.number, number)

    def record_event(self) -> Event:
        """An event recorded on the current stream."""
        if not self.is_cuda:
            return NullEvent()
        # Not `torch.cuda.Event`, whose Python looks for the current stream first: this is native code throughout.
        event = torch.Event(self.torch_device)
        event.record()
        return event

    def record_moment(self) -> Moment:
        """The moment when the current stream comes here."""
        if not self.is_cuda:
            return HostMoment(time.perf_counter())
        event = torch.Event(self.torch_device, enable_timing=True)
        event.record()
        return CudaMoment(event)

    def synchronize(self) -> None:
        """Makes the host wait for all that was issued."""
        if self.is_cuda:
            torch.cuda.synchronize(self.torch_device)

    def peak_memory(self) -> PeakMemory | None:
        """What the caching allocator says; None on the CPU, which has none."""
        if not self.is_cuda:
            return None
        allocated = torch.cuda.max_memory_allocated(self.torch_device)
        return PeakMemory(allocated, torch.cuda.max_memory_reserved(self.torch_device))

    def range(self, name: str) -> contextlib.AbstractContextManager:
        """A named range for profilers."""
        return torch.cuda.nvtx.range(name) if self.is_cuda else contextlib.nullcontext()

    def free_nbytes(self) -> int:
        """Memory that this process can still take; what torch has cached counts only above its highest use so far."""
        if not self.is_cuda:
            return 0
        free, _ = torch.cuda.mem_get_info(self.torch_device)
        reserved = torch.cuda.memory_reserved(self.torch_device)
        return max(0, free + reserved - torch.cuda.max_memory_reserved(self.torch_device))

    def empty_cache(self) -> None:
        """Returns cached free blocks to the device."""
        if self.is_cuda:
            torch.cuda.empty_cache()


def default_device_type() -> str:
    """The mesh's device type when the user names none."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def join_device(local_rank: int) -> None:
    """Makes this process's CUDA device current, unless the process has chosen one already; nothing on the CPU."""
    if torch.cuda.is_available() and not torch.cuda.is_initialized():
        torch.cuda.set_device(local_rank)
