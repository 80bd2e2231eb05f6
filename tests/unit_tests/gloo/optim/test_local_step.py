"""Steps on local tensors: who takes them, what everybody else sees, and gradients of another dtype."""

import contextlib
import functools
import sys
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from tests.unit_tests.harness.models import OddShapes, square_loss
from tests.unit_tests.harness.optimizing import (
    AUTO,
    Kind,
    assert_close,
    batches,
    build_sharded,
    full,
    plain_step,
    plain_weights,
    sharded_step,
)
from tests.unit_tests.harness.optimizing import build as build_whole
from tests.unit_tests.harness.reference import DtypePolicy
from tests.unit_tests.harness.sharded import Sharding, shard

ADAMW = Kind("AdamW", {"lr": 0.01, "weight_decay": 0.1, "foreach": False})


def build(kind=ADAMW):
    """A sharded model and an optimizer over it. **Collective.**"""
    from megatron_fsdp import fully_shard_optimizer

    model = build_sharded(3, **AUTO)
    return model, fully_shard_optimizer(kind.over(model.parameters()))


#: The module; `torch.optim` hides it.
ADAM = sys.modules[torch.optim.Adam.__module__]


@contextlib.contextmanager
def watched(*, acts=True):
    """Lists what torch's Adam computes with, a step each: the types of parameters, gradients and first moments."""
    seen = []
    adam = ADAM.adam

    def watch(params, grads, exp_avgs, *args, **kwargs):
        seen.append({type(tensor) for tensor in (*params, *grads, *exp_avgs)})
        if acts:
            adam(params, grads, exp_avgs, *args, **kwargs)

    with mock.patch.object(ADAM, "adam", watch):
        yield seen


def see_types(model, optimizer, steps):
    with watched() as seen:
        for batch in batches(dist.get_world_size(), steps):
            sharded_step(model, optimizer, batch)
    return seen


def step_and_look():
    model, optimizer = build()
    shown = []
    optimizer.register_step_pre_hook(lambda opt, *_: shown.append(type(opt.param_groups[0]["params"][0])))
    optimizer.register_step_post_hook(lambda opt, *_: shown.extend({type(param) for param in opt.state}))
    params = list(optimizer.param_groups[0]["params"])
    seen = see_types(model, optimizer, 3)
    kept = all(one is other for one, other in zip(params, optimizer.param_groups[0]["params"], strict=True))
    moments = [state["exp_avg"] for state in optimizer.state.values()]
    is_clean = all(param._local_tensor.grad is None for param in params)
    return seen, set(shown), kept, is_clean, {type(moment) for moment in moments}, set(optimizer.state) == set(params)


def test_steps_compute_with_local_tensors_and_show_sharded_ones(ranks2):
    for seen, shown, kept, is_clean, moments, has_state in ranks2.run(step_and_look):
        assert seen == [{torch.Tensor}] * 3, "the first step makes the state"
        assert shown == {DTensor}
        assert moments == {DTensor}
        assert kept
        assert is_clean
        assert has_state


def step_with_a_closure():
    model, optimizer = build()
    inputs, target = batches(dist.get_world_size(), 1)[0][dist.get_rank()]

    def closure():
        optimizer.zero_grad()
        loss = square_loss(model(inputs), target)
        loss.backward()
        return loss.detach()

    with watched() as seen:
        loss = optimizer.step(closure)
    assert loss.item() > 0
    return seen, full(model)


def step_with_a_full_gradient():
    model, optimizer = build()
    inputs, target = batches(dist.get_world_size(), 1)[0][dist.get_rank()]
    square_loss(model(inputs), target).backward()
    for param in model.parameters():
        param.grad = DTensor.from_local(param.grad.full_tensor(), param.device_mesh, [Replicate()], run_check=False)
    with watched() as seen:
        optimizer.step()
    return seen, full(model)


