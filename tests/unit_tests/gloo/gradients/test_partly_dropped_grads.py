"""Two optimizers over one group of parameters: what one of them drops is dropped at any time, and nothing else."""

from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from megatron_fsdp import MixedPrecisionPolicy, fully_shard_model, fully_shard_optimizer
from tests.unit_tests.harness.rank_pool import RankPool
from tests.unit_tests.harness.sharded import flat_mesh

FLOATS, HALVES = torch.float32, torch.bfloat16


class Sums(nn.Module):
    """Every gradient is the input."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.ones(5))
        self.b = nn.Parameter(torch.ones(7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.a * x).sum() + (self.b * x).sum()


class Made(NamedTuple):
    """A model and an optimizer of each parameter, which decays what it has a gradient of, be it zero."""

    model: Any
    of_a: torch.optim.Optimizer
    of_b: torch.optim.Optimizer

    def backward(self, value: float, dtype: torch.dtype) -> None:
        self.model(torch.tensor(value, dtype=dtype)).backward()

    @property
    def values(self) -> list[float]:
        return [param.full_tensor()[0].item() for param in self.model.module.parameters()]

    @property
    def grads(self) -> list[float | None]:
        grads = [param.grad for param in self.model.module.parameters()]
        return [None if grad is None else grad.full_tensor()[0].item() for grad in grads]


def make(dtype: torch.dtype, *, syncs: bool = True, **policy: Any) -> Made:
    model = fully_shard_model(
        Sums().to(dtype),
        flat_mesh(),
        "dp",
        sync_model_each_microbatch=syncs,
        mixed_precision_policy=MixedPrecisionPolicy(**policy),
    )
    params = [model.module.a, model.module.b]
    return Made(model, *(fully_shard_optimizer(torch.optim.AdamW([p], lr=0.1, weight_decay=0.5)) for p in params))


def job_before_final(dtype: torch.dtype) -> None:
    made = make(dtype, syncs=False)
    with made.model.no_sync():
        made.backward(1.0, dtype)
    made.of_a.zero_grad()
    made.of_b.step()
    made.of_a.step()
    assert made.grads[0] is None and made.values[0] == 1.0, "nothing came for it"
    assert made.values[1] < 1.0
    made.of_b.zero_grad()
    made.backward(2.0, dtype)
    made.of_a.zero_grad()
    made.backward(3.0, dtype)
    made.model.finish_grad_sync()
    assert made.grads == [3.0, 5.0], "what comes later is there"


def job_one_by_one(dtype: torch.dtype) -> None:
    made = make(dtype, syncs=False)
    with made.model.no_sync():
        made.backward(1.0, dtype)
    made.of_a.zero_grad()
    made.of_b.zero_grad()
    assert not made.model.param_and_grad_buffer.parameter_groups[0].main_grad_buffer.data.numel()
    made.of_a.step()
    made.of_b.step()
    assert made.values == [1.0, 1.0]


def job_dropped_then_detached(dtype: torch.dtype) -> None:
    made = make(dtype)
    made.backward(1.0, dtype)
    made.of_a.zero_grad()
    made.of_a.zero_grad(zero_grad_buffer=False)
    made.of_a.step()
    assert made.values[0] == 1.0


def job_held(dtype: torch.dtype) -> None:
    made = make(dtype)
    made.backward(1.0, dtype)
    held = made.model.module.a.grad
    made.of_a.zero_grad()
    assert held.full_tensor()[0] == 1.0
    made.backward(3.0, dtype)
    assert held.full_tensor()[0] == 1.0 and made.grads == [3.0, 4.0]


def job_alias_held(dtype: torch.dtype) -> None:
    made = make(dtype)
    made.backward(1.0, dtype)
    alias, other = made.model.module.a.grad.to_local(), made.model.module.b.grad
    made.of_a.zero_grad()
    made.backward(3.0, dtype)
    assert (alias == 1.0).all() and made.grads == [3.0, 4.0]
    assert made.model.module.b.grad is other, "it was not dropped, and is added to in place"


def job_before_the_sum_is_final(dtype: torch.dtype) -> None:
    made = make(dtype, syncs=False)
    made.backward(1.0, dtype)
    made.model.finish_grad_sync()
    with made.model.no_sync():
        made.backward(2.0, dtype)
    made.model.module.a.grad = None
    made.model.finish_grad_sync()
    assert made.grads == [None, 3.0]
    with made.model.no_sync():
        made.backward(4.0, dtype)
        made.model.module.b.grad = None
        made.backward(8.0, dtype)
    made.model.finish_grad_sync()
    assert made.grads == [12.0, 8.0]


@pytest.mark.parametrize("dtype", [FLOATS, HALVES])
@pytest.mark.parametrize(
    "job",
    [
        job_before_final,
        job_one_by_one,
        job_dropped_then_detached,
        job_held,
        job_alias_held,
        job_before_the_sum_is_final,
    ],
)
def test_one_of_two_optimizers_drops_its_gradients_only(ranks2: RankPool, job: Any, dtype: torch.dtype) -> None:
    ranks2.run(job, dtype)


def job_scaled() -> tuple[float, float]:
    """A gradient that was scaled between backwards, and what it should be; the copy on the parameter is narrower."""
    made = make(HALVES, main_params_dtype=None, main_grads_dtype=FLOATS)
    total = 0.0
    for value in torch.randn(20, generator=torch.Generator().manual_seed(1)).bfloat16().tolist():
        made.backward(value, HALVES)
        made.model.scale_gradients(0.7)
        total = 0.7 * (total + value)
    final = made.model.param_and_grad_buffer.parameter_groups[0].main_grad_buffer.data
    return final[:1].sum().item(), total


def test_what_was_not_changed_is_not_rounded(ranks2: RankPool) -> None:
    found, expected = ranks2.run(job_scaled)[0]
    assert found == pytest.approx(expected, rel=1e-5)
