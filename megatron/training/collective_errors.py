"""Decisions that all ranks must take alike."""

from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist

from megatron.training.errors import CollectiveError

Value = TypeVar("Value")


def any_rank(is_true: bool, device: torch.device) -> bool:
    """True on every rank if `is_true` on one. **Collective.**"""
    return bool(largest(int(is_true), device))


def largest(value: int, device: torch.device) -> int:
    """The largest `value` of all ranks. **Collective.**"""
    shared = torch.tensor([value], dtype=torch.int32, device=device)
    dist.all_reduce(shared, op=dist.ReduceOp.MAX)
    return int(shared.item())


def gather_if_any(value: Value, device: torch.device) -> list[Value]:
    """Every rank's `value`, by rank, if one of them is true; otherwise an empty list. **Collective.**"""
    if not any_rank(bool(value), device):
        return []
    values = [value] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def reason(error: OSError | ValueError) -> str:
    """The message of `error` for a user: sentences as they are, the system's errors with the path first."""
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return str(error) or type(error).__name__


def on_first_rank(function: Callable[[], Value], device: torch.device) -> Value:
    """The result of `function` on rank 0, on every rank; if it fails there, every rank raises. **Collective.**

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
        raise CollectiveError(str(answer[1])) from cause
    return answer[0]


def on_every_rank(function: Callable[[], Value], device: torch.device) -> Value:
    """The result of `function` on this rank; if it fails on one, every rank raises alike. **Collective.**

    `function` itself must not communicate. `device` is where the process group's backend communicates.
    """
    value, message, cause = None, None, None
    try:
        value = function()
    except (OSError, ValueError) as error:
        message, cause = reason(error), error
    if messages := gather_if_any(message, device):
        rank, first = next((rank, each) for rank, each in enumerate(messages) if each is not None)
        raise CollectiveError(f"rank {rank}: {first}" if None in messages else first) from cause
    return value
