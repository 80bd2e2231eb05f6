"""Partition of parameters over tensor-parallel ranks, from torch's DTensor or megatron-core's tags."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from megatron_fsdp.machine.torch_compat import local_tensor, sharded_dim, waited

TensorParallelMode = Literal["column", "row", "replicated"]
#: The dim of a parameter that tensor-parallel ranks split in each of megatron-core's modes.
PARTITION_DIM: dict[TensorParallelMode, int | None] = {"column": 0, "row": 1, "replicated": None}


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor-parallel tensor: the local tensor of a DTensor; any other value as it is."""
    return waited(local_tensor(tensor)) if isinstance(tensor, DTensor) else tensor


def in_form_of(param: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """`local`, this rank's part, as a DTensor if `param` is one. Shares memory."""
    if not isinstance(param, DTensor):
        return local
    return DTensor.from_local(local, param.device_mesh, param.placements, run_check=False)


class TpRange(NamedTuple):
    """Consecutive indices along the split dim that are consecutive in the local and in the whole tensor."""

    local: int
    whole: int
    length: int


@dataclasses.dataclass(frozen=True)
class TpPartition:
    """Partition of one parameter over tensor-parallel ranks, all of which have equal parts."""

    group: dist.ProcessGroup | None
    """The ranks; None: there is no such axis."""
    rank: int
    size: int
    dim: int | None
    """The dim that is cut; None: every rank has the whole parameter."""
    blocks: int = 1
    """The dim is made of so many blocks, each of which is cut over the ranks (megatron-core's `partition_stride`): of a
    gated layer's [gate; up] rank r has [gate_r; up_r]."""

    @classmethod
    def of(cls, param: torch.Tensor, group: dist.ProcessGroup | None) -> TpPartition:
        """The partition of `param` over `group`; without DTensor or tag every rank has all of it."""
        if group is None:  # tags mean nothing then
            return cls(None, 0, 1, None)
        blocks = 1 if isinstance(param, DTensor) else max(getattr(param, "partition_stride", 1), 1)
        return cls(group, group.rank(), group.size(), split_dim(param), blocks)

    @property
    def is_cut(self) -> bool:
        """Ranks have different parts."""
        return self.dim is not None and self.size > 1

    @property
    def cut_dim(self) -> int | None:
        """The dim in which ranks have different parts; None if they have not."""
        return self.dim if self.is_cut else None

    @property
    def counts_here(self) -> bool:
        """A sum over all ranks' elements takes this rank's: of copies, the first one's."""
        return self.is_cut or self.rank == 0

    def whole_shape(self, local_shape: torch.Size) -> torch.Size:
        """Shape of the parameter of which the local tensors are parts."""
        shape = list(local_shape)
        if (dim := self.cut_dim) is not None:
            shape[dim] *= self.size
        return torch.Size(shape)

    def take(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's part of the whole tensor."""
        if (dim := self.cut_dim) is None:
            return whole
        parts = whole.unflatten(dim, (self.blocks, self.size, -1)).select(dim + 1, self.rank)
        return parts.flatten(dim, dim + 1)

    def ranges(self, low: int, high: int, length: int) -> Iterator[TpRange]:
        """Positions in the whole dim of the indices [low, high) of the local split dim, which has `length`."""
        block = length // self.blocks
        for number in range(self.blocks):
            first, last = max(low, number * block), min(high, (number + 1) * block)
            if first < last:
                start = (number * self.size + self.rank) * block
                yield TpRange(first - low, start + first - number * block, last - first)


def split_dim(param: torch.Tensor) -> int | None:
    """The dim that tensor-parallel ranks split; None if they all have the whole parameter."""
    if isinstance(param, DTensor):
        return sharded_dim(param.placements[0])
    mode = getattr(param, "_tensor_parallel_mode", None)
    return PARTITION_DIM[mode] if mode in PARTITION_DIM else tagged_dim(param)


def tagged_dim(param: torch.Tensor) -> int | None:
    """The dim that megatron-core's tags say ranks split: the first where they name none; None if they say nothing.

    Its state-space and linear-attention layers tag convolutions, norms and what they have of each head without a dim.
    """
    return max(getattr(param, "partition_dim", 0), 0) if getattr(param, "tensor_model_parallel", False) else None
