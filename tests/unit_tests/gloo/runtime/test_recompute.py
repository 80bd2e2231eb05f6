"""Activation recomputation of both kinds: around one unit, around several, around a unit that runs twice."""

import itertools

import pytest

from tests.unit_tests.harness.models import MLPBlock
from tests.unit_tests.harness.parity import TASKS, Case, check
from tests.unit_tests.harness.rank_pool import RankPool
from tests.unit_tests.harness.sharded import Sharding
from tests.unit_tests.harness.strategies import STRATEGIES

#: Recomputation around one unit, two units, all units, a unit that runs twice, a unit with units inside.
TASKS_THAT_RECOMPUTE = [
    "integers_reentrant",
    "integers_non_reentrant",
    "span_reentrant",
    "span_non_reentrant",
    "whole_reentrant",
    "whole_non_reentrant",
    "twice_reentrant",
    "twice_non_reentrant",
    "sandwich_reentrant",
    "sandwich_non_reentrant",
]


def unit_lists(task: str) -> list[tuple | None]:
    """Nothing, the task's own units, and units inside units."""
    unit = TASKS[task].unit
    return [None, (unit,), (unit, MLPBlock), (unit, MLPBlock, "torch.nn.Linear")]


@pytest.mark.parametrize("task", TASKS_THAT_RECOMPUTE)
def test_recomputation_changes_nothing(ranks2: RankPool, task: str) -> None:
    check(
        ranks2,
        [
            Case(
                task=task,
                microbatches=1 + strategy % 2,
                sharding=Sharding(strategy=strategy, units=units, is_poisoned=(strategy + number) % 2 == 0),
            )
            for strategy, (number, units) in itertools.product(STRATEGIES, enumerate(unit_lists(task)))
            if strategy == 3 or number == strategy
        ],
    )


@pytest.mark.parametrize(("ranks", "outer"), [(1, None), (3, None), (4, 0), (4, 1)])
def test_recomputation_on_other_worlds(rank_pools: dict[int, RankPool], ranks: int, outer: int | None) -> None:
    tasks = TASKS_THAT_RECOMPUTE[:: 1 if ranks == 1 else 3]
    check(
        rank_pools[ranks],
        [
            Case(task=task, is_mean=ranks != 3, sharding=Sharding(units=(TASKS[task].unit,), outer=outer))
            for task in tasks
        ],
    )
