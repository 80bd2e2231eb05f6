"""Gradients of linear layers, which are computed where they are reduced from: never wrong, and not copied."""

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import prune
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from tests.unit_tests.harness.rank_pool import RankPool
from tests.unit_tests.harness.reference import DtypePolicy
from tests.unit_tests.harness.sharded import Sharding, full_grads, shard

WIDTH = 4


class Layer(nn.Module):
    """A unit with a weight of its own, which `use` reads."""

    def __init__(self, use: Callable[[nn.Linear, torch.Tensor], torch.Tensor], *, bias: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, bias=bias)
        self.use = use

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.use(self.linear, x)


class Doubled(nn.Linear):
    """What it computes is its own business."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return 2 * F.linear(input, self.weight)


def plainly(linear: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    return linear(x)


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


def changed_in_place(linear: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    by_batch, by_row = linear(x.view(2, -1, WIDTH)), [linear(row) for row in x]
    by_batch[..., :2] = 0
    return F.relu(by_batch, inplace=True).view(-1, WIDTH) + torch.stack([row.mul_(2) for row in by_row])


def sparse(linear: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    return linear(x.detach().to_sparse()) + linear(x.detach().to_sparse_csr()) + x


def nested(linear: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    return torch.cat(linear(torch.nested.as_nested_tensor([x[:1], x[1:]])).unbind())


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


USES = (
    plainly, twice, also_by_hand, by_hand, row_by_row, transposed, without_rows, mapped, in_autocast, asked_for, slope,
    in_mode, on_device,
)  # fmt: skip


def build(use: Callable, *, bias: bool = False) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Layer(use, bias=bias), Layer(use, bias=bias))


@contextlib.contextmanager
def counted_copies() -> Iterator[list[int]]:
    """Elements of gradients that are copied inside the context, in a list of one."""
    from megatron_fsdp.state import main_grad

    copied, write, copy_all = [0], main_grad.MainGrad._write, main_grad.foreach_copy_

    def count(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
        copied[0] += sum(source.numel() for source in sources)
        copy_all(targets, sources)

    def counting(*args, **kwargs) -> None:
        main_grad.foreach_copy_ = count
        try:
            write(*args, **kwargs)
        finally:
            main_grad.foreach_copy_ = copy_all

    main_grad.MainGrad._write = counting
    try:
        yield copied
    finally:
        main_grad.MainGrad._write = write


def trained(build_model: Callable[[], nn.Module], strategy: int = 3, **options) -> tuple[int, dict[str, torch.Tensor]]:
    """Elements copied, and gradients of two micro-batches, of a sharded model."""
    model = shard(build_model(), Sharding(strategy=strategy, units=(Layer,), options=options))
    with counted_copies() as copied:
        for seed in range(2):
            model.is_last_microbatch = seed == 1
            x = torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(seed))
            model(x).square().sum().backward()
        model.finish_grad_sync()
    return copied[0], full_grads(model)


def whole(build_model: Callable[[], nn.Module]) -> dict[str, torch.Tensor]:
    module = build_model()
    for seed in range(2):
        x = torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(seed))
        module(x).square().sum().backward()
    return {name: param.grad for name, param in module.named_parameters()}


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
        assert [by_use[use] for use in (plainly, transposed, without_rows, asked_for, on_device)] == [0] * 5
        # Of two gradients autograd makes a third.
        others = (twice, also_by_hand, by_hand, mapped, in_autocast, slope, in_mode)
        assert [by_use[use] for use in others] == [every] * len(others)


@pytest.mark.parametrize("strategy", [1, 2])
def test_other_strategies_are_as_right(ranks2: RankPool, strategy: int) -> None:
    ranks2.run(use_in_every_way, strategy, USES, {})


@contextlib.contextmanager
def wider_products() -> Iterator[None]:
    """Products of bf16 are written in fp32, as CUDA can."""
    from megatron_fsdp.runtime import linear_grads
    from megatron_fsdp.state import main_grad

    before = main_grad.multiplies_into, linear_grads.multiply_into
    main_grad.multiplies_into = lambda dtype, wider, device_type: wider is torch.float32
    linear_grads.multiply_into = lambda left, right, out: torch.mm(left.float(), right.float(), out=out)
    try:
        yield
    finally:
        main_grad.multiplies_into, linear_grads.multiply_into = before


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
    ranks2.run(with_wider_products, reduce_in_fp32, (plainly, by_hand))


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
    assert copied == 2 * 2 * WIDTH * WIDTH
    assert set(found) == {"0.linear.weight", "1.linear.weight"}


def change_outputs() -> None:
    for bias in (False, True):
        _, found = trained(lambda bias=bias: build(changed_in_place, bias=bias))
        for name, expected in whole(lambda bias=bias: build(changed_in_place, bias=bias)).items():
            torch.testing.assert_close(found[name], expected)


def give_other_layouts() -> None:
    for use in (sparse, nested):
        _, found = trained(lambda use=use: build(use, bias=True))
        for name, expected in whole(lambda use=use: build(use, bias=True)).items():
            torch.testing.assert_close(found[name], expected)


@pytest.mark.filterwarnings("ignore:Sparse CSR", "ignore:The PyTorch API of nested")
def test_inputs_may_be_sparse_or_nested(ranks2: RankPool) -> None:
    ranks2.run(give_other_layouts)


def test_outputs_can_be_changed_in_place(ranks2: RankPool) -> None:
    ranks2.run(change_outputs)


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


def keep_gradients(watch: str) -> list[torch.Tensor]:
    """What hooks that were registered before sharding keep of this rank's own gradients."""
    kept: list[torch.Tensor] = []
    module = build(plainly)
    for param in module.parameters():
        if watch == "gradients":
            param.register_hook(kept.append)
        else:
            param.register_post_accumulate_grad_hook(lambda param: kept.append(param.grad))
    model = shard(module, Sharding(strategy=3, units=(Layer,)))
    for seed in range(2):
        model.is_last_microbatch = seed == 1
        x = torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(seed))
        model(x * (1 + dist.get_rank())).square().sum().backward()
    model.finish_grad_sync()
    return kept


