"""Linear layers that torch.compile has made: their gradients too are computed where they are reduced from."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

from tests.unit_tests.gloo.gradients.test_linear_grads import (
    also_by_hand,
    by_hand,
    in_autocast,
    mapped,
    transposed,
    twice,
)
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


def same_twice(linear: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    """The compiler finds that both are the same."""
    return linear(x) + linear(x)


def in_batches(linear: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    return F.gelu(linear(x.view(2, -1, WIDTH))).view(-1, WIDTH)


def changed_in_place(linear: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    by_batch = linear(x.view(2, -1, WIDTH))
    by_batch[..., :2] = 0
    return F.relu(by_batch, inplace=True).view(-1, WIDTH)


def recomputed(linear: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    return checkpoint(linear, torch.tanh(x), use_reentrant=False)


def compiled(build_model: Callable[[], nn.Module], backend: str, way: str) -> nn.Module:
    module = build_model()
    for layer in module:
        if way == "forward":  # the compiler sees no hook, so the whole graph is one
            layer.forward = torch.compile(layer.forward, backend=backend, fullgraph=True)
        elif way == "recomputed":
            forward = torch.compile(layer.forward, backend=backend)
            layer.forward = lambda x, forward=forward: checkpoint(forward, x, use_reentrant=False)
        else:
            layer.compile(backend=backend)
    return module


def train_compiled(use: Callable, backend: str, way: str, bias: bool = False) -> int:
    """Elements that are copied, biases not counted; the gradients are right."""
    torch._dynamo.reset()
    copied, found = trained(lambda: compiled(lambda: build(use, bias=bias), backend, way))
    for name, expected in whole(lambda: build(use, bias=bias)).items():
        torch.testing.assert_close(found[name], expected, rtol=1e-5, atol=1e-6, msg=name)
    return copied - (2 * 2 * WIDTH if bias else 0)


EVERY = 2 * 2 * WIDTH * WIDTH
"""Elements of two layers' gradients in two micro-batches."""


@pytest.mark.parametrize(
    ("use", "way"),
    [
        (plainly, "forward"), (by_hand, "forward"), (transposed, "forward"), (in_batches, "module"),
        (in_batches, "recomputed"), (changed_in_place, "forward"), (recomputed, "forward"),
    ],
)  # fmt: skip
def test_compiled_layers_compute_their_gradients_in_place(ranks2: RankPool, use: Callable, way: str) -> None:
    assert ranks2.run(train_compiled, use, "aot_eager", way, use is in_batches) == [0, 0]


@pytest.mark.parametrize(
    ("use", "times"), [(mapped, 1), (in_autocast, 1), (twice, 2), (also_by_hand, 2), (same_twice, 2)]
)
def test_compiled_layers_copy_what_cannot_be_in_place(ranks2: RankPool, use: Callable, times: int) -> None:
    # A gradient that is not found in the place that was lent to it is copied with all that is there.
    assert ranks2.run(train_compiled, use, "aot_eager", "module") == [times * EVERY] * 2


class Reusing(torch.autograd.Function):
    """A layer as inductor may make it: memory of what is only added to something else is reused for another result."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t() + x @ weight

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight = ctx.saved_tensors
        used = torch.ops.megatron_fsdp.weight_grad(grad, x, weight)
        of_weight, of_input = used + x.t() @ grad, grad @ weight + grad @ weight.t()
        used.copy_(of_input)
        return used.as_strided(of_input.shape, of_input.stride()), of_weight


def reuse_memory() -> int:
    def reused(linear: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        return Reusing.apply(x if len(x) == WIDTH else x[:WIDTH], linear.weight)

    copied, found = trained(lambda: build(reused))
    for name, expected in whole(lambda: build(reused)).items():
        torch.testing.assert_close(found[name], expected, rtol=1e-5, atol=1e-6)
    return copied


def test_memory_that_compiled_code_reuses_is_not_overwritten(ranks2: RankPool) -> None:
    assert ranks2.run(reuse_memory) == [2 * EVERY] * 2  # all is copied elsewhere first


def reduce_in_fp32() -> None:
    """Gradients of compiled code have the weight's dtype, so they are rounded as torch rounds them, and copied."""
    x = (1 + torch.arange(7 * WIDTH).view(7, WIDTH) / 128).bfloat16()
    model = shard(
        compiled(lambda: build(plainly).bfloat16(), "aot_eager", "forward"), Sharding(units=(Layer,)), DtypePolicy()
    )
    with wider_products(), counted_copies() as copied:
        model(x).sum().backward()
        model.finish_grad_sync()
    expected = build(plainly).bfloat16()
    expected(x).sum().backward()
    assert copied[0] == 2 * WIDTH * WIDTH
    for name, grad in full_grads(model).items():
        assert torch.equal(grad, expected.get_parameter(name).grad.float())


def test_compiled_gradients_that_travel_in_fp32_are_copied(ranks2: RankPool) -> None:
    ranks2.run(reduce_in_fp32)


def compilations(least: int) -> int:
    from megatron_fsdp.runtime import linear_grads

    before, linear_grads.LEAST_NUMEL = linear_grads.LEAST_NUMEL, least
    try:
        torch._dynamo.reset()
        module, backend = nn.Sequential(*[Layer(plainly) for _ in range(5)]), CompileCounterWithBackend("aot_eager")
        for layer in module:
            layer.forward = torch.compile(layer.forward, backend=backend)
        trained(lambda: module)
        return backend.frame_count
    finally:
        linear_grads.LEAST_NUMEL = before


def test_layers_of_one_kind_are_not_compiled_more_often_than_without(ranks2: RankPool) -> None:
    assert ranks2.run(compilations, 1) == ranks2.run(compilations, 2**62)


@pytest.mark.slow
def test_layers_that_inductor_compiled_compute_their_gradients_in_place(ranks2: RankPool) -> None:
    assert ranks2.run(train_compiled, in_batches, "inductor", "forward", True) == [0, 0]
