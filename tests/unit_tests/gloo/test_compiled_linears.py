"""Linear layers that torch.compile has made: their gradients too are computed where they are reduced from."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

from tests.unit_tests.gloo.test_linear_grads import also_by_hand, by_hand, in_autocast, mapped, transposed, twice
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


def train_compiled(uses: tuple[Callable, ...], backend: str, ways: tuple[str, ...], bias: bool) -> list[int]:
    copies = []
    for use in uses:
        for way in ways:
            torch._dynamo.reset()
            copied, found = trained(lambda use=use, way=way: compiled(lambda: build(use, bias=bias), backend, way))
            copies.append(copied - (2 * 2 * WIDTH if bias else 0))
            for name, expected in whole(lambda use=use: build(use, bias=bias)).items():
                torch.testing.assert_close(
                    found[name], expected, rtol=1e-5, atol=1e-6, msg=f"{use.__name__} {way} {name}"
                )
    return copies


EVERY = 2 * 2 * WIDTH * WIDTH
"""Elements of two layers' gradients in two micro-batches."""


@pytest.mark.parametrize("bias", [False, True])
def test_compiled_layers_compute_their_gradients_in_place(ranks2: RankPool, bias: bool) -> None:
    uses = (plainly, by_hand, transposed, in_batches, changed_in_place, recomputed)
    ways = ("forward", "recomputed", "module")
    assert ranks2.run(train_compiled, uses, "aot_eager", ways, bias) == [[0] * len(uses) * len(ways)] * 2


def test_compiled_layers_copy_what_cannot_be_in_place(ranks2: RankPool) -> None:
    uses = (twice, also_by_hand, mapped, in_autocast, same_twice)
    assert ranks2.run(train_compiled, uses, "aot_eager", ("module",), False) == [[EVERY] * len(uses)] * 2


def reduce_in_fp32() -> None:
    """What the compiler makes has the weight's dtype, so it is rounded as torch rounds it, and copied."""
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
    assert ranks2.run(train_compiled, (in_batches,), "inductor", ("forward",), True) == [[0]] * 2
