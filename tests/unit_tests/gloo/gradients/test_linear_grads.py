"""Gradients of linear layers, which are computed where they are reduced from: never wrong, and not copied."""

import contextlib
import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from tests.unit_tests.harness.linears import (
    WIDTH,
    Layer,
    build,
    counted_copies,
    plainly,
    trained,
    whole,
    wider_products,
)
from tests.unit_tests.harness.rank_pool import RankPool
from tests.unit_tests.harness.reference import DtypePolicy
from tests.unit_tests.harness.sharded import Sharding, full_grads, shard


class Doubled(nn.Linear):
    """A layer whose output is its own business."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return 2 * F.linear(input, self.weight)


def twice(linear: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    return linear(torch.tanh(linear(x)))


def also_by_hand(linear: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    return linear(x) + torch.tanh(x) @ linear.weight


def by_hand(linear: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    return F.linear(x, linear.weight, linear.bias)


def row_by_row(linear: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    return torch.stack([linear(row) for row in x])


def transposed(linear: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    return linear(x.view(2, -1, WIDTH)).transpose(0, 1).reshape(-1, WIDTH)


def without_rows(linear: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    return torch.cat([linear(x[:0]), x])


def mapped(linear: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    return torch.vmap(linear)(x)


def in_autocast(linear: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return linear(x).float()


def asked_for(linear: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    """A gradient that its asker keeps must not lie where others are written."""
    with torch.enable_grad():
        (kept,) = torch.autograd.grad(linear(x.detach()).square().sum(), linear.weight)
    return linear(x) + x @ kept


def slope(linear: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    """A forward-mode derivative beside the value."""
    _, tangent = torch.func.jvp(linear, (x,), (torch.ones_like(x),))
    return linear(x) + tangent


class Doubling(TorchFunctionMode):
    """Doubles what linear layers compute."""

    def __torch_function__(self, func: Callable, types: tuple, args: tuple = (), kwargs: dict | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return 2 * result if func is F.linear else result


def in_mode(linear: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    with Doubling():
        return linear(x)


def on_device(linear: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    with torch.device("cpu"):
        return linear(x)


class Marked(torch.Tensor):
    """Says of what it is made, by torch's own way to override functions."""


