"""On GPUs, with deterministic kernels: 50 iterations and 50 after a resume are 100 in a row, bit for bit."""

import json
import os
import subprocess
import sys

import pytest
import torch

from tests.unit_tests.harness.rank_pool import REPO_ROOT, import_paths

FLAGS = (
    "--num-layers 4 --hidden-size 256 --num-attention-heads 8 --seq-length 256 --swiglu --disable-bias-linear "
    "--normalization RMSNorm --deterministic-mode --data-parallel-sharding-strategy optim_grads_params "
)


def launch(folder: str, iterations: int, flags: str) -> list[dict]:
    """Results of each of two ranks."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "tests.unit_tests.cuda.resume_job", folder, str(iterations), flags]
    paths = os.pathsep.join(filter(None, (*import_paths(), os.environ.get("PYTHONPATH"))))
    done = subprocess.run(
        command, cwd=REPO_ROOT, env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=150, check=False,
    )  # fmt: skip
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert done.returncode == 0 and lines, done.stdout[-2000:] + done.stderr[-4000:]
    return json.loads(lines[-1].removeprefix("RESULT "))


@pytest.mark.cuda
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("precision", ["--bf16", "--fp16 --loss-scale-window 7 --hysteresis 1"])
def test_50_and_50_iterations_are_100_bit_for_bit(precision, tmp_path):
    for rank, found in enumerate(launch(str(tmp_path), 100, FLAGS + precision)):
        assert found["steps"] == [50, 50, 0 if rank else 100] and found["tensors"] > 20
        assert found["differing"] == []
        assert found["losses"][1] < found["losses"][0], "it learns"
