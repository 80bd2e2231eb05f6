"""All-gathers by copies out of the other ranks' memory, which copy engines make while the multiprocessors compute."""

from __future__ import annotations

import dataclasses
import logging
import socket
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_fsdp.machine.collectives import Axis
from megatron_fsdp.machine.device import Device
from megatron_fsdp.machine.mesh import FSDPDistributedIndex
from megatron_fsdp.machine.torch_compat import symmetric_memory

logger = logging.getLogger(__name__)

#: Buffers in which a rank offers its shards in turn; `PeerGather` says why two are enough.
BUFFERS = 2
#: Buffers begin at multiples of this, so that their bytes can be read as any dtype.
_ALIGNMENT = 512
_OPTION = "copy_engine_gather=True (fsdp_copy_engine_gather)"
#: Another one after every boot, the same in all containers of a host.
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class SymmetricMemory:
    """As many bytes on every rank of an axis, all readable by all of its CUDA devices. **Collective** over `axis`."""

    def __init__(self, nbytes: int, axis: Axis, device: Device):
        self._nbytes = nbytes
        assert device.number is not None and axis.gather_group is not None, "peers are on GPUs, and several"
        place = torch.device("cuda", device.number)
        self._tensor, self._handle = symmetric_memory(nbytes, place, axis.gather_group)

    def of(self, rank: int) -> torch.Tensor:
        """The bytes of the rank with this number on the axis, 1-D."""
        return self._handle.get_buffer(rank, (self._nbytes,), torch.uint8)

    def barrier(self) -> None:
        """Lets what follows on the current stream begin when all ranks' streams have come to theirs. **Collective**.

        A kernel of one warp, which waits for those of the others as long as it takes.
        """
        # Signals lie in the memory itself, which is of one axis: another one's barriers cannot be taken for its.
        self._handle.barrier(channel=0)


