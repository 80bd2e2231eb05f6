"""Streams: what one writes and another reads is ordered by an event, and no memory is reused too early."""

import collections
import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.unit_tests.harness.parity import TASKS, Case
from tests.unit_tests.harness.races import races_watched
from tests.unit_tests.harness.rank_pool import RankPool
from tests.unit_tests.harness.reference import DtypePolicy
from tests.unit_tests.harness.sharded import Sharding, build_sharded, train_sharded

MIXED = DtypePolicy(compute=torch.bfloat16, main_grads=torch.float32, grad_comm=torch.bfloat16)
WIDE = DtypePolicy(compute=torch.bfloat16, main_grads=torch.bfloat16, grad_comm=torch.float32)
NARROW = DtypePolicy(main_grads=torch.float32, grad_comm=torch.bfloat16)
WIDE_INTEGERS = DtypePolicy(main_grads=torch.bfloat16, grad_comm=torch.float32)
AUTO = {"sync_model_each_microbatch": True}
HYBRIDS = ((0, 0), (1, 0), (2, 0), (3, 0), (3, "optim"))


def case(task: str, dtypes: DtypePolicy, strategy: int, outer: int | str | None = None, **options: Any) -> Case:
    """Two micro-batches, two steps, storage really freed."""
    sharding = Sharding(strategy=strategy, outer=outer, units=(TASKS[task].unit,), is_poisoned=False, options=options)
    return Case(task=task, microbatches=2, steps=2, dtypes=dtypes, max_norm=1.0, sharding=sharding)


def job_watch(cases: list[Case], sabotage: str = "none") -> list[list[str]]:
    """The races of every case."""
    found = []
    for case in cases:
        with races_watched() as races, SABOTAGE[sabotage]():
            train_sharded(TASKS[case.task].build, case.batches(dist.get_world_size()), case.recipe, case.sharding)
        assert races.streams[1].clock["stream 1"], "nothing ran beside the compute stream"
        found.append(sorted(set(races.found)))
    return found


def assert_nothing_races(pool: RankPool, cases: list[Case]) -> None:
    for by_case in pool.run(job_watch, cases):
        for case, found in zip(cases, by_case, strict=True):
            assert not found, (case, found)


def test_nothing_races_where_units_take_turns_in_slots(ranks2: RankPool) -> None:
    slots = {"fsdp_double_buffer": True, "fsdp_db_use_persist_buf_on_alloc_fail": True}
    cases = [case("transformer", MIXED, 3, **slots), case("integers", WIDE_INTEGERS, 2, **slots, **AUTO)]
    assert_nothing_races(ranks2, [*cases, case("reentrant", MIXED, 3, maxpool_double_buffer=True)])


@pytest.mark.parametrize("task", ["transformer", "reentrant"])
def test_nothing_races_on_one_axis(ranks2: RankPool, task: str) -> None:
    cases = [case(task, MIXED, strategy, **options) for strategy in (0, 1, 2, 3) for options in ({}, AUTO)]
    assert_nothing_races(ranks2, [*cases, case(task, WIDE, 1), case(task, WIDE, 3, **AUTO)])


def test_nothing_races_on_two_axes(ranks4: RankPool) -> None:
    cases = [case("integers", NARROW, *pair, **options) for pair in HYBRIDS for options in ({}, AUTO)]
    assert_nothing_races(ranks4, [*cases, *(case("integers", WIDE_INTEGERS, *pair) for pair in ((1, 0), (3, "optim")))])


def job_delete(is_joined: bool) -> list[str]:
    """The races of a model that goes with reductions on their way and the root's weights gathered."""
    from megatron_fsdp.machine.device import Device

    joins = contextlib.nullcontext() if is_joined else mock.patch.object(Device, "join", _nothing)
    one = case("integers", NARROW, 3)
    with races_watched() as races, joins:
        model, optimizer = build_sharded(TASKS["integers"].build, one.recipe, one.sharding)
        inputs, target = one.batches(dist.get_world_size())[0][0][dist.get_rank()]
        one.recipe.loss_fn(model(inputs), target).backward()
        loss = one.recipe.loss_fn(model(inputs), target)
        del model, optimizer, loss
        torch.zeros(8)
        for stream in races.streams:
            with races.use(stream):
                torch.zeros(8)
    return races.found


