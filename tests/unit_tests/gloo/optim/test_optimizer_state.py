"""Optimizer state on shards: made in advance, taken over, gathered and refused."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from tests.unit_tests.harness.models import OddShapes
from tests.unit_tests.harness.optimizing import (
    AUTO,
    KINDS,
    RARE_KINDS,
    Kind,
    assert_close,
    batches,
    build,
    build_sharded,
    full,
    plain_step,
    plain_weights,
    sharded_step,
    train_each,
)


def test_a_state_dict_before_the_first_step_changes_nothing(ranks2):
    kinds = [kind for kind in KINDS[1:] + RARE_KINDS if not kind.options.get("dampening")]
    asked, unasked = ranks2.run(train_each, kinds, 3, True)[0], ranks2.run(train_each, kinds, 3)[0]
    for one, other in zip(asked, unasked, strict=True):
        assert_close(one, other, rtol=0, atol=0)


def ask_for_state(kind, strategy):
    from megatron_fsdp import fully_shard_optimizer

    model = build_sharded(strategy, **AUTO)
    fully_shard_optimizer(kind.over(model.parameters())).state_dict()


def test_state_that_cannot_be_made_in_advance_is_refused_by_name(ranks2):
    dampened = Kind("SGD", {"lr": 0.1, "momentum": 0.9, "dampening": 0.1})
    ranks2.run_expecting(ValueError, "SGD with dampening .*call step", ask_for_state, dampened, 3)
    ranks2.run_expecting(ValueError, "Adafactor keeps 'row_var'.*call step", ask_for_state, Kind("Adafactor", {}), 0)


def shard_a_used_optimizer(kind, dtype):
    """Two plain steps, which leave gradients behind, then sharding, then two sharded steps."""
    from megatron_fsdp import fully_shard

    model = build().to(dtype)
    optimizer = kind.over(model.parameters())
    inputs = batches(dist.get_world_size())
    for batch in inputs[:2]:
        plain_step(model, optimizer, [(x.to(dtype), y) for x, y in batch])
    model, optimizer = fully_shard(model, optimizer, fsdp_unit_modules=[OddShapes])
    dtypes = {value.dtype for state in optimizer.state.values() for value in state.values() if value.dim()}
    if dtype is torch.float32:
        for batch in inputs[2:]:
            sharded_step(model, optimizer, batch)
    return full(model), dtypes, len(optimizer.state)


@pytest.mark.parametrize("kind", [KINDS[1], KINDS[3], RARE_KINDS[0]], ids=lambda kind: kind.name)
def test_state_that_an_optimizer_has_is_sharded_with_its_parameters(ranks3, kind):
    for weights, _, count in ranks3.run(shard_a_used_optimizer, kind, torch.float32):
        assert_close(weights, plain_weights(kind, 3))
        assert count == len(weights)


def test_state_follows_the_main_weights_dtype(ranks2):
    for _, dtypes, _ in ranks2.run(shard_a_used_optimizer, KINDS[3], torch.bfloat16):
        assert dtypes == {torch.float32}


def compare_full_tensors(strategy, make_early):
    """True if `full_tensor` of parameters, gradients and state is what one process has."""
    from megatron_fsdp import fully_shard_optimizer

    plain, model = build(), build_sharded(strategy, **AUTO)
    reference = torch.optim.Adam(plain.parameters(), lr=0.01)
    optimizer = fully_shard_optimizer(torch.optim.Adam(model.parameters(), lr=0.01))
    if make_early:
        optimizer.state_dict()
    for batch in batches(dist.get_world_size())[:2]:
        plain_step(plain, reference, batch)
        sharded_step(model, optimizer, batch)
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert_close([ours.full_tensor(), ours.grad.full_tensor()], [theirs.detach(), theirs.grad])
        for key in ("exp_avg", "exp_avg_sq"):
            state = optimizer.state[ours][key]
            assert_close([state.full_tensor()], [reference.state[theirs][key]])
            assert_close(
                [state.redistribute(placements=[Replicate()]).to_local()],
                [state.full_tensor()],
            )
    return sum(v.to_local().numel() for s in optimizer.state.values() for v in s.values() if v.dim())


@pytest.mark.parametrize("make_early", [False, True])
@pytest.mark.parametrize("strategy", [0, 1, 3])
def test_full_tensors_of_parameters_gradients_and_state_are_right(ranks3, strategy, make_early):
    numels = ranks3.run(compare_full_tensors, strategy, make_early)
    params = sum(param.numel() for param in build().parameters())
    # Adam keeps two numbers per element, each on one rank, or on all where nothing is sharded.
    assert sum(numels) == 2 * params * (3 if strategy == 0 else 1)
    assert strategy == 0 or max(numels) < 2 * params


def make_state_anew(change):
    """First moments of ours and of one process, after steps between which state was thrown away."""
    from megatron_fsdp import fully_shard_optimizer

    plain, model = build(), build_sharded(3, **AUTO)
    reference = torch.optim.Adam(plain.parameters(), lr=0.01)
    optimizer = fully_shard_optimizer(torch.optim.Adam(model.parameters(), lr=0.01))
    first, second = batches(dist.get_world_size())[:2]
    plain_step(plain, reference, first)
    sharded_step(model, optimizer, first)
    change(reference)
    change(optimizer)
    plain_step(plain, reference, second)
    sharded_step(model, optimizer, second)
    moments = [state["exp_avg"].full_tensor() for state in optimizer.state.values()]
    return moments, [reference.state[param]["exp_avg"] for param in plain.parameters()]


def start_again(optimizer):
    optimizer.state.clear()


def replace_moments(optimizer):
    for state in optimizer.state.values():
        state["exp_avg"] = torch.zeros_like(state["exp_avg"])


@pytest.mark.parametrize("change", [start_again, replace_moments])
def test_full_tensors_of_state_that_was_made_anew_are_right(ranks3, change):
    for ours, theirs in ranks3.run(make_state_anew, change):
        assert_close(ours, theirs)


def misuse_a_shard():
    next(build_sharded(3).parameters()).redistribute(placements=[Shard(1)])


def test_a_shard_is_not_cut_in_another_way(ranks2):
    ranks2.run_expecting(NotImplementedError, "can be redistributed to Replicate, not", misuse_a_shard)


def load_full_state(strategy):
    """State that one process saved, loaded into a sharded optimizer; then both continue."""
    from megatron_fsdp import fully_shard_optimizer

    plain = build()
    reference = torch.optim.Adam(plain.parameters(), lr=0.01, amsgrad=True)
    data = batches(dist.get_world_size())
    for batch in data[:2]:
        plain_step(plain, reference, batch)
    model = build_sharded(strategy, **AUTO)
    optimizer = fully_shard_optimizer(torch.optim.Adam(model.parameters(), lr=0.5, amsgrad=True))
    model.module.load_state_dict(plain.state_dict())
    optimizer.load_state_dict(copy.deepcopy(reference.state_dict()))  # torch loads counters by reference
    for batch in data[2:]:
        plain_step(plain, reference, batch)
        sharded_step(model, optimizer, batch)
    assert_close(full(model), [param.detach() for param in plain.parameters()])
    return [state["exp_avg"].full_tensor().shape == param.shape for param, state in optimizer.state.items()]


@pytest.mark.parametrize("strategy", [0, 3])
def test_a_full_state_dict_loads(ranks2, strategy):
    assert all(map(all, ranks2.run(load_full_state, strategy)))


def load_state_of_another_layout():
    from megatron_fsdp import fully_shard_optimizer

    model = build_sharded(3, **AUTO)
    optimizer = fully_shard_optimizer(torch.optim.Adam(model.parameters()))
    state_dict = optimizer.state_dict()
    cut_in_columns = distribute_tensor(torch.zeros(3, 5, 7), model.dist_index.dp_mesh(), [Shard(1)])
    state_dict["state"][0]["exp_avg"] = cut_in_columns
    optimizer.load_state_dict(state_dict)


def test_state_that_lies_otherwise_is_refused(ranks3):
    ranks3.run_expecting(
        ValueError, r"optimizer state 'exp_avg' of shape \(3, 5, 7\) has ", load_state_of_another_layout
    )
