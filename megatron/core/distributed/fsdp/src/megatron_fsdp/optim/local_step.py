"""Steps of optimizers on this rank's rows, and their state, which users see as DTensors.

DTensor's dispatch works out placements of hundreds of tensors anew in every call, which takes the host 0.1 ms a layer
(docs/lab/measurements.md), and no optimizer that reads whole matrices can work on rows. So while `step()` computes, the
optimizer holds local tensors, with local gradients and local state. Everybody else sees the model's DTensors.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import functools
import operator
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from megatron_fsdp.dtensor.chunk_metadata import ShardMethod
from megatron_fsdp.dtensor.shard_spec import ShardSpec, spec_of
from megatron_fsdp.machine.device import Device
from megatron_fsdp.machine.torch_compat import foreach_copy_, local_tensor, waited
from megatron_fsdp.optim.kinds import is_elementwise, owned_kind, params_of
from megatron_fsdp.state.param_tags import SPEC_TAG, copy_tags

#: An attribute of DTensors that the engine has made or looked at: they lie like their parameter, and torch DCP knows.
MARK = "full_tensor"
#: State that is one number per parameter: name -> its value after zero steps, from the options of the group.
_SCALAR_STATE: dict[str, Callable[[dict[str, Any]], Any]] = {
    "step": lambda group: 0.0,
    "mu_product": lambda group: 1.0,  # NAdam
    "mu": lambda group: 1.0,  # ASGD
    "eta": lambda group: group["lr"],  # ASGD
}


def engine_step(optimizer: torch.optim.Optimizer, base: Callable) -> Callable:
    """`base`, the optimizer's own `step` as a function of it, on local tensors where that is right.

    torch's own element-wise classes and those that own whole matrices step on local tensors, and torch's hooks of the
    step run outside. Other classes may take norms over a parameter, say, so they keep DTensors. All of them find
    gradients in their parameters' dtype.
    """
    is_owner = owned_kind(optimizer) is not None
    # In its class, or by a learning-rate scheduler, around torch's wrapper that calls hooks.
    is_replaced = getattr(base, "__globals__", {}).get("__name__") != torch.optim.Optimizer.__module__
    if not is_owner and (is_replaced or not is_elementwise(optimizer)):
        return _step_on_dtensors(base)
    if is_replaced:
        return _step_on_rows(base, is_owner=is_owner)
    return torch.optim.Optimizer.profile_hook_step(_step_on_rows(vars(base)["__wrapped__"], is_owner=is_owner))


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


@contextlib.contextmanager
def on_rows(optimizer: torch.optim.Optimizer, *, is_owner: bool = False) -> Iterator[None]:
    """Inside, the optimizer holds the local tensors of its parameters that have gradients, with local state.

    Args:
        is_owner: it needs whole matrices: it gets those that this rank has, as parameters, and may keep any state.

    Raises:
        ValueError: a gradient or state lies otherwise than its parameter.
    """
    groups, state = optimizer.param_groups, optimizer.state
    local_state: collections.defaultdict[torch.Tensor, dict[str, Any]] = collections.defaultdict(dict)
    # A learning rate may be a DTensor too, which cannot be multiplied with local tensors.
    shown = [{k: v for k, v in group.items() if k == "params" or isinstance(v, DTensor)} for group in groups]
    held: list[tuple[nn.Parameter, torch.Tensor]] = []
    refusal = optimizer.register_state_dict_pre_hook(_refuse_state_dict, prepend=True)
    optimizer.state = local_state
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
                if param in state:
                    local_state[rows] = _local_state(param, state[param], is_owner=is_owner)
                held.append((param, rows))
                group["params"].append(rows)
        _give_grads(held)
        yield
    finally:
        refusal.remove()
        optimizer.state = state
        for group, options in zip(groups, shown, strict=True):
            group.update(options)
        for param, rows in held:
            rows.grad = None
            _show_state(param, state, local_state[rows])


def _refuse_state_dict(optimizer: torch.optim.Optimizer) -> NoReturn:
    raise RuntimeError(
        f"{type(optimizer).__name__}.state_dict() was called inside step(), as by a signal handler or another thread: "
        "the state is neither that before the step nor that after it; call it between steps."
    )


def _local_state(param: nn.Parameter, state: dict[str, Any], *, is_owner: bool) -> dict[str, Any]:
    """`state` with local tensors in place of DTensors."""
    local = dict(state)
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


def _show_state(param: nn.Parameter, state: dict[torch.Tensor, dict[str, Any]], local: dict[str, Any]) -> None:
    """Brings what users see in `state` up to date: a DTensor stays one, and what the step has made becomes one."""
    shards = state.setdefault(param, {})
    for name in shards.keys() - local.keys():
        del shards[name]
    for name, value in local.items():
        shard = shards.get(name)
        if shard is not value and not (isinstance(shard, DTensor) and local_tensor(shard) is value):
            shards[name] = as_shard(param, name, value)
    if not shards:
        del state[param]


def _give_grads(held: list[tuple[nn.Parameter, torch.Tensor]]) -> None:
    """Gives every parameter's rows their gradient, cast to their dtype where it has another one."""
    grads, casts = [], []
    for param, rows in held:
        grad = param.grad
        assert grad is not None, "only these are held"
        if MARK in vars(grad):
            grad = local_tensor(grad)
        else:  # somebody has put it here
            grad = waited(local_tensor(_taken(param, grad, "a gradient")))
        if grad.dtype is not rows.dtype:
            grads.append(grad)
            grad = torch.empty_like(rows)
            casts.append(grad)
        rows.grad = grad
    if casts:
        foreach_copy_(casts, grads)


