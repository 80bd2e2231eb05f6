"""`fully_shard_optimizer`: `step` and `zero_grad` that know the sharded model, and state that torch DCP can store."""

from __future__ import annotations

import copy
import inspect
import types
import weakref
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from megatron_fsdp.dtensor import ShardSpec

_MARK = "_megatron_fsdp_optimizer"
#: Scalar state after zero steps, by name, for optimizers whose state can be made in advance.
_SCALAR_STATE = {"step": 0.0, "mu_product": 1.0}


def fully_shard_optimizer(
    optimizer: torch.optim.Optimizer, preproc_state_dict_for_dcp_ckpt: bool = True
) -> torch.optim.Optimizer:
    """Ties `optimizer`, which holds the parameters of one sharded model, to that model; returns it, changed in place.

    `step` gains `sync_grad_before_optimizer_step=True` (waits for gradient reductions and attaches gradients, unless the
    model does so by itself) and `install_optimized_model_weights=True`; `zero_grad` gains `zero_grad_buffer=True`.
    All ranks must call both. Calling this again changes nothing.

    Args:
        optimizer: any torch optimizer that updates element by element.
        preproc_state_dict_for_dcp_ckpt: `optimizer.state_dict()` tells torch DCP where every shard lies, and has state
            even before the first step, so that there is something to load into.

    Raises:
        ValueError: the optimizer holds no parameters, or some that are not of one sharded model.
    """
    model = _model_of(optimizer)
    if getattr(optimizer, _MARK, False):
        return optimizer
    setattr(optimizer, _MARK, True)
    _wrap_step(optimizer, model)
    _wrap_zero_grad(optimizer, model)
    if preproc_state_dict_for_dcp_ckpt:
        bare_step = getattr(type(optimizer).step, "__wrapped__", type(optimizer).step)
        optimizer.register_state_dict_pre_hook(lambda opt: create_state(opt, bare_step))
        optimizer.register_state_dict_post_hook(_mark_state)
    return optimizer


def _model_of(optimizer: torch.optim.Optimizer) -> Any:
    params = [param for group in optimizer.param_groups for param in group["params"]]
    if not params:
        raise ValueError("the optimizer has no parameters; build it from the sharded model's parameters().")
    models = {id(model): model for model in (_owner(param) for param in params)}
    if None in models.values():
        foreign = next(i for i, param in enumerate(params) if _owner(param) is None)
        raise ValueError(
            f"parameter {foreign} of the optimizer, shape {tuple(params[foreign].shape)}, is not of a sharded model; build the "
            "optimizer from the parameters() of what fully_shard_model returned, or pass both to fully_shard."
        )
    if len(models) > 1:
        raise ValueError(f"the optimizer holds parameters of {len(models)} sharded models; use one optimizer per model.")
    return next(iter(models.values()))


def _owner(param: torch.Tensor) -> Any:
    reference = getattr(param, "_megatron_fsdp_owner", None)
    return reference() if reference is not None else None


def _wrap_step(optimizer: torch.optim.Optimizer, model: Any) -> None:
    base = optimizer.step

    def step(
        self: torch.optim.Optimizer,
        *args: Any,
        sync_grad_before_optimizer_step: bool = True,
        install_optimized_model_weights: bool = True,
        **kwargs: Any,
    ) -> Any:
        if sync_grad_before_optimizer_step and not model.model_auto_sync:
            model.finish_grad_sync()
        result = base(*args, **kwargs)
        if install_optimized_model_weights:
            model.install_optimized_model_weights()
        return result

    _bind(optimizer, "step", step, base)


def _wrap_zero_grad(optimizer: torch.optim.Optimizer, model: Any) -> None:
    base = optimizer.zero_grad

    def zero_grad(self: torch.optim.Optimizer, *args: Any, zero_grad_buffer: bool = True, **kwargs: Any) -> Any:
        result = base(*args, **kwargs)
        if zero_grad_buffer:
            model.zero_grad_buffer()
        return result

    _bind(optimizer, "zero_grad", zero_grad, base)


