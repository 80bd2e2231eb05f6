"""Parts of shards that are stored by themselves: uneven, empty, and read back where shards are cut otherwise."""

import cProfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.tensor import DTensor, Shard

from megatron_fsdp import fsdp_no_shard, fully_shard_model

ROWS = {"0.weight": 10, "1.weight": 2, "2.weight": 6, "2.bias": 6, "3.weight": 4}


def build(value: float, strategy: int) -> nn.Module:
    """Rows that do not divide, a layer that stays whole, and a frozen one; element i of each is i x `value`."""
    model = nn.Sequential(
        nn.Linear(3, 10, bias=False), nn.Linear(10, 2, bias=False), nn.Linear(2, 6), nn.Linear(6, 4, bias=False)
    )
    fsdp_no_shard(model[1])
    model[3].requires_grad_(False)
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(torch.arange(param.numel(), dtype=torch.float32).view_as(param) * value)
    return fully_shard_model(model, fsdp_unit_modules=[nn.Linear], zero_dp_strategy=strategy)


def parts(model: nn.Module) -> dict[str, DTensor]:
    """The first third (rounded) and the rest of every parameter's rows."""
    stored = {}
    for name, param in model.module.named_parameters():
        spec, cut = param.megatron_fsdp_spec, ROWS[name] // 3
        stored[f"{name}.a"] = spec.rows_of_parts(param, 0, cut)
        stored[f"{name}.b"] = spec.rows_of_parts(param, cut, ROWS[name] - cut)
    return stored


def save(folder: str) -> None:
    dcp.save(parts(build(1.0, 3)), checkpoint_id=folder)


def load(folder: str, strategy: int) -> bool:
    """True if reading into the parts fills the parameters, and nothing beside them."""
    model = build(0.0, strategy)
    stored = parts(model)
    shapes = {name.removesuffix(".b"): value.shape[0] for name, value in stored.items() if name.endswith(".b")}
    assert shapes == {name: rows - rows // 3 for name, rows in ROWS.items()}
    dcp.load(stored, checkpoint_id=folder)
    return all(
        param.full_tensor().flatten().equal(torch.arange(param.numel(), dtype=torch.float32))
        for param in model.module.parameters()
    )


def test_parts_of_uneven_shards_are_read_back_anywhere(ranks3, ranks2, ranks1, tmp_path):
    ranks3.run(save, str(tmp_path))
    for ranks, strategy in ((ranks2, 3), (ranks2, 1), (ranks1, 0), (ranks3, 2)):
        assert all(ranks.run(load, str(tmp_path), strategy)), strategy


def calls_of_planning(count: int) -> int:
    """Function calls that it takes to plan saving and loading so many tensors."""
    from torch.distributed.device_mesh import init_device_mesh

    from megatron_fsdp.uneven_dtensor import attach_chunk_metadata

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    state = {}
    for number in range(count):
        state[f"layers.{number}.weight"] = DTensor.from_local(torch.ones(2), mesh, [Shard(0)], run_check=False)
        attach_chunk_metadata(state[f"layers.{number}.weight"], (0,), (2,))
    profile = cProfile.Profile()
    with profile:
        save_planner, load_planner = DefaultSavePlanner(), DefaultLoadPlanner()
        save_planner.set_up_planner(state, is_coordinator=True)
        _, metadata = save_planner.create_global_plan([save_planner.create_local_plan()])
        load_planner.set_up_planner(state, metadata, is_coordinator=True)
        load_planner.create_local_plan()
    return sum(entry.callcount for entry in profile.getstats())


def test_planning_grows_with_the_number_of_tensors_and_no_faster(ranks1):
    (few,), (many,) = ranks1.run(calls_of_planning, 100), ranks1.run(calls_of_planning, 800)
    assert 4 * few < many < 9 * few
