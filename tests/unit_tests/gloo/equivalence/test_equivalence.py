"""Cells of the equivalence matrix equal one process, bit by bit or within its bound, and faults are seen."""

import functools
import itertools
import os

import pytest
import torch

from tests.unit_tests.harness import matrix, matrix_runs
from tests.unit_tests.harness.matrix import Cell
from tests.unit_tests.harness.models import Batches, dot_loss
from tests.unit_tests.harness.rank_pool import RankPool
from tests.unit_tests.harness.reference import DtypePolicy, StepRecord, train_reference

#: Every cell takes minutes on two cores.
STRIDE = 1 if os.environ.get("MEGATRON_FSDP_ALL_CELLS", "0") != "0" else matrix.DEFAULT_STRIDE
#: Parts that a world's cells are run in, to keep each test short.
PARTS = {1: 1, 2: 2, 3: 2, 4: 4, 8: 6} if STRIDE == 1 else {1: 1, 2: 1, 3: 1, 4: 2}


def assert_equivalent(pool: RankPool, cells: list[Cell]) -> None:
    found = matrix_runs.measured(cells, pool.run(matrix_runs.run_cells, cells, timeout_s=300))
    wrong = matrix_runs.failures(cells, found)
    assert not wrong, f"{len(wrong)} of {len(cells)} cells differ from one process:\n" + "\n".join(wrong[:10])


@pytest.mark.parametrize(("world", "part"), [(world, part) for world, parts in PARTS.items() for part in range(parts)])
def test_integers_equal_one_process_bit_by_bit(rank_pools: dict[int, RankPool], world: int, part: int) -> None:
    cells = matrix.cells_of(world, is_exact=True, stride=STRIDE)
    assert_equivalent(rank_pools[world], cells[part :: PARTS[world]])


@pytest.mark.parametrize("world", PARTS)
def test_floats_equal_one_process_within_their_bounds(rank_pools: dict[int, RankPool], world: int) -> None:
    assert_equivalent(rank_pools[world], matrix.cells_of(world, is_exact=False, stride=STRIDE))


@pytest.mark.parametrize("fault", matrix_runs.SABOTAGES)
def test_a_fault_makes_cells_fail(ranks2: RankPool, fault: str) -> None:
    accumulates = fault == "micro-batches before the last are lost"
    cells = [
        next(cell for cell in matrix.cells_of(2, is_exact=is_exact) if _is_like(cell, strategy, 3))
        for is_exact, strategy in itertools.product((True, False), (0, 1) if accumulates else range(4))
    ]
    found = matrix_runs.measured(cells, ranks2.run(matrix_runs.run_cells, cells, "cpu", fault))
    assert len(matrix_runs.failures(cells, found)) == len(cells), f"{fault}: some cell does not see it"


def _is_like(cell: Cell, strategy: int, microbatches: int) -> bool:
    return cell.topology.strategy == strategy and cell.microbatches == microbatches


NARROW = [
    DtypePolicy(compute=matrix.BF16, main_params=None, main_grads=matrix.BF16, grad_comm=matrix.BF16),
    DtypePolicy(compute=matrix.FP32, main_params=matrix.FP32, main_grads=matrix.BF16, grad_comm=matrix.BF16),
]


def largest_sum(batches: Batches, expected: list[StepRecord]) -> float:
    """Of one element's magnitudes over ranks and micro-batches: no order of summation comes to more."""
    model = matrix_runs.build(True, None, "cpu").double()
    largest = 0.0
    for step, record in zip(batches, expected, strict=True):
        for inputs, target in itertools.chain(*step):
            kept = {param: param.grad for param in model.parameters()}
            model.zero_grad()
            dot_loss(model(inputs), target).backward()
            for param, grad in kept.items():
                if param.grad is not None:
                    param.grad = param.grad.abs() + (0 if grad is None else grad)
        largest = max(largest, *(p.grad.max().item() for p in model.parameters() if p.grad is not None))
        model.zero_grad()
        model.load_state_dict(record.weights, strict=False)  # the head's is the stem's
    return largest


@pytest.mark.parametrize("microbatches", matrix.ACCUMULATIONS)
@pytest.mark.parametrize("world", matrix.WORLDS)
def test_the_integers_fit_bf16_and_every_trainable_parameter_matters(world: int, microbatches: int) -> None:
    cell = next(c for c in matrix.cells_of(world, is_exact=True) if c.microbatches == microbatches)
    expected = matrix_runs.reference(cell)
    moved = {name for step in expected for name, grad in step.grads.items() if grad.any()}
    assert moved == {name for name in expected[0].grads if not name.endswith("unused")}
    batches = matrix_runs.batches_of(True, microbatches, world, "cpu")
    assert largest_sum(batches, expected) <= 256, "bf16 does not hold every sum of some of these gradients"
    for dtypes, reduces_each in itertools.product(NARROW, (True, False)):
        recipe = matrix_runs.recipe_of(True, cell.is_mean, dtypes, reduces_each)
        came = train_reference(functools.partial(matrix_runs.build, True, None, "cpu"), batches, recipe)
        for ours, theirs in zip(came, expected, strict=True):
            assert ours.losses == theirs.losses
            for name, grad in theirs.grads.items():
                assert torch.equal(ours.grads[name].double(), grad), name
                assert torch.equal(ours.weights[name].double(), theirs.weights[name]), name
