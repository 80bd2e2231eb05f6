"""Every strategy trains every kind of model as one process does, at every world size and with every unit list."""

import functools
import itertools

import pytest
import torch

from tests.unit_tests.harness.models import MLPBlock, TinyMLP
from tests.unit_tests.harness.parity import TASKS, Case, check, compare, reference
from tests.unit_tests.harness.rank_pool import RankPool
from tests.unit_tests.harness.reference import DtypePolicy
from tests.unit_tests.harness.sharded import (
    Sharding,
    backward,
    build_sharded,
    finish_step,
    full_grads,
    full_weights,
    shard,
    train_step,
)
from tests.unit_tests.harness.strategies import STRATEGIES

#: None, the blocks, the blocks and what is inside them, the root itself, plain layers by path.
UNIT_LISTS = (None, (MLPBlock,), (MLPBlock, "torch.nn.Linear"), (TinyMLP,), ("torch.nn.Linear",))
MODELS = [
    "frozen_first",
    "frozen_middle",
    "frozen_weights",
    "frozen_but_head",
    "frozen_but_first",
    "transformer",
    "tied",
    "unused",
    "frozen_embedding",
    "reentrant",
    "non_reentrant",
    "odd",
]
#: On two axes every strategy inside an outer axis that replicates, and strategy 3 inside one that shards.
HYBRIDS = [(0, 0), (1, 0), (2, 0), (3, 0), (3, "optim")]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_integers_are_exact_under_every_strategy_and_unit_list(rank_pools: dict[int, RankPool], ranks: int) -> None:
    cases = [
        Case(
            task="integers",
            microbatches=microbatches,
            is_mean=ranks != 3,  # a third is no binary number
            sharding=Sharding(strategy=strategy, units=units, is_poisoned=(strategy + number + microbatches) % 2 == 0),
        )
        for strategy, (number, units), microbatches in itertools.product(STRATEGIES, enumerate(UNIT_LISTS), (1, 3))
        # On two ranks every strategy with every list of units, once: accumulation is the equivalence matrix's matter.
        if (number + strategy) % 4 in ((microbatches, microbatches - 1) if ranks == 2 else (microbatches,))
    ]
    check(rank_pools[ranks], cases)


