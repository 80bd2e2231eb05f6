"""The equivalence matrix with NCCL on 2, 4 and 8 ranks, HSDP and HFSDP on 2 x 2 and 2 x 4 among them.

With fewer than 8 GPUs the 8 ranks are two hosts that share 4 (`hosts.py`).
On one machine with 4 GPUs, from the root of the repository (less than 8 minutes):

    EQUIVALENCE_RESULTS=RESULTS python -m pytest -s -m cuda tests/unit_tests/cuda/test_equivalence.py

and then, there or elsewhere (what the page has of other numbers of ranks stays):

    python -m tests.unit_tests.harness.matrix --keep-gloo --write docs/equivalence.md --cuda-results RESULTS
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.unit_tests.cuda.hosts import Agents, Hosts, hosts_of
from tests.unit_tests.harness import matrix, matrix_document, matrix_runs
from tests.unit_tests.harness.matrix_runs import Measure
from tests.unit_tests.harness.rank_pool import import_paths

#: Seconds in which cells may start, by number of ranks.
SECONDS = {2: 70, 4: 100, 8: 150}
#: For starting the ranks and for the last cells.
GRACE_S = 60


def results_path() -> Path:
    """Folder of the results of all runs."""
    return Path(os.environ.get("EQUIVALENCE_RESULTS") or Path(tempfile.gettempdir()) / "equivalence_cuda.json")


def launch(hosts: Hosts, device: str, seconds: int, stride: int, folder: Path) -> dict[str, Any]:
    """Results that the job's first rank wrote into `folder`; whatever happens, no process stays behind."""
    results, log = folder / "results.json", folder / "log"
    arguments = ["-m", "tests.unit_tests.cuda.equivalence_job", device, str(seconds), str(stride), str(results)]
    paths = [*import_paths(), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1"}
    if device == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""  # the engine computes on a GPU wherever there is one
    with log.open("w") as output, hosts.start(arguments, environment, output) as agents:
        failure = agents.failure(seconds + GRACE_S)
    assert failure is None, f"{failure}:\n{log.read_text()[-6000:]}"
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
    lines = [f"{found['machine']}: {counts}", *matrix_document.table(cells, measures)]
    sys.stdout.write("\n".join(["", *lines, ""]))
    return matrix_runs.failures(cells, measures)


@pytest.mark.cuda
@pytest.mark.parametrize("ranks", SECONDS)
def test_every_cell_equals_one_gpu(ranks: int, tmp_path: Path) -> None:
    hosts = hosts_of(ranks, torch.cuda.device_count())
    if hosts is None:
        pytest.skip(f"{ranks} ranks need {min(ranks, 4)} CUDA devices; there are {torch.cuda.device_count()}")
    found = launch(hosts, "cuda", SECONDS[ranks], 1, tmp_path)
    record(found)
    wrong = report(found)
    assert not wrong, f"{len(wrong)} cells differ from one GPU:\n" + "\n".join(wrong[:20])


def test_the_job_runs_on_the_cpu_too_as_two_hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EQUIVALENCE_RESULTS", str(tmp_path / "all.json"))
    found = launch(Hosts(2, 1), "cpu", 60, 24, tmp_path)
    assert found["cells"] and not found["not_run"] and not report(found)
    record(found)
    record(found)
    written = json.loads(results_path().read_text())
    assert len(written["runs"]) == 1
    (page,) = matrix_document.cuda_runs(written).values()
    assert "2 ranks on 1 x " in page[0] and " as 2 hosts, " in page[0]


def test_when_an_agent_fails_or_time_is_up_no_agent_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.unit_tests.cuda.hosts.PEER_GRACE_S", 0.2)
    for ends, timeout_s, why in ((True, 60, "exit codes are [3, None]"), (False, 0.2, "no end within 0.2 s")):
        commands = ["exit 3" if ends else "exec sleep 60", "exec sleep 60"]
        processes = [subprocess.Popen(command, shell=True, start_new_session=True) for command in commands]
        with Agents(processes) as agents:
            assert why in (agents.failure(timeout_s) or "")
        assert None not in [process.poll() for process in processes]


@pytest.mark.parametrize(
    ("ranks", "gpus", "hosts"),
    [(2, 4, Hosts(1, 2)), (4, 2, None), (8, 3, None), (8, 4, Hosts(2, 4)), (8, 7, Hosts(2, 4)), (8, 8, Hosts(1, 8))],
)
def test_only_eight_ranks_share_gpus(ranks: int, gpus: int, hosts: Hosts | None) -> None:
    assert hosts_of(ranks, gpus) == hosts
