"""Meshes of every shape: flattened, with axes of one rank, over a part of the world, and several at once."""

import functools
import gc
import weakref

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from megatron_fsdp import fully_shard_optimizer
from tests.unit_tests.harness.communication import collectives_by_group
from tests.unit_tests.harness.mixture import Mixture, MixtureBlock, Topology
from tests.unit_tests.harness.models import MLPBlock, SignSGD, dot_loss, integer_batches
from tests.unit_tests.harness.parity import TASKS, Case, compare, run_cases
from tests.unit_tests.harness.rank_pool import RankPool
from tests.unit_tests.harness.sharded import RankStep, Sharding, build_sharded, shard, train_step

HYBRIDS = [(0, 0), (1, 0), (2, 0), (3, 0), (3, "optim")]


@functools.cache
def mesh_of(*shape: int) -> DeviceMesh:
    """(outer, dp, cp), the last two also as one, and all three. **Collective.**"""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("outer", "dp", "cp"))
    mesh[("dp", "cp")]._flatten("dp_shard_cp")
    mesh[("outer", "dp", "cp")]._flatten("all")
    return mesh


def on_mesh(case: Case, shape: tuple[int, int, int], outer: int | str | None) -> list[RankStep]:
    """Steps on a mesh of this shape, its context-parallel ranks flattened into the shard axis."""
    mesh = mesh_of(*shape)
    options = {"device_mesh": mesh, "dp_shard_dim": "dp_shard_cp"}
    if outer is not None:
        group = mesh["all"].get_group()
        options |= {"dp_outer_dim": "outer", "hybrid_fsdp_group": group, "outer_dp_sharding_strategy": outer}
    sharding = Sharding(strategy=case.sharding.strategy, units=(MLPBlock,), options=options)
    (steps,) = run_cases([_with(case, sharding)], dist.get_world_size())
    return steps


def _with(case: Case, sharding: Sharding) -> Case:
    return Case(task=case.task, microbatches=case.microbatches, sharding=sharding)


def on_meshes(cases: list[tuple]) -> list:
    return [on_mesh(*each) for each in cases]


def check(pool: RankPool, cases: list[tuple]) -> None:
    for (case, *_), *by_rank in zip(cases, *pool.run(on_meshes, cases), strict=True):
        compare(case, by_rank)


def integers(strategy: int) -> Case:
    return Case(task="integers", microbatches=3, sharding=Sharding(strategy=strategy))


def test_context_parallel_ranks_are_data_parallel_ranks(ranks4: RankPool) -> None:
    flat = [(integers(strategy), (1, 2, 2), None) for strategy in range(4)]
    hybrid = [(integers(inner), (2, 1, 2), outer) for inner, outer in HYBRIDS[2:]]
    check(ranks4, [*flat, *hybrid])


def test_two_by_four_ranks_and_eight_in_a_row_train_alike() -> None:
    pool = RankPool(8)
    try:
        row = [(integers(3), (1, 8, 1), None)]
        hybrid = [(integers(inner), (2, 4, 1), outer) for inner, outer in ((2, 0), (3, 0), (3, "optim"))]
        check(pool, [*row, *hybrid])
    finally:
        pool.close()


@pytest.mark.parametrize(("ranks", "shape"), [(1, (1, 1, 1)), (2, (1, 2, 1)), (2, (2, 1, 1)), (4, (4, 1, 1))])
def test_axes_of_one_rank(rank_pools: dict[int, RankPool], ranks: int, shape: tuple[int, int, int]) -> None:
    check(rank_pools[ranks], [(integers(inner), shape, outer) for inner, outer in HYBRIDS])


@functools.cache
def half(number: int) -> DeviceMesh:
    """Ranks {0, 1} or {2, 3} of four. **Collective** over the world."""
    return DeviceMesh("cpu", [2 * number, 2 * number + 1], mesh_dim_names=("dp",))


def on_halves(both_train: bool) -> list[RankStep]:
    """Each half of the world trains a model of its own, or one half does nothing at all."""
    halves = [half(0), half(1)]
    if not both_train and dist.get_rank() >= 2:
        return []
    number = dist.get_rank() // 2
    case = integers(3 if number == 0 else 1)
    sharding = Sharding(strategy=case.sharding.strategy, units=(MLPBlock,), options={"device_mesh": halves[number]})
    model, optimizer = build_sharded(TASKS["integers"].build, case.recipe, sharding)
    # Batches are looked up by the world's rank numbers.
    steps = [[ranks * 2 for ranks in microbatches] for microbatches in case.batches(2)]
    return [train_step(model, optimizer, case.recipe, microbatches) for microbatches in steps]


@pytest.mark.parametrize("both_train", [False, True])
def test_a_mesh_over_a_part_of_the_world(ranks4: RankPool, both_train: bool) -> None:
    by_rank = ranks4.run(on_halves, both_train)
    compare(integers(3), by_rank[:2])
    if both_train:
        compare(integers(1), by_rank[2:])
    else:
        assert by_rank[2:] == [[], []]


