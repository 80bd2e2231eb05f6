"""The schedule under odd control flow, rank-dependent control flow and exceptions, and its order."""

import collections
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megatron_fsdp.state.main_grad import MainGrad
from megatron_fsdp.state.param_group import ParamGroup
from tests.unit_tests.harness.communication import collectives_heard
from tests.unit_tests.harness.models import MLPBlock
from tests.unit_tests.harness.odd_models import BUILDERS, Table
from tests.unit_tests.harness.parity import TASKS, Case, check, joint_step
from tests.unit_tests.harness.rank_pool import RankPool
from tests.unit_tests.harness.sharded import Sharding, build_sharded, full_grads, shard
from tests.unit_tests.harness.strategies import STRATEGIES

#: Ranks run different units, or different numbers of them.
RANK_DEPENDENT = [
    "skipping",
    "skipping_reentrant",
    "skipping_non_reentrant",
    "choosy",
    "handing_through",
    "lending_skipped",
]


@pytest.mark.parametrize(
    "task", [t for t in BUILDERS if t not in (*RANK_DEPENDENT, "wandering") and "reentrant" not in t]
)
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
    strategies = STRATEGIES if ranks == 2 else (3,)
    units = (TASKS[task].unit,)
    check(
        rank_pools[ranks],
        [Case(task=task, microbatches=2, sharding=Sharding(strategy=s, units=units)) for s in strategies],
    )


def job_orphan() -> None:
    case = Case(task="integers", sharding=Sharding(units=(MLPBlock,)))
    module = build_sharded(TASKS["integers"].build, case.recipe, case.sharding)[0].module
    module(torch.ones(2, 6))


def test_a_module_does_not_outlive_its_sharded_model_unnoticed(ranks2: RankPool) -> None:
    ranks2.run_expecting(RuntimeError, "sharded this module is gone; keep a reference", job_orphan)


def job_reductions(cases: list[tuple[str, int]]) -> list[set[int]]:
    """Number of reductions of units in a second step of each task, with one backward for so many forwards."""
    return [set(_reductions(*case).values()) for case in cases]


def _reductions(task: str, forwards: int) -> collections.Counter:
    case = Case(task=task, microbatches=2, sharding=Sharding(units=(TASKS[task].unit,)))
    model, optimizer = build_sharded(TASKS[task].build, case.recipe, case.sharding)
    batches, real = case.batches(dist.get_world_size()), MainGrad.collect
    joint_step(model, optimizer, case, batches[0], forwards)
    with mock.patch.object(MainGrad, "collect", autospec=True, side_effect=real) as spy:
        joint_step(model, optimizer, case, batches[1], forwards)
    return collections.Counter(id(call.args[0]) for call in spy.call_args_list)


def test_a_unit_is_reduced_once_in_a_backward_however_its_gradients_come(ranks2: RankPool) -> None:
    tasks = ["integers_reentrant", "span_reentrant", "twice_reentrant", "span_non_reentrant", "twice", "branches"]
    for seen in ranks2.run(job_reductions, [(task, 2) for task in tasks]):
        assert seen == [{1}] * len(tasks)
    for seen in ranks2.run(job_reductions, [(task, 1) for task in tasks]):
        assert seen == [{2}] * len(tasks)  # a backward for each of two forwards


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
        seen.append([call.args[0].spec.name.partition(":")[0] for call in spy.call_args_list])
    return seen


def test_the_first_forward_teaches_the_order(ranks2: RankPool) -> None:
    for seen in ranks2.run(job_gathers, "reversed"):
        assert seen == [["root", "blocks.2", "blocks.1", "blocks.0"]] * 3


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


def job_pending(forwards: int) -> dict[str, torch.Tensor]:
    """Gradients of four forwards, `forwards` at a time before their backwards, the last one's first."""
    case = Case(task="lending_skipped", microbatches=2, steps=2, sharding=Sharding(units=(Table,)))
    model, _ = build_sharded(TASKS[case.task].build, case.recipe, case.sharding)
    given = [ranks[dist.get_rank()] for step in case.batches(dist.get_world_size()) for ranks in step]
    for start in range(0, len(given), forwards):
        losses = [case.recipe.loss_fn(model(x), target) for x, target in given[start : start + forwards]]
        while losses:
            losses.pop().backward()
    model.finish_grad_sync()
    return full_grads(model)


def test_a_forward_waits_for_its_backward_with_weights_that_only_some_ranks_were_lent(ranks2: RankPool) -> None:
    for alone, together in zip(ranks2.run(job_pending, 1), ranks2.run(job_pending, 2), strict=True):
        for name, grad in alone.items():
            torch.testing.assert_close(together[name], grad)


def job_shared(task: str) -> None:
    """One backward for two forwards, in which ranks run different units."""
    _reductions(task, 2)


@pytest.mark.parametrize("task", ["skipping", "lending_skipped"])
def test_forwards_in_which_ranks_differ_cannot_share_a_backward(ranks2: RankPool, task: str) -> None:
    message = "several of its forwards share one backward, .* call backward for each forward's loss by itself"
    ranks2.run_expecting(NotImplementedError, message, job_shared, task, timeout_s=15)


