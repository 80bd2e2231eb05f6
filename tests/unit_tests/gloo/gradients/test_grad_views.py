"""Attached gradients are views of the buffer, in the dtype in which gradients accumulate."""

import copy
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.multiprocessing.reductions import StorageWeakRef

from tests.unit_tests.harness.models import OddShapes, square_loss
from tests.unit_tests.harness.optimizing import batches, build
from tests.unit_tests.harness.rank_pool import RankPool


def made(strategy: int, accumulates: torch.dtype = torch.bfloat16, **options):
    """A bf16 model whose main weights are fp32. **Collective.**"""
    from megatron_fsdp import MixedPrecisionPolicy, fully_shard_model

    policy = MixedPrecisionPolicy(main_params_dtype=torch.float32, main_grads_dtype=accumulates)
    options |= {"zero_dp_strategy": strategy, "mixed_precision_policy": policy}
    return fully_shard_model(build().bfloat16(), fsdp_unit_modules=[OddShapes], **options)


def backward(model, batch) -> None:
    inputs, target = (tensor.bfloat16() for tensor in batch[dist.get_rank()])
    square_loss(model(inputs), target).backward()
    model.finish_grad_sync()


def grads(model) -> list[torch.Tensor]:
    return [param.grad.full_tensor() for param in model.parameters()]


def step_by_step(strategy: int, accumulates: torch.dtype) -> dict:
    model = made(strategy, accumulates)
    first, second = batches(dist.get_world_size())[:2]
    backward(model, first)
    held = {name: param.grad for name, param in model.named_parameters()}
    before = grads(model)
    model.zero_grad()
    backward(model, second)
    is_kept = all(map(torch.equal, before, (grad.full_tensor() for grad in held.values())))
    has_dtype = {param.grad.dtype for param in model.parameters()} == {accumulates}
    ours, held = grads(model), [param.grad for param in model.parameters()]
    backward(model, second)  # adds up
    is_sum = all(map(torch.equal, [grad * 2 for grad in ours], grads(model)))
    is_same = all(param.grad is grad for param, grad in zip(model.parameters(), held, strict=True))
    copied = copy.deepcopy(held)
    model.zero_grad()
    is_copied = all(torch.equal(a.to_local(), b.to_local()) for a, b in zip(copied, held, strict=True))
    return {"kept": is_kept, "dtype": has_dtype, "sum": is_sum, "same": is_same, "copied": is_copied}


@pytest.mark.parametrize("accumulates", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("strategy", [1, 3])
def test_gradients_add_up_in_place_and_are_kept_by_who_holds_them(
    ranks2: RankPool, strategy: int, accumulates: torch.dtype
) -> None:
    expected = {"kept": True, "dtype": True, "sum": True, "same": True, "copied": True}
    assert ranks2.run(step_by_step, strategy, accumulates) == [expected] * 2


def changed_in_place() -> list[bool]:
    """Operations on attached gradients change the buffer itself."""
    model = made(3)
    backward(model, batches(dist.get_world_size())[0])
    found = []
    for group, param in model.param_and_grad_buffer.trained():
        param.sharded.grad.fill_(3.0)
        slot = group.spec.fqns.index(param.fqn)
        found.append(bool((group.main_grad.final.view(slot) == 3.0).all()))
    return found


def test_attached_gradients_share_the_memory_of_the_buffer(ranks2: RankPool) -> None:
    assert all(all(found) for found in ranks2.run(changed_in_place))


def saved_and_loaded(folder: str) -> bool:
    model = made(3)
    backward(model, batches(dist.get_world_size())[0])
    state, before = {name: param.grad for name, param in model.named_parameters()}, grads(model)
    torch.distributed.checkpoint.save(state, checkpoint_id=folder)
    for grad in state.values():
        grad.zero_()
    torch.distributed.checkpoint.load(state, checkpoint_id=folder)
    return all(map(torch.equal, before, grads(model)))


def test_torch_saves_and_loads_them(ranks2: RankPool, tmp_path: Path) -> None:
    assert ranks2.run(saved_and_loaded, str(tmp_path)) == [True] * 2


def first_state() -> set[torch.dtype]:
    """torch attaches gradients of the parameters' own dtype to have state made."""
    from megatron_fsdp import fully_shard_optimizer

    model = made(3)
    optimizer = fully_shard_optimizer(torch.optim.AdamW(model.parameters()))
    state = get_optimizer_state_dict(model.module, optimizer)["state"]
    return {value["exp_avg"].dtype for value in state.values()}


def test_torch_makes_state_before_there_are_any(ranks2: RankPool) -> None:
    assert ranks2.run(first_state) == [{torch.float32}] * 2


def zeroed_in_place(by: str) -> list[bool]:
    """torch's rule for `set_to_none=False`: zeros stay attached; what is not attached yet is forgotten."""
    from megatron_fsdp import fully_shard_optimizer

    model = made(3, sync_model_each_microbatch=False)
    params = list(model.parameters())
    optimizer = fully_shard_optimizer(torch.optim.SGD(params, lr=1.0))
    zero_grad = model.zero_grad if by == "model" else optimizer.zero_grad
    first, second = batches(dist.get_world_size())[:2]
    backward(model, second)
    once = grads(model)
    held = [param.grad for param in params]
    zero_grad(set_to_none=False)
    found = [all(p.grad is h and not h.to_local().any() for p, h in zip(params, held, strict=True))]
    square_loss(model(first[0][0].bfloat16()), first[0][1].bfloat16()).backward()
    zero_grad(set_to_none=False)
    backward(model, second)
    return [*found, all(map(torch.equal, once, grads(model)))]


@pytest.mark.parametrize("by", ["model", "optimizer"])
def test_zeros_stay_attached_if_they_are_asked_for(ranks2: RankPool, by: str) -> None:
    assert ranks2.run(zeroed_in_place, by) == [[True, True]] * 2


def zero_replaced(by: str) -> bool:
    """Gradients that users have put in the place of the model's are made zero as well."""
    from megatron_fsdp import fully_shard_optimizer

    model = made(3)
    optimizer = fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=1.0))
    backward(model, batches(dist.get_world_size())[0])
    for param in model.parameters():
        param.grad = param.grad * 2
    (model.zero_grad if by == "model" else optimizer.zero_grad)(set_to_none=False)
    return not any(param.grad.to_local().any() for param in model.parameters())


