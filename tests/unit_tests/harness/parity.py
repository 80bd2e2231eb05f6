"""Named training tasks, run whole in the test's process and sharded on a pool, and compared step by step."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tests.unit_tests.harness import float8_reference, models, odd_models
from tests.unit_tests.harness.rank_pool import RankPool
from tests.unit_tests.harness.reference import (
    DtypePolicy,
    LossFn,
    Recipe,
    StepRecord,
    assert_same_training,
    train_reference,
)
from tests.unit_tests.harness.sharded import MAIN_FP32, RankStep, Sharding, assembled, train_sharded


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """A model with data, a loss and an optimizer."""

    build: Callable[[], nn.Module]
    batches: Callable[[int, int, int], models.Batches]
    """Of steps, micro-batches and ranks."""
    loss_fn: LossFn
    optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    unit: type
    is_exact: bool
    """All numbers are small integers over a power of two (if the number of ranks is one)."""


def _sign_sgd(module: nn.Module) -> torch.optim.Optimizer:
    return models.SignSGD(module.parameters())


def _sgd(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.25, momentum=0.5)


def integer_task(build: Callable[[], nn.Module], unit: type) -> Task:
    """Linear in each weight, with integers everywhere: sums are exact in any order."""
    return Task(
        build=functools.partial(_with_integers, build),
        batches=odd_models.marked_batches,
        loss_fn=models.dot_loss,
        optimizer=_sign_sgd,
        unit=unit,
        is_exact=True,
    )


def _with_integers(build: Callable[[], nn.Module]) -> nn.Module:
    module = build()
    models.integer_init_(module)
    return module


def _transformer_task(*frozen: str, **options: Any) -> Task:
    return Task(
        build=functools.partial(_frozen, functools.partial(models.TinyTransformer, **options), frozen),
        batches=models.token_batches,
        loss_fn=models.token_loss,
        optimizer=_sgd,
        unit=models.TransformerBlock,
        is_exact=False,
    )


def _mlp_task(*frozen: str, **options: Any) -> Task:
    build = functools.partial(_frozen, functools.partial(models.TinyMLP, integers=True, **options), frozen)
    return integer_task(build, models.MLPBlock)


def _float8_task(*frozen: str, **options: Any) -> Task:
    plain = functools.partial(_frozen, functools.partial(models.TinyMLP, **options), frozen)
    return Task(
        build=functools.partial(float8_reference.build_float8, plain),
        batches=models.float_batches,
        loss_fn=models.square_loss,
        optimizer=_sgd,
        unit=models.MLPBlock,
        is_exact=False,
    )


def _frozen(build: Callable[[], nn.Module], prefixes: tuple[str, ...]) -> nn.Module:
    module = build()
    return models.freeze(module, *prefixes) if prefixes else module


TASKS: dict[str, Task] = {
    "integers": _mlp_task(),
    "floats": Task(
        build=odd_models.Casting,
        batches=models.float_batches,
        loss_fn=models.square_loss,
        optimizer=_sgd,
        unit=models.MLPBlock,
        is_exact=False,
    ),
    "frozen_first": _mlp_task("blocks.0"),
    "frozen_middle": _mlp_task("blocks.1"),
    "frozen_weights": _mlp_task("blocks.0.linear.weight", "blocks.2.linear.bias"),
    "frozen_but_head": _mlp_task("blocks"),
    "frozen_but_first": _mlp_task("blocks.1", "blocks.2", "head"),
    "transformer": _transformer_task(),
    "tied": _transformer_task(is_tied=True),
    "unused": _transformer_task(has_unused=True),
    "frozen_embedding": _transformer_task("embedding", "blocks.0.qkv"),
    "reentrant": _transformer_task(recompute="reentrant"),
    "non_reentrant": _transformer_task(recompute="non_reentrant"),
    "float8": _float8_task(),
    "float8_recompute": _float8_task(recompute="non_reentrant"),
    "float8_frozen": _float8_task("blocks.1", "blocks.0.linear.bias"),
    "odd": Task(
        build=models.OddModel,
        batches=functools.partial(models.float_batches, width=7, width_out=3),
        loss_fn=models.square_loss,
        optimizer=_sgd,
        unit=models.OddShapes,
        is_exact=False,
    ),
    **{name: integer_task(build, unit) for name, (build, unit) in odd_models.BUILDERS.items()},
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A task and how it is trained."""

    task: str
    sharding: Sharding
    microbatches: int = 1
    steps: int = 2
    dtypes: DtypePolicy = MAIN_FP32
    max_norm: float | None = None
    is_mean: bool = True

    @property
    def recipe(self) -> Recipe:
        """Options of training."""
        return _recipe(self.task, self.dtypes, self.sharding.reduces_each_microbatch, self.is_mean, self.max_norm)

    def batches(self, ranks: int) -> models.Batches:
        """The data."""
        return TASKS[self.task].batches(self.steps, self.microbatches, ranks)


def _recipe(task: str, dtypes: DtypePolicy, reduces_each: bool, is_mean: bool, max_norm: float | None) -> Recipe:
    return Recipe(
        build_optimizer=TASKS[task].optimizer,
        loss_fn=TASKS[task].loss_fn,
        dtypes=dtypes,
        reduces_each_microbatch=reduces_each,
        is_mean_over_ranks=is_mean,
        max_norm=max_norm,
    )


def run_cases(cases: Sequence[Case], ranks: int) -> list[list[RankStep]]:
    """A pool job: this rank's part of every case."""
    return [train_sharded(TASKS[case.task].build, case.batches(ranks), case.recipe, case.sharding) for case in cases]


def joint_step(model: Any, optimizer: Any, case: Case, microbatches: Sequence[Any], forwards: int) -> None:
    """A step on a rank, with one backward for every `forwards` micro-batches. **Collective.**"""
    batches = [ranks[dist.get_rank()] for ranks in microbatches]
    for first in range(0, len(batches), forwards):
        sum(case.recipe.loss_fn(model(x), target) for x, target in batches[first : first + forwards]).backward()
    optimizer.step()
    optimizer.zero_grad()


def reference(case: Case, ranks: int) -> list[StepRecord]:
    """The case trained whole; the same for many shardings, so computed once."""
    key = (case.task, case.dtypes, case.sharding.reduces_each_microbatch, case.is_mean, case.max_norm)
    return _reference(key, case.steps, case.microbatches, ranks)


@functools.cache
def _reference(key: tuple, steps: int, microbatches: int, ranks: int) -> list[StepRecord]:
    task = TASKS[key[0]]
    return train_reference(task.build, task.batches(steps, microbatches, ranks), _recipe(*key))


def check(pool: RankPool, cases: Sequence[Case], **tolerance: float) -> None:
    """Trains every case in one job and compares each with its reference, bit by bit where the task is exact."""
    runs = pool.run(run_cases, list(cases), pool.world_size)
    for case, *by_rank in zip(cases, *runs, strict=True):
        compare(case, by_rank, **tolerance)


def compare(case: Case, by_rank: Sequence[Sequence[RankStep]], **tolerance: float) -> None:
    """Asserts that all ranks' steps together are what the reference does."""
    ranks = len(by_rank)
    expected = reference(case, ranks)
    is_power_of_two = ranks & (ranks - 1) == 0
    is_exact = TASKS[case.task].is_exact and (is_power_of_two or not case.is_mean) and not tolerance
    try:
        assert_same_training(assembled(by_rank, expected), expected, is_exact=is_exact, **tolerance)
    except AssertionError as error:
        raise AssertionError(f"{case} on {ranks} ranks: {error}") from error