def _taken(param: nn.Parameter, value: torch.Tensor, name: str) -> torch.Tensor:
    """`value` as a shard like `param`. Raises ValueError if it lies otherwise."""
    spec = getattr(param, SPEC_TAG, None)
    return value if spec is None else spec.take(value, name)


def _step_on_dtensors(base: Callable) -> Callable:
    def step(self: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        replaced: list[tuple[torch.Tensor, torch.Tensor, torch.dtype | None]] = []

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
            adopt_state(self)

    return step


def _set_grad(param: torch.Tensor, grad: torch.Tensor, dtype: torch.dtype | None) -> None:
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


# -- state -------------------------------------------------------------------------------------------------------------


@torch.no_grad()
def create_state(optimizer: torch.optim.Optimizer) -> None:
    """Gives an optimizer that has not stepped yet the state of zero steps; parameters and options stay as they are.

    The state is what one step with zero gradients leaves on a copy of each parameter, its counters set back.
    What is owned has its kind's, on every rank, empty where it owns nothing. State that is there is left alone.

    Raises:
        ValueError: the state before the first step is not known, or is not that of a step with zero gradients.
    """
    if any(optimizer.state.values()):
        return
    owned, groups, made = owned_kind(optimizer), optimizer.param_groups, {}
    try:
        for group in groups:
            for param in filter(operator.attrgetter("requires_grad"), group["params"]):
                if owned is None:
                    made[param] = _state_after_zero_steps(optimizer, group, param)
                else:
                    made[param] = {name: torch.zeros_like(local_tensor(param)) for name in owned.state or ()}
    finally:
        optimizer.param_groups = groups
        optimizer.state.clear()
    for param, state in made.items():
        if state:
            optimizer.state[param] = {name: as_shard(param, name, value) for name, value in state.items()}
    adopt_state(optimizer)


def _state_after_zero_steps(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], param: nn.Parameter
) -> dict[str, Any]:
    if isinstance(optimizer, torch.optim.SGD) and group["momentum"] and group["dampening"]:
        raise ValueError(
            "SGD with dampening starts from its first gradient undamped, which no state before the first step can say; "
            "call step() once before state_dict()."
        )
    stand_in = nn.Parameter((local_tensor(param) if is_elementwise(optimizer) else param).detach().clone())
    copy_tags(param, stand_in)
    stand_in.grad = torch.zeros_like(stand_in)
    # A weight decay that is part of the gradient would leave a trace.
    changed = {"params": [stand_in], **({"weight_decay": 0.0} if "weight_decay" in group else {})}
    options = {key: v.to_local() if isinstance(v, DTensor) else v for key, v in group.items() if key not in changed}
    optimizer.param_groups = [{**copy.deepcopy(options), **changed}]
    step = type(optimizer).step
    getattr(step, "__wrapped__", step)(optimizer)  # without hooks
    state = optimizer.state.pop(stand_in, {})
    for key, value in state.items():
        # Every rank must come to the same end, so the name decides, not the values.
        if key in _SCALAR_STATE:
            zero = _SCALAR_STATE[key](group)
            state[key] = value.fill_(zero) if isinstance(value, torch.Tensor) else type(value)(zero)
        elif value is not None and getattr(value, "shape", None) != stand_in.shape:
            raise ValueError(
                f"{type(optimizer).__name__} keeps {key!r}, whose value before the first step is unknown; "
                "call step() once before state_dict()."
            )
    return state


def compact_before_state(optimizer: torch.optim.Optimizer) -> None:
    """Gives free memory back to the device when a first step is about to make state.

    Otherwise what stays for ever is put into holes that the first backward has left, and later steps, which find these
    holes taken, take new memory: of an 8B model on 8 GPUs 4 GiB each (docs/lab/measurements.md).
    """
    is_first = True

    def compact(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        nonlocal is_first
        if is_first and not any(optimizer.state.values()):
            Device.current().empty_cache()
        is_first = False

    optimizer.register_step_pre_hook(compact)


def as_shard(param: nn.Parameter, name: str, value: Any) -> Any:
    """Local state as users see it: as a DTensor where it is shaped like this rank's rows of `param`, else as it is."""
    is_plain = isinstance(value, torch.Tensor) and not isinstance(value, DTensor)
    if not is_plain or name in _SCALAR_STATE or value.shape != local_tensor(param).shape:
        return value
    spec = getattr(param, SPEC_TAG, None)
    if spec is not None:
        return spec.wrap(value)
    assert isinstance(param, DTensor), "what has rows"
    mesh, placements = param.device_mesh, param.placements
    return DTensor.from_local(value, mesh, placements, run_check=False, shape=param.shape, stride=param.stride())


def adopt_state(optimizer: torch.optim.Optimizer) -> None:
    """Cuts state in full tensors to the parameters' shards; gives all shards the right `full_tensor` and DCP's chunks.

    Raises:
        ValueError: state lies otherwise than its parameter.
    """
    for param, state in optimizer.state.items():
        if hasattr(param, SPEC_TAG):  # loading keeps what belongs to no parameter
            state.update(shard_state(spec_of(param), state))


def shard_state(spec: ShardSpec, state: dict[str, Any], dtype: torch.dtype | None = None) -> dict[str, Any]:
    """A parameter's optimizer state with its parameter-shaped tensors as marked shards, in `dtype` if given.

    Raises:
        ValueError: see `ShardSpec.take`.
    """
    return {
        key: spec.take(value, f"optimizer state {key!r}", dtype)
        if isinstance(value, torch.Tensor)
        and value.shape == spec.shape
        and key not in _SCALAR_STATE
        # Copies, as a loaded state dict may be, have the marks of a tensor without a model.
        and not isinstance(vars(value).get(MARK), ShardMethod)
        else value
        for key, value in state.items()
    }
