"""Parameters of one owner: each matrix on one rank, so that optimizers that need whole matrices update it there."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.unit_tests.harness.communication import no_collectives
from tests.unit_tests.harness.mistakes import Mistake, assert_each_raises
from tests.unit_tests.harness.models import MLPBlock, TinyMLP, float_batches, square_loss
from tests.unit_tests.harness.optimizing import assert_close
from tests.unit_tests.harness.sharded import Sharding, shard

STEPS, WIDTH = 3, 6
AUTO = {"sync_model_each_microbatch": True}


class SOAP(torch.optim.SGD):
    """Stands for one that is not torch's: known by its name."""


def build(*, is_marked: bool = True) -> nn.Module:
    from megatron_fsdp import fsdp_single_owner

    torch.manual_seed(0)
    model = TinyMLP(width=WIDTH, bias=False)
    if is_marked:
        fsdp_single_owner(model)
    return model


def optimizer_over(name: str, params) -> torch.optim.Optimizer:
    return SOAP(params, lr=0.1, momentum=0.5) if name == "SOAP" else getattr(torch.optim, name)(params, lr=0.02)


def batches(world: int) -> list:
    return [step[0] for step in float_batches(STEPS, 1, world, width=WIDTH)]


def train_whole(name: str, world: int) -> list[torch.Tensor]:
    model = build()
    optimizer = optimizer_over(name, model.parameters())
    for ranks in batches(world):
        optimizer.zero_grad()
        for inputs, target in ranks:
            (square_loss(model(inputs), target) / world).backward()
        optimizer.step()
    return [param.detach() for param in model.parameters()]


def train_sharded(name: str, strategy: int, outer: str | None, reloads: bool = False) -> tuple:
    """Whole weights, and how many parameters have rows here. **Collective.**"""
    from megatron_fsdp import fully_shard_optimizer

    def start() -> tuple:
        model = shard(build(), Sharding(strategy=strategy, outer=outer, units=(MLPBlock,), options=AUTO))
        return model, fully_shard_optimizer(optimizer_over(name, model.parameters()))

    model, optimizer = start()
    for number, ranks in enumerate(batches(dist.get_world_size())):
        if reloads and number == 1:
            weights, state = model.module.state_dict(), optimizer.state_dict()
            model, optimizer = start()
            model.module.load_state_dict(weights)
            optimizer.load_state_dict(state)
        optimizer.zero_grad()
        inputs, target = ranks[dist.get_rank()]
        square_loss(model(inputs), target).backward()
        with no_collectives():
            optimizer.step()
    owned = [param.to_local().shape[0] for param in model.parameters()]
    return [param.full_tensor() for param in model.parameters()], owned


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")
@pytest.mark.parametrize(("ranks", "strategy", "outer"), [(2, 3, None), (3, 2, None), (2, 0, None), (4, 3, "optim")])
def test_muon_updates_whole_matrices_where_they_are(rank_pools, ranks, strategy, outer):
    expected = train_whole("Muon", ranks)
    for weights, owned in rank_pools[ranks].run(train_sharded, "Muon", strategy, outer):
        assert_close(weights, expected, rtol=1e-3, atol=1e-3)  # it computes in bfloat16
        assert set(owned) <= {0, WIDTH}


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")
def test_muon_goes_on_from_its_state_dict(ranks2):
    expected = train_whole("Muon", 2)
    for weights, _ in ranks2.run(train_sharded, "Muon", 3, None, True):
        assert_close(weights, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", ["Adafactor", "SOAP"])
def test_others_that_read_whole_matrices_work_too(ranks3, name):
    expected = train_whole(name, 3)
    for weights, _ in ranks3.run(train_sharded, name, 3, None):
        assert_close(weights, expected)


def shard_with(name: str, *, is_marked: bool, is_wrapped: bool) -> None:
    from megatron_fsdp import fully_shard, fully_shard_optimizer

    if is_wrapped:
        model = shard(build(is_marked=is_marked), Sharding(units=(MLPBlock,)))
        with no_collectives():
            fully_shard_optimizer(optimizer_over(name, model.parameters()))
    else:
        module = build(is_marked=is_marked)
        with no_collectives():
            fully_shard(module, optimizer_over(name, module.parameters()))


def wrap_unmarked(name: str) -> None:
    shard_with(name, is_marked=False, is_wrapped=True)


def shard_unmarked(name: str) -> None:
    shard_with(name, is_marked=False, is_wrapped=False)


def save_state_of_another_shape() -> None:
    from megatron_fsdp import fully_shard_optimizer

    model = shard(build(), Sharding(units=(MLPBlock,)))
    fully_shard_optimizer(optimizer_over("Adafactor", model.parameters())).state_dict()


def test_rows_are_refused_by_name_before_anything_is_sent(ranks2):
    names = [name for name in ("Muon", "Adafactor", "SOAP") if name == "SOAP" or hasattr(torch.optim, name)]
    message = r"{} cannot update parameters whose rows are spread over ranks.*4 of its 4.*fsdp_single_owner\(\)"
    mistakes = [
        Mistake(function, (name,), ValueError, message.format(name))
        for name in names
        for function in (wrap_unmarked, shard_unmarked)
    ]
    mistakes.append(
        Mistake(save_state_of_another_shape, (), NotImplementedError, "state of Adafactor lies on the owner")
    )
    assert_each_raises(ranks2, mistakes)


def test_only_modules_and_parameters_can_be_marked():
    from megatron_fsdp import fsdp_single_owner

    with pytest.raises(TypeError, match="fsdp_single_owner expects a Module or a Parameter, got str"):
        fsdp_single_owner("blocks")
