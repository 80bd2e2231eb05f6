"""Optimizers by what they need of shards: tables by class, and the refusals that follow from them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch

from megatron_fsdp.state.param_tags import has_single_owner, is_no_shard

#: Optimizers of torch that update element by element and pass over parameters without a gradient.
_ELEMENTWISE = ("ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "SGD")


@dataclasses.dataclass(frozen=True)
class WholeKind:
    """Need of an optimizer class for whole parameters, and its reason."""

    reason: str
    least_dims: int = 2
    """Parameters of fewer dims may be cut anywhere."""
    state: tuple[str, ...] | None = None
    """Names of its state, all of it shaped like the parameter and zero at first; None: shaped otherwise."""
    takes_owned: bool = True
    """It can update those matrices that this rank owns; False: it needs all of them."""


#: Optimizers whose step on a parameter reads all of it, by the name of their class or of one above it.
_WHOLE_KINDS: dict[str, WholeKind] = {
    "Muon": WholeKind("it orthogonalizes whole matrices", state=("momentum_buffer",)),
    "SOAP": WholeKind("it rotates whole matrices into the eigenbasis of their own statistics"),
    "Shampoo": WholeKind("its preconditioners are products of whole matrices"),
    "DistributedShampoo": WholeKind("its preconditioners are products of whole matrices"),
    "Adafactor": WholeKind("its second moments are sums over rows and columns", least_dims=1),
    "LBFGS": WholeKind("its step is a product over all parameters", least_dims=0, takes_owned=False),
    "Rprop": WholeKind("it picks elements by index, which DTensor cannot", least_dims=0, takes_owned=False),
    "SparseAdam": WholeKind("it takes sparse gradients only", least_dims=0, takes_owned=False),
}


def params_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """The parameters of all groups."""
    return [param for group in optimizer.param_groups for param in group["params"]]


def is_elementwise(optimizer: torch.optim.Optimizer) -> bool:
    """True for torch's own element-wise classes with their own `step`; subclasses of them may do anything."""
    kind = type(optimizer)
    if kind.__name__ not in _ELEMENTWISE or optimizer.defaults.get("differentiable"):
        return False
    step, origins = kind.step, [kind.__module__]
    while step is not None:  # `functools.wraps` copies names, but not globals
        origins.append(getattr(step, "__globals__", {}).get("__name__", ""))
        step = getattr(step, "__wrapped__", None)
    return all(origin.startswith("torch.optim.") for origin in origins)


def owned_kind(optimizer: torch.optim.Optimizer) -> WholeKind | None:
    """Kind of an optimizer that needs parameters whole, so that each rank updates those it owns; None: no need."""
    return _whole_kind(optimizer) if any(map(_is_spread, params_of(optimizer))) else None


def check_fits(optimizer: torch.optim.Optimizer) -> None:
    """Refuses an optimizer that would be wrong on its sharded parameters.

    Raises:
        ValueError: `optimizer` cannot update shards, and a parameter is spread over ranks.
    """
    _check(optimizer, _is_spread)


def check_before_sharding(optimizer: torch.optim.Optimizer) -> None:
    """Refuses what `check_fits` would after sharding over several ranks. Raises ValueError."""
    _check(optimizer, lambda param: not is_no_shard(param) and param.dim() > 0)


def _check(optimizer: torch.optim.Optimizer, is_spread: Callable[[torch.Tensor], bool]) -> None:
    kind, params = _whole_kind(optimizer), params_of(optimizer)
    if kind is None:
        return
    cut = [param for param in params if param.dim() >= kind.least_dims and is_spread(param)]
    if kind.takes_owned:
        cut = [param for param in cut if not _is_whole(param)]
    if cut:
        remedy = "mark them with fsdp_single_owner() before sharding, or " if kind.takes_owned else ""
        raise ValueError(
            f"{type(optimizer).__name__} cannot update parameters whose rows are spread over ranks: {kind.reason}. "
            f"{len(cut)} of its {len(params)} parameters are (the first has shape {tuple(cut[0].shape)}); {remedy}use "
            "strategy 0, or an optimizer that updates element by element."
        )


def _whole_kind(optimizer: torch.optim.Optimizer) -> WholeKind | None:
    names = (cls.__name__ for cls in type(optimizer).__mro__)
    return next((_WHOLE_KINDS[name] for name in names if name in _WHOLE_KINDS), None)


def _is_spread(param: torch.Tensor) -> bool:
    spec = getattr(param, "megatron_fsdp_spec", None)
    return spec is not None and spec.is_sharded


def _is_whole(param: torch.Tensor) -> bool:
    spec = getattr(param, "megatron_fsdp_spec", None)
    if spec is not None and spec.cut_over_tp.is_cut:
        return False
    return has_single_owner(param) or is_no_shard(param)
