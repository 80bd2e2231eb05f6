"""The gradient norm over shards and replicas, and clipping by it."""

import math
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist

from tests.unit_tests.harness.communication import collectives_heard
from tests.unit_tests.harness.models import OddShapes, square_loss
from tests.unit_tests.harness.optimizing import AUTO, assert_close, batches, build
from tests.unit_tests.harness.sharded import Sharding, shard


class Clipped(NamedTuple):
    """One rank's view of one clipping."""

    norm: torch.Tensor
    grads: list[torch.Tensor]
    """Whole, and clipped."""
    collectives: int


def clip(strategy, max_norm, norm_types=(2.0,), has_replicated=False, by_torch=False, is_decoupled=False):
    """The same gradients clipped by each kind of norm."""
    from megatron_fsdp import fsdp_no_shard

    module = build()
    if has_replicated:
        fsdp_no_shard(module.blocks[0].coprime)
        fsdp_no_shard(module.head.bias)
    options = {**AUTO, "use_decoupled_grad": is_decoupled}
    model = shard(module, Sharding(strategy=strategy, units=(OddShapes,), options=options))
    inputs, target = batches(dist.get_world_size())[0][dist.get_rank()]
    results = []
    for norm_type in norm_types:
        model.zero_grad_buffer()
        square_loss(model(inputs), target).backward()
        with collectives_heard() as heard:
            if by_torch:
                norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm, norm_type).full_tensor()
            else:
                norm = model.clip_grad_norm_(max_norm, norm_type)
        assert all(param.grad is None for param in model.parameters()) == is_decoupled
        grads = [param.decoupled_grad if is_decoupled else param.grad for param in model.parameters()]
        results.append(Clipped(norm, [grad.full_tensor() for grad in grads], len(heard)))
    return results


def clipped_in_one_process(world, max_norm, norm_type):
    model = build()
    for inputs, target in batches(world)[0]:
        (square_loss(model(inputs), target) / world).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm, norm_type)
    return norm, [param.grad for param in model.parameters()]


NORMS = (2.0, math.inf, 1.0)


@pytest.mark.parametrize("has_replicated", [False, True], ids=["sharded", "mixed"])
@pytest.mark.parametrize("strategy", range(4))
def test_clipping_uses_the_true_norm(ranks3, strategy, has_replicated):
    for results in ranks3.run(clip, strategy, 0.05, NORMS, has_replicated):
        for norm_type, clipped in zip(NORMS, results, strict=True):
            norm, grads = clipped_in_one_process(3, 0.05, norm_type)
            assert_close([clipped.norm, *clipped.grads], [norm, *grads])
            assert clipped.collectives == (0 if strategy == 0 else 1)


def test_a_small_norm_leaves_gradients_alone(ranks2):
    _, grads = clipped_in_one_process(2, 1e9, 2.0)
    for (clipped,) in ranks2.run(clip, 3, 1e9):
        assert_close(clipped.grads, grads)


@pytest.mark.parametrize("has_replicated", [False, True], ids=["sharded", "mixed"])
@pytest.mark.parametrize("strategy", [0, 3])
def test_torch_clips_our_gradients_too(ranks3, strategy, has_replicated):
    """Its infinity norm knows no empty shards; `MegatronFSDP.clip_grad_norm_` does."""
    norm, grads = clipped_in_one_process(3, 0.05, 2.0)
    for (clipped,) in ranks3.run(clip, strategy, 0.05, (2.0,), has_replicated, True):
        assert_close([clipped.norm, *clipped.grads], [norm, *grads])


def test_decoupled_gradients_stand_beside_the_parameters(ranks2):
    norm, grads = clipped_in_one_process(2, 0.05, 2.0)
    for (clipped,) in ranks2.run(clip, 3, 0.05, (2.0,), False, False, True):
        assert_close([clipped.norm, *clipped.grads], [norm, *grads])


def test_a_norm_that_is_none_is_refused(ranks2):
    """Minus infinity, the smallest element, gave the largest; 0 divided by zero."""
    message = "norm_type is .*; expected a number above 0, or inf"
    for norm_type in (float("-inf"), 0.0, -1.0, float("nan")):
        ranks2.run_expecting(ValueError, message, clip, 3, 1.0, (norm_type,))
    for max_norm in (-1.0, float("nan")):
        ranks2.run_expecting(ValueError, "max_norm is .*; expected a number of 0 or more", clip, 3, max_norm)
    for text, number in ranks2.run(clip, 3, 0.05, ("inf", float("inf"))):
        assert text.norm.equal(number.norm)


def clip_what_is_not_finite(value, norm_type):
    """Norm and whole gradients by us, and by torch in one process, of gradients with `value` on the last rank."""
    model = shard(build(), Sharding(units=(OddShapes,), options=AUTO))
    inputs, target = batches(dist.get_world_size())[0][dist.get_rank()]
    square_loss(model(inputs), target).backward()
    if dist.get_rank() == dist.get_world_size() - 1:
        next(param for param in model.parameters() if param.to_local().numel()).grad.to_local().view(-1)[0] = value
    plain = [torch.nn.Parameter(param.full_tensor()) for param in model.parameters()]
    for ours, theirs in zip(model.parameters(), plain, strict=True):
        theirs.grad = ours.grad.full_tensor()
    expected = torch.nn.utils.clip_grad_norm_(plain, 0.05, norm_type)
    norm = model.clip_grad_norm_(0.05, norm_type)
    ours = [norm, *(param.grad.full_tensor() for param in model.parameters())]
    return ours, [expected, *(param.grad for param in plain)]


@pytest.mark.parametrize("norm_type", [2.0, math.inf])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_norms_that_are_not_finite_do_what_they_do_in_torch(ranks3, value, norm_type):
    for ours, theirs in ranks3.run(clip_what_is_not_finite, value, norm_type):
        assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)
        assert not ours[0].isfinite()


def clip_low_precision(max_norm):
    """Number of clipped elements of bf16 and fp32 gradients that differ from those scaled in fp32 and rounded once."""
    from megatron_fsdp.optim import grad_norm

    multiply = torch._foreach_mul_
    calls = []

    def multiply_as_cuda_does(tensors, factor):
        calls.append(len(tensors))
        multiply(tensors, factor.to(tensors[0].dtype))

    before = [torch.randn(5, 3, dtype=dtype) for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float32)]
    before.append(torch.ones((), dtype=torch.bfloat16))
    after, norm = [grad.clone() for grad in before], torch.tensor(3.0)
    torch._foreach_mul_ = multiply_as_cuda_does
    try:
        grad_norm.clip_by_norm(after, max_norm, norm)
    finally:
        torch._foreach_mul_ = multiply
    expected = [(grad.float() * (max_norm / (norm + 1e-6))).to(grad.dtype) for grad in before]
    return calls, [int((grad != other).sum()) for grad, other in zip(after, expected, strict=True)]


def test_low_precision_gradients_are_rounded_once_when_they_are_clipped(ranks1):
    """CUDA rounds a scalar tensor to the dtype of what it multiplies: 1/3 in bf16 is 0.15 % too large."""
    ((calls, differing),) = ranks1.run(clip_low_precision, 1.0)
    assert calls == [2]  # those of fp32 are scaled at once
    assert differing == [0] * 5
