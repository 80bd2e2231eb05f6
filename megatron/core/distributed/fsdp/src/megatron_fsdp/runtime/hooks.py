"""Turns autograd and module hooks into schedule calls; knows recomputation."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import register_multi_grad_hook

from megatron_fsdp.machine.torch_compat import in_backward
from megatron_fsdp.runtime.schedule import Schedule
from megatron_fsdp.runtime.unit import Phase, Unit


def install_hooks(schedule: Schedule) -> list[torch.utils.hooks.RemovableHandle]:
    """Hooks every unit's module and trainable parameters. Hooks hold the schedule weakly: user modules do not own it."""
    handles = []
    for unit in schedule.units:
        hooks = _UnitHooks(weakref.ref(schedule), weakref.ref(unit))
        module = unit.module()
        handles.append(module.register_forward_pre_hook(hooks.pre_forward, prepend=True, with_kwargs=True))
        handles.append(module.register_forward_hook(hooks.post_forward))
        handles.extend(raw.register_post_accumulate_grad_hook(hooks.grad_ready) for raw in unit.trainable)
    return handles


@dataclasses.dataclass(frozen=True)
class _UnitHooks:
    """The hooks of one unit."""

    schedule: weakref.ref[Schedule]
    unit: weakref.ref[Unit]

    def pre_forward(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        schedule, unit = self.schedule(), self.unit()
        if in_backward():
            schedule.recompute_forward(unit)
            return
        schedule.pre_forward(unit)
        if unit.has_frozen and torch.is_grad_enabled():
            inputs = [tensor for tensor in tensors_in((args, kwargs)) if tensor.requires_grad]
            if inputs:
                register_multi_grad_hook(inputs, self.inputs_ready, mode="all")

    def post_forward(self, module: nn.Module, args: tuple, output: Any) -> None:
        schedule, unit = self.schedule(), self.unit()
        outputs = [tensor for tensor in tensors_in(output) if tensor.requires_grad]
        if outputs and torch.is_grad_enabled():
            register_multi_grad_hook(outputs, self.pre_backward, mode="any")
        if unit.phase is not Phase.BACKWARD:
            schedule.post_forward(unit, awaits_backward=bool(outputs) and torch.is_grad_enabled())

    def pre_backward(self, grad: torch.Tensor) -> None:
        self.schedule().pre_backward(self.unit())

    def grad_ready(self, param: torch.Tensor) -> None:
        self.schedule().grad_ready(self.unit())

    def inputs_ready(self, grads: object) -> None:
        self.schedule().inputs_ready(self.unit())


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Every tensor in nested tuples, lists, dicts and dataclasses."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from tensors_in(getattr(value, field.name))
