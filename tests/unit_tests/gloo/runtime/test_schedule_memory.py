"""Memory that the schedule keeps, and for how long; nothing outlives its model."""

import gc
import time
import weakref
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.unit_tests.harness.counting_pool import CountingPool, counted_pool
from tests.unit_tests.harness.models import MLPBlock
from tests.unit_tests.harness.parity import TASKS, Case, joint_step
from tests.unit_tests.harness.rank_pool import RankPool
from tests.unit_tests.harness.sharded import Sharding, build_sharded, train_step


def job_peak(task: str, leftover_numel: int, forwards: int = 1) -> list:
    """Most units gathered and most gradient buffers alive in two steps, and what stays alive after each."""
    from megatron_fsdp.build import find_units

    case = Case(task=task, microbatches=2, sharding=Sharding(units=(TASKS[task].unit,), is_poisoned=False))
    with counted_pool(), mock.patch.object(find_units, "LARGE_LEFTOVER_NUMEL", leftover_numel):
        model, optimizer = build_sharded(TASKS[task].build, case.recipe, case.sharding)
    pool, rest = CountingPool.latest, []
    for microbatches in case.batches(dist.get_world_size()):
        pool.most_gathered = pool.most_scratches = 0
        joint_step(model, optimizer, case, microbatches, forwards)
        rest.append((sorted(pool.gathered), len(pool.scratches)))
    units = [unit.label for unit in model._schedule.units]
    return [pool.most_gathered, pool.most_scratches, rest, units]


PEAK_TASKS = [
    "integers",
    "integers_reentrant",
    "integers_non_reentrant",
    "span_reentrant",
    "span_non_reentrant",
    "frozen_first",
    "alternating",
]


def job_peaks() -> dict[tuple[str, int], list]:
    """The peaks of every task, with a backward for each forward and for two."""
    return {(task, forwards): job_peak(task, 1 << 22, forwards) for task in PEAK_TASKS for forwards in (1, 2)}


def test_two_units_and_two_gradient_buffers_are_alive_at_most(ranks2: RankPool) -> None:
    for by_case in ranks2.run(job_peaks):
        for (task, forwards), (most_gathered, most_scratches, rest, _) in by_case.items():
            # Where the backward of a second forward begins, the last unit of the first one is still there.
            assert most_gathered <= (2 if forwards == 1 else 3), (task, forwards)
            assert most_scratches <= 2, (task, forwards)
            assert rest == [([], 0)] * 2, (task, forwards)


def test_a_large_embedding_and_head_are_units_of_their_own(ranks2: RankPool) -> None:
    most_gathered, _, rest, units = ranks2.run(job_peak, "transformer", 100)[0]
    assert units == ["(root)", "embedding", "blocks.0", "blocks.1", "head"]
    assert most_gathered == 2
    assert rest == [([], 0)] * 2
    *_, units = ranks2.run(job_peak, "tied", 100)[0]
    assert units == ["(root)", "blocks.0", "blocks.1"], "a tied weight is read outside one of its owners"


def job_storages(task: str, units: tuple | None) -> list[list[str]]:
    """Names of parameters whose full storage exists: at first, in the head, after evaluation, forward and backward."""
    case = Case(task=task, sharding=Sharding(units=units, is_poisoned=False))
    model, _ = build_sharded(TASKS[task].build, case.recipe, case.sharding)
    managed = model.param_and_grad_buffer.managed_params

    def full() -> list[str]:
        return sorted(param.fqn for param in managed if param.unsharded.untyped_storage().size())

    stages = [full()]
    handle = model.module.head.register_forward_pre_hook(lambda *_: stages.append(full()))
    (ranks,), *_ = case.batches(dist.get_world_size())
    inputs, target = ranks[dist.get_rank()]
    with torch.no_grad():
        model(inputs)
    handle.remove()
    stages.append(full())
    loss = case.recipe.loss_fn(model(inputs), target)
    stages.append(full())
    loss.backward()
    stages.append(full())
    return stages


@pytest.mark.parametrize("task", ["transformer", "tied", "frozen_weights"])
def test_between_steps_no_full_weight_exists(ranks2: RankPool, task: str) -> None:
    names = {name for name, _ in TASKS[task].build().named_parameters()}
    at_root = sorted(name for name in names if not name.startswith("blocks"))
    for units in (None, (TASKS[task].unit,)):
        for at_first, in_head, after_evaluation, before_backward, after in ranks2.run(job_storages, task, units):
            assert at_first == after_evaluation == after == []
            assert in_head == before_backward == (at_root if units else sorted(names))


