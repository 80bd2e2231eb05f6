"""Rank of this process, as torchrun sets it in the environment; without torchrun it is the only one."""

import os
from dataclasses import dataclass

ON_EVERY_RANK = {"is_on_every_rank": True}
"""`extra` of a log record that all ranks make alike, so that only rank 0 need show it."""


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """This process among those of the run."""

    rank: int
    """Its number, from 0."""
    local_rank: int
    """Its number on this machine, and so its device."""
    world_size: int
    """Number of processes."""

    @property
    def is_first(self) -> bool:
        """Rank 0 speaks for all."""
        return self.rank == 0

    @staticmethod
    def from_environment() -> "Ranks":
        """As torchrun set them; without it this process is the only one."""
        return Ranks(
            rank=int(os.environ.get("RANK", "0")),
            local_rank=int(os.environ.get("LOCAL_RANK", "0")),
            world_size=int(os.environ.get("WORLD_SIZE", "1")),
        )
