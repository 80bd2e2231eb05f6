"""Samplers: the next samples of a data-parallel rank, as a function of the number that all ranks have consumed.

Both samplers yield one list of sample indices per micro-batch. A step of M micro-batches on R ranks consumes M blocks
of micro_batch_size * R samples; resuming needs nothing but that running total, and the order is Megatron-LM's.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True)
class _Blocks:
    """Distribution of samples over ranks; the arguments common to both samplers."""

    total_samples: int
    """Samples in the set."""

    consumed_samples: int
    """Samples that all ranks together have already read."""

    micro_batch_size: int
    """Samples per micro-batch of one rank."""

    data_parallel_rank: int
    """This rank."""

    data_parallel_size: int
    """Ranks that share the set."""

    def __post_init__(self) -> None:
        if self.micro_batch_size < 1 or self.consumed_samples < 0:
            raise ValueError(
                f"expected micro_batch_size >= 1 and consumed_samples >= 0; "
                f"got {self.micro_batch_size} and {self.consumed_samples}"
            )
        if not 0 <= self.data_parallel_rank < self.data_parallel_size:
            raise ValueError(
                f"data_parallel_rank {self.data_parallel_rank} is not in a group of {self.data_parallel_size} ranks"
            )

    @property
    def block(self) -> int:
        """Samples that all ranks together read per micro-batch."""
        return self.micro_batch_size * self.data_parallel_size


@dataclass(frozen=True, kw_only=True)
class MegatronPretrainingSampler(_Blocks):
    """The set in its own order, once: rank r reads the r-th micro-batch of every block but a last, partial one."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.total_samples < 1:
            raise ValueError(f"the data set has {self.total_samples} samples; expected at least one")
        if self.consumed_samples >= self.total_samples:
            raise ValueError(
                f"no samples left: {self.consumed_samples} of the data set's {self.total_samples} are consumed; "
                "use more data, fewer iterations, or --dataloader-type cyclic"
            )

    def __len__(self) -> int:
        return (self.total_samples - self.consumed_samples) // self.block

    def __iter__(self) -> Iterator[list[int]]:
        first = self.consumed_samples + self.data_parallel_rank * self.micro_batch_size
        for start in range(first, first + len(self) * self.block, self.block):
            yield list(range(start, start + self.micro_batch_size))


@dataclass(frozen=True, kw_only=True)
class MegatronPretrainingRandomSampler(_Blocks):
    """The set over and over, without end, shuffled anew every epoch; the epoch's number is the seed."""

    data_sharding: bool = True
    """Each rank shuffles its own contiguous part of the set. If False, one shuffle of all is dealt out in turn."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.total_samples < self.block:
            raise ValueError(
                f"the data set has {self.total_samples} samples, fewer than the {self.block} of one micro-batch "
                f"on {self.data_parallel_size} ranks; use more data or a smaller --micro-batch-size"
            )
        if self.consumed_samples % self.block:
            raise ValueError(
                f"{self.consumed_samples} consumed samples are not whole micro-batches of "
                f"{self.micro_batch_size} on {self.data_parallel_size} ranks; resume with the sizes of the saved run"
            )

    def __iter__(self) -> Iterator[list[int]]:
        blocks_per_epoch = self.total_samples // self.block
        epoch, first_block = divmod(self.consumed_samples // self.block, blocks_per_epoch)
        while True:
            order = self._order(epoch)
            for block in range(first_block, blocks_per_epoch):
                yield order[block * self.micro_batch_size : (block + 1) * self.micro_batch_size]
            epoch, first_block = epoch + 1, 0

    def _order(self, epoch: int) -> list[int]:
        """This rank's samples of one epoch, in reading order."""
        generator = torch.Generator().manual_seed(epoch)
        if self.data_sharding:
            shard = self.total_samples // self.block * self.micro_batch_size
            start = self.data_parallel_rank * shard
            return (torch.randperm(shard, generator=generator) + start).tolist()
        # Megatron-LM shuffles whole micro-batches' worth of samples, which may be more than ranks can share evenly;
        # __iter__ counts blocks, so that no rank reads a rest that the others do not have.
        usable = self.total_samples // self.micro_batch_size * self.micro_batch_size
        return torch.randperm(usable, generator=generator)[self.data_parallel_rank :: self.data_parallel_size].tolist()