class Ordered(torch.nn.Module):
    """Runs its blocks in the order that it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(MLPBlock(6, 6, is_linear=True) for _ in range(3))
        self.order: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shape (batch, 6), kept."""
        for number in self.order:
            x = self.blocks[number](x)
        return x


def job_forget() -> tuple[list[str], list[torch.Tensor]]:
    """Errors of a step in an order that no rank had, where ranks had differed; and gradients of it once forgotten."""
    torch.manual_seed(0)
    model = shard(Ordered(), Sharding(units=(MLPBlock,)))
    errors = []
    for order in ([dist.get_rank()], [2, 0]):
        model.module.order = order
        try:
            model(torch.ones(2, 6)).sum().backward()
        except RuntimeError as error:
            errors.append(str(error))
        model.finish_grad_sync()
        model.zero_grad()
    model.schedule.forget()
    for _ in range(2):
        model.zero_grad()
        model(torch.ones(2, 6)).sum().backward()
        model.finish_grad_sync()
    return errors, [full_grads(model)[f"blocks.{number}.linear.weight"] for number in (0, 2)]


def test_training_goes_on_in_a_new_order_once_the_old_one_is_forgotten(ranks2: RankPool) -> None:
    torch.manual_seed(0)
    module = Ordered()
    module.order = [2, 0]
    module(torch.ones(2, 6)).sum().backward()
    for rank, (errors, grads) in enumerate(ranks2.run(job_forget, timeout_s=20)):
        assert len(errors) == 1 and f"rank {rank}, pass 3 (forward), operation" in errors[0]
        assert (
            "last event: enter blocks.0 is not in its program" in errors[0] and "model.schedule.forget()" in errors[0]
        )
        for number, grad in zip((0, 2), grads, strict=True):
            torch.testing.assert_close(grad, module.blocks[number].linear.weight.grad)


def job_skip_batches(strategy: int) -> tuple[int, torch.Tensor]:
    """Batches that raise on every rank, in another unit each, in forward and in backward; gradients of the next one."""
    torch.manual_seed(0)
    model = shard(Ordered(), Sharding(strategy=strategy, units=(MLPBlock,)))
    model.module.order = [0, 1, 2]
    failing, caught = [""], 0

    def fail(kind: str) -> None:
        if kind == failing[0]:
            raise ValueError("a batch to be skipped")

    own = model.module.blocks[dist.get_rank()]
    own.register_forward_pre_hook(lambda *_: fail("forward"))
    own.register_forward_hook(lambda _, args, output: output.register_hook(lambda grad: fail("backward")) and None)
    for failing[0] in ("", "", "forward", "", "backward", "", "forward", "backward", ""):
        model.zero_grad()
        try:
            model(torch.ones(2, 6)).sum().backward()
        except ValueError:
            caught += 1
    model.finish_grad_sync()
    return caught, full_grads(model)["blocks.1.linear.weight"]


@pytest.mark.parametrize("strategy", [1, 3])
def test_batches_that_raise_in_another_unit_on_every_rank_can_be_skipped(ranks2: RankPool, strategy: int) -> None:
    torch.manual_seed(0)
    module = Ordered()
    module.order = [0, 1, 2]
    module(torch.ones(2, 6)).sum().backward()
    for caught, grad in ranks2.run(job_skip_batches, strategy, timeout_s=20):
        assert caught == 4
        torch.testing.assert_close(grad, module.blocks[1].linear.weight.grad)


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
    # The last unit of the forward stays gathered for its backward.
    ("integers", 3, None): (GATHER * 4, GATHER + SCATTER + GATHER + SCATTER * 3),
    # Frozen weights do not change, so what rests whole is never gathered again; sharded ones are not reduced.
    ("frozen_but_head", 1, None): (GATHER, SCATTER),
    ("frozen_but_head", 2, None): (GATHER, SCATTER),
    ("frozen_but_head", 3, None): (GATHER * 4, SCATTER),
    ("frozen_but_first", 3, None): (GATHER * 4, GATHER * 2 + SCATTER),
}
#: On two axes the outer one follows the inner one in backward, and comes first in forward.
TABLE_OF_TWO_AXES = {
    ("integers", 3, 0): (GATHER * 4, GATHER + SCATTER + REDUCE + GATHER + (SCATTER + REDUCE) * 3),
    ("integers", 3, 1): (GATHER * 8, GATHER + SCATTER * 2 + GATHER + SCATTER * 6),
}


@pytest.mark.parametrize(("ranks", "table"), [(2, TABLE), (4, TABLE_OF_TWO_AXES)], ids=["one_axis", "two_axes"])
def test_a_step_communicates_what_the_table_says_and_nothing_else(
    rank_pools: dict[int, RankPool], ranks: int, table: dict
) -> None:
    for by_case in rank_pools[ranks].run(job_collectives, list(table)):
        for case, heard in zip(table, by_case, strict=True):
            assert heard == [*table[case], []], case