def _strategies(number: int, ranks: int) -> tuple[int, ...]:
    """Of a model: two on two ranks, the next model the other two; one on every other number of ranks."""
    return (number % 2, number % 2 + 2) if ranks == 2 else ((number + ranks) % 4,)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_models_of_every_kind_follow_one_process(rank_pools: dict[int, RankPool], ranks: int) -> None:
    cases = []
    for (number, task), strategy in itertools.product(enumerate(MODELS), STRATEGIES):
        if strategy in _strategies(number, ranks):
            units = (None, (TASKS[task].unit,), (TASKS[task].unit, torch.nn.Linear))[(number + strategy) % 3]
            sharding = Sharding(strategy=strategy, units=units, is_poisoned=(number // 2 + strategy // 2) % 2 == 0)
            is_mean = ranks != 3 or not TASKS[task].is_exact  # a third is no binary number
            cases.append(Case(task=task, microbatches=1 + 2 * (number % 2), is_mean=is_mean, sharding=sharding))
    check(rank_pools[ranks], cases)


@pytest.mark.parametrize("task", ["tied", "frozen_weights"])
def test_two_axes_follow_one_process(ranks4: RankPool, task: str) -> None:
    cases = [
        Case(
            task=task,
            microbatches=2,
            sharding=Sharding(strategy=inner, outer=outer, units=(TASKS[task].unit,), is_poisoned=inner % 2 == 0),
        )
        for inner, outer in HYBRIDS
    ]
    check(ranks4, cases)


def test_two_axes_of_which_the_inner_one_is_a_single_rank(ranks2: RankPool) -> None:
    check(
        ranks2,
        [
            Case(task="integers", microbatches=2, sharding=Sharding(strategy=inner, outer=outer, units=(MLPBlock,)))
            for inner, outer in HYBRIDS
        ],
    )


OPTIONS = [
    ({"average_in_collective": True}, DtypePolicy(main_grads=None)),
    ({"overlap_grad_reduce": False, "overlap_param_gather": False}, DtypePolicy(main_grads=None)),
    ({"overlap_grad_reduce": False}, DtypePolicy(grad_comm=torch.float64)),
    ({"overlap_param_gather": False, "average_in_collective": True}, DtypePolicy(main_grads=torch.float64)),
]


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_options_change_when_things_happen_not_what_comes_out(rank_pools: dict[int, RankPool], ranks: int) -> None:
    where = [(strategy, None) for strategy in STRATEGIES] if ranks < 4 else [(0, 0), (1, 0), (3, "optim")]
    cases = [
        Case(
            task="integers",
            microbatches=2,
            is_mean=is_mean,
            dtypes=dtypes,
            sharding=Sharding(strategy=strategy, outer=outer, units=(MLPBlock,), options=options),
        )
        for number, (options, dtypes) in enumerate(OPTIONS)
        for strategy, outer in where
        for is_mean in ((True, False) if ranks == 2 else ((number + strategy) % 2 == 0,))
    ]
    check(rank_pools[ranks], cases)


def job_full_tensors(case: Case, ranks: int) -> tuple:
    """Full gradients and weights by DTensor's own method; clipping by the true norm is checked inside."""
    model, optimizer = build_sharded(TASKS[case.task].build, case.recipe, case.sharding)
    step, *_ = case.batches(ranks)
    for microbatch in step:
        backward(model, case.recipe, microbatch[torch.distributed.get_rank()])
    model.finish_grad_sync()
    grads = full_grads(model)
    finish_step(model, optimizer, case.recipe, [])
    return grads, full_weights(model)


@pytest.mark.parametrize(("ranks", "inner", "outer"), [(2, 0, None), (2, 1, None), (3, 3, None), (4, 2, 0), (4, 3, 1)])
def test_full_tensor_and_the_clipped_norm_are_true_on_every_rank(
    rank_pools: dict[int, RankPool], ranks: int, inner: int, outer: int | None
) -> None:
    sharding = Sharding(strategy=inner, outer=outer, units=(TASKS["odd"].unit,))
    case = Case(task="odd", steps=1, sharding=sharding, max_norm=0.1)
    expected = reference(case, ranks)[0]
    for grads, weights in rank_pools[ranks].run(job_full_tensors, case, ranks):
        torch.testing.assert_close(grads, expected.grads, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(weights, expected.weights, rtol=1e-5, atol=1e-6)


def job_two_models(case: Case, ranks: int) -> list:
    """Steps of two models in turn; both are alive all the time."""
    built = [build_sharded(TASKS[case.task].build, case.recipe, case.sharding) for _ in range(2)]
    steps: list[list] = [[], []]
    for microbatches in case.batches(ranks):
        for mine, (model, optimizer) in zip(steps, built, strict=True):
            mine.append(train_step(model, optimizer, case.recipe, microbatches))
    return steps


@pytest.mark.parametrize("strategy", [1, 3])
def test_two_models_live_side_by_side(ranks2: RankPool, strategy: int) -> None:
    case = Case(task="integers", microbatches=2, sharding=Sharding(strategy=strategy, units=(MLPBlock,)))
    first, second = ranks2.run(job_two_models, case, 2)
    for number in range(2):
        compare(case, [first[number], second[number]])


class WithExpert(torch.nn.Module):
    """A dense layer and one that every expert-parallel rank has to itself."""

    def __init__(self) -> None:
        super().__init__()
        self.dense, self.expert = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
        for param in self.expert.parameters():
            param.allreduce = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shape (batch, 4), kept."""
        return self.dense(x) + self.expert(x)


def job_experts(strategy: int, ranks_per_expert: int, options: dict) -> dict[str, torch.Tensor]:
    """Sums of two backwards whose gradients are this rank's number plus one, reduced in each of them."""
    world = torch.distributed.get_world_size()
    names = ("expert", "dp")
    mesh = expert_mesh(world // ranks_per_expert, ranks_per_expert, names)
    model = shard(WithExpert(), Sharding(strategy=strategy, options={"expt_device_mesh": mesh, **options}))
    with model.sync():
        for _ in range(2):
            model(torch.full((1, 4), torch.distributed.get_rank() + 1.0)).sum().backward()
    return full_grads(model)


@functools.cache
def expert_mesh(*shape_and_names):
    return torch.distributed.device_mesh.init_device_mesh("cpu", shape_and_names[:2], mesh_dim_names=shape_and_names[2])


@pytest.mark.parametrize("options", [{}, {"average_in_collective": True}, {"calculate_per_token_loss": True}], ids=str)
@pytest.mark.parametrize(("ranks", "ranks_per_expert"), [(2, 1), (2, 2), (4, 2)])
def test_experts_are_averaged_over_the_dense_ranks(
    rank_pools: dict[int, RankPool], ranks: int, ranks_per_expert: int, options: dict
) -> None:
    for strategy in STRATEGIES if ranks == 2 else (1, 3):
        results = rank_pools[ranks].run(job_experts, strategy, ranks_per_expert, options)
        divisor = 1 if "calculate_per_token_loss" in options else ranks
        for rank, grads in enumerate(results):
            first = rank - rank % ranks_per_expert
            own = sum(peer + 1 for peer in range(first, first + ranks_per_expert))
            everyone = sum(peer + 1 for peer in range(ranks))
            for name, total in (("expert", own), ("dense", everyone)):
                expected = torch.full((4, 4), 2 * total / divisor)
                assert torch.equal(grads[f"{name}.weight"], expected), (strategy, rank, name, grads, expected)