def build_outside() -> None:
    mesh = half(0)
    shard(TASKS["integers"].build(), Sharding(options={"device_mesh": mesh if dist.get_rank() >= 2 else half(1)}))


def test_ranks_outside_the_mesh_are_told(ranks4: RankPool) -> None:
    ranks4.run(half, 1)
    ranks4.run_expecting(ValueError, r"rank \d is not in device_mesh, which has ranks \[\d, \d\]", build_outside)


def side_by_side(steps: int) -> list[list[RankStep]]:
    """A flat and a hybrid model, and one on this rank's half, step in turn; the flat one is deleted after its first."""
    meshes = [
        {"device_mesh": mesh_of(1, 4, 1)["dp"]},
        {
            "device_mesh": mesh_of(2, 2, 1),
            "dp_outer_dim": "outer",
            "hybrid_fsdp_group": mesh_of(2, 2, 1)["all"].get_group(),
            "outer_dp_sharding_strategy": "optim",
        },
        {"device_mesh": (half(0), half(1))[dist.get_rank() // 2]},
    ]
    case = integers(3)
    shardings = [Sharding(strategy=3, units=(MLPBlock,), options=options) for options in meshes]
    built = [build_sharded(TASKS["integers"].build, case.recipe, sharding) for sharding in shardings]
    found: list[list[RankStep]] = [[], [], []]
    for number in range(steps):
        for which, each in enumerate(built):
            if each is not None:
                batches = case.batches(4) if which < 2 else [[r * 2 for r in m] for m in case.batches(2)]
                found[which].append(train_step(*each, case.recipe, batches[number]))
        if number == 0:
            gone = weakref.ref(built[0][0])
            del each
            built[0] = None
            gc.collect()
            assert gone() is None
    return found


def test_models_on_different_meshes_step_in_turn_and_one_goes(ranks4: RankPool) -> None:
    by_rank = ranks4.run(side_by_side, 2)
    case = integers(3)
    flat, hybrid, on_half = ([found[which] for found in by_rank] for which in range(3))
    compare(Case(task="integers", microbatches=3, steps=1, sharding=case.sharding), flat)
    for steps in (hybrid, on_half[:2], on_half[2:]):
        compare(case, steps)


@functools.cache
def twin(*ranks: tuple[int, ...]) -> dist.ProcessGroup:
    """A second communicator over this rank's row. **Collective.**"""
    return dist.new_subgroups_by_enumeration([list(row) for row in ranks])[0]


def communicators(outer: int | str | None) -> dict[str, set[str]]:
    """Traffic of each communicator in a step of a mixture of experts, with gathers on groups of their own."""
    is_hybrid = outer is not None
    topology = Topology(ep=2, outer=2 if is_hybrid else 1, spans_outer=is_hybrid)
    rows = ((0, 1), (2, 3)) if is_hybrid else ((0, 1, 2, 3),)
    options = {**topology.options(), "fsdp_group_ag": twin(*rows)}
    # Of experts, two outer ranks leave one inner rank, which has nothing to gather.
    options |= {"outer_dp_sharding_strategy": outer} if is_hybrid else {"expt_fsdp_group_ag": twin((0, 2), (1, 3))}
    place = topology.place()
    model = shard(Mixture(place), Sharding(strategy=3, units=(MixtureBlock,), options=options))
    optimizer = fully_shard_optimizer(SignSGD(model.parameters()))
    inputs, target = integer_batches(1, 1, dist.get_world_size(), width=4)[0][0][dist.get_rank()]
    for _ in range(2):  # in the first step ranks also agree on the order of units
        with collectives_by_group() as heard:
            dot_loss(model(inputs), target).backward()
            optimizer.step()
    index = model.get_distributed_index()
    groups = {
        "gathers": index.fsdp_group_ag,
        "expert gathers": index.expt_fsdp_group_ag,
        "reductions": index.fsdp_group,
        "expert reductions": index.expt_fsdp_group,
        "outer": index.outer_fsdp_group,
        "expert outer": index.expt_outer_fsdp_group,
        "tokens": place.group,
    }
    return {name: set(heard.pop(g.group_name, ())) for name, g in groups.items() if g is not None} | {
        "more": set(heard)
    }


GATHER, REDUCE = {"allgather_base"}, {"reduce_scatter_base"}
OURS = {"gathers": GATHER, "reductions": REDUCE, "tokens": {"allreduce", "allgather"}, "more": set()}
COMMUNICATORS = [
    (None, {"expert gathers": GATHER, "expert reductions": REDUCE}),
    (0, {"expert reductions": set(), "outer": {"allreduce"}, "expert outer": {"allreduce"}}),
    ("optim", {"expert reductions": set(), "outer": GATHER | REDUCE, "expert outer": GATHER | REDUCE}),
]


@pytest.mark.parametrize(("outer", "of_mesh"), COMMUNICATORS)
def test_gathers_and_reductions_have_their_own_communicators(
    ranks4: RankPool, outer: int | str | None, of_mesh: dict[str, set[str]]
) -> None:
    assert ranks4.run(communicators, outer) == [OURS | of_mesh] * 4
