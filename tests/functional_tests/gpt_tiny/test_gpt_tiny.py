"""A GPT sharded over two processes, from the command line, follows the curve of one process that shards nothing."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.functional_tests.compare_golden import problems, read_golden, read_log
from tests.unit_tests.harness.rank_pool import REPO_ROOT, import_paths

HERE = Path(__file__).parent
RTOL_LOSS, RTOL_NORM = 1e-3, 1e-2
"""Several times what processors with and without bf16 instructions differ by."""


def torchrun(*flags: str) -> subprocess.CompletedProcess:
    """`pretrain_gpt.py` on two gloo processes."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(import_paths()),
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
    }
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "pretrain_gpt.py",
    ]
    return subprocess.run(
        [*command, *flags], cwd=REPO_ROOT, env=environment, capture_output=True, text=True, timeout=120
    )


def test_two_processes_follow_one():
    done = torchrun("--yaml-cfg", str(HERE / "config.yaml"))
    assert done.returncode == 0, done.stderr
    curve, golden = read_log(done.stdout), read_golden(HERE / "golden.json", "gpt_tiny")
    assert problems(curve, golden, RTOL_LOSS, iterations=10) == []
    for iteration, expected in golden.items():
        assert curve[iteration].grad_norm == pytest.approx(expected.grad_norm, rel=RTOL_NORM)