def test_a_model_that_goes_leaves_no_memory_in_use(ranks2: RankPool) -> None:
    assert ranks2.run(job_delete, True) == [[], []]
    assert all(ranks2.run(job_delete, False))


# ---- the watch itself: without any one of the engine's precautions it finds something ----


def _without(path: str, name: str, replacement: Callable) -> Callable:
    def patched() -> contextlib.AbstractContextManager:
        module, _, cls = path.rpartition(".")
        owner = getattr(__import__(f"megatron_fsdp.{module}", fromlist=[cls]), cls)
        return mock.patch.object(owner, name, replacement)

    return patched


def _drain_at_once(reducer: Any, unit: Any) -> None:
    reducer.in_flight.pop(unit, None)


@contextlib.contextmanager
def _along_outer_at_once(reducer: Any, unit: Any) -> Iterator[None]:
    with reducer._device.use(reducer._outer_stream):
        yield


def _release_at_once(gatherer: Any, unit: Any) -> None:
    unit.show_sharded()
    with gatherer._device.use(gatherer._stream):
        for group in unit.groups:
            group.reshard()


def _settle_and_forget(main_grad: Any, reduced: Any) -> None:
    main_grad.final.data.copy_(reduced.data)
    if main_grad._aside is not None:
        main_grad.final.data.add_(main_grad._aside)
        main_grad._aside = None


def _nothing(*_: Any) -> None: ...


SABOTAGE: dict[str, Callable] = {
    "none": contextlib.nullcontext,
    "gathers do not wait for an install": _without("runtime.communication.Gatherer", "wait_for_compute", _nothing),
    "compute does not wait for gathers": _without("runtime.communication.Gatherer", "wait_for", _nothing),
    "weights are freed while they are read": _without("runtime.communication.Gatherer", "reshard", _release_at_once),
    "staged gradients are freed at once": _without("runtime.communication.Reducer", "drain", _drain_at_once),
    "the step does not wait for reductions": _without("runtime.communication.Reducer", "wait", _nothing),
    "the outer axis does not wait": _without("runtime.communication.Reducer", "_along_outer", _along_outer_at_once),
    "copies on the wire are dropped": _without("runtime.communication.Reducer", "_keep_while_crossing", _nothing),
    "what was set aside is dropped": _without("state.main_grad.MainGrad", "_settle", _settle_and_forget),
}
SABOTAGED = {
    "the outer axis does not wait": [case("integers", NARROW, 3, 0)],
    "copies on the wire are dropped": [case("integers", NARROW, 0, 0)],
    "what was set aside is dropped": [case("integers", NARROW, 1, **AUTO)],
}


def job_sabotage(sabotages: list[str]) -> dict[str, list[str]]:
    """Races found without each precaution."""
    found = collections.defaultdict(list)
    for sabotage in sabotages:
        for races in job_watch(SABOTAGED.get(sabotage, [case("integers", NARROW, 3)]), sabotage):
            found[sabotage] += races
    return dict(found)


def test_without_any_precaution_a_race_is_found(ranks2: RankPool, ranks4: RankPool) -> None:
    outer = [name for name, cases in SABOTAGED.items() if any(case.sharding.outer is not None for case in cases)]
    for pool, sabotages in ((ranks4, outer), (ranks2, [name for name in SABOTAGE if name not in outer])):
        for by_sabotage in pool.run(job_sabotage, sabotages):
            unseen = [sabotage for sabotage in sabotages if not by_sabotage.get(sabotage)]
            assert unseen == ["none"] * ("none" in sabotages)
