"""`fully_shard_optimizer`: `step` and `zero_grad` that know the sharded model, and state that torch DCP can store."""

from __future__ import annotations

import functools
import inspect
import types
import weakref
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from megatron_fsdp.local_step import can_step_locally, local_step
from megatron_fsdp.optimizer_state import adopt_state, compact_before_state, count_unmarked, create_state, mark_state
from megatron_fsdp.owner_step import (
    check_state_can_be_stored,
    check_whole,
    create_owned_state,
    step_as_owner,
    whole_kind,
)
from megatron_fsdp.runtime.moment import check_not_taken
from megatron_fsdp.state.param_tags import is_no_shard

_MARK = "_megatron_fsdp_optimizer"
#: Optimizers that cannot work on shards, not even on whole matrices: class -> why.
_UNFIT_FOR_SHARDS = {
    "LBFGS": "its step is a product over all parameters",
    "Rprop": "it picks elements by index, which DTensor cannot",
    "SparseAdam": "it takes sparse gradients only",
}
#: Optimizers whose fused implementation DTensor has no rule for (torch 2.13).
_WITHOUT_FUSED_RULE = ("SGD", "Adagrad")


def fully_shard_optimizer(
    optimizer: torch.optim.Optimizer, preproc_state_dict_for_dcp_ckpt: bool = True
) -> torch.optim.Optimizer:
    """Ties `optimizer`, which holds the parameters of one sharded model, to that model; returns it, changed in place.

    `step` gains `sync_grad_before_optimizer_step=True` (waits for gradient reductions and attaches gradients, unless
    the model does so by itself) and `install_optimized_model_weights=True`; `zero_grad` gains `zero_grad_buffer=True`.
    All ranks must call both. Without the install, the next forward raises until `install_optimized_model_weights()`;
    under strategy 3, which gathers the main weights themselves, it sees the step. `zero_grad` drops the gradients of
    the optimizer's own parameters. `load_state_dict` takes full tensors too. Calling this again changes
    nothing.

    Args:
        optimizer: any torch optimizer that updates element by element; or Muon, SOAP, Shampoo or Adafactor over
            parameters that are marked by `fsdp_single_owner`.
        preproc_state_dict_for_dcp_ckpt: `optimizer.state_dict()` tells torch DCP where every shard lies, and has state
            even before the first step, so that there is something to load into.

    Raises:
        TypeError: `optimizer` is no torch optimizer.
        ValueError: it holds no parameters, some that are not of one sharded model, or shards that it cannot update.
    """
    model = _model_of(optimizer)
    if getattr(optimizer, _MARK, False):
        return optimizer
    check_kind(optimizer)
    setattr(optimizer, _MARK, True)
    optimizer.__deepcopy__ = _refuse_copy  # copy.deepcopy asks the instance
    _wrap_step(optimizer, model)
    _wrap_zero_grad(optimizer, model)
    compact_before_state(optimizer)
    adopt_state(optimizer)
    optimizer.register_load_state_dict_post_hook(adopt_state)
    if _works_as_owner(optimizer):
        optimizer.register_state_dict_pre_hook(check_state_can_be_stored)
        optimizer.register_state_dict_pre_hook(create_owned_state)
    elif preproc_state_dict_for_dcp_ckpt:
        optimizer.register_state_dict_pre_hook(lambda opt: create_state(opt, _bare_step(opt)))
    if preproc_state_dict_for_dcp_ckpt:
        optimizer.register_state_dict_post_hook(lambda opt, state_dict: mark_state(opt))
    return optimizer


def _count_changes(optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict[str, Any]) -> None:
    """Makes the step of any optimizer visible to the model whose parameters it holds.

    Those that update many tensors in one operation leave no trace on DTensors (torch 2.13).
    """
    for group in optimizer.param_groups:
        if group.get("fused") or group.get("foreach"):
            for param in group["params"]:
                if hasattr(param, "_megatron_fsdp_owner"):
                    torch.autograd.graph.increment_version(param)


register_optimizer_step_post_hook(_count_changes)


def _refuse_copy(memo: dict) -> NoReturn:
    raise NotImplementedError(
        "the optimizer of a sharded model cannot be deep-copied: the copy would hold parameters of no model; copy its "
        "state_dict()."
    )


def check_kind(optimizer: torch.optim.Optimizer) -> None:
    """Refuses optimizers that would be wrong on shards, or fail in their first step.

    Raises:
        ValueError: `optimizer` cannot update shards and a parameter is spread over ranks, or its fused implementation
            knows no DTensors.
    """
    _check_fits(optimizer, _is_spread)
    for name in _WITHOUT_FUSED_RULE:
        if _is_kind(optimizer, name) and any(group.get("fused") for group in optimizer.param_groups):
            raise ValueError(f"{name}(fused=True) does not take the DTensors of a sharded model; use foreach=True.")


