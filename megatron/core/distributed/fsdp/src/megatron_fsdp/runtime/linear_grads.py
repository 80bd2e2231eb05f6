"""Has linear layers compute their weight's gradient where it is reduced from, so that nothing copies it there."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator

import torch
import torch.nn.functional as F
from torch import nn

from megatron_fsdp.machine.torch_compat import (
    accumulates_gradient,
    graph_task,
    has_hooks,
    is_transformed,
    multiply_into,
)
from megatron_fsdp.runtime.schedule import Schedule
from megatron_fsdp.runtime.unit import Place, Unit, contains

LEAST_NUMEL = 2**25
"""Elements of a weight from which on it pays. An H200 copies a million bf16 gradients in 1.7 us beside other work, and
the layer's call and its backward take 28 us more of the host than torch's (docs/performance.md)."""


def install(schedule: Schedule) -> None:
    """Gives every large `nn.Linear` whose gradients are reduced in each backward a forward with such a backward.

    They travel in the weight's dtype or, on CUDA, in fp32: then they are not even rounded before they are. Only plain
    layers: of a subclass, or with a `forward` of its own, nobody knows what it computes. Not in a unit around others,
    whose gradients would lie in a communication buffer all the while that theirs come and go.
    """
    tasks = _Tasks()
    for unit in schedule.units:
        large = list(_large_weights(unit))
        if not large or any(contains(unit, other) for other in schedule.units if other is not unit):
            continue
        places = {id(param.raw): param.places for param in unit.params}
        for number, slot, raw in large:
            raw.grad_dtype = None  # as it is computed, even if that is wider than the weight
            _install(_Lender(schedule, unit, number, slot, tasks), places[id(raw)])


def _large_weights(unit: Unit) -> Iterator[tuple[int, int, nn.Parameter]]:
    """Parameters whose gradients could be computed in place, each with its group's number and its place in that."""
    for number, group in enumerate(unit.groups):
        if group.main_grad is not None and group.main_grad.lends:
            for slot, raw in enumerate(group.params):
                if type(raw) is nn.Parameter and raw.numel() >= LEAST_NUMEL:
                    yield number, slot, raw


def _install(lender: _Lender, places: Iterable[Place]) -> None:
    for place in places:
        module = place.module()
        if type(module) is nn.Linear and place.name == "weight" and "forward" not in vars(module):
            module.forward = _LinearForward(module, lender)


class _Tasks:
    """What becomes of the gradients that autograd's graph tasks compute; each is asked once, for all its leaves."""

    def __init__(self) -> None:
        self._task = -1
        self._accumulates = False

    def accumulates(self, leaf: torch.Tensor) -> bool:
        """The running task accumulates into `leaf.grad`; it does not hand gradients to somebody who keeps them."""
        task = graph_task()
        if task != self._task:
            self._task, self._accumulates = task, accumulates_gradient(leaf)
        return self._accumulates


class _Lender:
    """Where the gradient of one weight goes. Like hooks it keeps nothing alive."""

    def __init__(self, schedule: Schedule, unit: Unit, number: int, slot: int, tasks: _Tasks):
        self._schedule = weakref.ref(schedule)
        self._unit = weakref.ref(unit)
        self._number = number
        """Of the unit's groups the one that the weight is in."""
        self._slot = slot
        self._raw = weakref.ref(unit.groups[number].params[slot])
        self._tasks = tasks
        self._device_type = unit.groups[number].facts.device.type

    def serves(self, weight: torch.Tensor, x: torch.Tensor) -> bool:
        """This is the weight, and nothing but autograd looks at what is done with it."""
        return (
            weight is self._raw()
            and type(x) is torch.Tensor
            and x.dtype is weight.dtype
            and x.layout is torch.strided  # not sparse
            and not x.is_nested
            and torch.is_grad_enabled()
            and not torch.is_autocast_enabled(self._device_type)
            and not is_transformed()
        )

    def product(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        """The weight's gradient as `left @ right`, in its place or, if that is taken or of no use, in new memory."""
        place = self._place()
        return left @ right if place is None else multiply_into(left, right, place)

    def _place(self) -> torch.Tensor | None:
        schedule, unit = self._schedule(), self._unit()
        if schedule is None or unit is None or torch.is_grad_enabled():  # differentiated again
            return None
        raw = self._raw()
        if has_hooks(raw) or not self._tasks.accumulates(raw):  # somebody may keep it
            return None
        return schedule.lend_gradient(unit, unit.groups[self._number], self._slot)


class _LinearForward:
    """Stands in for `nn.Linear.forward` of one module."""

    def __init__(self, module: nn.Linear, lender: _Lender):
        self._module = weakref.ref(module)
        self._lender = lender

    def __call__(self, input: torch.Tensor) -> torch.Tensor:
        """What `nn.Linear` computes."""
        module = self._module()
        params = module._parameters  # not through the module: the host must run ahead of the device
        weight = params.get("weight")
        if self._lender.serves(weight, input) and _is_plain(module):
            return _Linear.apply(input, weight, params["bias"], self._lender)
        return type(module).forward(module, input)

    def __deepcopy__(self, memo: dict) -> _LinearForward:
        raise NotImplementedError(
            "a module of a sharded model cannot be deep-copied; copy it before sharding, or copy its state_dict()."
        )


def _is_plain(module: nn.Module) -> bool:
    """It is still torch's own layer, and its `weight` and `bias` are its parameters of these names.

    A pruned bias is an attribute, one that is not trained may be a buffer, and libraries replace `nn.Linear.forward`.
    """
    attributes = vars(module)
    return (
        type(module) is nn.Linear
        and "bias" in attributes["_parameters"]
        and "bias" not in attributes
        and "weight" not in attributes
        and getattr(nn.Linear.forward, "__globals__", None) is _TORCHS
    )


_TORCHS = vars(torch.nn.modules.linear)
"""Where torch's own `nn.Linear.forward` finds its names."""


class _Linear(torch.autograd.Function):
    """`F.linear`, with torch's own products in backward, but for where one of them is written."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, lender: _Lender) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.lender = lender
        # Of a batch torch gives a view of rows, and views that leave such a function cannot be changed in place.
        return F.linear(x, weight, bias).data

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        of_input, of_weight, of_bias, _ = ctx.needs_input_grad
        rows = grad.reshape(-1, grad.shape[-1])
        return (
            rows.mm(weight).view(x.shape) if of_input else None,
            ctx.lender.product(rows.t(), x.reshape(-1, x.shape[-1])) if of_weight else None,
            rows.sum(0) if of_bias else None,
            None,
        )