class PeerGather:
    """Gathers over one axis, all issued on one stream, and in the same order on every rank.

    Gather i writes this rank's shard to buffer i mod 2, meets the others at barrier i and copies their buffers. What it
    copies is what was written for gather i: a rank writes before its barrier i, and to that buffer again in gather
    i + 2, so after its barrier i + 1, which it leaves only when every rank has come to its own, with all copies of
    gather i behind it. So one barrier for each gather is enough, and one buffer would not be.

    Copies run one after the other on that stream. Spread over 2 or 3 streams they took half as long again, and more
    from products beside them (4 H200, 436 MiB: 1.02 ms alone, 39.8 ms for the products; on 2 streams 1.65 and 41.2).
    """

    def __init__(self, axis: Axis, device: Device):
        self.axis = axis
        self._device = device
        # Every rank begins with its neighbour, so that no rank is read by all at once, and ends with its own.
        self._order = [(axis.rank + step) % axis.size for step in range(1, axis.size + 1)]
        self._memory: SymmetricMemory | None = None
        self._buffer_nbytes = 0
        self._turn = 0
        self._views: dict[tuple[int, int], list[torch.Tensor]] = {}
        """By buffer and bytes of a shard, every rank's: views are made once, since the host must run ahead."""

    @property
    def nbytes(self) -> int:
        """Bytes that this rank holds for its peers to read."""
        return BUFFERS * self._buffer_nbytes

    def allocate(self, shard_nbytes: int, group: dist.ProcessGroup) -> None:
        """Takes memory for shards of up to `shard_nbytes`; nothing if that is 0. **Collective** over axis and `group`.

        Raises:
            ValueError: memory cannot be shared between the processes; on every rank of `group`.
        """
        self._buffer_nbytes = -(-shard_nbytes // _ALIGNMENT) * _ALIGNMENT
        problem = None
        try:
            self._memory = SymmetricMemory(self.nbytes, self.axis, self._device) if shard_nbytes else None
        except RuntimeError as error:
            problem = f"rank {dist.get_rank()} could not share memory with its peers: {error}"
        _raise_on_all(problem, group)

    def gather(self, out: torch.Tensor, shard: torch.Tensor) -> None:
        """Fills `out` with the shards in rank order, on the current stream. **Collective**.

        `shard` is this rank's, perhaps its slice of `out`; of another dtype it is cast on its way.
        """
        if not out.numel():
            return
        assert self._memory is not None, "allocated for the largest shard"
        pieces = out.view(torch.uint8).chunk(self.axis.size)
        shards = self._shards(self._memory, pieces[0].numel())
        own = shards[self.axis.rank]
        own.view(out.dtype).copy_(shard)
        self._memory.barrier()
        for rank in self._order:
            if pieces[rank].data_ptr() != shard.data_ptr():
                pieces[rank].copy_(shards[rank])

    def _shards(self, memory: SymmetricMemory, nbytes: int) -> list[torch.Tensor]:
        """Every rank's `nbytes` of the next gather."""
        buffer, self._turn = self._turn, (self._turn + 1) % BUFFERS
        if (buffer, nbytes) not in self._views:
            assert nbytes <= self._buffer_nbytes, (nbytes, self._buffer_nbytes)
            start = buffer * self._buffer_nbytes
            whole = [memory.of(rank) for rank in range(self.axis.size)]
            self._views[buffer, nbytes] = [buffers[start : start + nbytes] for buffers in whole]
        return self._views[buffer, nbytes]


@dataclasses.dataclass(frozen=True)
class RankLocation:
    """The host and the device of a rank."""

    rank: int
    """Global number."""
    host: tuple[str, str]
    """Name and boot."""
    device: int | None
    """This process's number of its CUDA device; None on the CPU."""


def peer_gathers(index: FSDPDistributedIndex, device: Device) -> dict[bool, PeerGather]:
    """Gathers by copies over the inner axes, by `is_expert`, without memory yet. **Collective**.

    Raises:
        ValueError: ranks of an inner axis cannot read each other's memory; on every data-parallel rank.
    """
    gathers: dict[bool, PeerGather] = {}
    for is_expert in (False, True) if index.expt_fsdp_group is not None else (False,):
        _, inner = index.axes(is_expert)
        _raise_on_all(_problem_on(inner, device) if inner.size > 1 else None, index.get_dp_group(is_expert))
        if inner.size > 1:
            gathers[is_expert] = PeerGather(inner, device)
    if not gathers and dist.get_rank() == 0:
        logger.warning("%s has no effect: the axis over which weights are gathered has one rank.", _OPTION)
    return gathers


def _problem_on(axis: Axis, device: Device) -> str | None:
    """The reason that this rank cannot read its peers' memory. **Collective** over `axis`."""
    host = (socket.gethostname(), _BOOT_ID.read_text(encoding="ascii").strip() if _BOOT_ID.exists() else "")
    own = RankLocation(dist.get_rank(), host, device.number)
    locations = [own] * axis.size
    dist.all_gather_object(locations, own, group=axis.group)
    return problem_between(own, locations, device.reads)


def problem_between(own: RankLocation, locations: Sequence[RankLocation], reads: Callable[[int], bool]) -> str | None:
    """The reason, in words, that the rank at `own` cannot read the memory of those at `locations`; None if it can."""
    for other in locations:
        names = f"rank {own.rank} ({own.host[0]}) and rank {other.rank} ({other.host[0]})"
        if other.host != own.host:
            return f"{names} are on different hosts; an outer axis between hosts leaves an inner one in each"
        if other.rank == own.rank or other.device is None:
            continue
        if other.device == own.device:
            return f"{names} both call their device cuda:{own.device}; let every process see all GPUs of its host"
        if not reads(other.device):
            return f"{names} have devices, cuda:{own.device} and cuda:{other.device}, that do not reach each other"
    return None


def _raise_on_all(problem: str | None, group: dist.ProcessGroup) -> None:
    """Raises ValueError on all ranks of `group` if one of them has a problem. **Collective**."""
    problems = [problem] * group.size()
    dist.all_gather_object(problems, problem, group=group)
    for found in filter(None, problems):
        raise ValueError(
            f"{_OPTION} copies weights out of the memory of GPUs of one host, but {found}. Leave it out otherwise."
        )
