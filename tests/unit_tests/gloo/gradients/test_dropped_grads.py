"""Gradients that users drop by any of torch's ways are dropped, and only those."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron_fsdp import MixedPrecisionPolicy, fully_shard, fully_shard_model, fully_shard_optimizer
from tests.unit_tests.harness.communication import no_collectives
from tests.unit_tests.harness.models import MLPBlock, TinyMLP
from tests.unit_tests.harness.rank_pool import RankPool
from tests.unit_tests.harness.sharded import flat_mesh


def none_each(model: nn.Module, optimizer: Any) -> None:
    for param in model.parameters():
        param.grad = None


def inner_zero_grad(model: nn.Module, optimizer: Any) -> None:
    getattr(model, "module", model).zero_grad()


def some_layers(model: nn.Module, optimizer: Any) -> None:
    getattr(model, "module", model).blocks[0].zero_grad()


def torch_zero_grad(model: nn.Module, optimizer: Any) -> None:
    torch.optim.Optimizer.zero_grad(optimizer)


def in_place(model: nn.Module, optimizer: Any) -> None:
    for param in model.parameters():
        if param.grad is not None:
            param.grad.zero_()


WAYS = [none_each, inner_zero_grad, some_layers, torch_zero_grad, in_place]


def train(drop: Callable, model: nn.Module, optimizer: Any, ranks: int, mine: slice, between: bool) -> list[list]:
    """Weights after each of three steps; gradients are dropped after a step, or between forward and backward."""
    seen = []
    for step in range(3):
        for part in range(2):
            x = torch.randn(4 * ranks, 6, generator=torch.Generator().manual_seed(10 * step + part))[mine]
            loss = model(x).square().mean()
            if between and part == 0:
                drop(model, optimizer)
            loss.backward()
        optimizer.step()
        if not between:
            drop(model, optimizer)
        params = getattr(model, "module", model).parameters()
        seen.append([getattr(p, "full_tensor", lambda p=p: p.detach().clone())() for p in params])
    return seen


def build() -> TinyMLP:
    torch.manual_seed(0)
    return TinyMLP()


def shard_blocks(accumulates: torch.dtype | None = None, **options: Any) -> Any:
    """The model, sharded, with gradients that accumulate in this dtype. **Collective.**"""
    policy = MixedPrecisionPolicy(main_grads_dtype=accumulates)
    return fully_shard_model(
        build(), flat_mesh(), "dp", fsdp_unit_modules=[MLPBlock], mixed_precision_policy=policy, **options
    )


sgd = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.5)


def job_drop(strategy: int, accumulates: torch.dtype | None = None) -> None:
    ranks, rank = dist.get_world_size(), dist.get_rank()
    for drop in WAYS:
        # Between forward and backward the inner module shows the root's whole weights, whose gradients are not there.
        for between in (False,) if drop is inner_zero_grad else (False, True):
            plain = build()
            expected = train(drop, plain, sgd(plain.parameters()), ranks, slice(None), between)
            model = build()
            mesh = {"device_mesh": flat_mesh(), "dp_shard_dim": "dp"}
            sharded = fully_shard(
                model,
                sgd(model.parameters()),
                fsdp_unit_modules=[MLPBlock],
                zero_dp_strategy=strategy,
                mixed_precision_policy=MixedPrecisionPolicy(main_grads_dtype=accumulates),
                **mesh,
            )
            mine = slice(4 * rank, 4 * rank + 4)
            came = train(drop, *sharded, ranks, mine, between)
            torch.testing.assert_close(came, expected, rtol=1e-5, atol=1e-6, msg=lambda m, d=drop: f"{d.__name__}: {m}")


@pytest.mark.parametrize("strategy", [0, 1, 2, 3])
def test_gradients_dropped_by_any_way_are_dropped(ranks2: RankPool, strategy: int) -> None:
    ranks2.run(job_drop, strategy)


@pytest.mark.parametrize("strategy", [0, 3])
def test_so_are_those_of_another_dtype_than_the_weights(ranks2: RankPool, strategy: int) -> None:
    ranks2.run(job_drop, strategy, torch.float64)


def job_change(strategy: int, accumulates: torch.dtype, syncs: bool) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Gradients of three backwards, changed in place after the second, in which some elements stay as they are."""
    gradients = []
    for is_sharded in (False, True):
        options = {"zero_dp_strategy": strategy, "sync_model_each_microbatch": syncs}
        model = shard_blocks(accumulates, **options) if is_sharded else build()
        for number in range(3):
            x = torch.randn(4, 6, generator=torch.Generator().manual_seed(number))
            model(x).square().mean().backward()
            if is_sharded and not syncs and number:
                model.finish_grad_sync()
            if number == 1:
                for param in list(model.parameters())[::2]:
                    param.grad.mul_(-3.0)
        gradients.append([getattr(param.grad, "full_tensor", lambda p=param: p.grad)() for param in model.parameters()])
    return gradients[0], gradients[1]