def step_at_a_rate_that_is_a_dtensor():
    model, optimizer = build()
    mesh = next(model.parameters()).device_mesh
    rate = DTensor.from_local(torch.tensor(0.01), mesh, [Replicate()], run_check=False)
    optimizer.param_groups[0]["lr"] = rate
    with watched() as seen:
        sharded_step(model, optimizer, batches(dist.get_world_size(), 1)[0])
    assert optimizer.param_groups[0]["lr"] is rate
    return seen, full(model)


@pytest.mark.parametrize("step", [step_with_a_closure, step_with_a_full_gradient, step_at_a_rate_that_is_a_dtensor])
def test_what_is_not_local_is_made_local(ranks2, step):
    model = build_whole()
    plain_step(model, ADAMW.over(model.parameters()), batches(2)[0])
    for seen, weights in ranks2.run(step):
        assert seen == [{torch.Tensor}]
        assert_close(weights, [param.detach() for param in model.parameters()])


def step_with_a_gradient_cut_otherwise():
    model, optimizer = build()
    param = next(param for param in model.parameters() if param.dim() > 1)
    sharded_step(model, optimizer, batches(dist.get_world_size(), 1)[0])
    param.grad = distribute_tensor(torch.zeros(param.shape), param.device_mesh, [Shard(1)])
    optimizer.step()


def test_a_gradient_that_lies_otherwise_is_refused(ranks2):
    ranks2.run_expecting(ValueError, "a gradient of shape .* but this model keeps", step_with_a_gradient_cut_otherwise)


class Halving(torch.optim.SGD):
    """Reads norms of whole parameters, so it needs DTensors."""

    def step(self, closure=None):
        assert all(type(param) is DTensor for group in self.param_groups for param in group["params"])
        return super().step(closure)


class SOAP(torch.optim.SGD):
    """Stands for one that owns whole matrices: known by its name."""


CASTING = {
    "local": lambda params: torch.optim.AdamW(params, lr=0.01),
    "foreach": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, foreach=True),
    "DTensors": lambda params: Halving(params, lr=0.1, momentum=0.9),
    "owned": lambda params: SOAP(params, lr=0.1, momentum=0.9),
}


def ask_for_state_of_a_class_on_dtensors():
    from megatron_fsdp import fully_shard_optimizer

    model = build_sharded(3, **AUTO)
    optimizer = fully_shard_optimizer(CASTING["DTensors"](model.parameters()))
    state = optimizer.state_dict()["state"].values()
    return [each["momentum_buffer"].full_tensor() for each in state]


def test_a_class_that_steps_on_dtensors_makes_its_state_on_them(ranks2):
    for moments in ranks2.run(ask_for_state_of_a_class_on_dtensors):
        assert_close(moments, [torch.zeros_like(param) for param in build_whole().parameters()])


def compare_casts(which, main_dtype, grad_dtype, by_closure):
    """Local weights after steps with gradients of their own dtype, and with the same ones cast by hand before."""
    from megatron_fsdp import fsdp_single_owner, fully_shard_optimizer

    def train(*, casts):
        module = build_whole()
        fsdp_single_owner(module)
        policy = DtypePolicy(main_params=main_dtype)
        model = shard(module.to(main_dtype), Sharding(units=(OddShapes,), options=AUTO), policy)
        optimizer = fully_shard_optimizer(CASTING[which](model.parameters()))

        def backward():
            for param in model.parameters():
                param.grad, param.grad_dtype = None, None
            optimizer.zero_grad()
            square_loss(model(inputs), target).backward()
            for param in model.parameters():
                local = param.grad.to_local().to(grad_dtype)
                param.grad = None
                if not casts:
                    local = local.to(main_dtype)
                param.grad_dtype = local.dtype
                param.grad = param.megatron_fsdp_spec.wrap(local)

        for batch in batches(dist.get_world_size()):
            inputs, target = (tensor.to(main_dtype) for tensor in batch[dist.get_rank()])
            if by_closure:
                optimizer.step(backward)
            else:
                backward()
                grads = [param.grad for param in model.parameters()]
                values = [grad.to_local().clone() for grad in grads]
                optimizer.step()
                for param, grad, value in zip(model.parameters(), grads, values, strict=True):
                    assert param.grad is grad and param.grad_dtype is value.dtype
                    assert_close([grad.to_local()], [value], rtol=0, atol=0)
        assert all(param.to_local().grad is None for param in model.parameters())
        return [param.to_local().clone() for param in model.parameters()]

    return train(casts=True), train(casts=False)


