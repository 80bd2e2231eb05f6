"""The equivalence matrix with NCCL on 2 and 4 GPUs, HSDP and HFSDP on 2 x 2 among them.

On one machine with 4 GPUs, from the root of the repository (less than 4 minutes):

    EQUIVALENCE_RESULTS=equivalence_cuda.json python -m pytest -s -m cuda tests/unit_tests/cuda/test_equivalence.py

and then, there or elsewhere, for docs/equivalence.md:

    python -m tests.unit_tests.harness.matrix --write docs/equivalence.md --cuda-results equivalence_cuda.json
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.unit_tests.harness import matrix, matrix_document, matrix_runs
from tests.unit_tests.harness.matrix_runs import Measure
from tests.unit_tests.harness.rank_pool import REPO_ROOT, import_paths

#: Seconds in which cells may start, by number of ranks.
SECONDS = {2: 70, 4: 100}
#: For starting the ranks and for the last cells.
GRACE_S = 60


def results_path() -> Path:
    """Where results of all runs are gathered."""
    return Path(os.environ.get("EQUIVALENCE_RESULTS") or Path(tempfile.gettempdir()) / "equivalence_cuda.json")


def launch(ranks: int, device: str, seconds: int, stride: int, results: Path) -> dict[str, Any]:
    """What the job's first rank wrote; whatever happens, no process stays behind."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command += ["-m", "tests.unit_tests.cuda.equivalence_job", device, str(seconds), str(stride), str(results)]
    paths = [*import_paths(), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1"}
    if device == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""  # the engine computes on a GPU wherever there is one
    process = subprocess.Popen(
        command, cwd=REPO_ROOT, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        start_new_session=True,
    )  # fmt: skip
    try:
        output, _ = process.communicate(timeout=seconds + GRACE_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        raise AssertionError(f"no answer within {seconds + GRACE_S} s:\n{output[-4000:]}") from None
    assert process.returncode == 0, output[-6000:]
    return json.loads(results.read_text())


def record(found: dict[str, Any]) -> None:
    """Puts a run in the place of an earlier one on as many ranks."""
    path = results_path()
    known = json.loads(path.read_text()) if path.exists() else {}
    if known.get("fingerprint") != matrix_document.fingerprint():
        known = {"runs": []}  # of other cells
    runs = [run for run in known["runs"] if run["ranks"] != found["ranks"]]
    command = "python -m pytest -s -m cuda tests/unit_tests/cuda/test_equivalence.py"
    all_runs = sorted([*runs, found], key=lambda run: run["ranks"])
    path.write_text(json.dumps({"command": command, "fingerprint": matrix_document.fingerprint(), "runs": all_runs}))


def report(found: dict[str, Any]) -> list[str]:
    """Prints the table; the cells that are not as equal as they must be."""
    cells = [matrix.CELLS[place] for place in found["cells"]]
    measures = [Measure(**one) for one in found["measures"]]
    counts = f"{len(cells)} cells in {found['seconds']:.0f} s, {len(found['not_run'])} not run"
    lines = [f"{found['ranks']} x {found['machine']}: {counts}", *matrix_document.table(cells, measures)]
    sys.stdout.write("\n".join(["", *lines, ""]))
    return matrix_runs.failures(cells, measures)


@pytest.mark.cuda
@pytest.mark.parametrize("ranks", [2, 4])
def test_every_cell_equals_one_gpu(ranks: int, tmp_path: Path) -> None:
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} CUDA devices")
    found = launch(ranks, "cuda", SECONDS[ranks], 1, tmp_path / "results.json")
    record(found)
    wrong = report(found)
    assert not wrong, f"{len(wrong)} cells differ from one GPU:\n" + "\n".join(wrong[:20])


def test_the_job_runs_on_the_cpu_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EQUIVALENCE_RESULTS", str(tmp_path / "all.json"))
    found = launch(2, "cpu", 60, 24, tmp_path / "results.json")
    assert found["cells"] and not found["not_run"] and not report(found)
    record(found)
    record(found)
    written = json.loads(results_path().read_text())
    assert len(written["runs"]) == 1
    assert "2 x " in "\n".join(matrix_document.cuda_section(written))
