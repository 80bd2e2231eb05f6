"""torch's optimizers on shards: their numbers, groups, schedulers and arguments."""

import inspect
import math
import warnings

import pytest
import torch
import torch.distributed as dist
from torch.optim import lr_scheduler

from tests.unit_tests.harness.communication import no_collectives
from tests.unit_tests.harness.mistakes import Mistake, assert_each_raises
from tests.unit_tests.harness.models import OddShapes, square_loss
from tests.unit_tests.harness.optimizing import (
    AUTO,
    KINDS,
    RARE_KINDS,
    STEPS,
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
from tests.unit_tests.harness.sharded import Sharding, shard


@pytest.mark.parametrize(
    ("strategy", "world", "kinds"),
    [(3, 3, KINDS), (3, 2, RARE_KINDS), (2, 2, KINDS[2:4]), (1, 3, KINDS[2:4]), (0, 2, KINDS[2:5])],
)
def test_an_optimizer_steps_on_shards_as_on_the_whole(rank_pools, strategy, world, kinds):
    for results in rank_pools[world].run(train_each, kinds, strategy):
        for kind, weights in zip(kinds, results, strict=True):
            assert_close(weights, plain_weights(kind, world))


def wrap(kind, strategy):
    from megatron_fsdp import fully_shard_optimizer

    model = build_sharded(strategy, **AUTO)
    fully_shard_optimizer(kind.over(model.parameters()))


UNFIT = [
    (Kind("LBFGS", {}), "LBFGS cannot update parameters whose rows are spread over ranks: its step is a product"),
    (Kind("Adafactor", {}), "Adafactor cannot update parameters whose rows are spread over ranks.*strategy 0"),
    (Kind("Rprop", {}), "Rprop cannot update"),
    (Kind("SparseAdam", {}), "SparseAdam cannot update"),
]


def test_an_optimizer_that_would_be_wrong_is_refused_by_name(ranks2):
    assert_each_raises(ranks2, [Mistake(wrap, (kind, 3), ValueError, message) for kind, message in UNFIT])


class DecoupledSGD(torch.optim.SGD):
    """SGD that reads `decoupled_grad`, and says so."""

    use_decoupled_grad = True

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                if (grad := getattr(param, "decoupled_grad", None)) is not None:
                    param.add_(grad, alpha=-group["lr"])


def train_with_decoupled_grads(together):
    from megatron_fsdp import fully_shard, fully_shard_optimizer

    options = {**AUTO, "use_decoupled_grad": True}
    model = build() if together else build_sharded(3, **options)
    optimizer = DecoupledSGD(model.parameters(), lr=0.05)
    if together:
        model, optimizer = fully_shard(model, optimizer, fsdp_unit_modules=[OddShapes], **options)
    else:
        fully_shard_optimizer(optimizer)
    for batch in batches(dist.get_world_size()):
        sharded_step(model, optimizer, batch)
    return full(model)


@pytest.mark.parametrize("together", [True, False])
def test_an_optimizer_may_read_decoupled_grads(ranks2, together):
    for weights in ranks2.run(train_with_decoupled_grads, together):
        assert_close(weights, plain_weights(Kind("SGD", {"lr": 0.05}), 2))


def shard_for_a_model_that_is_gone():
    from megatron_fsdp import fully_shard_optimizer

    fully_shard_optimizer(torch.optim.SGD(build_sharded(3).parameters()))


def test_the_model_must_outlive_the_call(ranks2):
    ranks2.run_expecting(ValueError, "has been deleted; keep a reference", shard_for_a_model_that_is_gone)


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
        warnings.filterwarnings("error", message=".*(optimizer|scheduler)")
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


def move_an_optimizer_by_hand():
    """An optimizer that exists is emptied and given the sharded parameters, as the README allows."""
    from megatron_fsdp import fully_shard_optimizer

    module = build()
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01, weight_decay=0.1)
    plain_step(module, optimizer, batches(1)[0])
    module.load_state_dict(build().state_dict())
    model = shard(module, Sharding(units=(OddShapes,), options=AUTO))
    optimizer.param_groups.clear()
    optimizer.state.clear()
    optimizer.add_param_group({"params": model.parameters()})
    fully_shard_optimizer(optimizer)
    for batch in batches(dist.get_world_size()):
        sharded_step(model, optimizer, batch)
    return full(model)


def test_an_emptied_optimizer_takes_the_sharded_parameters(ranks2):
    for weights in ranks2.run(move_an_optimizer_by_hand):
        assert_close(weights, plain_weights(KINDS[3], 2))


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
    """Work that each argument leaves undone when it is False. The model does not synchronize by itself.

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
    seen["old"] = torch.equal(model(inputs), output)
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


def train_compiled(what, is_auto):
    """Weights after steps of which a part, or all, is compiled, and functions of the engine that were."""
    from torch._dynamo import convert_frame

    from megatron_fsdp import fully_shard_optimizer

    model = build_sharded(3, sync_model_each_microbatch=is_auto)
    optimizer = fully_shard_optimizer(KINDS[3].over(model.parameters()))

    def whole_step(inputs, target):
        square_loss(model(inputs), target).backward()
        model.finish_grad_sync()
        model.clip_grad_norm_(1e9)
        optimizer.step()
        optimizer.zero_grad()

    compiled, hook = [], lambda code, _: compiled.append(code.co_filename)
    handle = convert_frame.register_bytecode_hook(hook)
    torch._dynamo.reset()
    step = torch.compile(optimizer.step if what == "step" else whole_step, backend="eager")
    for batch in batches(dist.get_world_size()):
        inputs, target = batch[dist.get_rank()]
        if what == "whole_step":
            step(inputs, target)
            continue
        square_loss(model(inputs), target).backward()
        step()
        optimizer.zero_grad()
    handle.remove()
    return full(model), {name.rpartition("/megatron_fsdp/")[2] for name in compiled if "/megatron_fsdp/" in name}


@pytest.mark.parametrize("is_auto", [True, False])
@pytest.mark.parametrize("what", ["step", "whole_step"])
def test_the_engine_is_not_compiled_with_its_callers(ranks2, what, is_auto):
    for weights, compiled in ranks2.run(train_compiled, what, is_auto):
        assert_close(weights, plain_weights(KINDS[3], 2))
        # Callers of the functions that are left out, and the output of a layer.
        assert compiled <= {"optim/optimizer.py", "megatron_fsdp.py", "runtime/linear_grads.py"}
