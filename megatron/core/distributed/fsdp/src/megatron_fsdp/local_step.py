"""Steps of optimizers on the local tensors of sharded parameters, past DTensor's dispatch."""

from __future__ import annotations

import collections
import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, NoReturn

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from megatron_fsdp.machine.torch_compat import local_tensor, mesh_and_placements, waited

#: Optimizers known to update element by element, to keep their state in place once they have it, and to pass over
#: parameters without a gradient. Subclasses of them may do anything.
_KINDS = ("ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "SGD")


class Lent(NamedTuple):
    """A parameter in whose place an optimizer is given its local tensor, or a parameter over that."""

    param: nn.Parameter
    local: torch.Tensor
    grad: torch.Tensor
    state: dict[str, Any]
    """With local tensors."""


def can_step_locally(optimizer: torch.optim.Optimizer) -> bool:
    """`optimizer` is one of torch's own, with torch's own `step`, that updates element by element."""
    kind = type(optimizer)
    return kind.__name__ in _KINDS and _is_from_torch(kind) and "step" not in vars(optimizer)


def _is_from_torch(kind: type[torch.optim.Optimizer]) -> bool:
    """Neither the class nor its `step` has been replaced; `functools.wraps` copies names, but not globals."""
    step, origins = kind.step, [kind.__module__]
    while step is not None:
        origins.append(getattr(step, "__globals__", {}).get("__name__", ""))
        step = getattr(step, "__wrapped__", None)
    return all(origin.startswith("torch.optim.") for origin in origins)


@functools.cache
def local_step(kind: type[torch.optim.Optimizer]) -> Callable:
    """The `step` of a class for which `can_step_locally`, with hooks and all, which computes with local tensors.

    DTensor works out anew in every step how the results of operations on hundreds of tensors lie, for which the host
    takes 0.1 ms a layer (docs/performance.md). Element by element, they lie as the parameters do. A step that has to
    make state, and one with a closure, go the long way.
    """
    bare = getattr(kind.step, "__wrapped__", kind.step)

    @functools.wraps(bare)
    def step(self: torch.optim.Optimizer, closure: Callable | None = None) -> Any:
        lent = None if closure is not None else _lent_by(self)
        if lent is None:
            return bare(self, closure)
        with holding(self, lent):
            return bare(self)

    return torch.optim.Optimizer.profile_hook_step(step)


def _lent_by(optimizer: torch.optim.Optimizer) -> list[list[Lent]] | None:
    """By group, the parameters with gradients; None where only DTensors can tell what is right, or what is wrong.

    So it is if a parameter has no state, or other things than local tensors of one kind would meet.
    """
    lent = []
    for group in optimizer.param_groups:
        if group.get("differentiable") or _has_dtensor(group):
            return None
        is_stateless = type(optimizer) is torch.optim.SGD and not group["momentum"]
        lent.append([])
        for param in group["params"]:
            if param.grad is None:
                continue
            state = optimizer.state.get(param, {})
            entry = _lent_of(param, state) if state or is_stateless else None
            if entry is None:
                return None
            lent[-1].append(entry)
    return lent


def _has_dtensor(group: dict[str, Any]) -> bool:
    """A learning rate, say, which cannot be multiplied with local tensors."""
    return any(isinstance(value, DTensor) for value in (*group.values(), *group.get("betas", ())))


def _lent_of(param: torch.Tensor, state: dict[str, Any]) -> Lent | None:
    grad = param.grad
    if not (isinstance(param, DTensor) and isinstance(grad, DTensor)):
        return None
    lies, local, local_grad = mesh_and_placements(param), local_tensor(param), waited(local_tensor(grad))
    if mesh_and_placements(grad) != lies or local_grad.dtype != local.dtype:
        return None
    given = {}
    for name, value in state.items():
        if isinstance(value, DTensor):
            if mesh_and_placements(value) != lies:
                return None
            given[name] = waited(local_tensor(value))
        elif isinstance(value, torch.Tensor) and value.dim():
            return None  # DTensors refuse to meet it
        else:
            given[name] = value
    return Lent(param, local, local_grad, given)


@contextlib.contextmanager
def holding(optimizer: torch.optim.Optimizer, lent: list[list[Lent]]) -> Iterator[None]:
    """Inside, the optimizer holds what is `lent` in place of its parameters, with their gradients and their state."""
    groups, sharded = optimizer.param_groups, [group["params"] for group in optimizer.param_groups]
    state, ours = optimizer.state, [entry for entries in lent for entry in entries]
    refusal = optimizer.register_state_dict_pre_hook(_refuse_state_dict)
    try:
        for entry in ours:
            entry.local.grad = entry.grad
        for group, entries in zip(groups, lent, strict=True):
            group["params"] = [entry.local for entry in entries]
        optimizer.state = collections.defaultdict(dict, {entry.local: dict(entry.state) for entry in ours})
        yield
    finally:
        refusal.remove()
        updated, optimizer.state = optimizer.state, state
        for group, params in zip(groups, sharded, strict=True):
            group["params"] = params
        for entry in ours:
            entry.local.grad = None
            _take_back(entry, updated.get(entry.local, {}), state)


def _refuse_state_dict(optimizer: torch.optim.Optimizer) -> NoReturn:
    raise RuntimeError(
        f"{type(optimizer).__name__}.state_dict() was called inside step(), as by a signal handler or another thread: "
        "the state is neither that before the step nor that after it; call it between steps."
    )


def _take_back(entry: Lent, updated: dict[str, Any], state: dict[nn.Parameter, dict[str, Any]]) -> None:
    """Enters what was not updated in place: counters that are numbers, say; and what has just been made, or is gone."""
    for name, value in updated.items():
        if name not in entry.state or value is not entry.state[name]:
            is_whole = not isinstance(value, torch.Tensor) or value.shape != entry.local.shape or not value.dim()
            taken = value if is_whole else entry.param.megatron_fsdp_spec.wrap(value)
            state.setdefault(entry.param, {})[name] = taken
    for name in entry.state.keys() - updated.keys():
        del state[entry.param][name]
