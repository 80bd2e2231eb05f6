"""Turns autograd and module hooks into schedule calls; knows recomputation."""

from __future__ import annotations

import collections
import copy
import dataclasses
import functools
import sys
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch import nn

from megatron_fsdp.machine.torch_compat import (
    base_of,
    graph_task,
    in_backward,
    uncompiled,
    version_of,
)
from megatron_fsdp.plan.strategy import strategies_that
from megatron_fsdp.runtime import linear_grads
from megatron_fsdp.runtime.schedule import Schedule, UnitCall
from megatron_fsdp.runtime.unit import Unit


class Guard(Protocol):
    """Checks around forwards of the whole model."""

    is_active: bool
    """The next forward is to be checked."""

    def check(self) -> None:
        """Called when a forward begins, before it communicates; raises if the model is not what was sharded."""

    def explain(self, error: BaseException) -> None:
        """Called with the exception of a forward, while units are as they were when it was raised."""


def install_hooks(schedule: Schedule, guard: Guard) -> None:
    """Hooks every unit's module. Hooks hold the schedule weakly: user modules do not own it."""
    for unit in schedule.units:
        hooks = _UnitHooks(weakref.ref(schedule), weakref.ref(unit), guard)
        module = unit.module()
        assert module is not None, "the model is being sharded"
        module.register_forward_pre_hook(hooks.pre_forward, prepend=True, with_kwargs=True)
        module.register_forward_hook(hooks.post_forward, with_kwargs=True)
        if unit.is_root:
            module.register_forward_hook(hooks.after_forward, always_call=True)
    linear_grads.install(schedule)