@pytest.mark.parametrize("by_closure", [False, True])
@pytest.mark.parametrize(
    ("main_dtype", "grad_dtype"), [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)]
)
@pytest.mark.parametrize("which", CASTING)
def test_gradients_of_another_dtype_are_cast_for_the_step(ranks2, which, main_dtype, grad_dtype, by_closure):
    for ours, theirs in ranks2.run(compare_casts, which, main_dtype, grad_dtype, by_closure):
        assert_close(ours, theirs, rtol=0, atol=0)


def step_with_state_that_is_no_dtensor():
    model, optimizer = build(Kind("SGD", {"lr": 0.1, "momentum": 0.9}))
    first, second = batches(dist.get_world_size(), 2)
    sharded_step(model, optimizer, first)
    for state in optimizer.state.values():
        state["momentum_buffer"] = state["momentum_buffer"].to_local()  # no checkpoint would know where it lies
    sharded_step(model, optimizer, second)


def test_state_that_is_no_dtensor_is_refused(ranks2):
    message = "'momentum_buffer' of shape .* is a plain tensor.* load_state_dict"
    ranks2.run_expecting(ValueError, message, step_with_state_that_is_no_dtensor)


def step_with_a_replaced_step():
    kind = torch.optim.AdamW
    model, _ = build()  # a step on local tensors has been made for the class
    before, calls, hooked = kind.step, [], []

    @functools.wraps(before)
    def step(self, closure=None):
        calls.append(closure)
        return before(self, closure)

    with mock.patch.object(kind, "step", step):
        model, optimizer = build()
        optimizer.register_step_pre_hook(lambda *_: hooked.append(1))
        see_types(model, optimizer, 2)
    return len(calls), len(hooked)


def test_a_step_that_was_replaced_in_its_class_is_taken(ranks2):
    assert ranks2.run(step_with_a_replaced_step) == [(2, 2)] * 2


def count_steps_of_a_replaced_class():
    calls = []

    class AdamW(torch.optim.AdamW):
        def step(self, closure=None):
            calls.append(closure)
            return super().step(closure)

    with mock.patch.object(torch.optim, "AdamW", AdamW):
        model, optimizer = build()
        seen = see_types(model, optimizer, 2)
    return len(calls), seen


def test_a_class_put_in_the_place_of_torchs_own_may_do_anything(ranks2):
    assert ranks2.run(count_steps_of_a_replaced_class) == [(2, [{DTensor}] * 2)] * 2


def fail_in_a_step():
    model, optimizer = build()
    see_types(model, optimizer, 1)
    params = optimizer.param_groups[0]["params"]
    state = optimizer.state
    inputs, target = batches(dist.get_world_size(), 1)[0][dist.get_rank()]
    square_loss(model(inputs), target).backward()
    with mock.patch.object(ADAM, "adam", side_effect=ZeroDivisionError), pytest.raises(ZeroDivisionError):
        optimizer.step()
    is_clean = all(param._local_tensor.grad is None for param in params)
    return optimizer.param_groups[0]["params"] is params, optimizer.state is state, is_clean


def test_a_step_that_raises_leaves_the_optimizer_as_it_was(ranks2):
    assert ranks2.run(fail_in_a_step) == [(True, True, True)] * 2


