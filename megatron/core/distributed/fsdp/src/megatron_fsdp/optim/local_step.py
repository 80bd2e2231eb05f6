"""Steps of optimizers on this rank's rows: the one place where `step()` meets tensors that are no DTensors.

DTensor's dispatch works out placements of hundreds of tensors anew in every call, which takes the host 0.1 ms a layer
(docs/performance.md), and no optimizer that reads whole matrices can work on rows. So while `step()` computes, the
optimizer holds local tensors, with local gradients and local state. Everybody else sees the model's DTensors.
"""

from __future__ import annotations

import collections
import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, NoReturn

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from megatron_fsdp.machine.torch_compat import foreach_copy_, local_tensor, waited
from megatron_fsdp.optim.kinds import is_elementwise, owned_kind, params_of
from megatron_fsdp.optim.state import MARK, as_shard, create_state, mark_state


def engine_step(optimizer: torch.optim.Optimizer, base: Callable) -> Callable:
    """`base`, the optimizer's own `step` as a function of it, on local tensors where that is right.

    torch's own element-wise classes and those that own whole matrices step on local tensors, and torch's hooks of the
    step run outside. Other classes may take norms over a parameter, say, so they keep DTensors. All of them find
    gradients in their parameters' dtype.
    """
    is_owner = owned_kind(optimizer) is not None
    if not is_owner and ("step" in vars(optimizer) or not is_elementwise(optimizer)):
        return _step_on_dtensors(base)
    if getattr(base, "__globals__", {}).get("__name__") != torch.optim.Optimizer.__module__:
        return _step_on_rows(base, is_owner=is_owner)  # replaced in the class, around torch's hooks
    return torch.optim.Optimizer.profile_hook_step(_step_on_rows(base.__wrapped__, is_owner=is_owner))


def _step_on_rows(bare: Callable, *, is_owner: bool) -> Callable:
    @functools.wraps(bare)
    def step(self: torch.optim.Optimizer, closure: Callable | None = None) -> Any:
        loss = None
        if closure is not None:  # its gradients are attached to DTensors, so it comes first
            with torch.enable_grad():
                loss = closure()
        if is_owner:
            create_state(self)  # on every rank, whatever it owns
        with on_rows(self, is_owner=is_owner):
            result = bare(self)
        return result if closure is None else loss

    return step


class _Held(NamedTuple):
    """One parameter as the optimizer holds it inside a step."""

    param: nn.Parameter
    rows: torch.Tensor
    state: dict[str, Any]
    """Its own, which has local tensors inside the step."""
    shards: dict[str, Any]
    """State as users have seen it."""


@contextlib.contextmanager
def on_rows(optimizer: torch.optim.Optimizer, *, is_owner: bool = False) -> Iterator[None]:
    """Inside, the optimizer holds the local tensors of its parameters that have gradients, with local state.

    Args:
        is_owner: it needs whole matrices: it gets those that this rank has, as parameters, and may keep any state.

    Raises:
        ValueError: a gradient or state lies otherwise than its parameter.
    """
    groups, state = optimizer.param_groups, optimizer.state
    # A learning rate may be a DTensor too, which cannot be multiplied with local tensors.
    shown = [{k: v for k, v in group.items() if k == "params" or isinstance(v, DTensor)} for group in groups]
    held: list[_Held] = []
    refusal = optimizer.register_state_dict_pre_hook(_refuse_state_dict)
    optimizer.state = collections.defaultdict(dict)
    try:
        for group, options in zip(groups, shown, strict=True):
            group.update({name: value.to_local() for name, value in options.items() if name != "params"})
            group["params"] = []
            for param in options["params"]:
                rows = local_tensor(param)
                if param.grad is None or (is_owner and not rows.numel()):
                    continue
                if is_owner:
                    rows = nn.Parameter(rows.detach())
                mine = state.get(param, {})
                local = _local_state(param, mine, is_owner=is_owner)
                held.append(_Held(param, rows, mine, dict(mine)))
                mine.update(local)
                optimizer.state[rows] = mine
                group["params"].append(rows)
        _give_grads(held)
        yield
    finally:
        refusal.remove()
        updated, optimizer.state = optimizer.state, state
        for group, options in zip(groups, shown, strict=True):
            group.update(options)
        for param, rows, mine, shards in held:
            rows.grad = None
            now = updated[rows]
            _show_state(param, now, shards)
            if now is not mine or not shards:  # made, replaced or thrown away
                state[param] = now
            if not now:
                del state[param]