@dataclasses.dataclass
class _UnitHooks:
    """The hooks of one unit."""

    schedule: weakref.ref[Schedule]
    unit: weakref.ref[Unit]
    guard: Guard
    input_versions: dict[int, int | None] = dataclasses.field(default_factory=dict)
    """Version counters, by id, of the tensors that the forward in progress was given."""
    is_called_by_hand: bool = False
    """Passes have begun with the unit, so its module tells when its forward has raised, as the root's always does."""

    def __deepcopy__(self, memo: dict) -> _UnitHooks:
        raise NotImplementedError(
            "a module of a sharded model cannot be deep-copied; copy it before sharding, or copy its state_dict()."
        )

    @uncompiled
    def pre_forward(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        schedule, unit = self._alive()
        schedule.check_unblocked("a forward")
        if schedule.lost_weights:
            raise RuntimeError(
                "step(install_optimized_model_weights=False) has overwritten what this forward would compute with: of "
                f"{', '.join(schedule.lost_weights)} no values are kept beside the main weights. Call "
                "install_optimized_model_weights() before the next forward."
            )
        if unit.is_root and self.guard.is_active and not in_backward():
            self.guard.check()
        if torch.is_grad_enabled():
            given = (*args, *kwargs.values())
            self.input_versions = {id(value): version_of(value) for value in given if isinstance(value, torch.Tensor)}
        if in_backward():
            schedule.recompute(unit)
        elif schedule.enter(unit) and not (unit.is_root or self.is_called_by_hand):
            self.is_called_by_hand = True
            module.register_forward_hook(self.after_forward, always_call=True)
        if schedule.timeline.is_on:
            schedule.timeline.enter(unit)

    @uncompiled
    def post_forward(self, module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> Any:
        """Gives a copy of the unit's weights where the output is a view of them: they go when it is resharded."""
        schedule, unit = self._alive()
        if schedule.timeline.is_on:
            schedule.timeline.leave()
        tensors = [output] if isinstance(output, torch.Tensor) else list(tensors_in(output))
        if unit.gathers_weights and any(map(unit.owns, tensors)):
            output = _without_views(unit, output)
            tensors = list(tensors_in(output))
            if any(map(unit.owns, tensors)):
                raise RuntimeError(
                    f"unit {unit.label} returns a view of its weights inside {type(output).__name__}; they are freed "
                    "when its forward is over, so return a copy: .clone()."
                )
        own = [tensor for tensor in tensors if tensor.requires_grad] if torch.is_grad_enabled() else []
        call = schedule.exit(unit, awaits_backward=bool(own))
        if own and call is not None:
            # The gradient of an input that is handed through, unchanged, arrives when another unit's does.
            given = {id(value) for value in (*args, *kwargs.values())}
            own = [each for each in own if each.grad_fn is not None and not (id(each) in given and self._kept(each))]
            if own:
                _on_first_gradient(own, functools.partial(self.pre_backward, call))
        return output

    def _kept(self, given: torch.Tensor) -> bool:
        """The forward has not changed the tensor that it was given in place."""
        return self.input_versions.get(id(given)) in (None, version_of(given))

    @uncompiled
    def after_forward(self, module: nn.Module, args: tuple, output: Any) -> None:
        """Runs also when the forward has raised."""
        schedule, unit = self.schedule(), self.unit()
        error = sys.exc_info()[1]
        if schedule is None or unit is None or error is None or in_backward():
            return
        if schedule.aborts_forward(unit):
            if unit.is_root:
                self.guard.explain(error)
            schedule.abort_forward()

    @uncompiled
    def pre_backward(self, call: UnitCall, grad: torch.Tensor) -> None:
        schedule, unit = self._alive()
        if schedule.generation != call.generation:
            raise RuntimeError(
                f"the weights of unit {unit.label} have changed since its forward (an optimizer step or a load came in "
                "between), so its gradients would be wrong; run backward before changing weights."
            )
        if torch.is_grad_enabled() and unit.gathers_weights:
            raise NotImplementedError(
                f"unit {unit.label} is differentiated with create_graph=True, whose second backward would read weights "
                "that have been released by then; for gradient penalties use zero_dp_strategy="
                f"{strategies_that(lambda plan: not plan.gathers_weights)}."
            )
        schedule.gradient_arrived(call)
        if schedule.timeline.is_on:
            schedule.timeline.turn_back(unit)

    def _alive(self) -> tuple[Schedule, Unit]:
        schedule, unit = self.schedule(), self.unit()
        if schedule is None or unit is None:
            raise RuntimeError("the MegatronFSDP that sharded this module is gone; keep a reference to it.")
        return schedule, unit


def _without_views(unit: Unit, value: Any) -> Any:
    """`value` with copies of the views of the unit's weights in nested tuples, lists, dicts and dataclasses."""
    if isinstance(value, torch.Tensor):
        return value.clone() if unit.owns(value) else value
    if isinstance(value, (tuple, list)):
        items = [_without_views(unit, item) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):  # some are dicts, too, and keep both alike
        record: Any = copy.copy(value)
        assign = object.__setattr__ if record.__dataclass_params__.frozen else setattr
        for field in dataclasses.fields(value):
            assign(record, field.name, _without_views(unit, getattr(value, field.name)))
        return record
    if isinstance(value, dict):
        copied = copy.copy(value)
        for key, item in value.items():
            copied[key] = _without_views(unit, item)
        return copied
    return value


def _on_first_gradient(tensors: list[torch.Tensor], hook: Callable[[torch.Tensor], None]) -> None:
    """Lets every backward that brings gradients to some of `tensors` call `hook` with the first of them."""
    # A view that is changed in place gets a new history, from that of its base, and loses its hooks.
    bases = {id(base): base for base in map(base_of, tensors) if base is not None and base.grad_fn is not None}
    tensors = [*tensors, *bases.values()]
    if len(tensors) == 1:  # as most modules return
        tensors[0].register_hook(hook)
        return
    heard: set[int] = set()

    def hear(grad: torch.Tensor) -> None:
        if (task := graph_task()) not in heard:
            heard.add(task)
            hook(grad)

    for tensor in tensors:
        tensor.register_hook(hear)


#: Objects that hold no output, however much they refer to.
_OPAQUE = (nn.Module, type, types.FunctionType, types.MethodType, types.ModuleType)


def tensors_in(value: Any, seen: set[int] | None = None) -> Iterator[torch.Tensor]:
    """Every tensor in nested tuples, lists, dicts, dataclasses and attributes of other objects."""
    if isinstance(value, torch.Tensor):
        yield value
        return
    if value is None or isinstance(value, (str, bytes, int, float, torch.dtype, torch.device, *_OPAQUE)):
        return
    seen = set() if seen is None else seen
    if id(value) in seen:  # objects may refer to each other
        return
    seen.add(id(value))
    for item in _items(value):
        yield from tensors_in(item, seen)


def _items(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        yield from value.values()
    elif isinstance(value, (list, tuple, set, frozenset, collections.deque)):
        yield from value
    else:
        yield from getattr(value, "__dict__", {}).values()
        for cls in type(value).__mro__:
            slots = getattr(cls, "__slots__", ())
            names = (slots,) if isinstance(slots, str) else slots
            yield from (getattr(value, name) for name in names if hasattr(value, name))
