"""Units that stay gathered through a step: the same training with fewer gathers, within a budget."""

import dataclasses
from unittest import mock

import pytest
import torch.distributed as dist

from megatron_fsdp.runtime import programs
from megatron_fsdp.state.param_group import ParamGroup
from tests.unit_tests.harness.parity import TASKS, Case, check, joint_step
from tests.unit_tests.harness.rank_pool import RankPool
from tests.unit_tests.harness.sharded import Sharding, build_sharded, train_step

EVERYTHING = 1 << 30
#: Ranks run different units.
RANK_DEPENDENT = ("lending_skipped", "skipping_reentrant", "choosy")


def case(task: str, budget: int, microbatches: int = 2, **sharding: object) -> Case:
    options = {"residency_bytes": budget}
    return Case(
        task=task, microbatches=microbatches, sharding=Sharding(units=(TASKS[task].unit,), options=options, **sharding)
    )


@pytest.mark.parametrize("budget", [EVERYTHING, 400])
def test_resident_units_train_like_one_process(ranks2: RankPool, budget: int) -> None:
    tasks = ("integers", "twice", "lending", "tied", "whole_reentrant", *RANK_DEPENDENT)
    check(ranks2, [dataclasses.replace(case(task, budget), steps=2) for task in tasks])


def test_residency_goes_with_every_strategy(ranks4: RankPool) -> None:
    check(ranks4, [case("integers", EVERYTHING, strategy=strategy) for strategy in (0, 1, 2)])
    check(ranks4, [case("integers", EVERYTHING, outer=outer) for outer in (0, 1)])


def job_gathers(budget: int, steps: int, is_auto: bool = False) -> tuple[list[list[str]], list[int], int]:
    """Units gathered in each step of three micro-batches, bytes gathered after it, and bytes of the largest unit."""
    wanted = case("integers", budget, microbatches=3)
    model, optimizer = build_sharded(TASKS["integers"].build, wanted.recipe, wanted.sharding)
    model.set_model_auto_sync(is_auto)
    real, seen, left = ParamGroup.unshard, [], []
    units = model._schedule.units
    for microbatches in wanted.batches(dist.get_world_size())[:steps]:
        with mock.patch.object(ParamGroup, "unshard", autospec=True, side_effect=real) as spy:
            if is_auto:
                joint_step(model, optimizer, wanted, microbatches, 1)
            else:
                train_step(model, optimizer, wanted.recipe, microbatches)
        seen.append([call.args[0].spec.name.partition(":")[0] for call in spy.call_args_list])
        left.append(sum(unit.gathered_nbytes for unit in units if unit.is_gathered))
    return seen, left, max(unit.gathered_nbytes for unit in units if not unit.is_root)


def test_what_the_budget_holds_is_gathered_once_in_a_step_and_gone_after_it(ranks2: RankPool) -> None:
    (_, _, largest), _ = ranks2.run(job_gathers, 0, 1)
    for budget, stays in ((0, ()), (largest, ("blocks.2",)), (EVERYTHING, ("blocks.0", "blocks.1", "blocks.2"))):
        for steps, left, _ in ranks2.run(job_gathers, budget, 2):
            assert left == [0, 0]
            counts = {name: steps[1].count(name) for name in ("blocks.0", "blocks.1", "blocks.2")}
            # Three times forward and backward; the last unit goes from one to the other as it is.
            assert counts == {
                name: 1 if name in stays else 3 if name == "blocks.2" else 6
                for name in ("blocks.0", "blocks.1", "blocks.2")
            }, (budget, counts)


def test_resident_units_stay_through_micro_batches_that_are_synchronized_each(ranks2: RankPool) -> None:
    for steps, left, _ in ranks2.run(job_gathers, EVERYTHING, 2, True):
        assert left == [0, 0] and [steps[1].count(f"blocks.{number}") for number in range(3)] == [1, 1, 1]


def job_refused(options: dict[str, object]) -> None:
    wanted = case("integers", 0)
    build_sharded(TASKS["integers"].build, wanted.recipe, dataclasses.replace(wanted.sharding, options=options))


def test_a_budget_that_cannot_be_is_refused(ranks2: RankPool) -> None:
    for value in (-1, 0.5, "all", True):
        ranks2.run_expecting(
            ValueError, "expected bytes, an int of 0 or more, or 'auto'", job_refused, {"residency_bytes": value}
        )
    both = {"residency_bytes": 1, "fsdp_double_buffer": True}
    ranks2.run_expecting(ValueError, "in a double buffer they take turns", job_refused, both)
    ranks2.run(job_refused, {"residency_bytes": "auto"})


def job_warned(*cases: tuple[int, int]) -> list[list[str]]:
    """Warnings with each budget under its strategy."""
    with mock.patch.object(programs.logger, "warning") as warning:
        told = []
        for budget, strategy in cases:
            wanted = case("integers", budget, strategy=strategy)
            build_sharded(TASKS["integers"].build, wanted.recipe, wanted.sharding)
            told.append([call.args[0] % call.args[1:] for call in warning.call_args_list])
            warning.reset_mock()
        return told


def test_a_budget_without_effect_is_told_by_the_first_rank(ranks2: RankPool) -> None:
    (small, whole, fine), others = ranks2.run(job_warned, (3, 3), (3, 1), (EVERYTHING, 3))
    assert len(small) == len(whole) == 1 and fine == [] and others == [[]] * 3
    assert "residency_bytes=3 keeps nothing gathered: the smallest unit has" in small[0]
    assert "residency_bytes=3 has no effect: no unit's weights come and go. Use it with zero_dp_strategy=" in whole[0]


def job_differing() -> list[bool]:
    """Residence of units where ranks have different budgets, all of them large, and one of them small."""
    wanted = case("integers", EVERYTHING if dist.get_rank() else 10**40, strategy=3)
    small = case("integers", 3 if dist.get_rank() else EVERYTHING, strategy=3)
    kept = []
    for each in (wanted, small):
        model, _ = build_sharded(TASKS["integers"].build, each.recipe, each.sharding)
        kept.append(bool(model.schedule.resident))
    return kept


def test_the_least_budget_of_all_ranks_counts(ranks2: RankPool) -> None:
    """If ranks took half of the memory free on each, those that kept less would wait for the others for ever."""
    assert ranks2.run(job_differing) == [[True, False]] * 2


def job_auto(free_nbytes: int) -> list[list[str]]:
    """Units that stay after each of three steps, with a budget found once; the first rank has less memory."""
    wanted = case("integers", 0)
    model, optimizer = build_sharded(TASKS["integers"].build, wanted.recipe, wanted.sharding)
    model.schedule._decides_residency = True  # as on CUDA with "auto"
    kept = []
    for number, microbatches in enumerate(wanted.batches(dist.get_world_size()) * 2):
        free = mock.Mock(return_value=free_nbytes * (1 + dist.get_rank()) * (1 + number))
        with mock.patch.object(type(model.schedule.device), "free_nbytes", free):
            train_step(model, optimizer, wanted.recipe, microbatches)
        kept.append([unit.label for unit in model.schedule.resident])
    return kept


def test_what_the_first_step_leaves_free_is_agreed_on_and_decided_once(ranks2: RankPool) -> None:
    (_, _, largest), _ = ranks2.run(job_gathers, 0, 1)
    for kept in ranks2.run(job_auto, int(2.5 * largest)):
        assert kept == [["blocks.1", "blocks.2"]] * len(kept)
