"""Move a flat tensor from one placement to another."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist

from megatron_fsdp.machine.torch_compat import all_gather_single, premul_sum, reduce_scatter_single


@dataclasses.dataclass(frozen=True)
class Axis:
    """One data-parallel axis: its ranks, this rank's place among them, and its communicators."""

    group: dist.ProcessGroup | None
    """Reductions. None for an axis of one rank."""
    gather_group: dist.ProcessGroup | None
    """Gathers; the same ranks in the same order, on a communicator of its own where one was given."""
    rank: int
    size: int

    @classmethod
    def of(cls, group: dist.ProcessGroup | None, gather_group: dist.ProcessGroup | None = None) -> Axis:
        """The axis of `group`; of one rank if it is None."""
        if group is None or group.size() == 1:
            return SOLO
        return cls(group, gather_group or group, group.rank(), group.size())


#: The axis of one rank.
SOLO = Axis(None, None, 0, 1)


@dataclasses.dataclass(frozen=True)
class GradScale:
    """Scaling of gradients in a reduction: multiplied by `pre`, then combined by `op`."""

    pre: float
    average: bool
    fused: bool = True
    """Let the backend multiply while it reduces, where it can."""

    @property
    def op(self) -> dist.ReduceOp.RedOpType:
        """SUM or AVG."""
        return dist.ReduceOp.AVG if self.average else dist.ReduceOp.SUM

    @property
    def for_the_rest(self) -> GradScale:
        """The scaling over the axes that follow: the factor belongs to the whole reduction, and has been applied."""
        return GradScale(1.0, self.average, self.fused)


NO_SCALE = GradScale(1.0, average=False)


def all_gather(out: torch.Tensor, shard: torch.Tensor, axis: Axis) -> None:
    """Fills `out` (numel = axis.size * shard.numel) with the shards in rank order. **Collective** over `axis`.

    `shard` may be this rank's slice of `out`.
    """
    if axis.size == 1:
        if out.data_ptr() != shard.data_ptr():
            out.copy_(shard)
        return
    all_gather_single(out, shard, group=axis.gather_group)


def reduce_scatter(out: torch.Tensor, full: torch.Tensor, axis: Axis, scale: GradScale = NO_SCALE) -> None:
    """Fills `out` with this rank's piece of the reduction of `full`. **Collective** over `axis`; may overwrite `full`.

    `out` may be this rank's slice of `full`.
    """
    op = _prepare(full, axis, scale)
    if axis.size == 1:
        if out.data_ptr() != full.data_ptr():
            out.copy_(full)
        return
    reduce_scatter_single(out, full, op=op, group=axis.group)


def all_reduce(full: torch.Tensor, axis: Axis, scale: GradScale = NO_SCALE) -> None:
    """Reduces `full` in place. **Collective** over `axis`."""
    op = _prepare(full, axis, scale)
    if axis.size > 1:
        dist.all_reduce(full, op=op, group=axis.group)


def largest(numbers: Sequence[int], groups: Iterable[dist.ProcessGroup], device: torch.device | str) -> list[int]:
    """The largest of each of the integers over all ranks of these groups. **Collective** over each group in turn."""
    most = torch.tensor(numbers, dtype=torch.int64, device=device)
    for group in groups:
        table = most.repeat(group.size(), 1)  # a fake backend writes nothing: then all ranks are like this one
        all_gather_single(table.view(-1), most, group=group)
        most = table.amax(dim=0)
    return most.tolist()


def _prepare(full: torch.Tensor, axis: Axis, scale: GradScale) -> dist.ReduceOp | dist.ReduceOp.RedOpType:
    """Scales `full` unless the reduction can, and gives the reduction operator."""
    if scale.pre == 1.0:
        return scale.op
    if scale.fused and not scale.average and _is_nccl(axis):
        if full.dtype in (torch.float32, torch.float64):
            return premul_sum(scale.pre)
        # Never premultiplied: torch 2.11 hands NCCL a float's bytes as the bf16 factor, whose lower half is 0, and the
        # sum becomes zero. NCCL's own average knows the dtype.
        if scale.pre == 1.0 / axis.size:
            return dist.ReduceOp.AVG
    full.mul_(scale.pre)
    return scale.op


def _is_nccl(axis: Axis) -> bool:
    # Gloo takes PREMUL_SUM without an error and without documented numerics.
    return axis.size > 1 and dist.get_backend(axis.group) == "nccl"
