"""`fully_shard_optimizer`: `step` and `zero_grad` that know the sharded model, and state that torch DCP can store."""

from __future__ import annotations

import functools
import inspect
import types
import weakref
from collections.abc import Callable
from typing import Any, NoReturn

import torch

from megatron_fsdp.machine.torch_compat import uncompiled
from megatron_fsdp.optim import local_step
from megatron_fsdp.optim.kinds import check_fits, check_reads_grads, owned_kind, params_of
from megatron_fsdp.state.param_tags import OWNER_TAG

_MARK = "_megatron_fsdp_optimizer"


def fully_shard_optimizer(
    optimizer: torch.optim.Optimizer, preproc_state_dict_for_dcp_ckpt: bool = True
) -> torch.optim.Optimizer:
    """Ties `optimizer`, which holds the parameters of one sharded model, to that model; returns it, changed in place.

    `step` gains `sync_grad_before_optimizer_step=True` (waits for gradient reductions and attaches gradients, unless
    the model does so by itself) and `install_optimized_model_weights=True`; `zero_grad` gains `zero_grad_buffer=True`.
    All ranks must call both. Without the install, forwards compute with the values from before the step until
    `install_optimized_model_weights()`; where none are kept beside the main weights, the next forward raises.
    `zero_grad` drops the gradients of the optimizer's own parameters. `load_state_dict` takes full tensors too. Calling
    this again changes nothing.

    Args:
        optimizer: any torch optimizer that updates element by element; or Muon, SOAP, Shampoo or Adafactor over
            parameters that are marked by `fsdp_single_owner`.
        preproc_state_dict_for_dcp_ckpt: `optimizer.state_dict()` tells torch DCP where every shard lies, and has state
            even before the first step, so that there is something to load into.

    Raises:
        TypeError: `optimizer` is not a `torch.optim.Optimizer`.
        ValueError: it holds no parameters, some that are not of one sharded model, or shards that it cannot update; or
            it reads gradients elsewhere than the model attaches them (`use_decoupled_grad`).
    """
    model = _model_of(optimizer)
    if getattr(optimizer, _MARK, False):
        return optimizer
    check_fits(optimizer)
    check_reads_grads(optimizer, are_decoupled=model.param_and_grad_buffer.are_grads_decoupled)
    model.step_guard.is_active = False
    setattr(optimizer, _MARK, True)
    vars(optimizer)["__deepcopy__"] = _refuse_copy  # copy.deepcopy asks the instance
    _bind(optimizer, "step", functools.partial(_make_step, model))
    _bind(optimizer, "zero_grad", functools.partial(_make_zero_grad, model))
    local_step.compact_before_state(optimizer)
    local_step.adopt_state(optimizer)
    optimizer.register_load_state_dict_post_hook(local_step.adopt_state)
    optimizer.register_state_dict_pre_hook(
        functools.partial(_before_state_dict, is_prepared=preproc_state_dict_for_dcp_ckpt)
    )
    return optimizer


