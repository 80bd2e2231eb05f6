"""Gradients of parameters of another dtype than gradients accumulate in: copies, which the same DTensors show."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist
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


def step_by_step(strategy: int) -> dict:
    from megatron_fsdp.dtensor import ShardSpec

    model = made(strategy)
    first, second, third = batches(dist.get_world_size())
    backward(model, first)
    held = {name: param.grad for name, param in model.named_parameters()}
    before = grads(model)
    model.zero_grad()
    backward(model, second)
    is_kept = all(map(torch.equal, before, (grad.full_tensor() for grad in held.values())))
    is_fp32 = {param.grad.dtype for param in model.parameters()} == {torch.float32}
    ours = grads(model)
    held.clear()
    model.zero_grad()
    backward(model, third)
    model.zero_grad()
    with mock.patch.object(ShardSpec, "wrap", autospec=True, side_effect=ShardSpec.wrap) as wrap:
        backward(model, second)
        counted = wrap.call_count
    is_same = all(map(torch.equal, ours, grads(model)))
    backward(model, second)  # adds up
    doubled = [grad * 2 for grad in ours]
    is_sum = all(map(torch.equal, doubled, grads(model)))
    is_rounded = all(torch.equal(grad, grad.bfloat16().float()) for grad in ours)
    return {"kept": is_kept, "fp32": is_fp32, "same": is_same, "sum": is_sum, "rounded": is_rounded, "made": counted}


@pytest.mark.parametrize("strategy", [1, 3])
def test_copies_hold_what_was_accumulated_and_cost_no_dtensors(ranks2: RankPool, strategy: int) -> None:
    expected = {"kept": True, "fp32": True, "same": True, "sum": True, "rounded": True, "made": 0}
    assert ranks2.run(step_by_step, strategy) == [expected] * 2


def is_memory_freed(by: str) -> bool:
    from megatron_fsdp.machine.torch_compat import local_tensor

    model = made(3)
    backward(model, batches(dist.get_world_size())[0])
    storages = [local_tensor(param.grad).untyped_storage() for param in model.parameters()]
    memory = [StorageWeakRef(storage) for storage in storages if storage.nbytes()]
    del storages
    assert memory
    assert not any(storage.expired() for storage in memory)
    if by == "zero_grad":
        model.zero_grad()
    else:  # as `optimizer.zero_grad(zero_grad_buffer=False)` does
        model.param_and_grad_buffer.detach_grads()
    return all(storage.expired() for storage in memory)


@pytest.mark.parametrize("by", ["zero_grad", "detach_grads"])
def test_copies_are_freed_with_the_gradients(ranks2: RankPool, by: str) -> None:
    assert ranks2.run(is_memory_freed, by) == [True] * 2


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
    ids=["copies", "views", "decoupled"],
)
def test_scaling_reaches_all_gradients_and_brings_none_back(
    ranks2: RankPool, accumulates: torch.dtype, name: str
) -> None:
    assert ranks2.run(scale_what_is_left, accumulates, name) == [[True, True]] * 2