def beside_another_class(linear: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    marked = F.linear(x.as_subclass(Marked), linear.weight) + torch.sum(linear.weight * x[0].as_subclass(Marked))
    assert type(marked) is Marked and type(linear.weight.relu()) is torch.Tensor
    return marked.as_subclass(torch.Tensor)


def named(linear: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    return F.linear(weight=linear.weight, input=x)


def recomputed(linear: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    """The forward runs again when the last layer's backward asks for what it has saved."""
    return checkpoint(lambda x: torch.tanh(linear(torch.tanh(x))), x, use_reentrant=False)


def recomputed_reentrantly(linear: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    return checkpoint(lambda x: torch.tanh(linear(torch.tanh(x))), x.requires_grad_(), use_reentrant=True)


def offloaded(linear: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    with torch.autograd.graph.save_on_cpu():
        return linear(torch.tanh(x))


def copied(linear: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    """Copies made or saved while the weight is there have gradients of their own."""
    stream = io.BytesIO()
    torch.save(linear.weight, stream)
    saved = torch.load(io.BytesIO(stream.getvalue()))
    copy_of = copy.deepcopy(linear)
    with torch.enable_grad():
        copy_of(x.detach()).sum().backward()
        F.linear(x.detach(), saved).sum().backward()
    assert torch.equal(copy_of.weight.grad, saved.grad) and type(saved) is nn.Parameter
    return linear(x)


USES = (
    plainly, twice, also_by_hand, by_hand, row_by_row, transposed, without_rows, mapped, in_autocast, asked_for, slope,
    in_mode, on_device, beside_another_class, named, recomputed, recomputed_reentrantly, offloaded, copied,
)  # fmt: skip


def use_in_every_way(strategy: int, uses: tuple[Callable, ...], options: dict) -> list[int]:
    copies = []
    for use in uses:
        copied, found = trained(lambda use=use: build(use), strategy, **options)
        copies.append(copied)
        for name, expected in whole(lambda use=use: build(use)).items():
            torch.testing.assert_close(found[name], expected, rtol=1e-5, atol=1e-6, msg=f"{use.__name__}: {name}")
    return copies


@pytest.mark.parametrize("options", [{}, {"fsdp_double_buffer": True}])
def test_gradients_are_right_however_a_layer_is_used_and_copied_only_where_they_must_be(
    ranks2: RankPool, options: dict
) -> None:
    every = 2 * 2 * WIDTH * WIDTH  # micro-batches and layers
    for copies in ranks2.run(use_in_every_way, 3, USES, options):
        by_use = dict(zip(USES, copies, strict=True))
        # Of two gradients autograd makes a third.
        others = (twice, also_by_hand, row_by_row, mapped, in_autocast, slope, beside_another_class)
        for use in USES:
            assert by_use[use] == (every if use in others else 0), use.__name__


@pytest.mark.parametrize("strategy", [1, 2])
def test_other_strategies_are_as_right(ranks2: RankPool, strategy: int) -> None:
    ranks2.run(use_in_every_way, strategy, USES, {})


def reduce_in_fp32(use: Callable) -> None:
    """One micro-batch of ones: whatever is rounded to bf16 on its way shows."""
    x = (1 + torch.arange(7 * WIDTH).view(7, WIDTH) / 128).bfloat16()
    model = shard(build(use).bfloat16(), Sharding(strategy=3, units=(Layer,)), DtypePolicy())
    with counted_copies() as copied:
        model(x).sum().backward()
        model.finish_grad_sync()
    found, expected = full_grads(model)["1.linear.weight"], build(use).bfloat16()
    expected(x).sum().backward()
    rounded = expected[1].linear.weight.grad
    torch.testing.assert_close(found, rounded.float(), rtol=2**-7, atol=0)
    is_precise = use is plainly
    assert (copied[0] == 0) == is_precise
    assert torch.equal(found, found.bfloat16().float()) != is_precise


def test_gradients_that_travel_in_fp32_are_not_rounded_before(ranks2: RankPool) -> None:
    ranks2.run(with_wider_products, reduce_in_fp32, (plainly, also_by_hand))


def with_wider_products(job: Callable, uses: tuple[Callable, ...]) -> None:
    with wider_products():
        for use in uses:
            job(use)


def learn_beside_a_bias_and_what_is_not_plain() -> None:
    copied, found = trained(lambda: build(plainly, bias=True))
    assert copied == 2 * 2 * WIDTH, "biases"
    for name, expected in whole(lambda: build(plainly, bias=True)).items():
        torch.testing.assert_close(found[name], expected)

    def subclassed() -> nn.Module:
        module = build(plainly)
        module[0].linear = Doubled(WIDTH, WIDTH, bias=False)
        own = module[1].linear
        own.forward = lambda x: F.linear(x, own.weight) + 1
        return module

    copied, found = trained(subclassed)
    assert copied == 0
    assert set(found) == {"0.linear.weight", "1.linear.weight"}


def test_biases_are_copied_and_layers_of_ones_own_left_alone(ranks2: RankPool) -> None:
    ranks2.run(learn_beside_a_bias_and_what_is_not_plain)


def interrupt_and_ask() -> None:
    """Neither a backward that raised nor one that asked for the input's gradient leaves anything behind."""
    expected = whole(lambda: build(plainly))
    model = shard(build(plainly), Sharding(strategy=3, units=(Layer,)))
    x = torch.randn(6, WIDTH, requires_grad=True)
    hidden = model(x)
    hidden.register_hook(lambda grad: (_ for _ in ()).throw(ZeroDivisionError()))
    with contextlib.suppress(ZeroDivisionError):
        hidden.sum().backward()
    model.zero_grad()
    torch.autograd.grad(model(x).sum(), x)
    model.zero_grad()
    for seed in range(2):
        model(torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(seed))).square().sum().backward()
    model.finish_grad_sync()
    for name, grad in full_grads(model).items():
        torch.testing.assert_close(grad, expected[name])


def test_what_was_not_accumulated_is_forgotten(ranks2: RankPool) -> None:
    ranks2.run(interrupt_and_ask)


class Recomputing(nn.Module):
    """A graph task inside the backward ends before the last layer has all of its gradient, if two forwards share it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = (Layer(plainly) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = checkpoint(lambda x: self.first(self.second(x)), x.requires_grad_(), use_reentrant=True)
        return self.last(torch.tanh(x))


def share_a_backward(options: dict) -> None:
    found = []
    for is_sharded in (True, False):
        torch.manual_seed(0)
        module = Recomputing()
        model = shard(module, Sharding(units=(Layer,), options=options)) if is_sharded else module
        inputs = [torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(seed)) for seed in range(2)]
        sum(model(x).square().sum() for x in inputs).backward()
        if is_sharded:
            model.finish_grad_sync()
            found.append(full_grads(model))
        else:
            found.append({name: param.grad for name, param in module.named_parameters()})
    for name, expected in found[1].items():
        torch.testing.assert_close(found[0][name], expected, msg=name)


@pytest.mark.parametrize("options", [{}, {"fsdp_double_buffer": True}])
def test_what_autograd_still_holds_is_not_overwritten(ranks2: RankPool, options: dict) -> None:
    ranks2.run(share_a_backward, options)


def penalize_slopes() -> None:
    """A second backward differentiates the products of the first."""
    results = []
    for is_sharded in (False, True):
        module = build(plainly)
        model = shard(module, Sharding(strategy=2, units=(Layer,))) if is_sharded else module
        x = torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(0), requires_grad=True)
        (slopes,) = torch.autograd.grad(torch.tanh(model(x)).sum(), x, create_graph=True)
        slopes.square().sum().backward()
        if is_sharded:
            model.finish_grad_sync()
            results.append(full_grads(model))
        else:
            results.append({name: param.grad for name, param in module.named_parameters()})
    for name, expected in results[0].items():
        torch.testing.assert_close(results[1][name], expected)


def test_a_gradient_of_gradients_is_right(ranks2: RankPool) -> None:
    ranks2.run(penalize_slopes)


def small_layers() -> int:
    from megatron_fsdp.runtime import linear_grads

    before, linear_grads.LEAST_NUMEL = linear_grads.LEAST_NUMEL, WIDTH * WIDTH + 1
    try:
        return trained(lambda: build(plainly))[0]
    finally:
        linear_grads.LEAST_NUMEL = before


def test_small_layers_are_copied(ranks2: RankPool) -> None:
    assert ranks2.run(small_layers) == [2 * 2 * WIDTH * WIDTH] * 2
