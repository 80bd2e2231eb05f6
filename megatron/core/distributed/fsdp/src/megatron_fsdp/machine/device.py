"""The only place that knows CUDA from CPU: streams, events, memory."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Sequence
from typing import Any, Protocol

import torch


class Stream(Protocol):
    """`torch.cuda.Stream` or `torch.cpu.Stream`; on the CPU work is finished when its call returns."""

    def wait_stream(self, stream: Any, /) -> None:  # Any: each waits for its own kind, and a process has one kind
        """Makes later work wait for what is on `stream`."""


#: A point in a stream's work. On the CPU waiting for it does nothing.
Event = torch.Event | torch.cpu.Event


@dataclasses.dataclass(frozen=True)
class HostTime:
    """The CPU's event with a clock, which `torch.cpu.Event` lacks."""

    time_s: float

    def elapsed_time(self, later: HostTime) -> float:
        """Milliseconds until `later`."""
        return (later.time_s - self.time_s) * 1000


class TimedEvent(Protocol):
    """A point in a stream's work with a clock: `torch.Event` or `HostTime`."""

    def elapsed_time(self, later: Any, /) -> float:  # Any: of its own kind
        """Milliseconds until `later`, once the device has come to both."""


@dataclasses.dataclass(frozen=True)
class PeakMemory:
    """The most memory, in bytes, that torch has had on the device since the process began or the peaks were reset."""

    allocated: int
    """Held by tensors."""
    reserved: int
    """Taken from the device."""


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

    def new_stream(self, *, high_priority: bool = False) -> Stream:
        """A stream beside the compute stream."""
        if not self.is_cuda:
            return torch.cpu.Stream()
        return torch.cuda.Stream(self.torch_device, priority=-1 if high_priority else 0)

    def current_stream(self) -> Stream:
        """The stream on which the caller's work is issued."""
        return torch.cuda.current_stream(self.torch_device) if self.is_cuda else torch.cpu.Stream()

    def use(self, stream: Stream) -> contextlib.AbstractContextManager:
        """Issues work, and allocates, on `stream` inside the context."""
        # The stream itself, in native code: `torch.cuda.stream()` takes 5 microseconds of Python, several times a unit.
        # It must not be entered again while it is open (torch 2.11).
        return stream if self.is_cuda else contextlib.nullcontext()  # type: ignore[return-value]  # CUDA's is one

    def join(self, streams: Sequence[Stream]) -> None:
        """Makes the current stream and `streams` wait for each other."""
        current = self.current_stream()
        for stream in streams:
            current.wait_stream(stream)
        for stream in streams:
            stream.wait_stream(current)

    @property
    def number(self) -> int | None:
        """This process's number of its CUDA device; None on the CPU."""
        if not self.is_cuda:
            return None
        return torch.cuda.current_device() if self.torch_device.index is None else self.torch_device.index

    def reads(self, number: int) -> bool:
        """The CUDA device that this process calls `number`, another one than this, lets this one read its memory."""
        return number < torch.cuda.device_count() and torch.cuda.can_device_access_peer(self.number, number)

    def record_event(self) -> Event:
        """An event recorded on the current stream."""
        if not self.is_cuda:
            return torch.cpu.Event()
        # Not `torch.cuda.Event`, whose Python looks for the current stream first: this is native code throughout.
        event = torch.Event(self.torch_device)
        event.record()
        return event

    def record_timed_event(self) -> TimedEvent:
        """An event with a clock, recorded on the current stream."""
        if not self.is_cuda:
            return HostTime(time.perf_counter())
        event = torch.Event(self.torch_device, enable_timing=True)
        event.record()
        return event

    def synchronize(self) -> None:
        """Makes the host wait for all that was issued."""
        if self.is_cuda:
            torch.cuda.synchronize(self.torch_device)

    def peak_memory(self) -> PeakMemory | None:
        """Peaks of the caching allocator; None on the CPU, which has none."""
        if not self.is_cuda:
            return None
        allocated = torch.cuda.max_memory_allocated(self.torch_device)
        return PeakMemory(allocated, torch.cuda.max_memory_reserved(self.torch_device))

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
