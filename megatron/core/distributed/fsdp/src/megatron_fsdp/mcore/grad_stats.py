"""Norm and zeros of gradients that are spread over ranks, each element counted once, with one collective each."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from megatron_fsdp.machine.torch_compat import foreach_mul_, foreach_norm, local_tensor, waited

#: As in megatron-core: keeps a zero norm from dividing by zero.
_CLIP_EPS = 1e-6


def local_grads(grads: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """This rank's rows of each gradient, those without rows left out. Shares storage."""
    # Not `to_local()`, which autograd would know of: the device has nothing to do while these are gone through.
    rows = [waited(local_tensor(grad)) if isinstance(grad, DTensor) else grad.detach() for grad in grads]
    return [grad for grad in rows if grad.numel() > 0]


def counted_here(grads: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """`local_grads` without copies that another rank counts: on a replicated mesh axis the first rank counts alone."""
    is_first: dict[tuple, bool] = {}  # most lie alike
    mine = []
    for grad in grads:
        if isinstance(grad, DTensor):
            key = id(grad.device_mesh), grad.placements
            if key not in is_first:
                is_first[key] = _is_first_copy(grad)
            if not is_first[key]:
                continue
        mine.append(grad)
    return local_grads(mine)


def total_norm(grads: Sequence[torch.Tensor], group: dist.ProcessGroup, device: torch.device) -> torch.Tensor:
    """The 2-norm of all gradients as one vector, a float32 scalar equal on every rank. **Collective** over `group`.

    `grads` are DTensors, empty shards included; plain tensors count on every rank of `group`.
    """
    mine = counted_here(grads)
    square = torch.zeros((), dtype=torch.float32, device=device)
    if mine:
        # The norms of low-precision gradients would overflow or round in their own dtype.
        norms = foreach_norm(mine, 2.0, dtype=torch.float32)
        square = torch.linalg.vector_norm(torch.stack(norms)).square()
    dist.all_reduce(square, group=group)
    return square.sqrt()


def clip_by_norm(grads: Sequence[torch.Tensor], max_norm: float, norm: torch.Tensor) -> None:
    """Scales gradients in place so that their norm, `norm` now, is at most `max_norm`; the host does not wait."""
    rows = local_grads(grads)
    if not rows:
        return
    scale = max_norm / (norm + _CLIP_EPS)
    # A NaN norm compares false and leaves the gradients alone, as megatron-core does.
    scale = torch.where(scale < 1.0, scale, torch.ones_like(scale))
    foreach_mul_(rows, scale)


def count_zeros(grads: Sequence[torch.Tensor], group: dist.ProcessGroup, device: torch.device) -> torch.Tensor:
    """How many gradient elements are exactly zero, an int64 scalar equal on every rank. **Collective** over `group`."""
    mine = counted_here(grads)
    zeros = torch.zeros((), dtype=torch.int64, device=device)
    if mine:
        nonzeros = torch.stack([torch.count_nonzero(grad) for grad in mine]).sum()
        zeros = sum(grad.numel() for grad in mine) - nonzeros
    dist.all_reduce(zeros, group=group)
    return zeros


def _is_first_copy(grad: DTensor) -> bool:
    coordinate = grad.device_mesh.get_coordinate()
    return all(
        position == 0
        for position, placement in zip(coordinate, grad.placements, strict=True)
        if placement.is_replicate()
    )
