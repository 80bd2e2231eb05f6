"""How a parameter is spread over tensor-parallel ranks, as torch's DTensor or megatron-core's tags say it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from megatron_fsdp.machine.torch_compat import local_tensor, sharded_dim, waited

#: What the adapter for megatron-core has found out about a parameter -> the dim that its ranks split.
_DIM_BY_MODE: dict[str, int | None] = {"column": 0, "row": 1, "replicated": None}


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor-parallel tensor: what lies inside a DTensor; any other tensor as it is."""
    return waited(local_tensor(tensor)) if isinstance(tensor, DTensor) else tensor


def in_form_of(param: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """`local`, this rank's part, as a DTensor if `param` is one. Shares memory."""
    if not isinstance(param, DTensor):
        return local
    return DTensor.from_local(local, param.device_mesh, param.placements, run_check=False)


class Stretch(NamedTuple):
    """A run of indices along the split dim that lie together in the local and in the whole tensor."""

    local: int
    whole: int
    length: int


@dataclasses.dataclass(frozen=True)
class TensorCut:
    """How one parameter is cut over tensor-parallel ranks, all of which have equal parts."""

    group: dist.ProcessGroup | None
    """The ranks; None: there is no such axis."""
    rank: int
    size: int
    dim: int | None
    """The dim that is cut; None: every rank has the whole parameter."""
    blocks: int = 1
    """The dim is made of so many blocks, each of which is cut over the ranks (megatron-core's `partition_stride`): of a
    gated layer's [gate; up] rank r has [gate_r; up_r]."""

    @property
    def is_cut(self) -> bool:
        """Ranks have different parts."""
        return self.dim is not None and self.size > 1

    @property
    def counts_here(self) -> bool:
        """A sum over all ranks' elements takes this rank's: of copies, the first one's."""
        return self.is_cut or self.rank == 0

    def whole_shape(self, local_shape: torch.Size) -> torch.Size:
        """Shape of the parameter of which the local tensors are parts."""
        shape = list(local_shape)
        if self.is_cut:
            shape[self.dim] *= self.size
        return torch.Size(shape)

    def take(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's part of the whole tensor."""
        if not self.is_cut:
            return whole
        parts = whole.unflatten(self.dim, (self.blocks, self.size, -1)).select(self.dim + 1, self.rank)
        return parts.flatten(self.dim, self.dim + 1)

    def join(self, stacked: torch.Tensor) -> torch.Tensor:
        """The whole tensor from all ranks' parts, shape (size * length, *rest), the split dim in front."""
        stacked = stacked.unflatten(0, (self.size, self.blocks, -1)).transpose(0, 1)
        return stacked.flatten(0, 2).movedim(0, self.dim).contiguous()

    def stretches(self, low: int, high: int, length: int) -> Iterator[Stretch]:
        """Where indices [low, high) of the local split dim, which has `length`, lie in the whole one."""
        block = length // self.blocks
        for number in range(self.blocks):
            first, last = max(low, number * block), min(high, (number + 1) * block)
            if first < last:
                start = (number * self.size + self.rank) * block
                yield Stretch(first - low, start + first - number * block, last - first)


def tensor_cut(param: torch.Tensor, group: dist.ProcessGroup | None) -> TensorCut:
    """How `param` is cut over the tensor-parallel `group`; without DTensor or tag every rank has all of it."""
    if group is None:  # tags mean nothing then
        return TensorCut(None, 0, 1, None, 1)
    size, rank = group.size(), group.rank()
    dim, blocks = split_dim(param), 1
    if dim is not None and not isinstance(param, DTensor):
        blocks = max(getattr(param, "partition_stride", 1), 1)
    return TensorCut(group, rank, size, dim, blocks)


def split_dim(param: torch.Tensor) -> int | None:
    """The dim that tensor-parallel ranks split; None if they all have the whole parameter."""
    if isinstance(param, DTensor):
        return sharded_dim(param.placements[0])
    mode = getattr(param, "_tensor_parallel_mode", None)
    if mode in _DIM_BY_MODE:
        return _DIM_BY_MODE[mode]
    return tagged_dim(param)


def tagged_dim(param: torch.Tensor) -> int | None:
    """The dim that megatron-core's tags say ranks split: the first where they name none; None if they say nothing.

    Its state-space and linear-attention layers tag convolutions, norms and what they have of each head without a dim.
    """
    return max(getattr(param, "partition_dim", 0), 0) if getattr(param, "tensor_model_parallel", False) else None