def _refuse_state_dict(optimizer: torch.optim.Optimizer) -> NoReturn:
    raise RuntimeError(
        f"{type(optimizer).__name__}.state_dict() was called inside step(), as by a signal handler or another thread: "
        "the state is neither that before the step nor that after it; call it between steps."
    )


def _local_state(param: nn.Parameter, state: dict[str, Any], *, is_owner: bool) -> dict[str, torch.Tensor]:
    """The local tensors of DTensors in `state`."""
    local = {}
    for name, value in state.items():
        if isinstance(value, DTensor):
            if MARK not in vars(value):  # somebody has put it here since
                state[name] = value = _taken(param, value, f"optimizer state {name!r}")
            local[name] = local_tensor(value)
        elif isinstance(value, torch.Tensor) and value.dim() and not is_owner:
            raise ValueError(
                f"optimizer state {name!r} of shape {tuple(value.shape)} is a plain tensor: no checkpoint would know "
                "where it lies; put state in through load_state_dict(), or as zeros_like() of the parameter."
            )
    return local


def _show_state(param: nn.Parameter, state: dict[str, Any], shards: dict[str, Any]) -> None:
    """Puts DTensors into `state`, local now: those that were there, and new ones of what the step has made."""
    for name, value in state.items():
        was = shards.get(name)
        if value is not was:
            is_local = isinstance(was, DTensor) and local_tensor(was) is value
            state[name] = was if is_local else as_shard(param, name, value)


def _give_grads(held: list[_Held]) -> None:
    """Gives every parameter's rows their gradient, cast to their dtype where it has another one."""
    grads, casts = [], []
    for param, rows, _, _ in held:
        grad = param.grad
        grad = local_tensor(grad) if MARK in vars(grad) else waited(local_tensor(_taken(param, grad, "a gradient")))
        if grad.dtype is not rows.dtype:
            grads.append(grad)
            grad = torch.empty_like(rows)
            casts.append(grad)
        rows.grad = grad
    if casts:
        foreach_copy_(casts, grads)


def _taken(param: nn.Parameter, value: torch.Tensor, name: str) -> DTensor:
    """A value that somebody has put in, as a shard like `param`. Raises ValueError if it lies otherwise."""
    spec = getattr(param, "megatron_fsdp_spec", None)
    return value if spec is None else spec.mark(spec.take(value, name))


def _step_on_dtensors(base: Callable) -> Callable:
    def step(self: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        replaced: list[tuple[nn.Parameter, torch.Tensor, torch.dtype | None]] = []

        def cast() -> None:
            for param in params_of(self):
                grad = param.grad
                if grad is not None and grad.dtype is not param.dtype:
                    replaced.append((param, grad, param.grad_dtype))
                    _set_grad(param, grad.to(param.dtype), None)

        def restore() -> None:
            while replaced:
                _set_grad(*replaced.pop())

        args, kwargs = around_closures(args, kwargs, restore, cast)
        try:
            cast()
            return base(self, *args, **kwargs)
        finally:
            restore()
            mark_state(self)

    return step


def _set_grad(param: nn.Parameter, grad: torch.Tensor, dtype: torch.dtype | None) -> None:
    param.grad = None
    param.grad_dtype = dtype
    param.grad = grad


def around_closures(args: tuple, kwargs: dict[str, Any], before: Callable, after: Callable) -> tuple[tuple, dict]:
    """Arguments of a step, with `before` called before and `after` after each of its closures."""

    def wrapped(argument: Any) -> Any:
        if not callable(argument):
            return argument

        def closure() -> Any:
            before()
            loss = argument()
            after()
            return loss

        return closure

    return tuple(map(wrapped, args)), {name: wrapped(argument) for name, argument in kwargs.items()}
