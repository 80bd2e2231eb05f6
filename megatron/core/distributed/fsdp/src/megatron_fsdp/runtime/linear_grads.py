"""Large weights whose gradient `F.linear` computes where it is reduced from, so that nothing copies it there."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable
from typing import Any, SupportsIndex

import torch
import torch.nn.functional as F
from torch import nn

from megatron_fsdp.machine import torch_compat
from megatron_fsdp.runtime.schedule import Schedule
from megatron_fsdp.runtime.unit import Unit, contains
from megatron_fsdp.state.param_group import ParamGroup

LEAST_NUMEL = 2**25
"""Elements of a weight from which on it pays. An H200 copies a million bf16 gradients in 1.7 us beside other work. A
call and its backward take the host longer than torch's: 11.1 us on a CPU, where what took 28 us beside that H200 took
8.9 (docs/lab/measurements.md)."""


def install(schedule: Schedule) -> None:
    """Makes every large matrix whose gradients are reduced in each backward a `LinearWeight`.

    Gradients travel in the weight's dtype or, on CUDA, in fp32: then they are not even rounded before they are. Not in
    a unit around others, whose gradients would lie in a communication buffer all the while that theirs come and go.
    """
    for unit in schedule.units:
        if any(contains(unit, other) for other in schedule.units if other is not unit):
            continue
        for group in unit.groups:
            for slot, param in enumerate(group.params) if group.main_grad and group.main_grad.has_wgrad_out else ():
                if type(param) is not nn.Parameter or param.dim() != 2 or param.numel() < LEAST_NUMEL:
                    continue
                param.grad_dtype = None  # as it is computed, even if that is wider than the weight
                out = _WgradOut(weakref.ref(schedule), weakref.ref(unit), weakref.ref(group), slot)
                param.__class__, vars(param)["wgrad_out"] = LinearWeight, out
                if group.spec.comm_dtype is param.dtype:  # compiled gradients have the weight's dtype
                    _WGRAD_OUTS[torch_compat.storage_id(param), param.storage_offset()] = out


@dataclasses.dataclass(frozen=True)
class _WgradOut:
    """The memory that one weight's gradient is reduced from. Like hooks it keeps nothing alive."""

    schedule: weakref.ref[Schedule]
    unit: weakref.ref[Unit]
    group: weakref.ref[ParamGroup]
    slot: int

    @torch_compat.uncompiled
    def product(self, grad: torch.Tensor, input: torch.Tensor, *, is_compiled: bool = False) -> torch.Tensor:
        """The weight's gradient, in that memory or, if it is taken or somebody may keep the gradient, in new memory."""
        out, schedule, unit, group = None, self.schedule(), self.unit(), self.group()
        if schedule is None or unit is None or group is None or group.main_grad is None:
            return grad.t() @ input
        if torch_compat.only_accumulates(group.params[self.slot]):
            out = schedule.wgrad_out(unit, group, self.slot)
        if out is None:
            return grad.t() @ input
        if is_compiled:
            group.main_grad.hold_until_found(self.slot)
        return torch_compat.multiply_into(grad.t(), input, out)


_WGRAD_OUTS: weakref.WeakValueDictionary[tuple[int, int | torch.SymInt], _WgradOut] = weakref.WeakValueDictionary()
"""By storage and offset, which a weight keeps: compiled code and checkpoints hand on another object than the weight."""


class LinearWeight(nn.Parameter):
    """A weight whose gradient `F.linear` writes in place, whoever calls it; all else is torch's own."""

    wgrad_out: _WgradOut | None = None

    @classmethod
    def __torch_function__(
        cls,
        func: Callable,
        types: tuple[type[torch.Tensor], ...],
        args: tuple = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Calls `func`, or for `F.linear` what stands in for it."""
        if len(types) > 1 and (others := tuple(other for other in types if not issubclass(cls, other))):
            return others[0].__torch_function__(func, others, args, kwargs)  # as if this one overrode nothing
        with torch_compat.without_overrides():
            return (_linear if func is F.linear else func)(*args, **(kwargs or {}))

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple:
        """Saved as a parameter like any other."""
        return nn.Parameter(self.detach(), self.requires_grad).__reduce_ex__(protocol)


def _linear(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`F.linear`, differentiated by `_Linear` if nothing but autograd looks at it."""
    is_plain = (
        type(input) is torch.Tensor
        and input.layout is torch.strided  # not sparse
        and not input.is_nested
        and torch.is_grad_enabled()
        and not torch.is_autocast_enabled(input.device.type)
        and not torch_compat.is_transformed(input)
    )
    if not is_plain:
        return F.linear(input, weight, bias)
    linear = torch.ops.megatron_fsdp.linear if torch.compiler.is_compiling() else _Linear.apply
    return linear(input, weight, bias)


class _Linear(torch.autograd.Function):
    """`F.linear`, with torch's own products in backward, but for where one of them is written."""

    # `ctx` is Any because it holds what `forward` puts on it.
    @staticmethod
    def forward(ctx: Any, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        ctx.save_for_backward(input, weight)
        ctx.wgrad_out = getattr(weight, "wgrad_out", None)
        # Of a batch torch gives a view of rows, and views that leave such a function cannot be changed in place.
        return F.linear(input, weight, bias).data

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        input, weight = ctx.saved_tensors  # a checkpoint runs its forward again here, overrides and all
        of_input, of_weight, of_bias = ctx.needs_input_grad
        rows = grad.reshape(-1, grad.shape[-1])
        with torch_compat.without_overrides():
            return (
                rows.mm(weight).view(input.shape) if of_input else None,
                _weight_grad(ctx.wgrad_out, rows, input.reshape(-1, input.shape[-1]), weight) if of_weight else None,
                rows.sum(0) if of_bias else None,
            )


def _weight_grad(out: _WgradOut | None, grad: torch.Tensor, input: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    if torch.is_grad_enabled():  # differentiated again
        return grad.t() @ input
    if out is None:  # the compiler traces
        return torch.ops.megatron_fsdp.weight_grad(grad, input, weight)
    return out.product(grad, input)


def _compiled_weight_grad(grad: torch.Tensor, input: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    out = _WGRAD_OUTS.get((torch_compat.storage_id(weight), weight.storage_offset()))
    return grad.t() @ input if out is None else out.product(grad, input, is_compiled=True)


# For the compiler `linear` is what it is made of, and `weight_grad`, of which it knows nothing, a pure function.
_OPS = torch.library.Library("megatron_fsdp", "DEF")
_OPS.define("linear(Tensor input, Tensor weight, Tensor? bias) -> Tensor")
_OPS.impl("linear", _Linear.apply, "CompositeImplicitAutograd")
_OPS.define("weight_grad(Tensor grad, Tensor input, Tensor weight) -> Tensor", tags=torch.Tag.cudagraph_unsafe)
_OPS.impl("weight_grad", _compiled_weight_grad, "CompositeExplicitAutograd")
torch.library.register_fake("megatron_fsdp::weight_grad", lambda grad, input, weight: torch.empty_like(weight))
