"""When units gather and reduce: odd control flow, rank-dependent control flow, exceptions, memory and leaks."""

import contextlib
import gc
import time
import weakref
from collections.abc import Iterator
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megatron_fsdp.machine.allocator import ResizePool
from megatron_fsdp.state.param_group import ParamGroup
from tests.unit_tests.harness.communication import collectives_heard
from tests.unit_tests.harness.models import MLPBlock
from tests.unit_tests.harness.odd_models import BUILDERS, Table
from tests.unit_tests.harness.parity import TASKS, Case, check
from tests.unit_tests.harness.rank_pool import RankPool
from tests.unit_tests.harness.sharded import Sharding, build_sharded, full_grads, train_step

#: Ranks run different units, or different numbers of them.
RANK_DEPENDENT = [
    "skipping",
    "skipping_reentrant",
    "skipping_non_reentrant",
    "choosy",
    "handing_through",
    "lending_skipped",
]


@pytest.mark.parametrize("task", [t for t in BUILDERS if t not in RANK_DEPENDENT and "reentrant" not in t])
def test_unusual_control_flow_trains_like_one_process(ranks2: RankPool, task: str) -> None:
    units = (TASKS[task].unit, MLPBlock, Table)
    check(
        ranks2,
        [
            Case(task=task, microbatches=2, sharding=Sharding(strategy=strategy, units=units, is_poisoned=is_poisoned))
            for strategy, is_poisoned in ((0, True), (1, False), (2, True), (3, False), (3, True))
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


# ---- memory ----


class CountingPool(ResizePool):
    """Counts what is alive: gathered units by name, and communication buffers."""

    latest: "CountingPool"

    def __init__(self) -> None:
        CountingPool.latest = self
        self.names: dict[int, str] = {}
        self.gathered: set[str] = set()
        self.most_gathered = 0
        self.scratches: weakref.WeakSet = weakref.WeakSet()
        self.most_scratches = 0

    def reserve(self, key, *args):
        tensor = super().reserve(key, *args)
        self.names[id(tensor)] = key.partition(":")[0]
        return tensor

    def acquire(self, tensor, nbytes=None):
        super().acquire(tensor, nbytes)
        self.gathered.add(self.names[id(tensor)])
        self.most_gathered = max(self.most_gathered, len(self.gathered - {"root"}))

    def release(self, tensor):
        super().release(tensor)
        self.gathered.discard(self.names[id(tensor)])

    def scratch(self, *args):
        tensor = super().scratch(*args)
        self.scratches.add(tensor)
        self.most_scratches = max(self.most_scratches, len(self.scratches))
        return tensor


@contextlib.contextmanager
def counted_pool() -> Iterator[None]:
    from megatron_fsdp import MegatronFSDP

    with mock.patch.object(MegatronFSDP, "pool_class", CountingPool):
        yield


def job_peak(task: str, leftover_numel: int, forwards: int = 1) -> list:
    """Most units gathered and most gradient buffers alive in two steps, and what stays alive after each."""
    from megatron_fsdp.runtime import discovery

    case = Case(task=task, microbatches=2, sharding=Sharding(units=(TASKS[task].unit,), is_poisoned=False))
    with counted_pool(), mock.patch.object(discovery, "LARGE_LEFTOVER_NUMEL", leftover_numel):
        model, optimizer = build_sharded(TASKS[task].build, case.recipe, case.sharding)
    pool, rest = CountingPool.latest, []
    for microbatches in case.batches(dist.get_world_size()):
        pool.most_gathered = pool.most_scratches = 0
        train(model, optimizer, case, microbatches, forwards)
        rest.append((sorted(pool.gathered), len(pool.scratches)))
    units = [unit.label for unit in model._schedule.units]
    return [pool.most_gathered, pool.most_scratches, rest, units]


def train(model, optimizer, case: Case, microbatches: list, forwards: int) -> None:
    """A step, with one backward for every `forwards` micro-batches."""
    batches = [ranks[dist.get_rank()] for ranks in microbatches]
    for first in range(0, len(batches), forwards):
        sum(case.recipe.loss_fn(model(x), target) for x, target in batches[first : first + forwards]).backward()
    optimizer.step()
    optimizer.zero_grad()


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
        return sorted(param.fqn for param in managed if param.raw.untyped_storage().size())

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
        locals_ = [weakref.ref(param.grad) for param in others]
        optimizer.zero_grad()
        for _ in range(100):  # gloo's threads let go of what they reduced a moment later
            if not any(ref() is not None for ref in storages):
                break
            time.sleep(0.01)
        held.append(sum(buffer.data.numel() for buffer in buffers) + sum(ref() is not None for ref in storages))
        held.append(all(ref() is not None for ref in locals_))
    return held


@pytest.mark.parametrize(("strategy", "outer"), [(0, None), (1, None), (2, None), (3, None), (3, "optim")])
def test_gradients_have_memory_from_backward_to_zero_grad(
    rank_pools: dict[int, RankPool], strategy: int, outer: str | None
) -> None:
    # Their handles are made once; one that somebody has kept is left alone.
    pool = rank_pools[2 if outer is None else 4]
    assert pool.run(job_grad_memory, strategy, outer) == [[True, 0, True] * 3] * pool.world_size


# ---- leaks ----


def job_leaks(cases: list[Case]) -> list[dict[str, bool]]:
    """What of each model is still alive when its last reference is gone, with the garbage collector off."""
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
        "raw": weakref.ref(groups[0].params[0]),
        "sharded": weakref.ref(next(model.parameters())),
    }
    del model, optimizer, groups
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


# ---- order ----


def job_orphan() -> None:
    case = Case(task="integers", sharding=Sharding(units=(MLPBlock,)))
    module = build_sharded(TASKS["integers"].build, case.recipe, case.sharding)[0].module
    module(torch.ones(2, 6))


def test_a_module_does_not_outlive_its_sharded_model_unnoticed(ranks2: RankPool) -> None:
    ranks2.run_expecting(RuntimeError, "sharded this module is gone; keep a reference", job_orphan)


def job_warnings(cases: list[tuple[str, int]]) -> list[list[str]]:
    """Warnings of the schedule in two steps of each task, with a backward for so many forwards."""
    return [_warnings(*case) for case in cases]


def _warnings(task: str, forwards: int) -> list[str]:
    case = Case(task=task, microbatches=2, sharding=Sharding(units=(TASKS[task].unit,)))
    seen: list[str] = []
    with mock.patch("megatron_fsdp.runtime.schedule.logger.warning", seen.append):
        model, optimizer = build_sharded(TASKS[task].build, case.recipe, case.sharding)
        for microbatches in case.batches(dist.get_world_size()):
            train(model, optimizer, case, microbatches, forwards)
    return seen


def test_only_gradients_in_several_parts_make_reductions_wait(ranks2: RankPool) -> None:
    in_parts = ["integers_reentrant", "span_reentrant", "twice_reentrant"]
    for first in ranks2.run(job_warnings, [(task, 2) for task in in_parts]):
        assert all(len(seen) == 1 and "came in several parts" in seen[0] for seen in first), first
    at_once = [*in_parts, "shuffled", "reversed", "alternating", "twice", "branches", "sandwich", "span_non_reentrant"]
    at_once = [(task, 1) for task in at_once] + [(task, 2) for task in at_once if task not in in_parts]
    for seen in ranks2.run(job_warnings, at_once):
        assert seen == [[]] * len(at_once)


def job_gathers(task: str) -> list[list[str]]:
    """Units in the order in which three forwards for evaluation gather them."""
    case = Case(task=task, sharding=Sharding(units=(TASKS[task].unit,)))
    model, _ = build_sharded(TASKS[task].build, case.recipe, case.sharding)
    (ranks,), *_ = case.batches(dist.get_world_size())
    seen = []
    for _ in range(3):
        real = ParamGroup.unshard
        with mock.patch.object(ParamGroup, "unshard", autospec=True, side_effect=real) as spy, torch.no_grad():
            model(ranks[dist.get_rank()][0])
        seen.append([call.args[0].facts.name.partition(":")[0] for call in spy.call_args_list])
    return seen


def test_the_first_forward_teaches_the_order(ranks2: RankPool) -> None:
    first, second, third = ranks2.run(job_gathers, "reversed")[0]
    assert len(first) > len(second), "units were gathered in registered order, and again when they were reached"
    assert second == third == ["root", "blocks.2", "blocks.1", "blocks.0"]


def job_outside_the_root(strategies: list[int]) -> list[list[torch.Tensor]]:
    """Units called by hand, without the model's forward; gradients come all the same."""
    found = []
    for strategy in strategies:
        case = Case(task="integers", sharding=Sharding(strategy=strategy, units=(MLPBlock, torch.nn.Linear)))
        model, _ = build_sharded(TASKS["integers"].build, case.recipe, case.sharding)
        x = torch.ones(2, 6)
        for block in reversed(model.module.blocks):
            x = block(x)
        x.sum().backward()
        model.finish_grad_sync()
        found.append([x.detach(), full_grads(model)["blocks.1.linear.weight"]])
    return found


def test_units_may_be_called_by_hand(ranks2: RankPool) -> None:
    module = TASKS["integers"].build()
    x = torch.ones(2, 6)
    for block in reversed(module.blocks):
        x = block(x)
    x.sum().backward()
    for by_strategy in ranks2.run(job_outside_the_root, [0, 1, 3]):
        for output, grad in by_strategy:
            assert torch.equal(output, x.detach())
            assert torch.equal(grad, module.blocks[1].linear.weight.grad)


# ---- what is communicated ----


def job_collectives(cases: list[tuple]) -> list[list[list[str]]]:
    """Collectives of the third of three steps of each case: in forward, in backward, in the step."""
    return [_collectives(*case) for case in cases]


def _collectives(task: str, strategy: int, outer: int | None) -> list[list[str]]:
    case = Case(task=task, steps=3, sharding=Sharding(strategy=strategy, outer=outer, units=(TASKS[task].unit,)))
    model, optimizer = build_sharded(TASKS[task].build, case.recipe, case.sharding)
    for (ranks,) in case.batches(dist.get_world_size()):
        optimizer.zero_grad()
        inputs, target = ranks[dist.get_rank()]
        with collectives_heard() as forward:
            loss = case.recipe.loss_fn(model(inputs), target)
        with collectives_heard() as backward:
            loss.backward()
        with collectives_heard() as step:
            optimizer.step()
    return [[_kind(name) for name in heard] for heard in (forward, backward, step)]


def _kind(name: str) -> str:
    return "scatter" if "scatter" in name else "gather" if "gather" in name else "reduce"


GATHER, SCATTER, REDUCE = ["gather"], ["scatter"], ["reduce"]
#: (task, strategy, outer strategy) -> collectives in forward and in backward. There are three units and the root.
TABLE = {
    ("integers", 0, None): ([], REDUCE * 4),
    ("integers", 1, None): (GATHER * 4, SCATTER * 4),
    ("integers", 2, None): (GATHER * 4, SCATTER * 4),
    ("integers", 3, None): (GATHER * 4, GATHER * 2 + SCATTER + GATHER + SCATTER * 3),
    # Frozen weights do not change, so what rests whole is never gathered again; sharded ones are not reduced.
    ("frozen_but_head", 1, None): (GATHER, SCATTER),
    ("frozen_but_head", 2, None): (GATHER, SCATTER),
    ("frozen_but_head", 3, None): (GATHER * 4, SCATTER),
    ("frozen_but_first", 3, None): (GATHER * 4, GATHER * 3 + SCATTER),
}
#: On two axes the outer one follows the inner one in backward, and comes first in forward.
TABLE_OF_TWO_AXES = {
    ("integers", 3, 0): (GATHER * 4, GATHER * 2 + SCATTER + REDUCE + GATHER + (SCATTER + REDUCE) * 3),
    ("integers", 3, 1): (GATHER * 8, GATHER * 2 + SCATTER * 2 + GATHER + SCATTER * 6),
}


@pytest.mark.parametrize(("ranks", "table"), [(2, TABLE), (4, TABLE_OF_TWO_AXES)], ids=["one_axis", "two_axes"])
def test_a_step_communicates_what_the_table_says_and_nothing_else(
    rank_pools: dict[int, RankPool], ranks: int, table: dict
) -> None:
    for by_case in rank_pools[ranks].run(job_collectives, list(table)):
        for case, heard in zip(table, by_case, strict=True):
            assert heard == [*table[case], []], case
