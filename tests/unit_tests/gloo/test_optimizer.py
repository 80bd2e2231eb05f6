"""torch's optimizers on shards: their numbers, groups, schedulers, arguments, state and gradient norms."""

import copy
import inspect
import math
import warnings
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.optim import lr_scheduler

from tests.unit_tests.harness.communication import collectives_heard, no_collectives
from tests.unit_tests.harness.models import OddModel, OddShapes, float_batches, square_loss
from tests.unit_tests.harness.sharded import Sharding, shard

STEPS = 4
AUTO = {"sync_model_each_microbatch": True}


class Kind(NamedTuple):
    """A class of torch.optim and its options."""

    name: str
    options: dict[str, Any]

    def over(self, params: Any) -> torch.optim.Optimizer:
        return getattr(torch.optim, self.name)(params, **self.options)


KINDS = [
    Kind("SGD", {"lr": 0.1}),
    Kind("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    Kind("SGD", {"lr": 0.1, "momentum": 0.9, "dampening": 0.1, "foreach": True}),
    Kind("AdamW", {"lr": 0.01, "weight_decay": 0.1, "foreach": True}),
    Kind("AdamW", {"lr": 0.01, "weight_decay": 0.1, "fused": True}),
    Kind("Adam", {"lr": 0.01, "amsgrad": True}),
    Kind("Adam", {"lr": torch.tensor(0.01), "weight_decay": 0.1, "foreach": False}),
    Kind("RAdam", {"lr": 0.01}),
    Kind("NAdam", {"lr": 0.01}),
]
RARE_KINDS = [
    Kind("Adagrad", {"lr": 0.01, "initial_accumulator_value": 0.1}),
    Kind("Adadelta", {"lr": 1.0}),
    Kind("Adamax", {"lr": 0.01}),
    Kind("ASGD", {"lr": 0.01}),
    Kind("RMSprop", {"lr": 0.01, "momentum": 0.9}),
]


def build() -> nn.Module:
    torch.manual_seed(0)
    return OddModel(depth=1)


def build_sharded(strategy, **options):
    return shard(build(), Sharding(strategy=strategy, units=(OddShapes,), options=options))


def batches(world, steps=STEPS):
    return [step[0] for step in float_batches(steps, 1, world, width=7, width_out=3)]


def plain_step(model, optimizer, batch):
    optimizer.zero_grad()
    for inputs, target in batch:
        (square_loss(model(inputs), target) / len(batch)).backward()
    optimizer.step()


def sharded_step(model, optimizer, batch, **options):
    optimizer.zero_grad()
    inputs, target = batch[dist.get_rank()]
    square_loss(model(inputs), target).backward()
    optimizer.step(**options)


def full(model):
    return [param.full_tensor() for param in model.parameters()]


def plain_weights(kind, world):
    model = build()
    optimizer = kind.over(model.parameters())
    for batch in batches(world):
        plain_step(model, optimizer, batch)
    return [param.detach() for param in model.parameters()]


def train_each(kinds, strategy, saves_early=False):
    """Full weights after a few steps, by kind."""
    from megatron_fsdp import fully_shard_optimizer

    results = []
    for kind in kinds:
        model = build_sharded(strategy, **AUTO)
        optimizer = fully_shard_optimizer(kind.over(model.parameters()))
        if saves_early:
            with no_collectives():
                optimizer.state_dict()
        for batch in batches(dist.get_world_size()):
            sharded_step(model, optimizer, batch)
        results.append(full(model))
    return results


def assert_close(ours, theirs, **tolerance):
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, **(tolerance or {"rtol": 1e-5, "atol": 1e-5}))


@pytest.mark.parametrize(
    ("strategy", "world", "kinds"),
    [(3, 3, KINDS), (3, 2, RARE_KINDS), (2, 2, KINDS[2:4]), (1, 3, KINDS[2:4]), (0, 2, KINDS[2:5])],
)
def test_an_optimizer_steps_on_shards_as_on_the_whole(rank_pools, strategy, world, kinds):
    for results in rank_pools[world].run(train_each, kinds, strategy):
        for kind, weights in zip(kinds, results, strict=True):
            assert_close(weights, plain_weights(kind, world))


def test_a_state_dict_before_the_first_step_changes_nothing(ranks2):
    kinds = [kind for kind in KINDS + RARE_KINDS if not kind.options.get("dampening")]
    asked, unasked = ranks2.run(train_each, kinds, 3, True)[0], ranks2.run(train_each, kinds, 3)[0]
    for one, other in zip(asked, unasked, strict=True):
        assert_close(one, other, rtol=0, atol=0)