def check_before_sharding(optimizer: torch.optim.Optimizer) -> None:
    """Refuses what `check_kind` would after sharding over several ranks.

    Raises:
        ValueError: `optimizer` cannot update shards, and not every parameter that it needs whole is marked.
    """
    _check_fits(optimizer, lambda param: not is_no_shard(param) and param.dim() > 0)


def _check_fits(optimizer: torch.optim.Optimizer, is_spread: Callable[[torch.Tensor], bool]) -> None:
    for name, reason in _UNFIT_FOR_SHARDS.items():
        if _is_kind(optimizer, name) and any(map(is_spread, _params_of(optimizer))):
            raise ValueError(
                f"{type(optimizer).__name__} cannot update parameters that are spread over ranks: {reason}. "
                "Use an optimizer that updates element by element, or strategy 0."
            )
    check_whole(optimizer, is_spread)


def _works_as_owner(optimizer: torch.optim.Optimizer) -> bool:
    return whole_kind(optimizer) is not None and any(map(_is_spread, _params_of(optimizer)))


def _is_kind(optimizer: torch.optim.Optimizer, name: str) -> bool:
    kind = getattr(torch.optim, name, None)  # some came with later versions of torch
    return kind is not None and isinstance(optimizer, kind)


def _is_spread(param: torch.Tensor) -> bool:
    spec = getattr(param, "megatron_fsdp_spec", None)
    return spec is not None and spec.is_sharded


def _params_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def _model_of(optimizer: torch.optim.Optimizer) -> Any:
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"expected a torch.optim.Optimizer to shard, got {type(optimizer).__name__}.")
    params = _params_of(optimizer)
    if not params:
        raise ValueError("the optimizer has no parameters; build it from the sharded model's parameters().")
    foreign = next((i for i, param in enumerate(params) if not hasattr(param, "_megatron_fsdp_owner")), None)
    if foreign is not None:
        raise ValueError(
            f"parameter {foreign} of the optimizer, shape {tuple(params[foreign].shape)}, is not of a sharded model; "
            "build the optimizer from the parameters() of what fully_shard_model returned, or pass both to fully_shard."
        )
    models = {id(model): model for model in (param._megatron_fsdp_owner() for param in params)}
    if None in models.values():
        raise ValueError("the sharded model of the optimizer's parameters has been deleted; keep a reference to it.")
    if len(models) > 1:
        raise ValueError(
            f"the optimizer holds parameters of {len(models)} sharded models; use one optimizer for each model."
        )
    return next(iter(models.values()))


def owner_reference(model: Any) -> weakref.ref:
    """What a sharded parameter remembers of its model; weak, so that parameters do not keep the model alive."""
    return weakref.ref(model)


# -- step and zero_grad -----------------------------------------------------------------------------------------------


def _wrap_step(optimizer: torch.optim.Optimizer, model: Any) -> None:
    base = run = _unbound(optimizer.step)
    marks_its_state = False
    if _works_as_owner(optimizer):
        run = functools.partial(_run_as_owner, base)
    elif can_step_locally(optimizer):
        run, marks_its_state = local_step(type(optimizer)), True
    run = _casting_grads(run)
    unmarked = 0
    check_groups = _GroupCheck(optimizer)

    def step(
        self: torch.optim.Optimizer,
        *args: Any,
        sync_grad_before_optimizer_step: bool = True,
        install_optimized_model_weights: bool = True,
        **kwargs: Any,
    ) -> Any:
        nonlocal unmarked
        check_groups(self)
        check_not_taken(model._schedule, "optimizer.step()")
        if _only_wants_state(self, model):
            return _create_any_state(self)
        open_grads = model.param_and_grad_buffer.has_open_grads  # automatic synchronization may have come too late
        if sync_grad_before_optimizer_step and (open_grads or not model.model_auto_sync):
            model.finish_grad_sync()
            args = tuple(_synchronized(arg, model) for arg in args)
            kwargs = {name: _synchronized(arg, model) for name, arg in kwargs.items()}
        result = run(self, *args, **kwargs)
        if not marks_its_state and count_unmarked(self) != unmarked:  # something has just been made
            mark_state(self)
            unmarked = count_unmarked(self)  # what does not lie like its parameter
        if install_optimized_model_weights:
            model.install_optimized_model_weights()
        return result

    _bind(optimizer, "step", step, base)


def _only_wants_state(optimizer: torch.optim.Optimizer, model: Any) -> bool:
    """torch's `get_optimizer_state_dict` makes state with a step of zero gradients, of its own, at a rate of zero.

    A real first step at that rate has gradients of the model's.
    """
    is_still = not optimizer.state and all(group.get("lr") == 0 for group in optimizer.param_groups)
    return is_still and model.param_and_grad_buffer.has_foreign_grads_only


