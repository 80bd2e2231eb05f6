"""The norm of all gradients, each element counted once, and clipping by it."""

from __future__ import annotations

import functools
import math

import torch
import torch.distributed as dist

from megatron_fsdp.dtensor import dp_groups
from megatron_fsdp.machine.torch_compat import foreach_mul_, foreach_norm
from megatron_fsdp.param_and_grad_buffer import ParamAndGradBuffer


@torch.no_grad()
def clip_grad_norm(buffer: ParamAndGradBuffer, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
    """Scales all gradients so that their common norm is at most `max_norm`; returns the norm before. **Collective**.

    Shards are summed over the ranks that hold them, replicated gradients counted once. One reduction of a scalar per
    data-parallel group.
    """
    parts: dict[tuple[dist.ProcessGroup, ...], list[torch.Tensor]] = {}
    # Of all groups, not of the gradients that this rank happens to hold: ranks must reduce one dtype.
    dtype = functools.reduce(torch.promote_types, (group.facts.grad_dtype for group, _ in buffer.trained()), torch.float32)
    for group, _ in buffer.trained():
        dtype = torch.promote_types(dtype, group.facts.main_dtype)
    for group, param in buffer.trained():
        grad = getattr(param.sharded, "decoupled_grad", None)
        grad = param.sharded.grad if grad is None else grad
        if grad is not None:
            parts.setdefault(tuple(dp_groups(group)), []).append(grad.to_local())
        else:
            parts.setdefault(tuple(dp_groups(group)), [])
    device = buffer.parameter_groups[0].facts.device
    totals = [_reduced(_local(locals_, norm_type, dtype, device), groups, norm_type) for groups, locals_ in parts.items()]
    if not totals:
        return torch.zeros((), device=device)
    stacked = torch.stack(totals)
    norm = stacked.max() if math.isinf(norm_type) else stacked.sum() ** (1.0 / norm_type)
    coefficient = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for locals_ in parts.values():
        if locals_:
            foreach_mul_(locals_, coefficient)
    return norm


def _local(grads: list[torch.Tensor], norm_type: float, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """This rank's sum of powers (its maximum for the infinity norm)."""
    grads = [grad for grad in grads if grad.numel()]
    if not grads:
        return torch.zeros((), dtype=dtype, device=device)
    norms = torch.stack([norm.to(dtype) for norm in foreach_norm(grads, norm_type, dtype=dtype)])
    return norms.max() if math.isinf(norm_type) else (norms**norm_type).sum()


def _reduced(value: torch.Tensor, groups: tuple[dist.ProcessGroup, ...], norm_type: float) -> torch.Tensor:
    op = dist.ReduceOp.MAX if math.isinf(norm_type) else dist.ReduceOp.SUM
    for group in groups:
        dist.all_reduce(value, op=op, group=group)
    return value
