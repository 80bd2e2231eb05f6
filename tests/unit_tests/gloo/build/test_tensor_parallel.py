"""Tensor-parallel parameters, sharded over data-parallel ranks too, train as one process does."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.unit_tests.harness.models import (
    MLPBlock,
    SignSGD,
    TinyMLP,
    dot_loss,
    freeze,
    integer_batches,
    token_batches,
    token_loss,
)
from tests.unit_tests.harness.reference import Recipe, grad_norm, train_reference
from tests.unit_tests.harness.tensor_parallel import (
    FeedForward,
    Parallelize,
    SequenceParallelLM,
    TaggedMLP,
    dp_rank,
    mesh_of,
    parallelize_lm,
    parallelize_mlp,
    parallelize_tagged,
    shard_over,
    whole,
)

STEPS, MICROBATCHES = 2, 2


@dataclasses.dataclass(frozen=True)
class Case:
    """A model, how tensor-parallel ranks share it, and what it learns from."""

    build: Callable[[], nn.Module]
    parallelize: Parallelize
    units: tuple[type, ...]
    is_exact: bool = True


def integers_mlp(recompute=None) -> nn.Module:
    return TinyMLP(integers=True, recompute=recompute)


def frozen_mlp() -> nn.Module:
    return freeze(integers_mlp(), "blocks.0.linear.weight", "blocks.1", "head.bias")


def tied_mlp() -> nn.Module:
    model = TinyMLP(integers=True, depth=3)
    model.blocks[2].linear.weight = model.blocks[0].linear.weight
    return model


def parallelize_tied(model: nn.Module, mesh) -> None:
    parallelize_mlp(model, mesh)
    model.blocks[2].linear.weight = model.blocks[0].linear.weight  # parallelize_module has made two of it


def tagged_mlp() -> nn.Module:
    return nn.Sequential(TaggedMLP(), TaggedMLP())


def language_model() -> nn.Module:
    return SequenceParallelLM()


CASES = {
    "linears": Case(integers_mlp, parallelize_mlp, (MLPBlock,)),
    "recomputed": Case(lambda: integers_mlp("non_reentrant"), parallelize_mlp, (MLPBlock,)),
    "frozen": Case(frozen_mlp, parallelize_mlp, (MLPBlock,)),
    "tied": Case(tied_mlp, parallelize_tied, (MLPBlock,)),
    "tagged": Case(tagged_mlp, parallelize_tagged, (TaggedMLP,)),
    "sequence": Case(language_model, parallelize_lm, (FeedForward,), is_exact=False),
}


def train(case: Case, mesh, **options: Any) -> list[tuple[list[float], dict, float, dict]]:
    """Losses, whole gradients, their norm and whole weights of every step. **Collective.**"""
    from megatron_fsdp import fully_shard_optimizer

    torch.manual_seed(0)
    model = shard_over(mesh, case.build(), case.parallelize, fsdp_unit_modules=case.units, **options)
    optimizer = fully_shard_optimizer(recipe(case).build_optimizer(model))
    records = []
    for microbatches in batches(case, mesh.size() // mesh["tp"].size()):
        optimizer.zero_grad()
        losses = []
        for number, ranks in enumerate(microbatches):
            model.is_last_microbatch = number == len(microbatches) - 1
            inputs, target = ranks[dp_rank(mesh)]
            loss = recipe(case).loss_fn(model(inputs), target)
            loss.backward()
            losses.append(loss.item())
        model.finish_grad_sync()
        grads = whole(model, "grad")
        norm = float(model.clip_grad_norm_(math.inf))
        optimizer.step()
        records.append((losses, grads, norm, whole(model, "data")))
    return records


def batches(case: Case, ranks: int):
    return (integer_batches if case.is_exact else token_batches)(STEPS, MICROBATCHES, ranks, **sizes(case))


def sizes(case: Case) -> dict[str, int]:
    return {} if case.is_exact else {"sequence": 4}


def recipe(case: Case) -> Recipe:
    if case.is_exact:
        return Recipe(build_optimizer=lambda m: SignSGD(m.parameters()), loss_fn=dot_loss)
    return Recipe(build_optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9), loss_fn=token_loss)


def compare(name: str, dp: int, tp: int, outer: int | None = None, **options: Any) -> None:
    """Raises AssertionError where training on the mesh differs from training in one process."""
    case, mesh = CASES[name], mesh_of(dp, tp, outer)
    ranks = dp * (outer or 1)
    expected = train_reference(case.build, batches(case, ranks), recipe(case))
    tolerance = {"rtol": 0.0, "atol": 0.0} if case.is_exact else {"rtol": 1e-5, "atol": 1e-6}
    for step, (record, came) in enumerate(zip(expected, train(case, mesh, **options), strict=True)):
        losses, grads, norm, weights = came
        note = f"{name}, {options}, step {step}"
        torch.testing.assert_close(losses, [by_rank[dp_rank(mesh)] for by_rank in record.losses], msg=note, **tolerance)
        for kind, mine, theirs in (("grads", grads, record.grads), ("weights", weights, record.weights)):
            assert mine.keys() == theirs.keys()
            for key, tensor in theirs.items():
                same = lambda text, key=key, kind=kind, note=note: f"{note}: {kind}[{key}]: {text}"  # noqa: E731
                torch.testing.assert_close(mine[key], tensor, msg=same, **tolerance)
        torch.testing.assert_close(norm, grad_norm(grads), rtol=1e-5, atol=1e-6, msg=note)


def compare_all(names: list[str], strategies: list[int]) -> None:
    for name in names:
        for strategy in strategies:
            compare(name, 2, 2, zero_dp_strategy=strategy)


@pytest.mark.parametrize("names", [["linears", "recomputed"], ["frozen", "tied"], ["tagged"], ["sequence"]], ids=str)
def test_two_by_two_ranks_train_as_one_process(ranks4, names):
    ranks4.run(compare_all, names, [0, 1, 2, 3])


def compare_on_two_ranks() -> None:
    for name in CASES:
        compare(name, 1, 2, zero_dp_strategy=3)
        compare(name, 2, 1, zero_dp_strategy=3)


def test_one_rank_along_either_axis(ranks2):
    ranks2.run(compare_on_two_ranks)


def compare_hybrid() -> None:
    for name in ("linears", "tagged", "sequence"):
        for outer in (0, 1):
            compare(name, 1, 2, 2, zero_dp_strategy=3, outer_dp_sharding_strategy=outer)


def test_an_outer_axis_cuts_what_is_left(ranks4):
    ranks4.run(compare_hybrid)