@pytest.mark.parametrize("syncs", [True, False])
@pytest.mark.parametrize("accumulates", [torch.float64, torch.bfloat16])
def test_what_was_changed_in_place_is_added_to(ranks2: RankPool, accumulates: torch.dtype, syncs: bool) -> None:
    tolerance = 1e-6 if accumulates is torch.float64 else 3e-2
    for strategy in (0, 3):
        for theirs, ours in ranks2.run(job_change, strategy, accumulates, syncs):
            assert {grad.dtype for grad in ours} == {accumulates}
            torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance, check_dtype=False)


def job_two_optimizers(strategy: int, syncs: bool) -> None:
    """Each optimizer steps and drops its gradients before the other steps; in one step the first drops them unused."""
    results = []
    for is_sharded in (False, True):
        options = {"zero_dp_strategy": strategy, "sync_model_each_microbatch": syncs}
        model = shard_blocks(**options) if is_sharded else build()
        params = list(model.parameters())
        optimizers = [sgd(params[:3]), sgd(params[3:])]
        if is_sharded:
            optimizers = [fully_shard_optimizer(optimizer) for optimizer in optimizers]
        for step in range(3):
            x = torch.randn(8, 6, generator=torch.Generator().manual_seed(step))
            model(x).square().mean().backward()
            if step == 1:
                optimizers[0].zero_grad()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        held = (
            [group.main_grad_buffer.data.numel() for group in model.param_and_grad_buffer.parameter_groups]
            if is_sharded
            else []
        )
        assert not any(held), "a buffer of which nothing is left keeps its memory"
        results.append([getattr(p, "full_tensor", lambda p=p: p.detach())() for p in params])
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("strategy", "syncs"), [(0, True), (3, True), (0, False), (3, False)])
def test_two_optimizers_of_one_model_leave_each_other_alone(ranks2: RankPool, strategy: int, syncs: bool) -> None:
    ranks2.run(job_two_optimizers, strategy, syncs)


def job_partly_dropped() -> list[int]:
    """Elements that gradient buffers keep once the user has dropped some gradients, and an optimizer the others."""
    model = shard_blocks()
    params = list(model.parameters())
    optimizer = fully_shard_optimizer(sgd(params[1:]))
    model(torch.ones(4, 6)).square().mean().backward()
    params[0].grad = None
    optimizer.zero_grad()
    return [group.main_grad_buffer.data.numel() for group in model.param_and_grad_buffer.parameter_groups]


def test_nothing_is_kept_when_all_was_dropped_in_two_ways(ranks2: RankPool) -> None:
    for kept in ranks2.run(job_partly_dropped):
        assert not any(kept)


def job_detached() -> tuple[torch.Tensor, torch.Tensor]:
    """A gradient that was tripled in place, detached and added to; and the gradient of one backward."""
    model = shard_blocks(torch.float64)
    optimizer = fully_shard_optimizer(sgd(model.parameters()))
    found = []
    for is_changed in (True, False):
        model(torch.ones(4, 6)).square().mean().backward()
        if is_changed:
            for param in model.parameters():
                param.grad.mul_(3.0)
            optimizer.zero_grad(zero_grad_buffer=False)
            model(torch.ones(4, 6)).square().mean().backward()
        found.append(next(model.parameters()).grad.full_tensor())
        optimizer.zero_grad()
    return found[0], found[1]


def test_buffers_keep_what_was_changed_before_it_was_detached(ranks2: RankPool) -> None:
    for changed, once in ranks2.run(job_detached):
        torch.testing.assert_close(changed, 4 * once)


def job_clipped() -> tuple[float, float, float]:
    """The norm of two backwards' gradients, as clipping says, and after it; each attached, or not yet."""
    model = shard_blocks(torch.float64, sync_model_each_microbatch=False)
    model(torch.ones(4, 6)).square().mean().backward()
    once = model.clip_grad_norm_(float("inf"))
    model(torch.ones(4, 6)).square().mean().backward()
    twice = model.clip_grad_norm_(1e-3)
    model.finish_grad_sync()
    return once.item(), twice.item(), model.clip_grad_norm_(float("inf")).item()


def test_clipping_sees_what_was_added_since_gradients_were_attached(ranks2: RankPool) -> None:
    for once, twice, clipped in ranks2.run(job_clipped):
        assert twice == pytest.approx(2 * once)
        assert clipped == pytest.approx(1e-3, rel=1e-3)


def add_other_model() -> None:
    one, two = (fully_shard_model(build(), flat_mesh(), "dp") for _ in range(2))
    optimizer = fully_shard_optimizer(sgd(one.parameters()))
    optimizer.add_param_group({"params": list(two.parameters())})
    with no_collectives():
        optimizer.step()


def test_a_second_model_s_parameters_are_not_added_later(ranks2: RankPool) -> None:
    ranks2.run_expecting(ValueError, "parameters of 2 sharded models", add_other_model)
