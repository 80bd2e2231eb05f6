"""Peers: ranks that gather by copies out of each other's memory, and the memory that they offer."""

from __future__ import annotations

import dataclasses
import logging
import socket
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch.distributed as dist

from megatron_fsdp.config import EngineConfig
from megatron_fsdp.machine.collectives import Axis
from megatron_fsdp.machine.device import Device
from megatron_fsdp.machine.mesh import FSDPDistributedIndex
from megatron_fsdp.machine.copy_engine import PeerGather, SymmetricMemory
from megatron_fsdp.state.param_group import ParamGroup

logger = logging.getLogger(__name__)

_OPTION = "copy_engine_gather=True (fsdp_copy_engine_gather)"
#: Another one after every boot, the same in all containers of a host.
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclasses.dataclass(frozen=True)
class Seat:
    """Where a rank computes."""

    rank: int
    """Of all ranks."""
    host: tuple[str, str]
    """Name and boot."""
    device: int | None
    """The number by which its process calls its CUDA device; None on the CPU."""


def make_peers(config: EngineConfig, index: FSDPDistributedIndex, device: Device) -> dict[bool, PeerGather]:
    """Gathers by copies over the inner axes, by `is_expert`; none unless asked for. **Collective** if they are.

    Raises:
        ValueError: ranks of an inner axis cannot read each other's memory; on every data-parallel rank.
    """
    if not config.gathers_by_copies:
        return {}
    peers: dict[bool, PeerGather] = {}
    for is_expert in (False, True) if index.expt_fsdp_group is not None else (False,):
        _, inner = index.axes(is_expert)
        problem = _problem_on(inner, device) if inner.size > 1 else None
        _agree(problem, index.get_dp_group(is_expert))
        if inner.size > 1:
            peers[is_expert] = PeerGather(inner, device)
    if not peers and dist.get_rank() == 0:
        logger.warning("%s has no effect: the axis over which weights are gathered has one rank.", _OPTION)
    return peers


def open_peers(groups: Sequence[ParamGroup], index: FSDPDistributedIndex) -> None:
    """Gives gathers by copies the memory that these groups, all of the model, need. **Collective** if there are any.

    Raises:
        ValueError: memory cannot be shared between the processes; on every data-parallel rank.
    """
    for is_expert in (False, True):
        members = [group for group in groups if group.spec.is_expert == is_expert and group.spec.peers is not None]
        if not members:
            continue
        problem = None
        try:
            members[0].spec.peers.open(max(group.sent_nbytes for group in members), SymmetricMemory)
        except RuntimeError as error:
            problem = f"rank {dist.get_rank()} could not share memory with its peers: {error}"
        _agree(problem, index.get_dp_group(is_expert))


def offered_nbytes(groups: Iterable[ParamGroup]) -> int:
    """Bytes that this rank holds for its peers to read."""
    return sum(peers.nbytes for peers in {group.spec.peers for group in groups} if peers is not None)


def _problem_on(axis: Axis, device: Device) -> str | None:
    """Why this rank cannot read its peers' memory. **Collective** over `axis`."""
    host = (socket.gethostname(), _BOOT_ID.read_text(encoding="ascii").strip() if _BOOT_ID.exists() else "")
    own = Seat(dist.get_rank(), host, device.number)
    seats: list[Seat] = [own] * axis.size
    dist.all_gather_object(seats, own, group=axis.group)
    return problem_between(own, seats, device.reads)


def problem_between(own: Seat, seats: Sequence[Seat], reads: Callable[[int], bool]) -> str | None:
    """Why the rank at `own` cannot read the memory of those at `seats`, in words; None if it can."""
    for other in seats:
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


def _agree(problem: str | None, group: dist.ProcessGroup) -> None:
    """Raises ValueError on all ranks of `group` if one of them has a problem. **Collective**."""
    problems = [problem] * group.size()
    dist.all_gather_object(problems, problem, group=group)
    found = next((found for found in problems if found is not None), None)
    if found is not None:
        raise ValueError(
            f"{_OPTION} copies weights out of the memory of GPUs of one host, but {found}. Leave it out otherwise."
        )
