"""Checkpoints of unevenly sharded DTensors load at other numbers of ranks and on other grids."""

import itertools
import random

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import DeviceMesh

from megatron_fsdp import uneven_dtensor as uneven
from tests.unit_tests.harness.uneven import (
    DTYPES,
    mesh_of,
    random_cuts,
    rows,
    same,
    sharded,
    values,
)


def counts_for(world: int, seed: int) -> list[int]:
    """Rows per rank of 11, seldom those that torch would guess."""
    generator = random.Random(f"{world} {seed}")
    points = sorted(generator.choice([0, 0, 3, 4, 10, 11]) for _ in range(world - 1))
    return [high - low for low, high in itertools.pairwise([0, *points, 11])]


def row_state(is_blank: bool) -> dict:
    """Uneven tensors on all ranks; half of the chunks are attached from known offsets, half are exchanged."""
    world, model = dist.get_world_size(), {}
    for index in range(6):
        full = values((11, 3), DTYPES[index % 2], seed=index)
        full = torch.full_like(full, -1) if is_blank else full
        model[f"w{index}"] = rows(full, counts_for(world, index), attach=index % 2 == 0)
    uneven.preprocess_state_dict_for_uneven_dtensor({name: model[name] for name in ("w1", "w3", "w5")})
    model["no_elements"] = rows(torch.empty(0, 3), [0] * world, attach=True)
    return {"model": model, "step": 0 if is_blank else 7}


def save_rows_job(path: str) -> None:
    dcp.save(row_state(is_blank=False), checkpoint_id=path)


def load_rows_job(path: str) -> None:
    state = row_state(is_blank=True)
    dcp.load(state, checkpoint_id=path)
    assert state["step"] == 7
    for index in range(6):
        full = values((11, 3), DTYPES[index % 2], seed=index)
        assert same(uneven.uneven_dtensor_to_full_tensor(state["model"][f"w{index}"]), full), index


@pytest.mark.parametrize(("saved_at", "loaded_at"), [(3, 2), (2, 3), (4, 1), (1, 3)])
def test_checkpoint_moves_between_world_sizes(rank_pools, tmp_path, saved_at: int, loaded_at: int) -> None:
    rank_pools[saved_at].run(save_rows_job, str(tmp_path))
    rank_pools[loaded_at].run(load_rows_job, str(tmp_path))


def grid_state(mesh: DeviceMesh, seed: int, is_blank: bool) -> dict:
    state = {}
    for index, shape in enumerate([(9, 4), (7,), (3, 5, 2), (1, 8)]):
        full = values(shape, seed=index)
        generator = random.Random(seed + index)
        cuts = random_cuts(generator, len(shape), mesh)
        state[f"w{index}"] = sharded(torch.full_like(full, -1) if is_blank else full, mesh, cuts, seed + index)[0]
    return uneven.preprocess_state_dict_for_uneven_dtensor(state)


def save_grid_job(path: str, mesh_shape: tuple[int, ...], seed: int) -> None:
    dcp.save(grid_state(mesh_of(*mesh_shape), seed, is_blank=False), checkpoint_id=path)


def load_grid_job(path: str, mesh_shape: tuple[int, ...], seed: int) -> None:
    state = grid_state(mesh_of(*mesh_shape), seed, is_blank=True)
    dcp.load(state, checkpoint_id=path)
    for index, shape in enumerate([(9, 4), (7,), (3, 5, 2), (1, 8)]):
        dtensor = state[f"w{index}"]
        uneven.validate_uneven_dtensor(dtensor)
        assert same(uneven.uneven_dtensor_to_full_tensor(dtensor), values(shape, seed=index)), index


@pytest.mark.parametrize("seed", range(3))
def test_checkpoint_moves_between_grids(ranks4, ranks3, tmp_path, seed: int) -> None:
    """Dims cut on two axes in either order, two dims cut, replicas, in between."""
    ranks4.run(save_grid_job, str(tmp_path), (2, 2), seed)
    ranks3.run(load_grid_job, str(tmp_path), (3,), seed)
    ranks4.run(load_grid_job, str(tmp_path), (2, 2), seed + 10)