def _bind(optimizer: torch.optim.Optimizer, name: str, function: Any, base: Any) -> None:
    """Sets a bound method with `base`'s parameters plus `function`'s own keyword-only ones as its signature."""
    signature = inspect.signature(base)
    added = [p for p in inspect.signature(function).parameters.values() if p.kind is p.KEYWORD_ONLY]
    kept = list(signature.parameters.values())
    tail = [kept.pop()] if kept and kept[-1].kind is inspect.Parameter.VAR_KEYWORD else []
    own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    function.__signature__ = signature.replace(parameters=[own, *kept, *added, *tail])
    function.__doc__ = base.__doc__
    # A real bound method: learning-rate schedulers read `step.__func__`.
    setattr(optimizer, name, types.MethodType(function, optimizer))


# -- state ------------------------------------------------------------------------------------------------------------


@torch.no_grad()
def create_state(optimizer: torch.optim.Optimizer, bare_step: Any) -> None:
    """Gives an optimizer that has not stepped yet the state of zero steps; parameters and options stay as they are.

    Made by one step with zero gradients, zero learning rate and zero weight decay, undone afterwards.

    Raises:
        ValueError: the optimizer's first step leaves state that a step of zeros does not; step once before saving.
    """
    if any(optimizer.state.values()):
        return
    grads = [(param, param.grad) for group in optimizer.param_groups for param in group["params"]]
    options = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    saved = copy.deepcopy(options)
    for group in optimizer.param_groups:
        group.update({key: _like(group[key], 0.0) for key in ("lr", "weight_decay") if key in group})
    try:
        for param, _ in grads:
            if param.requires_grad:
                param.grad = torch.zeros_like(param)
        bare_step(optimizer)
        _to_zero_steps(optimizer)
    finally:
        for param, grad in grads:
            param.grad = grad
        for group, values in zip(optimizer.param_groups, saved, strict=True):
            group.update(values)


def _like(value: Any, number: float) -> Any:
    return torch.full_like(value, number) if isinstance(value, torch.Tensor) else type(value)(number)


def _to_zero_steps(optimizer: torch.optim.Optimizer) -> None:
    for param, state in optimizer.state.items():
        for key, value in state.items():
            if isinstance(value, DTensor):
                # The check of values is a local one; every rank must come to the same end, so only the name decides.
                continue
            if key not in _SCALAR_STATE and value is not None:
                optimizer.state.clear()
                raise ValueError(
                    f"{type(optimizer).__name__} keeps {key!r}, whose value before the first step is unknown; "
                    "call step() once before state_dict()."
                )
            if isinstance(value, torch.Tensor):
                value.fill_(_SCALAR_STATE[key])
            elif value is not None:
                state[key] = type(value)(_SCALAR_STATE[key])


def _mark_state(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
    """Tells torch DCP where every shard of the state lies; the indices of a state dict follow the groups' order."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    indices = [index for group in state_dict["param_groups"] for index in group["params"]]
    for index, param in zip(indices, params, strict=True):
        mark_param_state(param.megatron_fsdp_spec, state_dict["state"].get(index, {}))


def mark_param_state(spec: ShardSpec, state: dict[str, Any]) -> None:
    """Marks every tensor of one parameter's optimizer state that lies like the parameter."""
    for value in state.values():
        if spec.fits(value):
            spec.mark(value)


def shard_state(spec: ShardSpec, state: dict[str, Any]) -> dict[str, Any]:
    """A full parameter's optimizer state with its parameter-shaped tensors cut to this rank's rows."""
    return {
        key: spec.wrap(spec.cut(value).detach().to(spec.mesh.device_type).clone())
        if isinstance(value, torch.Tensor) and value.shape == spec.shape and value.dim() > 0
        else value
        for key, value in state.items()
    }


def owner_reference(model: Any) -> weakref.ref:
    """What a sharded parameter remembers of its model; weak, so that parameters do not keep the model alive."""
    return weakref.ref(model)
