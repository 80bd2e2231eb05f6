"""Runs the equivalence matrix and writes docs/equivalence.md from what was measured."""

import argparse
import hashlib
import json
import os
import platform
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from tests.unit_tests.harness import matrix, matrix_runs
from tests.unit_tests.harness.matrix import Bound, Cell, Topology
from tests.unit_tests.harness.matrix_runs import Measure
from tests.unit_tests.harness.rank_pool import RankPool, import_paths

COMMAND = "python -m tests.unit_tests.harness.matrix --write docs/equivalence.md"
_ON_GLOO, _ON_GPUS, _HOLES = "## On gloo", "## On GPUs", "## Holes"
_NO_CUDA = "Not run for this page. `tests/unit_tests/cuda/test_equivalence.py` runs the same cells and says how."


def fingerprint(cells: Sequence[Cell] = matrix.CELLS) -> str:
    """Changes with the enumeration."""
    digest = hashlib.sha256("\n".join(cell.name for cell in cells).encode()).hexdigest()
    return f"{len(cells)} cells, fingerprint {digest[:16]}"


def is_of_these_cells(page: str) -> bool:
    """True if all cells of `page` are cells still: it is of these, or from before some strategies were there."""
    counts = range(1, len(matrix.GENERATIONS) + 1)
    earlier = (matrix.cells_on(matrix.topologies(matrix.GENERATIONS[:count])) for count in counts)
    return any(fingerprint(cells) in page for cells in earlier)


def groups(cells: Sequence[Cell]) -> Iterator[tuple[Topology, Bound, list[int]]]:
    """Cells of a topology in one class, by their places in `cells`: one row of the document."""
    for is_exact in (True, False):
        for topology in matrix.TOPOLOGIES:
            for bound in matrix.BOUNDS:
                places = [
                    place
                    for place, cell in enumerate(cells)
                    if (cell.is_exact, cell.topology, matrix.bound_of(cell)) == (is_exact, topology, bound)
                ]
                if places:
                    yield topology, bound, places


def group_names() -> list[str]:
    """The beginnings of all rows, with the number of cells in each."""
    return [row_name(topology, bound, len(places)) for topology, bound, places in groups(matrix.CELLS)]


def row_name(topology: Topology, bound: Bound, count: int) -> str:
    """Topology, class and number of cells."""
    return f"| {topology.name} | {class_name(bound)} | {count} |"


def class_name(bound: Bound) -> str:
    """The letter under which a bound is explained."""
    return "ABCDEF"[matrix.BOUNDS.index(bound)]


