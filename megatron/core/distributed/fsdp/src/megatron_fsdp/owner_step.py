"""Optimizers that need whole matrices: each rank updates those that it owns, as plain tensors, and sends nothing."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from megatron_fsdp.dtensor import ShardSpec
from megatron_fsdp.local_step import Lent, holding
from megatron_fsdp.machine.torch_compat import local_tensor, waited
from megatron_fsdp.state.param_tags import has_single_owner, is_no_shard


@dataclasses.dataclass(frozen=True)
class WholeKind:
    """What an optimizer needs whole, and why."""

    reason: str
    least_dims: int = 2
    """Parameters of fewer dims may be cut anywhere."""
    state: tuple[str, ...] | None = None
    """Names of its state, all of it shaped like the parameter and zero at first; None: shaped otherwise."""


#: Optimizers whose step on a parameter reads all of it, by the name of their class or of one above it.
WHOLE_KINDS: dict[str, WholeKind] = {
    "Muon": WholeKind("it orthogonalizes whole matrices", state=("momentum_buffer",)),
    "SOAP": WholeKind("it rotates whole matrices into the eigenbasis of their own statistics"),
    "Shampoo": WholeKind("its preconditioners are products of whole matrices"),
    "DistributedShampoo": WholeKind("its preconditioners are products of whole matrices"),
    "Adafactor": WholeKind("its second moments are sums over rows and columns", least_dims=1),
}


def whole_kind(optimizer: torch.optim.Optimizer) -> WholeKind | None:
    """What `optimizer` needs whole; None: it updates element by element, as far as its name tells."""
    names = (cls.__name__ for cls in type(optimizer).__mro__)
    return next((WHOLE_KINDS[name] for name in names if name in WHOLE_KINDS), None)


def check_whole(optimizer: torch.optim.Optimizer, is_spread: Callable[[torch.Tensor], bool]) -> None:
    """Refuses an optimizer that needs whole matrices over rows of them.

    Args:
        optimizer: over the parameters before or after sharding.
        is_spread: says of a parameter whether it is, or will be, divided among ranks.

    Raises:
        ValueError: some parameter is neither replicated nor marked by `fsdp_single_owner`.
    """
    kind = whole_kind(optimizer)
    if kind is None:
        return
    params = [param for group in optimizer.param_groups for param in group["params"]]
    cut = [param for param in params if param.dim() >= kind.least_dims and not _is_whole(param) and is_spread(param)]
    if cut:
        raise ValueError(
            f"{type(optimizer).__name__} cannot update parameters whose rows are spread over ranks: {kind.reason}. "
            f"{len(cut)} of its {len(params)} parameters are (the first has shape {tuple(cut[0].shape)}); mark them "
            "with fsdp_single_owner() before sharding, or use strategy 0, or an optimizer that updates element by "
            "element."
        )


def _is_whole(param: torch.Tensor) -> bool:
    spec: ShardSpec | None = getattr(param, "megatron_fsdp_spec", None)
    if spec is not None and spec.cut_over_tp.is_cut:
        return False
    return has_single_owner(param) or is_no_shard(param)


def check_state_can_be_stored(optimizer: torch.optim.Optimizer) -> None:
    """Refuses a state dict that would hold other things on each rank.

    Raises:
        NotImplementedError: the optimizer's state is not shaped like its parameters.
    """
    kind = whole_kind(optimizer)
    if kind is not None and kind.state is None:
        raise NotImplementedError(
            f"the state of {type(optimizer).__name__} lies on the owner of each parameter, and is not shaped like it, "
            "so a sharded state dict cannot hold it; checkpoint the model alone, or use strategy 0."
        )


@torch.no_grad()
def create_owned_state(optimizer: torch.optim.Optimizer) -> None:
    """The state of zero steps of an optimizer that has none yet, on every rank, empty where it owns nothing."""
    kind = whole_kind(optimizer)
    if kind.state is None or any(optimizer.state.values()):
        return
    for group in optimizer.param_groups:
        for param in group["params"]:
            if param.requires_grad:
                spec: ShardSpec = param.megatron_fsdp_spec
                local = param.to_local()
                optimizer.state[param] = {name: spec.wrap(torch.zeros_like(local)) for name in kind.state}


def step_as_owner(optimizer: torch.optim.Optimizer, bare: Callable, *args: Any, closure: Callable | None = None) -> Any:
    """One step of `bare`, the optimizer's own, over what this rank owns of the parameters. No collective of its own."""
    closure = args[0] if args else closure
    loss = None
    if closure is not None:  # its gradients are attached to the sharded parameters, so it comes first
        with torch.enable_grad():
            loss = closure()
    create_owned_state(optimizer)
    with holding(optimizer, _owned_by(optimizer)):
        result = bare(optimizer)
    return loss if closure is not None else result


def _owned_by(optimizer: torch.optim.Optimizer) -> list[list[Lent]]:
    """By group, this rank's rows of parameters with gradients, as parameters of their own."""
    return [
        [
            Lent(param, nn.Parameter(local_tensor(param).detach()), _local(param.grad), _state_of(optimizer, param))
            for param in group["params"]
            if param.grad is not None and local_tensor(param).numel()
        ]
        for group in optimizer.param_groups
    ]


def _state_of(optimizer: torch.optim.Optimizer, param: nn.Parameter) -> dict[str, Any]:
    return {name: _local(value) for name, value in optimizer.state.get(param, {}).items()}


def _local(value: Any) -> Any:
    return waited(local_tensor(value)) if isinstance(value, DTensor) else value
