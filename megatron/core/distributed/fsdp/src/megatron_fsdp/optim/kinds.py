"""Optimizers by what they need of shards: tables by class, and the refusals that follow from them."""

from __future__ import annotations

import dataclasses

import torch

from megatron_fsdp.dtensor.shard_spec import spec_of
from megatron_fsdp.state.param_tags import SPEC_TAG, has_single_owner, is_no_shard

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
    steps = kind.step, getattr(kind.step, "__wrapped__", None)  # torch's hooks are around it
    # `functools.wraps` copies names, but not globals.
    origins = [kind.__module__, *(getattr(step, "__globals__", {}).get("__name__", "") for step in steps)]
    is_torchs = all(origin.startswith("torch.optim.") for origin in origins)
    return is_torchs and kind.__name__ in _ELEMENTWISE and not optimizer.defaults.get("differentiable")


def owned_kind(optimizer: torch.optim.Optimizer) -> WholeKind | None:
    """The needs of an optimizer over sharded parameters, of which each rank updates those that it owns; None: none."""
    return _whole_kind(optimizer) if any(map(_is_spread, params_of(optimizer))) else None


def check_fits(optimizer: torch.optim.Optimizer) -> None:
    """Refuses an optimizer that is wrong on its parameters, or will be when they are sharded over several ranks.

    Raises:
        ValueError: `optimizer` cannot update shards, and a parameter is or will be spread over ranks.
    """
    kind, params = _whole_kind(optimizer), params_of(optimizer)
    if kind is None:
        return
    cut = [param for param in params if param.dim() >= kind.least_dims and _is_spread(param)]
    if kind.takes_owned:
        cut = [param for param in cut if not has_single_owner(param) or _is_cut_over_tp(param)]
    if cut:
        remedy = "mark them with fsdp_single_owner() before sharding, or " if kind.takes_owned else ""
        raise ValueError(
            f"{type(optimizer).__name__} cannot update parameters whose rows are spread over ranks: {kind.reason}. "
            f"{len(cut)} of its {len(params)} parameters are (the first has shape {tuple(cut[0].shape)}); {remedy}use "
            "strategy 0, or an optimizer that updates element by element."
        )


def check_reads_grads(optimizer: torch.optim.Optimizer, *, are_decoupled: bool) -> None:
    """Refuses an optimizer that looks for gradients elsewhere than the model attaches them.

    One that reads `decoupled_grad` has an attribute `use_decoupled_grad=True`, as TransformerEngine's FusedAdam.

    Raises:
        ValueError: it would find no gradient, and weights would never move.
    """
    if bool(getattr(optimizer, "use_decoupled_grad", False)) is bool(are_decoupled):
        return
    read, attached = ("grad", "decoupled_grad") if are_decoupled else ("decoupled_grad", "grad")
    raise ValueError(
        f"{type(optimizer).__name__} reads `.{read}`, but with use_decoupled_grad={are_decoupled} the model attaches "
        f"gradients as `.{attached}`, and weights would never move; give both the same use_decoupled_grad. (An "
        "optimizer that reads `.decoupled_grad` says so by an attribute use_decoupled_grad=True.)"
    )


def _whole_kind(optimizer: torch.optim.Optimizer) -> WholeKind | None:
    names = (cls.__name__ for cls in type(optimizer).__mro__)
    return next((_WHOLE_KINDS[name] for name in names if name in _WHOLE_KINDS), None)


def _is_spread(param: torch.Tensor) -> bool:
    spec = getattr(param, SPEC_TAG, None)
    return spec.is_sharded if spec is not None else param.dim() > 0 and not is_no_shard(param)


def _is_cut_over_tp(param: torch.Tensor) -> bool:
    return hasattr(param, SPEC_TAG) and spec_of(param).cut_over_tp.is_cut