def prepare_steps(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Lets `optimizer`, which is not tied to a model here, step as those that are do; returns it, changed in place."""
    local_step.compact_before_state(optimizer)
    optimizer.register_load_state_dict_post_hook(local_step.adopt_state)
    _bind(optimizer, "step", local_step.engine_step)
    return optimizer


def _refuse_copy(memo: dict) -> NoReturn:
    raise NotImplementedError(
        "the optimizer of a sharded model cannot be deep-copied: the copy would hold parameters of no model; copy its "
        "state_dict()."
    )


def _before_state_dict(optimizer: torch.optim.Optimizer, *, is_prepared: bool) -> None:
    """Makes and marks state; raises NotImplementedError if each rank would store other state."""
    owned = owned_kind(optimizer)
    if owned is not None and owned.state is None:
        raise NotImplementedError(
            f"the state of {type(optimizer).__name__} lies on the owner of each parameter, and is not shaped like it, "
            "so a sharded state dict cannot hold it; checkpoint the model alone, or use strategy 0."
        )
    if owned is not None or is_prepared:
        local_step.create_state(optimizer)
    if is_prepared:
        local_step.adopt_state(optimizer)


def _model_of(optimizer: torch.optim.Optimizer) -> Any:
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"expected a torch.optim.Optimizer to shard, got {type(optimizer).__name__}.")
    params = params_of(optimizer)
    if not params:
        raise ValueError("the optimizer has no parameters; build it from the sharded model's parameters().")
    foreign = next((i for i, param in enumerate(params) if not hasattr(param, OWNER_TAG)), None)
    if foreign is not None:
        raise ValueError(
            f"parameter {foreign} of the optimizer, shape {tuple(params[foreign].shape)}, is not of a sharded model; "
            "build the optimizer from the parameters() of what fully_shard_model returned, or pass both to fully_shard."
        )
    models = {vars(param)[OWNER_TAG]() for param in params}
    if None in models:
        raise ValueError("the sharded model of the optimizer's parameters has been deleted; keep a reference to it.")
    if len(models) > 1:
        raise ValueError(
            f"the optimizer holds parameters of {len(models)} sharded models; use one optimizer for each model."
        )
    return models.pop()


# -- step and zero_grad -----------------------------------------------------------------------------------------------


def _make_step(model: Any, optimizer: torch.optim.Optimizer, base: Callable) -> Callable:
    run, known_groups = local_step.engine_step(optimizer, base), len(optimizer.param_groups)

    def step(
        self: torch.optim.Optimizer,
        *args: Any,
        sync_grad_before_optimizer_step: bool = True,
        install_optimized_model_weights: bool = True,
        **kwargs: Any,
    ) -> Any:
        nonlocal known_groups
        if len(self.param_groups) != known_groups:
            _model_of(self)
            check_fits(self)
            known_groups = len(self.param_groups)
        model._schedule.check_unblocked("optimizer.step()")
        if _only_wants_state(self, model):
            return local_step.create_state(self)
        open_grads = model.param_and_grad_buffer.has_open_grads  # automatic synchronization may have come too late
        if sync_grad_before_optimizer_step and (open_grads or not model.model_auto_sync):
            model.finish_grad_sync()
            args, kwargs = local_step.around_closures(args, kwargs, lambda: None, model.finish_grad_sync)
        result = run(self, *args, **kwargs)
        if install_optimized_model_weights:
            model.install_optimized_model_weights()
        else:
            model._schedule.note_uninstalled_step(params_of(self))
        return result

    return step


def _only_wants_state(optimizer: torch.optim.Optimizer, model: Any) -> bool:
    """torch's `get_optimizer_state_dict` makes state with a step of zero gradients, of its own, at a rate of zero.

    A real first step at that rate has gradients of the model's.
    """
    is_still = not optimizer.state and all(group.get("lr") == 0 for group in optimizer.param_groups)
    return is_still and model.param_and_grad_buffer.has_foreign_grads_only


def _make_zero_grad(model: Any, optimizer: torch.optim.Optimizer, base: Callable) -> Callable:
    def zero_grad(self: torch.optim.Optimizer, *args: Any, zero_grad_buffer: bool = True, **kwargs: Any) -> Any:
        buffer, own = model.param_and_grad_buffer, params_of(self)  # other parameters may be another optimizer's
        if not zero_grad_buffer:
            buffer.detach_grads(own)
            return base(self, *args, **kwargs)
        result = base(self, *args, **kwargs)
        buffer.forget_grads(own, set_to_none=(*args, kwargs.get("set_to_none", True))[0])
        return result

    return zero_grad


@uncompiled
def _untraced(function: Callable, *args: Any, **kwargs: Any) -> Any:
    """Calls `function`. The compiler's own wrapper would refer to it in a cycle, and with it to the model."""
    return function(*args, **kwargs)


def _bind(
    optimizer: torch.optim.Optimizer, name: str, make: Callable[[torch.optim.Optimizer, Callable], Callable]
) -> None:
    """Replaces the optimizer's method `name` by what `make` makes of it, a function of the optimizer.

    It has the class's parameters and its own keyword-only ones, and is not traced by torch.compile. It is bound to a
    weak proxy, since a reference to the optimizer would be a cycle, and the model outlive its last use.
    """
    method, owner = getattr(optimizer, name), weakref.ref(optimizer)
    # A method that a learning-rate scheduler has put here is bound already, and refers to the optimizer weakly.
    base = getattr(method, "__func__", None) or (lambda _, *args, **kwargs: method(*args, **kwargs))
    function = make(optimizer, base)
    own = [p for p in inspect.signature(function, eval_str=True).parameters.values() if p.kind is p.KEYWORD_ONLY]
    signature = inspect.signature(getattr(type(optimizer), name))  # the scheduler's is another one

    def unbound(_: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        return _untraced(function, owner(), *args, **kwargs)

    # Schedulers mark the method that they have seen, and warn about another one.
    vars(unbound).update({key: value for key, value in vars(method).items() if key.startswith("_wrapped_by")})
    params = sorted([*signature.parameters.values(), *own], key=lambda param: param.kind)
    vars(unbound)["__signature__"], unbound.__doc__ = signature.replace(parameters=params), method.__doc__
    setattr(optimizer, name, types.MethodType(unbound, weakref.proxy(optimizer)))
