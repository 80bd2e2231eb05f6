"""The equivalence matrix covers what its document says, and so does what is run of it by default."""

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_fsdp.plan.strategy import RESTING, plan_for
from tests.unit_tests.harness import matrix, matrix_document, matrix_runs
from tests.unit_tests.harness.matrix import Cell
from tests.unit_tests.harness.strategies import STRATEGIES

DOCUMENT = Path(__file__).resolve().parents[3] / "docs/equivalence.md"

DIMENSIONS: dict[str, Callable[[Cell], object]] = {
    "topology": lambda cell: cell.topology,
    "accumulation": lambda cell: cell.microbatches,
    "recomputation": lambda cell: cell.recompute,
    "compute dtype": lambda cell: cell.dtypes.compute,
    "main-parameter dtype": lambda cell: cell.dtypes.main_params,
    "main-gradient dtype": lambda cell: cell.dtypes.main_grads,
    "communication dtype": lambda cell: cell.dtypes.grad_comm,
    "poison": lambda cell: cell.is_poisoned,
}


def values(
    dimension: str, *, is_exact: bool, stride: int, worlds: tuple[int, ...] = matrix.DEFAULT_WORLDS
) -> set[object]:
    found = (matrix.cells_of(world, is_exact=is_exact, stride=stride) for world in worlds)
    return {DIMENSIONS[dimension](cell) for cells in found for cell in cells}


@pytest.mark.parametrize("dimension", DIMENSIONS)
def test_the_default_meets_every_value_of_every_dimension(dimension: str) -> None:
    stride = matrix.DEFAULT_STRIDE
    for is_exact in (True, False):
        assert values(dimension, is_exact=is_exact, stride=stride) == values(dimension, is_exact=is_exact, stride=1)
    for world in matrix.DEFAULT_WORLDS:
        some, every = (values(dimension, is_exact=True, stride=s, worlds=(world,)) for s in (stride, 1))
        assert some == every, world


def test_the_cells_cover_what_the_document_says() -> None:
    exact = [cell for cell in matrix.CELLS if cell.is_exact]
    ways = {(c.topology, c.microbatches, c.recompute, c.dtypes.grad_comm) for c in exact}
    assert len(ways) == len(matrix.TOPOLOGIES) * 2 * 3 * 3
    for topology in matrix.TOPOLOGIES:
        dtypes = {cell.dtypes for cell in exact if cell.topology == topology}
        assert len(dtypes) == (36 if topology.world == 2 else 18), topology
    for world in (1, 3, 4, 8):
        assert len({cell.dtypes for cell in exact if cell.topology.world == world}) == 36, world
    floats = [cell for cell in matrix.CELLS if not cell.is_exact]
    assert {cell.dtypes for cell in floats} == {cell.dtypes for cell in exact}
    assert {cell.topology for cell in floats} == set(matrix.TOPOLOGIES)
    assert len(set(matrix.CELLS)) == len(matrix.CELLS)


def test_the_document_lists_the_cells_that_there_are() -> None:
    written = DOCUMENT.read_text()
    stale = "docs/equivalence.md is stale: python -m tests.unit_tests.harness.matrix --write docs/equivalence.md"
    assert matrix_document.fingerprint() in written, stale
    for line in (*matrix_document.group_names(), *matrix.HOLES, *matrix_runs.PARAMETERS):
        assert line in written, f"{stale} ({line!r} is missing)"


def test_writing_the_document_again_keeps_what_was_measured_on_other_numbers_of_gpus() -> None:
    written = DOCUMENT.read_text()
    gloo, cuda = matrix_document.gloo_section_of(written), matrix_document.cuda_runs_of(written)
    assert {2, 4} <= cuda.keys()
    assert matrix_document.document(gloo, cuda) == written
    run = {"ranks": 8, "machine": "8 ranks on 4 x GPU as 2 hosts", "seconds": 1, "cells": [], "measures": []}
    late = len(matrix.CELLS) - 1
    new = matrix_document.cuda_runs({"command": "python", "runs": [run | {"not_run": [late]}]})
    page = matrix_document.document(gloo, cuda | new)
    assert matrix_document.cuda_runs_of(page) == cuda | new
    assert f"Not run, for want of time: {matrix.CELLS[late].name}." in page
    assert not matrix_document.cuda_runs_of(page.replace("fingerprint", "other"))


def test_what_was_measured_on_gpus_outlives_a_new_strategy(monkeypatch: pytest.MonkeyPatch) -> None:
    written = DOCUMENT.read_text()
    before = matrix_document.cuda_runs_of(written)
    generations = (*matrix.GENERATIONS, (max(map(max, matrix.GENERATIONS)) + 1,))
    more = matrix.cells_on(matrix.topologies(generations))
    assert set(matrix.CELLS) < set(more)
    monkeypatch.setattr(matrix, "GENERATIONS", generations)
    page = written.replace(matrix_document.fingerprint(), matrix_document.fingerprint(more))
    assert before and matrix_document.cuda_runs_of(written) == matrix_document.cuda_runs_of(page) == before


def test_the_matrix_has_every_strategy() -> None:
    assert sorted(itertools.chain(*matrix.GENERATIONS)) == list(STRATEGIES)
    assert [number for number, name in enumerate(RESTING) if plan_for(name).gathers_weights] == [*matrix.INSIDE_OPTIM]