def table(cells: Sequence[Cell], measures: Sequence[Measure]) -> list[str]:
    """The rows of one run of the matrix."""
    lines = [
        "| topology | class | cells | bitwise equal | largest absolute | largest relative | bound | where |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for topology, bound, places in groups(cells):
        found = [measures[place] for place in places]
        worst = max(found, key=lambda one: one.relative)
        bitwise = "all" if all(one.is_bitwise for one in found) else str(sum(one.is_bitwise for one in found))
        absolute = max(one.absolute for one in found)
        wanted = "bitwise" if bound.relative == 0 else f"{bound.relative:.0e}"
        name = row_name(topology, bound, len(places))
        lines.append(f"{name} {bitwise} | {absolute:.2g} | {worst.relative:.2g} | {wanted} | {worst.where} |")
    return lines


def run_everything() -> list[Measure]:
    """Every cell on gloo, in the order of `matrix.CELLS`."""
    pools = [RankPool(world) for world in matrix.WORLDS]
    try:
        *small, eight = pools
        for pool in small:
            pool.run(matrix_runs.run_cells, [])  # started one after the other, then busy at the same time
        with ThreadPoolExecutor(len(small)) as threads:
            by_cell = {cell: one for found in threads.map(_run_world, small) for cell, one in found.items()}
        by_cell |= _run_world(eight)  # slow enough by itself
    finally:
        for pool in pools:
            pool.close()
    return [by_cell[cell] for cell in matrix.CELLS]


def _run_world(pool: RankPool) -> dict[Cell, Measure]:
    cells = [cell for cell in matrix.CELLS if cell.topology.world == pool.world_size]
    found: list[Measure] = []
    for start in range(0, len(cells), 32):
        some = cells[start : start + 32]
        found += matrix_runs.measured(some, pool.run(matrix_runs.run_cells, some, timeout_s=300))
    return dict(zip(cells, found, strict=True))


def document(gloo: Sequence[str], cuda: Mapping[int, Sequence[str]]) -> str:
    """The whole text, with what gloo gave, and GPUs by number of ranks."""
    lines = [*_introduction(), "", _ON_GLOO, "", *gloo, "", _ON_GPUS, ""]
    for _, run in sorted(cuda.items()):
        lines += [*run, ""]
    lines += [] if cuda else [_NO_CUDA, ""]
    lines += [_HOLES, "", "Nothing else is known to be left out.", "", *(f"- {hole}" for hole in matrix.HOLES)]
    return "\n".join(lines) + "\n"


def gloo_section(measures: Sequence[Measure]) -> list[str]:
    """Results of this machine."""
    where = f"{platform.machine()} CPU, torch {torch.__version__}, Python {platform.python_version()}"
    return [f"`{COMMAND}`, {where}:", "", *table(matrix.CELLS, measures)]


def gloo_section_of(page: str) -> list[str]:
    """Results that an earlier run put into `page`.

    Raises:
        ValueError: it was of other cells.
    """
    if fingerprint() not in page:
        raise ValueError(f"expected a page of {fingerprint()}; write it anew, without --keep-gloo")
    return page.split(f"{_ON_GLOO}\n\n")[1].split(f"\n\n{_ON_GPUS}")[0].split("\n")


def _introduction() -> list[str]:
    parameters = [f"| `{name}` | {oddity} |" for name, oddity in matrix_runs.PARAMETERS.items()]
    classes = [
        f"| {class_name(bound)} | {f'{bound.relative:.0e}' if bound.relative else 'bitwise'} | {bound.reason} |"
        for bound in matrix.BOUNDS
    ]
    return [
        "# Equivalence with one process",
        "",
        "What sharded training computes, compared with a plain loop in one process. A command that runs all cells "
        "writes the page; `tests/unit_tests/gloo/equivalence/test_equivalence.py` runs every fifth of those on up to 4 "
        "ranks, and all, those on 8 too, with `MEGATRON_FSDP_ALL_CELLS=1`; `tests/unit_tests/pure/test_matrix.py` "
        "fails if the page is stale.",
        "",
        f"There are {fingerprint()}. Each trains {matrix.STEPS} steps; after each step all losses, every whole "
        "gradient and every whole weight are compared. The reference neither shards nor recomputes.",
        "",
        "Integers: model, inputs, loss and optimizer (the sign of the gradient) are such that all numbers are small "
        "integers, over a power of two; the reference computes them in fp64. The full product of topology, "
        "accumulation (1, 3), recomputation (none, reentrant, non-reentrant) and communication dtype (fp32, bf16, "
        "None) is run, and on 2 ranks every strategy with all 36 combinations of compute (fp32, bf16), main-parameter "
        "(fp32, None), main-gradient and communication dtype (fp32, bf16, None). Floats: the same model with tanh, "
        "normally distributed numbers and SGD with momentum.",
        "",
        "The reference of an integer cell depends on the number of ranks and micro-batches, not on how ranks are "
        "arranged. So where all integer cells of 8 ranks are bitwise equal to it, HSDP and HFSDP on 2 x 4 ranks train "
        "to the bit as FSDP on 8 does (and on 2 x 2 as on 4), whatever the strategy, the dtypes and the recomputation.",
        "",
        "On GPUs, 8 ranks on 4 GPUs are two hosts of 4 ranks that share them: within a host NCCL uses NVLink, between "
        "hosts (the outer axis of 2 x 4) loopback sockets (`tests/unit_tests/cuda/hosts.py`).",
        "",
        "Every cell trains all of these parameters at once, two layers of them:",
        "",
        "| parameter | what is odd |",
        "|---|---|",
        *parameters,
        "",
        "Relative differences are to the largest loss, gradient or weight of the step, whichever it is. Classes:",
        "",
        "| class | bound | reason |",
        "|---|---|---|",
        *classes,
    ]


def cuda_runs(cuda: Mapping[str, Any]) -> dict[int, list[str]]:
    """Results of GPUs, by number of ranks."""
    sections = {}
    for run in cuda["runs"]:
        cells = [matrix.CELLS[place] for place in run["cells"]]
        lines = [f"`{cuda['command']}`, {run['machine']}, {run['seconds']:.0f} s:", ""]
        lines += table(cells, [Measure(**one) for one in run["measures"]])
        if run["not_run"]:
            names = "; ".join(matrix.CELLS[place].name for place in run["not_run"])
            lines += ["", f"Not run, for want of time: {names}."]
        sections[run["ranks"]] = lines
    return sections


def cuda_runs_of(page: str) -> dict[int, list[str]]:
    """Results of earlier runs on GPUs in `page`, by number of ranks; empty if they were of other cells."""
    if not is_of_these_cells(page):
        return {}
    text = page.split(f"{_ON_GPUS}\n\n")[1].split(f"\n\n{_HOLES}")[0]
    runs = re.split(r"\n\n(?=`)", text)
    numbers = [re.match(r"`[^`]+`, (\d+) (?:x|ranks on) ", run) for run in runs]
    return {int(number[1]): run.split("\n") for number, run in zip(numbers, runs, strict=True) if number}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", type=Path, required=True, help="the document")
    parser.add_argument("--cuda-results", type=Path, help="what cuda/test_equivalence.py wrote; other runs are kept")
    parser.add_argument("--keep-gloo", action="store_true", help="run nothing: keep what the document has of gloo")
    arguments = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.path[:0] = [path for path in import_paths() if path not in sys.path]
    cuda = json.loads(arguments.cuda_results.read_text()) if arguments.cuda_results else None
    if cuda and cuda["fingerprint"] != fingerprint():
        sys.exit(f"expected results of {fingerprint()}; came those of {cuda['fingerprint']}")
    page = arguments.write.read_text() if arguments.write.exists() else ""
    measures = [] if arguments.keep_gloo else run_everything()
    gloo = gloo_section_of(page) if arguments.keep_gloo else gloo_section(measures)
    if page and not is_of_these_cells(page):
        sys.stderr.write("the page was of other cells: what it has of GPUs is dropped\n")
    arguments.write.write_text(document(gloo, cuda_runs_of(page) | (cuda_runs(cuda) if cuda else {})))
    wrong = matrix_runs.failures(matrix.CELLS, measures) if measures else []
    sys.exit("\n".join(wrong) if wrong else 0)
