"""Large weights whose gradient `F.linear` computes where it is reduced from, so that nothing copies it there."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from megatron_fsdp.machine.torch_compat import (
    accumulates_gradient,
    has_hooks,
    is_transformed,
    multiply_into,
    storage_id,
    without_overrides,
)
from megatron_fsdp.runtime.schedule import Schedule
from megatron_fsdp.runtime.unit import Unit, contains

LEAST_NUMEL = 2**25
"""Elements of a weight from which on it pays. An H200 copies a million bf16 gradients in 1.7 us beside other work, and
the layer's call and its backward take 28 us more of the host than torch's (docs/performance.md)."""


def install(schedule: Schedule) -> None:
    """Makes every large matrix whose gradients are reduced in each backward a `LinearWeight`.

    Gradients travel in the weight's dtype or, on CUDA, in fp32: then they are not even rounded before they are. Not in
    a unit around others, whose gradients would lie in a communication buffer all the while that theirs come and go.
    """
    for unit in schedule.units:
        large = [
            (raw, _Lender(weakref.ref(schedule), weakref.ref(unit), weakref.ref(raw), number, slot))
            for number, group in enumerate(unit.groups)
            if group.main_grad is not None and group.main_grad.lends
            for slot, raw in enumerate(group.params)
            if type(raw) is nn.Parameter and raw.dim() == 2 and raw.numel() >= LEAST_NUMEL
        ]
        if not large or any(contains(unit, other) for other in schedule.units if other is not unit):
            continue
        for raw, lender in large:
            raw.grad_dtype = None  # as it is computed, even if that is wider than the weight
            raw.__class__, raw.lender = LinearWeight, lender
            if unit.groups[lender.number].facts.comm_dtype is raw.dtype:  # the compiler rounds to the weight's dtype
                _LENDERS[storage_id(raw), raw.storage_offset()] = lender


@dataclasses.dataclass(frozen=True)
class _Lender:
    """Gives one weight's gradient its place in the running backward. Like hooks it keeps nothing alive."""

    schedule: weakref.ref[Schedule]
    unit: weakref.ref[Unit]
    raw: weakref.ref[nn.Parameter]
    number: int
    """Of the unit's groups the one that the weight is in."""
    slot: int

    def __call__(self) -> torch.Tensor | None:
        """The place, which nobody else is given in this backward; None if it is taken, or somebody may keep it."""
        schedule, unit, raw = self.schedule(), self.unit(), self.raw()
        if schedule is None or unit is None or raw is None or has_hooks(raw) or not accumulates_gradient(raw):
            return None
        return schedule.lend_gradient(unit, unit.groups[self.number], self.slot)


_LENDERS: weakref.WeakValueDictionary[tuple[int, int], _Lender] = weakref.WeakValueDictionary()
"""By storage and offset, which a weight keeps: compiled code and checkpoints hand on another object than the weight."""


class LinearWeight(nn.Parameter):
    """A weight that has `F.linear` write its gradient in place, whoever calls it; all else is torch's own."""

    lender: _Lender | None = None

    @classmethod
    def __torch_function__(
        cls, func: Callable, types: tuple[type, ...], args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Calls `func`, of which `F.linear` is another one."""
        if len(types) > 1 and (others := tuple(other for other in types if not issubclass(cls, other))):
            return others[0].__torch_function__(func, others, args, kwargs)  # as if this one overrode nothing
        with without_overrides():
            return (_linear if func is F.linear else func)(*args, **(kwargs or {}))


def _linear(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`F.linear`, with its gradient in place if nothing but autograd looks at what is done with `weight`."""
    if (
        type(weight) is not LinearWeight
        or type(input) is not torch.Tensor
        or input.layout is not torch.strided  # sparse
        or input.is_nested
        or not torch.is_grad_enabled()
        or torch.is_autocast_enabled(weight.device.type)
        or is_transformed()
    ):
        return F.linear(input, weight, bias)
    linear = torch.ops.megatron_fsdp.linear if torch.compiler.is_compiling() else _Linear.apply
    return linear(input, weight, bias)


class _Linear(torch.autograd.Function):
    """`F.linear`, with torch's own products in backward, but for where one of them is written."""

    @staticmethod
    def forward(ctx, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        ctx.save_for_backward(input, weight)
        ctx.lender = getattr(weight, "lender", None)
        # Of a batch torch gives a view of rows, and views that leave such a function cannot be changed in place.
        return F.linear(input, weight, bias).data

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        input, weight = ctx.saved_tensors
        of_input, of_weight, of_bias = ctx.needs_input_grad
        rows = grad.reshape(-1, grad.shape[-1])
        return (
            rows.mm(weight).view(input.shape) if of_input else None,
            _of_weight(ctx.lender, rows, input.reshape(-1, input.shape[-1]), weight) if of_weight else None,
            rows.sum(0) if of_bias else None,
        )


def _of_weight(
    lender: _Lender | None, grad: torch.Tensor, input: torch.Tensor, weight: torch.Tensor
) -> torch.Tensor:
    if torch.is_grad_enabled():  # differentiated again
        return grad.t() @ input
    if lender is None:  # what the compiler traces
        return torch.ops.megatron_fsdp.weight_grad(grad, input, weight)
    return _product(lender, grad, input)


def _product(lender: _Lender | None, grad: torch.Tensor, input: torch.Tensor) -> torch.Tensor:
    """The weight's gradient, in its place or, if that is taken or of no use, in new memory."""
    place = lender() if lender is not None else None
    return grad.t() @ input if place is None else multiply_into(grad.t(), input, place)


def _compiled_product(grad: torch.Tensor, input: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return _product(_LENDERS.get((storage_id(weight), weight.storage_offset())), grad, input)


# Inside compiled layers: traced as `_Linear`, in whose backward the compiler sees a function without side effects.
_OPS = torch.library.Library("megatron_fsdp", "DEF")
_OPS.define("linear(Tensor input, Tensor weight, Tensor? bias) -> Tensor")
_OPS.impl("linear", F.linear, "CompositeExplicitAutograd")
_OPS.impl("linear", _Linear.apply, "Autograd")
_OPS.define("weight_grad(Tensor grad, Tensor input, Tensor weight) -> Tensor", tags=torch.Tag.cudagraph_unsafe)
_OPS.impl("weight_grad", _compiled_product, "CompositeExplicitAutograd")
torch.library.register_fake(
    "megatron_fsdp::weight_grad", lambda grad, input, weight: weight.new_empty(weight.shape), lib=_OPS
)
