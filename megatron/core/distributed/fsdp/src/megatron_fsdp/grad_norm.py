"""The norm of all gradients, each element counted once, and clipping by it."""

from __future__ import annotations

import functools
import math

import torch
import torch.distributed as dist

from megatron_fsdp.machine.torch_compat import foreach_mul_, foreach_norm, local_tensor, waited
from megatron_fsdp.param_and_grad_buffer import ParamAndGradBuffer
from megatron_fsdp.plan.strategy import Placement
from megatron_fsdp.state.param_group import ParamGroup


@torch.no_grad()
def clip_grad_norm(
    buffer: ParamAndGradBuffer,
    dp_group: dist.ProcessGroup,
    max_norm: float,
    norm_type: float = 2.0,
    tp_group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """Scales all gradients so that their common norm is at most `max_norm`; returns the norm before. **Collective**.

    One reduction of a scalar over `dp_group`, the dense data-parallel ranks, and none if every rank has everything.
    These ranks hold every element of every gradient, those of all experts included: expert-parallel ranks are dense
    data-parallel ones. Of copies, on an axis that replicates, the first rank's counts. Tensor-parallel ranks, if there
    are several, have one more reduction over `tp_group`.

    Raises:
        ValueError: `norm_type` is no number above 0, or `max_norm` none of 0 or more.
    """
    norm_type = float(norm_type)  # as torch's function, which takes "inf" too
    if not max_norm >= 0:  # NaN would be every gradient, and a negative one would turn them round
        raise ValueError(f"max_norm is {max_norm}; expected a number of 0 or more; inf clips nothing")
    if not norm_type > 0:
        raise ValueError(f"norm_type is {norm_type}; expected a number above 0, or inf")
    trained = [(group, param.sharded) for group, param in buffer.trained()]
    groups = {id(group): group for group, _ in trained}
    # Of all groups, not of the gradients that this rank happens to hold: ranks must reduce one dtype.
    dtypes = [dtype for group in groups.values() for dtype in (group.facts.grad_dtype, group.facts.main_dtype)]
    dtype = functools.reduce(torch.promote_types, dtypes, torch.float32)
    grads = [(group, sharded.megatron_fsdp_spec, _grad(sharded)) for group, sharded in trained]
    grads = [(group, spec, grad) for group, spec, grad in grads if grad is not None]
    rows = [grad for _, _, grad in grads]
    is_spread = any(not _is_everywhere(group, dp_group) for group in groups.values())
    counts_here = {key: not is_spread or _counts_here(group) for key, group in groups.items()}
    counted = [grad for group, spec, grad in grads if counts_here[id(group)] and spec.cut_over_tp.counts_here]
    total = _local(counted, norm_type, dtype, buffer.parameter_groups[0].facts.device)
    for ranks in ([dp_group] if is_spread else []) + ([tp_group] if tp_group is not None else []):
        dist.all_reduce(total, op=dist.ReduceOp.MAX if math.isinf(norm_type) else dist.ReduceOp.SUM, group=ranks)
    norm = total if math.isinf(norm_type) else total ** (1.0 / norm_type)
    if rows:
        foreach_mul_(rows, torch.clamp(max_norm / (norm + 1e-6), max=1.0))
    return norm


def _grad(sharded: torch.Tensor) -> torch.Tensor | None:
    """This rank's rows of the attached gradient."""
    grad = getattr(sharded, "decoupled_grad", None)
    grad = sharded.grad if grad is None else grad
    return None if grad is None else waited(local_tensor(grad))  # `to_local()` would tell autograd


def _is_everywhere(group: ParamGroup, dp_group: dist.ProcessGroup) -> bool:
    """Every rank of `dp_group` holds the whole gradient of `group`."""
    sizes = [axis.size for axis, place in _placed(group) if place is not Placement.SHARD]
    return math.prod(sizes) == dp_group.size()


def _counts_here(group: ParamGroup) -> bool:
    return all(axis.rank == 0 for axis, place in _placed(group) if place is not Placement.SHARD)


def _placed(group: ParamGroup) -> zip:
    """(axis, placement of the final gradient) of both axes."""
    return zip(group.facts.axes, group.plan.finalized_grad(), strict=True)


def _local(grads: list[torch.Tensor], norm_type: float, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """This rank's sum of powers (its maximum for the infinity norm)."""
    grads = [grad for grad in grads if grad.numel()]
    if not grads:
        return torch.zeros((), dtype=dtype, device=device)
    norms = torch.stack([norm.to(dtype) for norm in foreach_norm(grads, norm_type, dtype=dtype)])
    return norms.max() if math.isinf(norm_type) else (norms**norm_type).sum()
