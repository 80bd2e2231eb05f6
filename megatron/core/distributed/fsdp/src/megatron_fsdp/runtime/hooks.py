"""Turns autograd and module hooks into schedule calls; knows recomputation."""

from __future__ import annotations

import collections
import dataclasses
import functools
import sys
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch import nn

from megatron_fsdp.machine.torch_compat import base_of, graph_task, in_backward, uncompiled, version_of
from megatron_fsdp.runtime import linear_grads
from megatron_fsdp.runtime.preconditions import check_not_taken
from megatron_fsdp.runtime.schedule import Call, Schedule
from megatron_fsdp.runtime.unit import Unit


class Guard(Protocol):
    """Guard that looks for mistakes around forwards of the whole model."""

    is_active: bool
    """The next forward is to be checked."""

    def check(self) -> None:
        """Called when a forward begins, before it communicates; raises if the model is not what was sharded."""

    def explain(self, error: BaseException) -> None:
        """Called with what a forward has raised, while units are as they were when it did."""


def install_hooks(schedule: Schedule, guard: Guard) -> list[torch.utils.hooks.RemovableHandle]:
    """Hooks every unit's module. Hooks hold the schedule weakly: user modules do not own it."""
    handles = []
    for unit in schedule.units:
        hooks = _UnitHooks(weakref.ref(schedule), weakref.ref(unit), guard)
        module = unit.module()
        handles.append(module.register_forward_pre_hook(hooks.pre_forward, prepend=True, with_kwargs=True))
        handles.append(module.register_forward_hook(hooks.post_forward, with_kwargs=True))
        if unit.is_root:
            handles.append(module.register_forward_hook(hooks.after_forward, always_call=True))
    linear_grads.install(schedule)
    return handles


@dataclasses.dataclass(frozen=True)
class _UnitHooks:
    """The hooks of one unit."""

    schedule: weakref.ref[Schedule]
    unit: weakref.ref[Unit]
    guard: Guard

    def __deepcopy__(self, memo: dict) -> _UnitHooks:
        raise NotImplementedError(
            "a module of a sharded model cannot be deep-copied; copy it before sharding, or copy its state_dict()."
        )

    @uncompiled
    def pre_forward(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        schedule, unit = self._alive()
        check_not_taken(schedule, "a forward")
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
            unit.input_versions = {id(value): version_of(value) for value in given if isinstance(value, torch.Tensor)}
        if in_backward():
            schedule.recompute(unit)
        else:
            begins = schedule.enter(unit)
            if begins and not unit.is_root and not unit.is_called_by_hand:
                unit.is_called_by_hand = True
                module.register_forward_hook(self.after_forward, always_call=True)
        if schedule.watch.is_on:
            schedule.watch.enter(unit)

    @uncompiled
    def post_forward(self, module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
        schedule, unit = self._alive()
        if schedule.watch.is_on:
            schedule.watch.leave()
        call = schedule.returned(unit)
        tensors = [output] if isinstance(output, torch.Tensor) else list(tensors_in(output))
        awaits_backward = torch.is_grad_enabled() and True in [tensor.requires_grad for tensor in tensors]
        if awaits_backward:
            # The gradient of an input that is handed through, unchanged, arrives when another unit's does.
            inputs = {id(value): value for value in (*args, *kwargs.values())}
            own = [tensor for tensor in tensors if tensor.grad_fn is not None]
            own = [each for each in own if id(each) not in inputs or not unit.left_alone(each)]
            if own and call is not None:
                _on_first_gradient(own, functools.partial(self.pre_backward, call))
        if not in_backward():
            schedule.exit(unit, awaits_backward=awaits_backward, lends=unit.lends(tensors))

    @uncompiled
    def after_forward(self, module: nn.Module, args: tuple, output: Any) -> None:
        """Runs also when the forward has raised."""
        schedule, unit = self.schedule(), self.unit()
        error = sys.exc_info()[1]
        if schedule is None or unit is None or error is None or in_backward():
            return
        if schedule.in_forward_of(unit):
            if unit.is_root:
                self.guard.explain(error)
            schedule.abort_forward()

    @uncompiled
    def pre_backward(self, call: Call, grad: torch.Tensor) -> None:
        schedule, unit = self._alive()
        if schedule.generation != call.generation:
            raise RuntimeError(
                f"the weights of unit {unit.label} have changed since its forward (an optimizer step or a load came in "
                "between), so its gradients would be wrong; run backward before changing weights."
            )
        if torch.is_grad_enabled() and unit.gathers_weights:
            raise NotImplementedError(
                f"unit {unit.label} is differentiated with create_graph=True, whose second backward would read weights "
                "that have been released by then; use zero_dp_strategy 2 or less for gradient penalties."
            )
        schedule.gradient_arrived(unit, call)
        if schedule.watch.is_on:
            schedule.watch.turn_back(unit)

    def _alive(self) -> tuple[Schedule, Unit]:
        schedule, unit = self.schedule(), self.unit()
        if schedule is None or unit is None:
            raise RuntimeError("the MegatronFSDP that sharded this module is gone; keep a reference to it.")
        return schedule, unit


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
    elif dataclasses.is_dataclass(value):
        yield from (getattr(value, field.name) for field in dataclasses.fields(value))
    else:
        yield from getattr(value, "__dict__", {}).values()
        for cls in type(value).__mro__:
            slots = getattr(cls, "__slots__", ())
            names = (slots,) if isinstance(slots, str) else slots
            yield from (getattr(value, name) for name in names if hasattr(value, name))
