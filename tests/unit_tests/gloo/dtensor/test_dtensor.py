"""Sharded parameters as DTensors: where their rows lie, whose memory they are, and what becomes of copies."""

import copy
import io
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from megatron_fsdp.dtensor.chunk_metadata import attached_chunk
from megatron_fsdp.machine.torch_compat import local_tensor, strided_shard
from tests.unit_tests.harness.models import OddModel, OddShapes
from tests.unit_tests.harness.sharded import Sharding, shard


def build() -> nn.Module:
    torch.manual_seed(0)
    return OddModel(depth=1)


def build_sharded(strategy: int = 3, outer: int | None = None, **options: Any) -> Any:
    return shard(build(), Sharding(strategy=strategy, outer=outer, units=(OddShapes,), options=options))


def look_at_params(strategy: int, outer: int | None) -> dict[str, Any]:
    """This rank's elements by name, and claims that must hold for each."""
    model = build_sharded(strategy, outer)
    plain = dict(build().named_parameters())
    pieces, placements = {}, set()
    for name, param in model.module.named_parameters():
        whole, mine = plain[name].detach(), param.megatron_fsdp_slice
        assert isinstance(param, DTensor) and isinstance(param, nn.Parameter) and param.shape == whole.shape
        assert torch.equal(param.to_local().flatten(), whole.flatten()[mine])
        assert torch.equal(param.full_tensor(), whole)
        chunk = attached_chunk(param)
        row = whole[0].numel()
        assert chunk.offsets[0] * row == mine.start and tuple(chunk.sizes) == tuple(param.to_local().shape)
        assert param.megatron_fsdp_dist_index is model.dist_index
        assert param._megatron_fsdp_owner() is model
        pieces[name] = set(range(mine.start, mine.stop))
        placements.add(param.placements)
    return {"pieces": pieces, "placements": placements, "rank": dist.get_rank()}


REPLICATED, SHARDED = (Replicate(),), (Shard(0),)


@pytest.mark.parametrize(
    ("world", "strategy", "outer", "placements", "copies"),
    [
        (3, 0, None, REPLICATED, 3),
        (3, 1, None, SHARDED, 1),
        (2, 2, None, SHARDED, 1),
        (3, 3, None, SHARDED, 1),
        (4, 3, 0, (Replicate(), Shard(0)), 2),
        (4, 3, 1, (strided_shard(0, 2), Shard(0)), 1),
    ],
)
def test_parameters_lie_where_their_slices_say(rank_pools, world, strategy, outer, placements, copies):
    seen = rank_pools[world].run(look_at_params, strategy, outer)
    for name, param in build().named_parameters():
        owners = [sum(at in rank["pieces"][name] for rank in seen) for at in range(param.numel())]
        assert owners == [copies] * param.numel(), name
    assert all(rank["placements"] == {placements} for rank in seen)


def share_memory() -> list[bool]:
    """Writing to a parameter writes to the main weights; a gradient is the buffer's memory, on every rank."""
    model = build_sharded(sync_model_each_microbatch=True)
    model(torch.ones(2, 7)).sum().backward()
    claims = []
    for group in model.param_and_grad_buffer.parameter_groups:
        for slot, fqn in enumerate(group.spec.fqns):
            param = model.module.get_parameter(fqn)
            main, grad = group.main_weight_buffer.view(slot), group.main_grad.final.view(slot)
            with torch.no_grad():
                param.fill_(slot + 2.0)
            claims.append(bool((main == slot + 2.0).all()))
            claims.append(torch.equal(param.grad.to_local(), grad) and param.grad.placements == param.placements)
            claims.append(not main.numel() or param.grad.to_local().data_ptr() == grad.data_ptr())
            local = local_tensor(param)
            claims.append(local.untyped_storage().nbytes() == local.numel() * local.element_size())
    return claims


def test_parameters_and_gradients_are_their_buffers_memory(ranks3):
    assert all(map(all, ranks3.run(share_memory)))


def copy_params() -> list[Any]:
    model = build_sharded()
    params = list(model.parameters())
    copies = copy.deepcopy(params)
    for param, copied in zip(params, copies, strict=True):
        assert isinstance(copied, nn.Parameter) and torch.equal(copied.to_local(), param.to_local())
        assert not param.to_local().numel() or copied.to_local().data_ptr() != param.to_local().data_ptr()
        assert copied.megatron_fsdp_spec is param.megatron_fsdp_spec
    # An average of weights, as it is usually written.
    with torch.no_grad():
        torch._foreach_lerp_(copies, params, 0.5)
    stream = io.BytesIO()
    torch.save(model.state_dict(), stream)
    stream.seek(0)
    loaded = torch.load(stream, weights_only=False)
    model.load_state_dict(loaded)
    return [copies[0].full_tensor, loaded["module.head.weight"].full_tensor]


def gather_a_copy(number: int) -> None:
    copy_params()[number]()


@pytest.mark.parametrize("number", [0, 1])
def test_copies_keep_their_values_and_refuse_to_be_gathered(ranks2, number):
    ranks2.run_expecting(RuntimeError, "was copied away from its model and cannot be gathered", gather_a_copy, number)


def copy_the_inner_module() -> None:
    copy.deepcopy(build_sharded().module)


def test_a_sharded_module_is_not_copied(ranks2):
    ranks2.run_expecting(NotImplementedError, "copy it before sharding, or copy its state_dict", copy_the_inner_module)


def differentiate_a_gather() -> None:
    next(build_sharded().parameters()).full_tensor(grad_placements=[Replicate()])


def test_gathering_is_not_differentiable(ranks2):
    ranks2.run_expecting(NotImplementedError, "is not differentiable", differentiate_a_gather)


def freeze_late(is_frozen: bool) -> None:
    module = build()
    module.head.requires_grad_(is_frozen)
    model = shard(module, Sharding(units=(OddShapes,), options={"sync_model_each_microbatch": True}))
    model.module.head.bias.requires_grad_(not is_frozen)
    model(torch.ones(2, 7)).sum().backward()


@pytest.mark.parametrize("is_frozen", [True, False])
def test_freezing_after_sharding_is_not_ignored(ranks2, is_frozen):
    """It would leave the gradient as it was."""
    message = f"head.bias.requires_grad has become {not is_frozen} after sharding.*freeze parameters before sharding"
    ranks2.run_expecting(RuntimeError, message, freeze_late, is_frozen)
