"""Dtypes of main weights, main gradients and reductions, in every combination and under every strategy."""

import dataclasses
import itertools

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.unit_tests.harness.models import MLPBlock, TinyMLP
from tests.unit_tests.harness.parity import Case, check
from tests.unit_tests.harness.rank_pool import RankPool
from tests.unit_tests.harness.reference import DtypePolicy
from tests.unit_tests.harness.sharded import Sharding, full_grads, full_weights, shard
from tests.unit_tests.harness.strategies import STRATEGIES

FP32, BF16, FP64 = torch.float32, torch.bfloat16, torch.float64


def sharding(strategy: int, number: int = 0) -> Sharding:
    return Sharding(strategy=strategy, units=(None, (MLPBlock,))[number % 2], is_poisoned=number % 3 != 0)


# On one and two ranks the engine and the reference round at the same places, so floating-point results agree to the bit
# wherever a sum has two terms; integers agree wherever they fit the dtype, on any power of two of ranks.


@pytest.mark.parametrize("compute", [FP32, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_every_combination_of_dtypes_rounds_where_the_reference_does(
    rank_pools: dict[int, RankPool], ranks: int, compute: torch.dtype
) -> None:
    policies = itertools.product((None, FP32, BF16), (None, FP32, BF16), (None, FP32, BF16))
    cases = [
        Case(
            task="floats",
            microbatches=2,
            steps=2,
            dtypes=DtypePolicy(compute=compute, main_params=params, main_grads=grads, grad_comm=comm),
            sharding=sharding(strategy, number),
        )
        for number, (params, grads, comm) in enumerate(policies)
        for strategy in STRATEGIES
        # None stands for another dtype of the list, so that every strategy meets every combination all the same.
        if (number + strategy) % (2 if ranks == 2 else 4) == 0
    ]
    check(rank_pools[ranks], cases, rtol=1e-6, atol=1e-7)


def test_dtypes_on_two_axes(ranks4: RankPool) -> None:
    policies = [(FP32, FP32, BF16), (BF16, None, FP32), (None, FP64, FP64)]
    check(
        ranks4,
        [
            Case(
                task="integers",
                microbatches=2,
                steps=1,
                dtypes=DtypePolicy(compute=FP32, main_params=params, main_grads=grads, grad_comm=comm),
                sharding=dataclasses.replace(sharding(inner, inner), outer=outer),
            )
            for inner, outer in [(0, 0), (1, 0), (2, 0), (3, 0), (3, 1)]
            for params, grads, comm in policies
        ],
    )


class Scale(nn.Module):
    """One weight per input feature, so that a gradient is the input itself."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shape (width,) to a scalar."""
        return (self.weight * x).sum()


def job_many_microbatches(strategy: int, count: int, policy: DtypePolicy) -> torch.Tensor:
    model = shard(Scale(5).to(BF16), Sharding(strategy=strategy), policy)
    x = torch.full((5,), 2.0**-9, dtype=BF16)
    with model.no_sync():
        for _ in range(count - 1):
            model(x).backward()
    model(x).backward()
    model.finish_grad_sync()
    return full_grads(model)["weight"]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_hundreds_of_tiny_bf16_gradients_add_up_in_fp32(ranks2: RankPool, strategy: int) -> None:
    fp32 = DtypePolicy(main_grads=FP32, grad_comm=None)
    for total in ranks2.run(job_many_microbatches, strategy, 300, fp32):
        assert torch.equal(total, torch.full((5,), 300 * 2.0**-9))


def test_the_same_sum_stalls_in_bf16(ranks2: RankPool) -> None:
    # Where half a unit in the last place exceeds the summand: that fp32 gets there is no accident.
    bf16 = DtypePolicy(main_grads=None, grad_comm=None)
    assert (ranks2.run(job_many_microbatches, 0, 300, bf16)[0] < 300 * 2.0**-9).all()


def job_dtypes_and_storage(cases: list[tuple[int, torch.dtype, DtypePolicy]]) -> list[list]:
    """Facts of the only group of each model, and whether its main weight and compute weight are one storage."""
    facts = []
    for strategy, compute, policy in cases:
        model = shard(TinyMLP(integers=True).to(compute), Sharding(strategy=strategy), policy)
        (group,) = model.param_and_grad_buffer.parameter_groups
        weight, main = group.model_weight_buffer.data, group.main_weight_buffer.data
        is_shared = weight.untyped_storage().data_ptr() == main.untyped_storage().data_ptr()
        facts.append([group.main_weight_buffer.dtype, group.main_grad_buffer.dtype, group.spec.comm_dtype, is_shared])
    return facts


def test_memory_is_spent_only_where_dtypes_differ(ranks2: RankPool) -> None:
    expected = {
        (FP32, FP32, None, None): [FP32, FP32, FP32, True],
        (BF16, None, None, None): [BF16, BF16, BF16, True],
        (BF16, FP32, None, None): [FP32, BF16, BF16, False],
        (BF16, FP32, FP32, BF16): [FP32, FP32, BF16, False],
    }
    cases = [
        (strategy, compute, DtypePolicy(compute=compute, main_params=params, main_grads=grads, grad_comm=comm))
        for strategy in STRATEGIES
        for compute, params, grads, comm in expected
    ]
    for facts in ranks2.run(job_dtypes_and_storage, cases):
        assert facts == [*expected.values()] * len(STRATEGIES)


POLICIES = [DtypePolicy(main_grads=None), DtypePolicy(main_grads=FP32, grad_comm=FP64)]


def job_reduce_thrice(where: list[tuple[int, int | None]]) -> list[list[torch.Tensor]]:
    """Full gradients after each of three backwards with automatic synchronization, without a zero_grad."""
    seen = []
    for (strategy, outer), policy in itertools.product(where, POLICIES):
        model = shard(Scale(7), Sharding(strategy=strategy, outer=outer), policy)
        model.set_model_auto_sync(True)
        seen.append([])
        for number in range(3):
            model(torch.full((7,), 3.0**number + dist.get_rank())).backward()
            seen[-1].append(full_grads(model)["weight"])
    return seen


@pytest.mark.parametrize(
    ("ranks", "where"), [(1, [(1, None), (3, None)]), (2, [(s, None) for s in STRATEGIES]), (4, [(1, 0), (3, 1)])]
)
def test_no_gradient_is_counted_twice(rank_pools: dict[int, RankPool], ranks: int, where: list) -> None:
    mean_rank = (ranks - 1) / 2
    totals = [sum(3.0**earlier + mean_rank for earlier in range(number + 1)) for number in range(3)]
    for by_case in rank_pools[ranks].run(job_reduce_thrice, where):
        for case, seen in zip(itertools.product(where, POLICIES), by_case, strict=True):
            for total, grad in zip(totals, seen, strict=True):
                assert torch.equal(grad, torch.full((7,), total)), (case, grad, total)


def job_small_updates() -> list[torch.Tensor]:
    """Of each strategy, bf16 weights that move by less than their last place many times, and what is computed then."""
    return [_small_updates(strategy) for strategy in STRATEGIES]


def _small_updates(strategy: int) -> torch.Tensor:
    model = shard(Scale(3).to(BF16), Sharding(strategy=strategy), DtypePolicy(main_params=FP32, main_grads=None))
    with torch.no_grad():
        for param in model.parameters():
            param.to_local().fill_(1.0)
        for _ in range(64):
            for param in model.parameters():
                param.to_local().add_(2.0**-13)
            model.install_optimized_model_weights()
        output = model(torch.ones(3, dtype=BF16))
    return torch.stack([full_weights(model)["weight"].sum(), output.float()])


def test_small_updates_gather_in_the_main_weights(ranks2: RankPool) -> None:
    for by_strategy in ranks2.run(job_small_updates):
        for total, output in by_strategy:
            assert total == 3 * (1 + 2.0**-7)
            assert output == torch.tensor(3 * (1 + 2.0**-7)).to(BF16).float()


def job_autocast() -> list[dict[str, torch.Tensor]]:
    """Of each strategy, the gradients of an fp32 model that computes in bf16, recomputing one unit after the other."""
    found = []
    for strategy in STRATEGIES:
        torch.manual_seed(0)
        model = shard(TinyMLP(recompute="non_reentrant"), Sharding(strategy=strategy, units=(MLPBlock,)))
        for _ in range(2):
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(torch.ones(2, 6)).square().sum()
            loss.backward()
        model.finish_grad_sync()
        found.append(full_grads(model))
    return found


def test_autocast_computes_in_bf16_and_leaves_fp32_gradients(ranks2: RankPool) -> None:
    torch.manual_seed(0)
    plain = TinyMLP()
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            loss = plain(torch.ones(2, 6)).square().sum()
        loss.backward()
    for by_strategy in ranks2.run(job_autocast):
        for grads in by_strategy:
            for name, param in plain.named_parameters():
                torch.testing.assert_close(grads[name], param.grad, rtol=1e-6, atol=1e-6, msg=name)


def job_scale_changed() -> list[bool]:
    """Changes attached gradients, as a sum over other ranks would, and scales all."""
    found = []
    for dtypes in (DtypePolicy(main_grads=None), DtypePolicy(main_grads=FP32)):  # narrower than the weights; as wide
        torch.manual_seed(0)
        model = shard(TinyMLP(integers=True).to(BF16), Sharding(units=(MLPBlock,)), dtypes)
        model(torch.ones(2, 6, dtype=BF16)).sum().backward()
        model.finish_grad_sync()
        before = [param.grad.to_local().clone() for param in model.parameters()]
        for param in model.parameters():
            param.grad.to_local().add_(2.0)
        model.scale_gradients(0.5)
        pairs = zip(model.parameters(), before, strict=True)
        found.append(all(torch.equal(param.grad.to_local(), (grad + 2.0) * 0.5) for param, grad in pairs))
    return found


def test_scaling_keeps_what_was_done_to_attached_gradients(ranks2: RankPool) -> None:
    assert ranks2.run(job_scale_changed) == [[True, True]] * 2