def keep_gradients_of_either_kind(watch: str) -> None:
    from megatron_fsdp.runtime import linear_grads

    before, linear_grads.LEAST_NUMEL = linear_grads.LEAST_NUMEL, 2**62
    try:
        expected = keep_gradients(watch)
    finally:
        linear_grads.LEAST_NUMEL = before
    found = keep_gradients(watch)
    assert len(found) == len(expected) == 4
    for grad, other in zip(found, expected, strict=True):
        torch.testing.assert_close(grad, other)


@pytest.mark.parametrize("watch", ["gradients", "parameters"])
def test_a_gradient_that_a_hook_keeps_is_not_overwritten(ranks2: RankPool, watch: str) -> None:
    ranks2.run(keep_gradients_of_either_kind, watch)


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


def copy_a_layer() -> None:
    model = shard(build(plainly), Sharding(strategy=3, units=(Layer,)))
    copy.deepcopy(model.module[0].linear)


def test_a_layer_cannot_be_copied(ranks2: RankPool) -> None:
    ranks2.run_expecting(NotImplementedError, "cannot be deep-copied", copy_a_layer)


def prune_bias(linear: nn.Linear) -> None:
    prune.l1_unstructured(linear, "bias", 2)


def fix_bias(linear: nn.Linear) -> None:
    fixed = linear.bias.detach()
    del linear.bias
    linear.register_buffer("bias", fixed)


def shadow_weight(linear: nn.Linear) -> None:
    def hook(module: nn.Linear, args: tuple) -> None:
        vars(module)["weight"] = 2 * module._parameters["weight"]

    def unhook(module: nn.Linear, args: tuple, output: torch.Tensor) -> None:
        del vars(module)["weight"]

    linear.register_forward_pre_hook(hook)
    linear.register_forward_hook(unhook)


def replaced_forward(module: nn.Linear, input: torch.Tensor) -> torch.Tensor:
    return 2 * F.linear(input, module.weight, module.bias)


def change_layers() -> None:
    def changed(change: Callable[[nn.Linear], None]) -> nn.Module:
        module = build(plainly, bias=True)
        for layer in module:
            change(layer.linear)
        return module

    def check(change: Callable[[nn.Linear], None]) -> None:
        _, found = trained(lambda: changed(change))
        for name, expected in whole(lambda: changed(change)).items():
            torch.testing.assert_close(found[name], expected)

    for change in (prune_bias, fix_bias, shadow_weight):
        check(change)
    before, nn.Linear.forward = nn.Linear.forward, replaced_forward
    try:
        check(lambda linear: None)
    finally:
        nn.Linear.forward = before


def test_layers_that_were_changed_compute_what_they_did(ranks2: RankPool) -> None:
    ranks2.run(change_layers)


def small_layers() -> int:
    from megatron_fsdp.runtime import linear_grads

    before, linear_grads.LEAST_NUMEL = linear_grads.LEAST_NUMEL, WIDTH * WIDTH + 1
    try:
        return trained(lambda: build(plainly))[0]
    finally:
        linear_grads.LEAST_NUMEL = before


def test_small_layers_are_copied(ranks2: RankPool) -> None:
    assert ranks2.run(small_layers) == [2 * 2 * WIDTH * WIDTH] * 2