def _create_any_state(optimizer: torch.optim.Optimizer) -> None:
    if _works_as_owner(optimizer):
        create_owned_state(optimizer)
    else:
        create_state(optimizer, _bare_step(optimizer))


def _bare_step(optimizer: torch.optim.Optimizer) -> Callable:
    return getattr(type(optimizer).step, "__wrapped__", type(optimizer).step)


def _run_as_owner(base: Callable, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
    return step_as_owner(optimizer, base, *args, **kwargs)


def _synchronized(argument: Any, model: Any) -> Any:
    """A closure that ends with its backward's gradients attached; anything else as it is."""
    if not callable(argument):
        return argument

    def closure() -> Any:
        loss = argument()
        model.finish_grad_sync()
        return loss

    return closure


def prepare_steps(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Lets `optimizer`, which is not tied to a model here, step as those that are do; returns it, changed in place."""
    compact_before_state(optimizer)
    base = _unbound(optimizer.step)
    run = local_step(type(optimizer)) if can_step_locally(optimizer) else base
    _bind(optimizer, "step", _casting_grads(run), base)
    return optimizer


def _casting_grads(run: Callable) -> Callable:
    """`run`, a step, with gradients in the dtype of their parameters. Stands in for casts inside local steps."""

    def step(self: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        grads = [(p, p.grad) for p in _params_of(self) if p.grad is not None and p.grad.dtype != p.dtype]
        if args or kwargs:  # a closure brings others
            return run(self, *args, **kwargs)
        for param, grad in grads:
            param.grad = grad.to(param.dtype)
        try:
            return run(self)
        finally:
            for param, grad in grads:
                param.grad = grad

    return step


def _wrap_zero_grad(optimizer: torch.optim.Optimizer, model: Any) -> None:
    base = _unbound(optimizer.zero_grad)
    check_groups = _GroupCheck(optimizer)

    def zero_grad(self: torch.optim.Optimizer, *args: Any, zero_grad_buffer: bool = True, **kwargs: Any) -> Any:
        check_groups(self)
        buffer, own = model.param_and_grad_buffer, _params_of(self)  # other parameters may be another optimizer's
        if not zero_grad_buffer:
            buffer.detach_grads(own)
            return base(self, *args, **kwargs)
        result = base(self, *args, **kwargs)
        buffer.forget_grads(own, set_to_none=(*args, kwargs.get("set_to_none", True))[0])
        return result

    _bind(optimizer, "zero_grad", zero_grad, base)


class _GroupCheck:
    """Notices parameter groups that were added later."""

    def __init__(self, optimizer: torch.optim.Optimizer):
        self._count = len(optimizer.param_groups)

    def __call__(self, optimizer: torch.optim.Optimizer) -> None:
        """Raises ValueError if an added group has parameters of another model, or of none."""
        if len(optimizer.param_groups) != self._count:
            _model_of(optimizer)
            check_kind(optimizer)
            self._count = len(optimizer.param_groups)


def _bind(optimizer: torch.optim.Optimizer, name: str, function: Callable, base: Callable) -> None:
    """Makes `function` the optimizer's method `name`, with the class's parameters and its own keyword-only ones."""
    own = [p for p in inspect.signature(function, eval_str=True).parameters.values() if p.kind is p.KEYWORD_ONLY]
    # From the class: a learning-rate scheduler may have put a plain function in the method's place.
    signature = inspect.signature(getattr(type(optimizer), name))
    kept = list(signature.parameters.values())
    tail = [kept.pop()] if kept[-1].kind is inspect.Parameter.VAR_KEYWORD else []
    function.__signature__ = signature.replace(parameters=[*kept, *own, *tail])
    function.__doc__ = base.__doc__
    # Schedulers mark the method they have seen, and warn about another one.
    function.__dict__.update({key: value for key, value in vars(base).items() if key.startswith("_wrapped_by")})
    setattr(optimizer, name, _WeakMethod(function, optimizer))


def _unbound(method: Callable) -> Callable:
    """`method` as a function of its object, which it does not keep alive."""
    if isinstance(method, types.MethodType):
        return method.__func__
    # What schedulers put in its place refers to it weakly, and is marked.
    return functools.wraps(method)(lambda _, *args, **kwargs: method(*args, **kwargs))


class _WeakMethod:
    """A bound method for its own object to hold; a real one would be a cycle, and the model outlive its last use."""

    def __init__(self, function: Callable, owner: Any):
        self.__func__ = function  # read by learning-rate schedulers
        self.__doc__ = function.__doc__
        signature = inspect.signature(function)
        self.__signature__ = signature.replace(parameters=list(signature.parameters.values())[1:])
        self._owner = weakref.ref(owner)

    @property
    def __self__(self) -> Any:
        return self._owner()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__func__, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.__func__(self._owner(), *args, **kwargs)