def read_state_inside_a_step():
    model, optimizer = build()
    see_types(model, optimizer, 1)
    inputs, target = batches(dist.get_world_size(), 1)[0][dist.get_rank()]
    square_loss(model(inputs), target).backward()
    with mock.patch.object(ADAM, "adam", side_effect=lambda *_, **__: optimizer.state_dict()):
        try:
            optimizer.step()
        finally:
            optimizer.state_dict()  # works again


def test_state_is_not_stored_while_a_step_computes(ranks2):
    ranks2.run_expecting(RuntimeError, "inside step.*call it between steps", read_state_inside_a_step)


def step_with_other_state():
    kind = Kind("SGD", {"lr": 0.1, "momentum": 0.9})
    model, optimizer = build(kind)
    for number, batch in enumerate(batches(dist.get_world_size())):
        if number:
            for state in optimizer.state.values():
                state["momentum_buffer"] = state["momentum_buffer"].clone()  # others than the step before had
        sharded_step(model, optimizer, batch)
    return full(model)


def test_state_that_was_replaced_between_steps_is_used(ranks2):
    for weights in ranks2.run(step_with_other_state):
        assert_close(weights, plain_weights(Kind("SGD", {"lr": 0.1, "momentum": 0.9}), 2))


def count_compactions(steps, loads):
    from megatron_fsdp.machine.device import Device

    model, optimizer = build()
    if loads:
        other_model, other = build()
        see_types(other_model, other, 1)
        optimizer.load_state_dict(other.state_dict())
    with mock.patch.object(Device, "empty_cache") as empty_cache:
        see_types(model, optimizer, steps)
    return empty_cache.call_count


@pytest.mark.parametrize(("loads", "count"), [(False, 1), (True, 0)])
def test_memory_is_compacted_once_before_state_is_made(ranks2, loads, count):
    assert ranks2.run(count_compactions, 3, loads) == [count] * 2


def take_away(kind, change):
    """Weights after steps before which `change` was done to the state, sharded and whole."""
    plain = build_whole()
    reference = kind.over(plain.parameters())
    model, optimizer = build(kind)
    for number, batch in enumerate(batches(dist.get_world_size(), 4)):
        for state in (*optimizer.state.values(), *reference.state.values()):
            change(state, number)
        plain_step(plain, reference, batch)
        sharded_step(model, optimizer, batch)
    return full(model), [param.detach() for param in plain.parameters()]


def forget_momentum(state, number):
    if number == 2:
        state["momentum_buffer"] = None


def tag_and_untag(state, number):
    if number == 1:
        state["age"] = 1
    elif number == 2:
        del state["age"]


@pytest.mark.parametrize("change", [forget_momentum, tag_and_untag])
def test_state_that_is_taken_away_between_steps_is_made_anew(ranks2, change):
    momentum = Kind("SGD", {"lr": 0.1, "momentum": 0.9, "foreach": False})
    for ours, theirs in ranks2.run(take_away, momentum, change):
        assert_close(ours, theirs)


def replace_inside_a_step():
    from megatron_fsdp.optim import local_step

    model, optimizer = build()
    see_types(model, optimizer, 1)
    inputs, target = batches(dist.get_world_size(), 1)[0][dist.get_rank()]
    square_loss(model(inputs), target).backward()
    before = [state["exp_avg"].full_tensor() for state in optimizer.state.values()]
    with local_step.on_rows(optimizer):
        for state in optimizer.state.values():
            state.update(exp_avg=state["exp_avg"] + 1, count=3)
            del state["exp_avg_sq"]
    found = optimizer.state.values()
    after = [state["exp_avg"].full_tensor() for state in found]
    return before, after, {state["count"] for state in found}, {name for state in found for name in state}


def test_state_that_a_step_replaces_is_taken_over(ranks2):
    for before, after, counts, names in ranks2.run(replace_inside_a_step):
        assert_close(after, [tensor + 1 for tensor in before], rtol=0, atol=0)
        assert counts == {3}
        assert names == {"step", "exp_avg", "count"}
