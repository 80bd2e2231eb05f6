"""Norm and zeros of gradients that are spread over ranks, each element counted once, and clipping by the norm."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Placement as TensorPlacement

from megatron_fsdp.dtensor.shard_spec import spec_of
from megatron_fsdp.machine.torch_compat import foreach_norm, local_tensor, multiply_each, waited
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
    data-parallel ones. Tensor-parallel ranks, if there are several, have one more reduction over `tp_group`. For norms
    that are not finite see `clip_by_norm`.

    Raises:
        ValueError: `norm_type` is not above 0, or `max_norm` is negative or NaN.
    """
    norm_type = float(norm_type)  # as torch's function, which takes "inf" too
    if not max_norm >= 0:  # NaN would be every gradient, and a negative one would turn them round
        raise ValueError(f"max_norm is {max_norm}; expected a number of 0 or more; inf clips nothing")
    if not norm_type > 0:
        raise ValueError(f"norm_type is {norm_type}; expected a number above 0, or inf")
    groups = [group for group in buffer.parameter_groups if group.main_grad is not None]
    # Of all groups, not of the gradients that this rank happens to hold: ranks must reduce one dtype.
    dtypes = [dtype for group in groups for dtype in (group.spec.grad_dtype, group.spec.main_dtype)]
    dtype = functools.reduce(torch.promote_types, dtypes, torch.float32)
    pairs = [(spec_of(param.sharded), _grad(param.sharded)) for _, param in buffer.trained()]
    found = [(spec, grad) for spec, grad in pairs if grad is not None]
    grads = [grad for _, grad in found]
    if any(_copies(group) != dp_group.size() for group in groups):
        counted, ranks = counted_here(grads), [dp_group]
    else:
        counted, ranks = local_grads(grad for spec, grad in found if spec.cut_over_tp.counts_here), []
    if tp_group is not None:
        ranks.append(tp_group)
    norm = total_norm(counted, ranks, buffer.parameter_groups[0].spec.device, norm_type, dtype)
    clip_by_norm(grads, max_norm, norm)
    return norm


def _grad(sharded: torch.Tensor) -> torch.Tensor | None:
    grad = getattr(sharded, "decoupled_grad", None)
    return sharded.grad if grad is None else grad


def _copies(group: ParamGroup) -> int:
    """The number of ranks that hold the same part of the group's final gradient."""
    placed = zip(group.spec.axes, group.plan.finalized_grad(), strict=True)
    return math.prod(axis.size for axis, place in placed if place is not Placement.SHARD)


def local_grads(grads: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """This rank's rows of each gradient, those without rows left out. Shares storage."""
    # Not `to_local()`, which autograd would know of: the device has nothing to do while these are gone through.
    rows = [waited(local_tensor(grad)) if isinstance(grad, DTensor) else grad.detach() for grad in grads]
    return [grad for grad in rows if grad.numel() > 0]


def counted_here(grads: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """`local_grads` without copies that another rank counts: on a replicated mesh axis the first rank counts alone.

    Plain tensors count on every rank.
    """
    is_first = functools.cache(_is_first_copy)  # most lie alike
    return local_grads(
        grad for grad in grads if not isinstance(grad, DTensor) or is_first(grad.device_mesh, grad.placements)
    )


def _is_first_copy(mesh: DeviceMesh, placements: tuple[TensorPlacement, ...]) -> bool:
    coordinate = mesh.get_coordinate() or ()
    return not any(at and place.is_replicate() for at, place in zip(coordinate, placements, strict=True))


def total_norm(
    rows: list[torch.Tensor],
    groups: Sequence[dist.ProcessGroup],
    device: torch.device,
    norm_type: float = 2.0,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """The norm of all gradients as one vector, a scalar of `dtype` equal on every rank. **Collective** over `groups`.

    `rows` are what counts on this rank. Low-precision norms would overflow or round in their own dtype.
    """
    total = torch.zeros((), dtype=dtype, device=device)
    if rows:
        norms = torch.stack([norm.to(dtype) for norm in foreach_norm(rows, norm_type, dtype=dtype)])
        total = torch.linalg.vector_norm(norms, norm_type)
    if math.isinf(norm_type):
        found = torch.stack([total, total.isnan().to(dtype)])  # a maximum over ranks may pass over NaN
        for group in groups:
            dist.all_reduce(found, op=dist.ReduceOp.MAX, group=group)
        return torch.where(found[1] > 0, math.nan, found[0])
    total = total**norm_type
    for group in groups:
        dist.all_reduce(total, group=group)
    return total ** (1.0 / norm_type)


def clip_by_norm(grads: Iterable[torch.Tensor], max_norm: float, norm: torch.Tensor) -> None:
    """Scales gradients in place so that their norm, `norm` now, is at most `max_norm`; the host does not wait.

    Those of low precision are multiplied in the norm's precision and rounded once.

    A norm that is not finite does what it does in `torch.nn.utils.clip_grad_norm_`: NaN makes all gradients NaN, and
    infinity makes finite ones zero and infinite ones NaN.
    """
    multiply_each(local_grads(grads), torch.clamp(max_norm / (norm + 1e-6), max=1.0))


def count_zeros(grads: Iterable[torch.Tensor], group: dist.ProcessGroup, device: torch.device) -> torch.Tensor:
    """The number of gradient elements that are zero, an int64 scalar, equal on every rank. **Collective**."""
    zeros = torch.zeros((), dtype=torch.int64, device=device)
    for grad in counted_here(grads):
        zeros += grad.numel() - torch.count_nonzero(grad)
    dist.all_reduce(zeros, group=group)
    return zeros