def wrap(kind, strategy, asks_for_state):
    from megatron_fsdp import fully_shard_optimizer

    model = build_sharded(strategy, **AUTO)
    optimizer = fully_shard_optimizer(kind.over(model.parameters()))
    if asks_for_state:
        optimizer.state_dict()


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Kind("LBFGS", {}), "LBFGS cannot update parameters that are spread over ranks: its step is a product"),
        (Kind("Adafactor", {}), "Adafactor cannot update parameters that are spread over ranks.*strategy 0"),
        (Kind("Rprop", {}), "Rprop cannot update"),
        (Kind("SparseAdam", {}), "SparseAdam cannot update"),
        (Kind("SGD", {"lr": 0.1, "fused": True}), r"SGD\(fused=True\) does not take.*use foreach=True"),
        (Kind("Adagrad", {"fused": True}), r"Adagrad\(fused=True\) does not take"),
    ],
)
def test_an_optimizer_that_would_be_wrong_is_refused_by_name(ranks2, kind, message):
    ranks2.run_expecting(ValueError, message, wrap, kind, 3, False)


def shard_for_a_model_that_is_gone():
    from megatron_fsdp import fully_shard_optimizer

    fully_shard_optimizer(torch.optim.SGD(build_sharded(3).parameters()))


def test_the_model_must_outlive_the_call(ranks2):
    ranks2.run_expecting(ValueError, "has been deleted; keep a reference", shard_for_a_model_that_is_gone)


def test_state_that_cannot_be_made_in_advance_is_refused_by_name(ranks2):
    dampened = Kind("SGD", {"lr": 0.1, "momentum": 0.9, "dampening": 0.1})
    ranks2.run_expecting(ValueError, "SGD with dampening .*call step", wrap, dampened, 3, True)
    ranks2.run_expecting(ValueError, "Adafactor keeps 'row_var'.*call step", wrap, Kind("Adafactor", {}), 0, True)


# -- groups and schedulers --------------------------------------------------------------------------------------------


def two_groups(model):
    decayed = [param for name, param in model.named_parameters() if "cube" in name or name.endswith("weight")]
    rest = [param for name, param in model.named_parameters() if "cube" not in name and not name.endswith("weight")]
    return [
        {"params": decayed, "lr": 0.03, "weight_decay": 0.2, "note": "kept"},
        {"params": rest, "lr": 0.001, "weight_decay": 0.0},
    ]


SCHEDULERS = {
    "lambda": lambda optimizer: lr_scheduler.LambdaLR(optimizer, [lambda step: 1 / (step + 1), lambda step: 0.9**step]),
    "one_cycle": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, max_lr=[0.1, 0.02], total_steps=STEPS + 1),
}


def options_of(optimizer):
    return [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]


def train_scheduled(model, optimizer, scheduler, step, world):
    trace = [options_of(optimizer)]
    for batch in batches(world):
        step(model, optimizer, batch)
        scheduler.step()
        trace.append(options_of(optimizer))
    return trace


def schedule_sharded(which, is_made_before, together):
    """Options by step and final weights; warnings are errors, because schedulers warn of a replaced `step`."""
    from megatron_fsdp import fully_shard, fully_shard_optimizer

    with warnings.catch_warnings():
        warnings.filterwarnings("error", module="torch.optim")
        model = build() if together else build_sharded(3, **AUTO)
        optimizer = torch.optim.AdamW(two_groups(model))
        scheduler = SCHEDULERS[which](optimizer) if is_made_before else None
        if together:
            model, optimizer = fully_shard(model, optimizer, fsdp_unit_modules=[OddShapes])
        else:
            optimizer = fully_shard_optimizer(optimizer)
        scheduler = scheduler or SCHEDULERS[which](optimizer)
        trace = train_scheduled(model, optimizer, scheduler, sharded_step, dist.get_world_size())
    return trace, full(model)


@pytest.mark.parametrize("together", [False, True], ids=["apart", "together"])
@pytest.mark.parametrize("is_made_before", [False, True], ids=["after", "before"])
@pytest.mark.parametrize("which", SCHEDULERS)
def test_groups_keep_their_options_and_schedulers_work(ranks2, which, is_made_before, together):
    model = build()
    optimizer = torch.optim.AdamW(two_groups(model))
    expected = train_scheduled(model, optimizer, SCHEDULERS[which](optimizer), plain_step, 2)
    assert expected[0][0]["initial_lr"] and expected[0][0]["note"] == "kept"
    for trace, weights in ranks2.run(schedule_sharded, which, is_made_before, together):
        assert trace == expected
        assert_close(weights, [param.detach() for param in model.parameters()])


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


# -- step and zero_grad -----------------------------------------------------------------------------------------------


