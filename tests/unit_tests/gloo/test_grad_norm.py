"""The gradient norm over shards and replicas, and clipping by it."""

import math

import pytest
import torch
import torch.distributed as dist

from tests.unit_tests.harness.communication import collectives_heard
from tests.unit_tests.harness.models import OddShapes, square_loss
from tests.unit_tests.harness.optimizing import AUTO, assert_close, batches, build
from tests.unit_tests.harness.sharded import Sharding, shard


def clip(strategy, max_norm, norm_type, has_replicated, by_torch, is_decoupled=False):
    """The norm before, and full gradients after; a grown gradient on one rank only counts once."""
    from megatron_fsdp import fsdp_no_shard

    module = build()
    if has_replicated:
        fsdp_no_shard(module.blocks[0].coprime)
        fsdp_no_shard(module.head.bias)
    options = {**AUTO, "use_decoupled_grad": is_decoupled}
    model = shard(module, Sharding(strategy=strategy, units=(OddShapes,), options=options))
    inputs, target = batches(dist.get_world_size())[0][dist.get_rank()]
    square_loss(model(inputs), target).backward()
    with collectives_heard() as heard:
        if by_torch:
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm, norm_type).full_tensor()
        else:
            norm = model.clip_grad_norm_(max_norm, norm_type)
    grads = [param.decoupled_grad if is_decoupled else param.grad for param in model.parameters()]
    return (
        norm,
        [grad.full_tensor() for grad in grads],
        len(heard),
        [param.grad is None for param in model.parameters()],
    )


def clipped_in_one_process(world, max_norm, norm_type):
    model = build()
    for inputs, target in batches(world)[0]:
        (square_loss(model(inputs), target) / world).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm, norm_type)
    return norm, [param.grad for param in model.parameters()]


@pytest.mark.parametrize("has_replicated", [False, True], ids=["sharded", "mixed"])
@pytest.mark.parametrize("norm_type", [2.0, math.inf, 1.0])
@pytest.mark.parametrize("strategy", range(4))
def test_clipping_uses_the_true_norm(ranks3, strategy, norm_type, has_replicated):
    expected, grads = clipped_in_one_process(3, 0.05, norm_type)
    for norm, clipped, count, _ in ranks3.run(clip, strategy, 0.05, norm_type, has_replicated, False):
        assert_close([norm, *clipped], [expected, *grads])
        assert count == (0 if strategy == 0 else 1)


def test_a_small_norm_leaves_gradients_alone(ranks2):
    _, grads = clipped_in_one_process(2, 1e9, 2.0)
    for _, clipped, _, _ in ranks2.run(clip, 3, 1e9, 2.0, False, False):
        assert_close(clipped, grads)


@pytest.mark.parametrize("has_replicated", [False, True], ids=["sharded", "mixed"])
@pytest.mark.parametrize("strategy", [0, 3])
def test_torch_clips_our_gradients_too(ranks3, strategy, has_replicated):
    """Its infinity norm knows no empty shards; `MegatronFSDP.clip_grad_norm_` does."""
    expected, grads = clipped_in_one_process(3, 0.05, 2.0)
    for norm, clipped, _, _ in ranks3.run(clip, strategy, 0.05, 2.0, has_replicated, True):
        assert_close([norm, *clipped], [expected, *grads])


def test_decoupled_gradients_stand_beside_the_parameters(ranks2):
    expected, grads = clipped_in_one_process(2, 0.05, 2.0)
    for norm, clipped, _, has_none in ranks2.run(clip, 3, 0.05, 2.0, False, False, True):
        assert all(has_none)
        assert_close([norm, *clipped], [expected, *grads])
