"""Torch's distributed checkpoints: across ranks and strategies, early, in the background and before sharding."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from tests.unit_tests.harness.checkpoints import (
    BF16,
    Setup,
    assert_same,
    batches,
    both,
    build,
    everything,
    full,
    load,
    optimizer_of,
    save,
    sharded,
    train,
)
from tests.unit_tests.harness.communication import no_collectives
from tests.unit_tests.harness.models import OddShapes
from tests.unit_tests.harness.sharded import Sharding, shard


@pytest.mark.parametrize(
    ("saver", "loader"),
    [
        (Setup(2, 3), Setup(3, 3)),
        (Setup(3, 2), Setup(2, 0)),
        (Setup(4, 3, outer=1), Setup(1, 1)),
        (Setup(1, 3), Setup(4, 3, outer=0)),
        (Setup(3, 3), Setup(3, 3)),
        (Setup(2, 1, dtype=BF16), Setup(2, 1, dtype=BF16)),
        (Setup(2, 0), Setup(4, 3, outer=1)),
    ],
    ids=lambda setup: f"{setup.world} ranks strategy {setup.strategy} outer {setup.outer}",
)
def test_a_checkpoint_continues_anywhere_as_if_it_had_never_stopped(rank_pools, tmp_path, saver, loader):
    saved, losses, final = rank_pools[saver.world].run(save, saver, str(tmp_path))[0]
    # The same ranks do the same arithmetic; others sum in another order.
    tolerance = 0.0 if saver == loader else 1e-5
    for loaded, next_losses, end in rank_pools[loader.world].run(load, loader, str(tmp_path)):
        assert_same(loaded, saved, where="loaded")
        assert_same(next_losses, losses, tolerance=tolerance, where="losses")
        assert_same(end, final, tolerance=tolerance, where="end")


def save_early_and_late(folder: str) -> tuple[list[float], list[float]]:
    """Losses of a run, and of one resumed from its checkpoint before the first step."""
    setup = Setup(2, 3)
    model = sharded(setup)
    optimizer = optimizer_of(model)
    dcp.save(both(model, optimizer), checkpoint_id=folder)
    losses = train(model, optimizer, batches(3))
    resumed = sharded(setup, seed=9)
    optimizer = optimizer_of(resumed)
    train(resumed, optimizer, batches(1))
    state = both(resumed, optimizer)
    dcp.load(state, checkpoint_id=folder)
    resumed.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return losses, train(resumed, optimizer, batches(3))


def test_a_checkpoint_before_the_first_step_is_the_beginning(ranks2, tmp_path):
    for losses, resumed in ranks2.run(save_early_and_late, str(tmp_path)):
        assert losses == resumed


def save_in_the_background(folder: str) -> bool:
    model = sharded(Setup(2, 3))
    optimizer = optimizer_of(model)
    train(model, optimizer, batches(1))
    before = everything(model, optimizer)
    pending = dcp.async_save(both(model, optimizer), checkpoint_id=folder)
    pending.result()
    train(model, optimizer, batches(1))
    state = both(model, optimizer)
    dcp.load(state, checkpoint_id=folder)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    assert_same(everything(model, optimizer), before)
    return True


def test_a_checkpoint_may_be_written_in_the_background(ranks2, tmp_path):
    assert all(ranks2.run(save_in_the_background, str(tmp_path)))


# -- without a file ---------------------------------------------------------------------------------------------------


def load_full_tensors(setup: Setup) -> tuple[torch.Tensor, torch.Tensor]:
    """The output after loading a plain state dict, beside the plain model's."""
    plain, model = build(3, setup.dtype), sharded(setup, seed=0)
    tokens = torch.arange(5)
    model(tokens)  # leaves weights gathered where they rest whole
    with no_collectives():
        model.module.load_state_dict(plain.state_dict())
    return model(tokens), plain(tokens)


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@pytest.mark.parametrize(
    ("world", "strategy", "outer"), [(2, 0, None), (3, 1, None), (2, 2, None), (3, 3, None), (4, 3, 1)]
)
def test_loading_makes_compute_weights_current_at_once(rank_pools, world, strategy, outer, dtype):
    for came, expected in rank_pools[world].run(load_full_tensors, Setup(world, strategy, outer, dtype)):
        assert torch.equal(came, expected)


def load_a_file_before_sharding(path: str) -> bool:
    """An ordinary checkpoint, written by torch.save and loaded before sharding."""
    if dist.get_rank() == 0:
        torch.save(build(3).state_dict(), path)
    dist.barrier()
    module = build(0)
    module.load_state_dict(torch.load(path))
    model = shard(module, Sharding(units=(OddShapes,)))
    assert_same(full(model.module.state_dict()), dict(build(3).state_dict()))
    return True


def test_an_ordinary_checkpoint_loads_before_sharding(ranks2, tmp_path):
    assert all(ranks2.run(load_a_file_before_sharding, str(tmp_path / "model.pt")))