def look_at_signatures():
    from megatron_fsdp import fully_shard_optimizer

    model = build_sharded(3)
    optimizer = fully_shard_optimizer(torch.optim.AdamW(model.parameters()))
    first = optimizer.step, optimizer.zero_grad
    assert fully_shard_optimizer(optimizer) is optimizer
    is_idempotent = (optimizer.step, optimizer.zero_grad) == first
    return [str(inspect.signature(f)) for f in first], is_idempotent, _is_like_a_method(optimizer.step)


def _is_like_a_method(bound):
    # Schedulers take the function, and others the object, from what a class would have bound.
    return bound.__self__ is not None and callable(bound.__func__) and bound.__doc__ == bound.__func__.__doc__


def test_step_and_zero_grad_show_their_arguments_and_wrap_once(ranks1):
    (((step, zero_grad), is_idempotent, is_method),) = ranks1.run(look_at_signatures)
    added = "*, sync_grad_before_optimizer_step: bool = True, install_optimized_model_weights: bool = True)"
    assert step == f"(closure=None, {added}"
    assert zero_grad == "(set_to_none: bool = True, *, zero_grad_buffer: bool = True) -> None"
    assert is_idempotent and is_method


def use_step_arguments():
    """What each argument leaves undone when it is False. The model does not synchronize by itself.

    It computes in bf16, so that main weights are separate.
    """
    from megatron_fsdp import fully_shard_optimizer

    model = shard(build().bfloat16(), Sharding(strategy=1, options={"overlap_grad_reduce": False}))
    optimizer = fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    inputs, target = batches(dist.get_world_size())[0][dist.get_rank()]
    inputs = inputs.bfloat16()
    before = full(model)
    square_loss(model(inputs), target).backward()
    seen = {"unsynchronized": [param.grad for param in model.parameters()]}
    with no_collectives():
        optimizer.step(sync_grad_before_optimizer_step=False)
    seen["skipped"] = all(map(torch.equal, full(model), before))
    output = model(inputs)
    optimizer.step(install_optimized_model_weights=False)
    seen["stepped"] = not any(map(torch.equal, full(model), before))
    seen["not installed"] = torch.equal(model(inputs), output)
    model.install_optimized_model_weights()
    seen["installed"] = not torch.equal(model(inputs), output)
    return seen


def test_step_arguments_switch_synchronization_and_installation_off(ranks2):
    for seen in ranks2.run(use_step_arguments):
        assert set(seen.pop("unsynchronized")) == {None}
        assert seen == dict.fromkeys(seen, True)


def use_zero_grad_arguments():
    from megatron_fsdp import fully_shard_optimizer

    model = build_sharded(3, **AUTO)
    optimizer = fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    inputs, target = batches(dist.get_world_size())[0][dist.get_rank()]

    def grads():
        square_loss(model(inputs), target).backward()
        return [param.grad.full_tensor() for param in model.parameters()]

    once = grads()
    optimizer.zero_grad(zero_grad_buffer=False)
    dropped = [param.grad for param in model.parameters()]
    twice = grads()
    optimizer.zero_grad()
    again = grads()
    optimizer.zero_grad(set_to_none=False)
    return once, dropped, twice, again, grads()


def test_zero_grad_may_leave_the_accumulation_buffer_alone(ranks2):
    for once, dropped, twice, again, last in ranks2.run(use_zero_grad_arguments):
        assert set(dropped) == {None}
        assert_close(twice, [2 * grad for grad in once])
        assert_close(again, once, rtol=0, atol=0)
        assert_close(last, once, rtol=0, atol=0)


def step_with_closure(is_auto, by_name):
    from megatron_fsdp import fully_shard_optimizer

    model = build_sharded(3, sync_model_each_microbatch=is_auto)
    optimizer = fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    losses = []
    for batch in batches(dist.get_world_size()):
        inputs, target = batch[dist.get_rank()]

        def closure(inputs=inputs, target=target):
            optimizer.zero_grad()
            loss = square_loss(model(inputs), target)
            loss.backward()
            return loss

        losses.append(optimizer.step(closure=closure) if by_name else optimizer.step(closure))
    return full(model), [loss.item() for loss in losses]


@pytest.mark.parametrize(("is_auto", "by_name"), [(True, True), (False, False), (False, True)])
def test_closures_are_evaluated_with_their_gradients(ranks2, is_auto, by_name):
    for weights, losses in ranks2.run(step_with_closure, is_auto, by_name):
        assert_close(weights, plain_weights(KINDS[0], 2))
        assert len(losses) == STEPS and all(map(math.isfinite, losses))


# -- state ------------------------------------------------------------------------------------------------------------


def compare_full_tensors(strategy, make_early):
    """Whether `full_tensor` of parameters, gradients and state is what one process has."""
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


# -- the norm ---------------------------------------------------------------------------------------------------------


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
