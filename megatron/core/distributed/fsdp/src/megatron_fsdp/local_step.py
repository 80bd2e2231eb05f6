"""Steps of optimizers on the local tensors of sharded parameters, past DTensor's dispatch."""

from __future__ import annotations

import collections
import contextlib
import functools
import operator
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, NoReturn

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from megatron_fsdp.machine.torch_compat import local_tensor, mesh_and_placements, waited
from megatron_fsdp.optimizer_state import count_unmarked, mark_param_state, mark_state

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


class _Known(NamedTuple):
    """A parameter, its gradient and its state that were found to lie alike.

    Weakly: whoever frees or moves state between steps frees its memory. As long as the same objects are there, nothing
    of that can have changed.
    """

    param: weakref.ref[torch.Tensor]
    grad: weakref.ref[torch.Tensor]
    names: tuple[str, ...]
    """Of the state."""
    state: tuple[weakref.ref[torch.Tensor], ...]
    sharded: tuple[str, ...]
    """What of the state is DTensors."""

    @classmethod
    def of(cls, param: torch.Tensor, grad: torch.Tensor, state: dict[str, Any]) -> _Known:
        """What is known of these from now on. State with numbers never is, and is looked at in each step."""
        return cls(
            weakref.ref(param),
            weakref.ref(grad),
            tuple(state),
            tuple(weakref.ref(value) for value in state.values() if isinstance(value, torch.Tensor)),
            tuple(name for name, value in state.items() if isinstance(value, DTensor)),
        )

    def is_of(self, param: torch.Tensor, grad: torch.Tensor, state: dict[str, Any]) -> bool:
        """These are the objects."""
        if self.grad() is not grad or self.param() is not param or tuple(state) != self.names:
            return False
        values = state.values()
        # What is gone is None, as what somebody has put in its place may be.
        is_same = len(self.state) == len(values) and all(map(operator.is_, [known() for known in self.state], values))
        return is_same and not any(value is None for value in values)


#: By optimizer, and by id of the parameter: the host would take 2 microseconds to look at each of them again.
_KNOWN: weakref.WeakKeyDictionary[torch.optim.Optimizer, dict[int, _Known]] = weakref.WeakKeyDictionary()


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
            result = bare(self, closure)
            if count_unmarked(self):
                mark_state(self)
            return result
        with holding(self, lent):
            return bare(self)

    return torch.optim.Optimizer.profile_hook_step(step)


def _lent_by(optimizer: torch.optim.Optimizer) -> list[list[Lent]] | None:
    """By group, the parameters with gradients; None where only DTensors can tell what is right, or what is wrong.

    So it is if a parameter has no state, or other things than local tensors of one kind would meet.
    """
    lent, known = [], _KNOWN.setdefault(optimizer, {})
    for group in optimizer.param_groups:
        if group.get("differentiable") or _has_dtensor(group):
            return None
        is_stateless = type(optimizer) is torch.optim.SGD and not group["momentum"]
        lent.append([])
        for param in group["params"]:
            if param.grad is None:
                continue
            state = optimizer.state.get(param, {})
            entry = _lent_of(param, state, known) if state or is_stateless else None
            if entry is None:
                return None
            lent[-1].append(entry)
    return lent


def _has_dtensor(group: dict[str, Any]) -> bool:
    """A learning rate, say, which cannot be multiplied with local tensors."""
    return any(isinstance(value, DTensor) for value in (*group.values(), *group.get("betas", ())))


def _lent_of(param: torch.Tensor, state: dict[str, Any], known: dict[int, _Known]) -> Lent | None:
    """What is lent of one parameter; enters it in `known`, or takes it from there."""
    grad, found = param.grad, known.get(id(param))
    if found is None or not found.is_of(param, grad, state):
        if not _lie_alike(param, grad, state):
            return None
        _mark_new(param, state)
        found = known[id(param)] = _Known.of(param, grad, state)
    given = dict(state)
    for name in found.sharded:
        given[name] = waited(local_tensor(given[name]))
    return Lent(param, local_tensor(param), waited(local_tensor(grad)), given)


def _mark_new(param: torch.Tensor, state: dict[str, Any]) -> None:
    """Marks what somebody has put into the state since."""
    spec = getattr(param, "megatron_fsdp_spec", None)
    if spec is not None and any(
        isinstance(each, DTensor) and "full_tensor" not in vars(each) for each in state.values()
    ):
        mark_param_state(spec, state)


def _lie_alike(param: torch.Tensor, grad: torch.Tensor, state: dict[str, Any]) -> bool:
    """Local tensors of one kind meet."""
    if not (isinstance(param, DTensor) and isinstance(grad, DTensor)):
        return False
    lies = mesh_and_placements(param)
    if mesh_and_placements(grad) != lies or local_tensor(grad).dtype != local_tensor(param).dtype:
        return False
    for value in state.values():
        if isinstance(value, DTensor):
            if mesh_and_placements(value) != lies:
                return False
        elif isinstance(value, torch.Tensor) and value.dim():
            return False  # DTensors refuse to meet it
    return True


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
    if updated.keys() == entry.state.keys() and all(map(operator.is_, updated.values(), entry.state.values())):
        return
    for name, value in updated.items():
        if name not in entry.state or value is not entry.state[name]:
            is_whole = not isinstance(value, torch.Tensor) or value.shape != entry.local.shape or not value.dim()
            state.setdefault(entry.param, {})[name] = value if is_whole else _wrapped(entry.param, value)
    for name in entry.state.keys() - updated.keys():
        del state[entry.param][name]


def _wrapped(param: nn.Parameter, value: torch.Tensor) -> DTensor:
    wrapped = param.megatron_fsdp_spec.wrap(value)
    param.megatron_fsdp_spec.mark(wrapped)
    return wrapped
