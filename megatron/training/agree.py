"""Decisions that all ranks must take alike."""

from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist

Value = TypeVar("Value")


class FirstRankError(RuntimeError):
    """What rank 0 was to do for all ranks failed; raised on every rank."""


def any_rank(is_true: bool, device: torch.device) -> bool:
    """Whether `is_true` on any rank. **Collective.**"""
    flag = torch.tensor([is_true], dtype=torch.int32, device=device)
    dist.all_reduce(flag, op=dist.ReduceOp.MAX)
    return bool(flag.item())


def reason(error: OSError | ValueError) -> str:
    """The message of `error` for a user: sentences as they are, the system's errors with the path first."""
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return str(error)


def on_first_rank(function: Callable[[], Value], device: torch.device) -> Value:
    """What `function` gives on rank 0, on every rank; if it fails there, every rank raises. **Collective.**

    `device` is where the process group's backend communicates.
    """
    answer: list[object] = [None, None]
    cause = None
    if dist.get_rank() == 0:
        try:
            answer[0] = function()
        except (OSError, ValueError) as error:
            cause = error
            answer[1] = reason(error)
    dist.broadcast_object_list(answer, src=0, device=device)
    if answer[1] is not None:
        raise FirstRankError(str(answer[1])) from cause
    return answer[0]
