"""When units gather and reduce: odd control flow, rank-dependent control flow, exceptions, memory and leaks."""

import pytest

from tests.unit_tests.harness.models import MLPBlock
from tests.unit_tests.harness.odd_models import BUILDERS, SandwichBlock
from tests.unit_tests.harness.parity import TASKS, Case, check
from tests.unit_tests.harness.rank_pool import RankPool
from tests.unit_tests.harness.sharded import Sharding

#: Ranks run different units, or different numbers of them.
RANK_DEPENDENT = ["skipping", "skipping_reentrant", "skipping_non_reentrant", "choosy", "handing_through"]


@pytest.mark.parametrize("task", [t for t in BUILDERS if t not in RANK_DEPENDENT and "reentrant" not in t])
def test_unusual_control_flow_trains_like_one_process(ranks2: RankPool, task: str) -> None:
    units = (TASKS[task].unit, MLPBlock) if TASKS[task].unit is SandwichBlock else (TASKS[task].unit,)
    check(
        ranks2,
        [
            Case(task=task, microbatches=2, sharding=Sharding(strategy=strategy, units=units, is_poisoned=is_poisoned))
            for strategy, is_poisoned in ((0, True), (1, False), (2, True), (3, True), (3, False))
        ],
    )


@pytest.mark.parametrize("task", RANK_DEPENDENT)
@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_that_run_different_units_keep_one_order_of_collectives(
    rank_pools: dict[int, RankPool], task: str, ranks: int
) -> None:
    strategies = (0, 1, 2, 3) if ranks == 2 else (3,)
    units = (TASKS[task].unit,)
    check(
        rank_pools[ranks],
        [Case(task=task, microbatches=2, sharding=Sharding(strategy=s, units=units)) for s in strategies],
    )