def job_grad_memory(strategy: int, outer: int | str | None) -> list:
    """Bytes of gradient buffers after a backward, and after `zero_grad`; and what somebody who kept gradients sees."""
    case = Case(task="integers", steps=3, sharding=Sharding(strategy=strategy, outer=outer, units=(MLPBlock,)))
    model, optimizer = build_sharded(TASKS["integers"].build, case.recipe, case.sharding)
    buffers = [group.main_grad_buffer for group in model.param_and_grad_buffer.parameter_groups]
    held, kept = [], None
    for microbatches in case.batches(dist.get_world_size()):
        before = [kept.to_local().clone(), kept] if kept is not None else None
        train_step(model, optimizer, case.recipe, microbatches)
        assert before is None or torch.equal(before[0], before[1].to_local()), "a kept gradient has changed"
        held.append(sum(buffer.data.numel() for buffer in buffers) == sum(buffer.numel for buffer in buffers))
        first, *others = (param.sharded for param in model.param_and_grad_buffer.managed_params)
        kept = first.grad
        storages = [weakref.ref(buffer.data.untyped_storage()) for buffer in buffers[1:] if buffer.numel]
        views = [weakref.ref(param.grad) for param in others if param.grad.to_local().numel()]
        optimizer.zero_grad()
        for _ in range(100):  # gloo's threads let go of what they reduced a moment later
            if not any(ref() is not None for ref in storages):
                break
            time.sleep(0.01)
        held.append(sum(buffer.data.numel() for buffer in buffers) + sum(ref() is not None for ref in storages))
        held.append(all(ref() is None for ref in views))
    return held


@pytest.mark.parametrize(("strategy", "outer"), [(0, None), (1, None), (2, None), (3, None), (3, "optim")])
def test_gradients_have_memory_from_backward_to_zero_grad(
    rank_pools: dict[int, RankPool], strategy: int, outer: str | None
) -> None:
    # So have the DTensors over it; one that somebody has kept is left alone.
    pool = rank_pools[2 if outer is None else 4]
    assert pool.run(job_grad_memory, strategy, outer) == [[True, 0, True] * 3] * pool.world_size


def job_leaks(cases: list[Case]) -> list[dict[str, bool]]:
    """Parts of each model that are alive when its last reference is gone, with the garbage collector off."""
    gc.collect()
    gc.disable()
    try:
        return [_leaks(case) for case in cases]
    finally:
        gc.enable()


def _leaks(case: Case) -> dict[str, bool]:
    model, optimizer = build_sharded(TASKS[case.task].build, case.recipe, case.sharding)
    for microbatches in case.batches(dist.get_world_size()):
        train_step(model, optimizer, case.recipe, microbatches)
    model.state_dict()
    groups = model.param_and_grad_buffer.parameter_groups
    refs = {
        "model": weakref.ref(model),
        "module": weakref.ref(model.module),
        "schedule": weakref.ref(model._schedule),
        "group": weakref.ref(groups[0]),
        "weight": weakref.ref(groups[0].model_weight_buffer.data),
        "main_weight": weakref.ref(groups[0].main_weight_buffer.data),
        "gradient": weakref.ref(groups[-1].main_grad_buffer.data),
        "unsharded": weakref.ref(groups[0].params[0]),
        "sharded": weakref.ref(next(model.parameters())),
    }
    del model, optimizer, groups
    for _ in range(100):  # gloo's threads let go of what they reduced a moment later
        if not any(ref() is not None for ref in refs.values()):
            break
        time.sleep(0.01)
    return {name: ref() is not None for name, ref in refs.items()}


def test_a_deleted_model_is_freed_at_once(ranks2: RankPool) -> None:
    cases = [
        Case(task=task, microbatches=2, sharding=Sharding(strategy=strategy, units=(TASKS[task].unit,)))
        for task in ("integers", "integers_reentrant", "tied", "lending")
        for strategy in (0, 3)
    ]
    for by_case in ranks2.run(job_leaks, cases):
        for case, alive in zip(cases, by_case, strict=True):
            assert not any(alive.values()), (case, alive)


def job_growth() -> list[int]:
    """Tensors alive after each of several steps, the garbage collector off."""
    case = Case(task="integers", microbatches=2, steps=5, sharding=Sharding(units=(MLPBlock,)))
    model, optimizer = build_sharded(TASKS["integers"].build, case.recipe, case.sharding)
    batches = case.batches(dist.get_world_size())
    counts = []
    for microbatches in batches:
        train_step(model, optimizer, case.recipe, microbatches)
        if not counts:
            gc.collect()
            gc.disable()
        counts.append(sum(isinstance(thing, torch.Tensor) for thing in gc.get_objects()))
    gc.enable()
    return counts


def test_steps_leave_nothing_behind(ranks2: RankPool) -> None:
    for counts in ranks2.run(job_growth):
        assert len(set(counts[1:])) == 1, counts