@pytest.mark.parametrize("by", ["model", "optimizer"])
def test_replaced_gradients_become_zero_too(ranks2: RankPool, by: str) -> None:
    assert ranks2.run(zero_replaced, by) == [True] * 2


def is_memory_freed() -> bool:
    from megatron_fsdp.machine.torch_compat import local_tensor

    model = made(3)
    backward(model, batches(dist.get_world_size())[0])
    storages = [local_tensor(param.grad).untyped_storage() for param in model.parameters()]
    storages += [
        group.main_grad_buffer.data.untyped_storage() for group in model.param_and_grad_buffer.parameter_groups
    ]
    memory = [StorageWeakRef(storage) for storage in storages if storage.nbytes()]
    del storages
    assert memory
    assert not any(storage.expired() for storage in memory)
    model.zero_grad()
    return all(storage.expired() for storage in memory)


def test_zero_grad_frees_what_nobody_holds(ranks2: RankPool) -> None:
    assert ranks2.run(is_memory_freed) == [True] * 2


def hold_local_tensors(accumulates: torch.dtype) -> list[bool]:
    model = made(3, accumulates)
    first, second, third = batches(dist.get_world_size())
    backward(model, first)
    with torch.no_grad():  # `to_local()` gives the very tensor then, not an alias
        held = [param.grad.to_local() for param in model.parameters()]
    before = [local.clone() for local in held]
    kept = []
    for batch in (second, third):
        model.zero_grad()
        kept.append(all(map(torch.equal, before, held)))
        backward(model, batch)
        kept.append(all(map(torch.equal, before, held)))
    return kept


@pytest.mark.parametrize("accumulates", [torch.bfloat16, torch.float32], ids=str)
def test_held_local_tensors_keep_their_values(ranks2: RankPool, accumulates: torch.dtype) -> None:
    assert ranks2.run(hold_local_tensors, accumulates) == [[True] * 4] * 2


def scale_what_is_left(accumulates: torch.dtype, name: str) -> list[bool]:
    model = made(3, accumulates, use_decoupled_grad=name == "decoupled_grad")
    backward(model, batches(dist.get_world_size())[0])
    dropped, *others = model.parameters()
    setattr(dropped, name, None)
    before = [getattr(param, name).full_tensor().clone() for param in others]
    model.scale_gradients(2.0)
    model.scale_gradients(torch.tensor(2.0))
    after = [getattr(param, name).full_tensor() for param in others]
    return [getattr(dropped, name) is None, all(torch.equal(a * 4, b) for a, b in zip(before, after, strict=True))]


@pytest.mark.parametrize(
    ("accumulates", "name"),
    [(torch.bfloat16, "grad"), (torch.float32, "grad"), (torch.bfloat16, "decoupled_grad")],
    ids=["narrower", "as_wide", "decoupled"],
)
def test_scaling_reaches_all_gradients_and_brings_none_back(
    ranks2: RankPool, accumulates: torch.dtype, name: str
) -> None:
    assert ranks2.run(scale_what_is_left, accumulates, name) == [[True, True]] * 2


def replace_and_step(is_automatic: bool) -> list[bool]:
    """True if gradients that users have put in the place of the model's are stepped with, as in one process."""
    from megatron_fsdp import fully_shard_optimizer

    model = made(3, torch.float32, sync_model_each_microbatch=is_automatic)
    optimizer = fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=1.0))
    found = []
    for drops in (False, True):
        before = [param.full_tensor().clone() for param in model.parameters()]
        backward(model, batches(dist.get_world_size())[0])
        whole = grads(model)
        taken = [param.grad for param in model.parameters()]
        if drops:
            optimizer.zero_grad()
        for param, grad in zip(model.parameters(), taken, strict=True):
            param.grad = grad * 2
        optimizer.step()
        expected = [weight - 2 * grad for weight, grad in zip(before, whole, strict=True)]
        found.append(all(map(torch.equal, expected, (param.full_tensor() for param in model.parameters()))))
        optimizer.zero_grad()
    return found


@pytest.mark.parametrize("is_automatic", [False, True])
def test_a_step_takes_gradients_that_were_replaced(ranks2: RankPool, is_automatic: bool) -> None:
    assert ranks2.run(replace_and_step, is_automatic) == [[True, True]] * 2
