"""The engine on GPUs: the same results as one GPU, and between steps nothing but shards."""

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.unit_tests.harness.rank_pool import import_paths

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]
JOB = Path(__file__).with_name("job.py")


def launch(job: str, *arguments: tuple, ranks: int = 2, **variables: str) -> list[Any]:
    """Results of the job for each tuple of arguments, in one torchrun with these environment variables."""
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(ranks),
        str(JOB),
        job,
    ]
    paths = os.pathsep.join(filter(None, (*import_paths(), os.environ.get("PYTHONPATH"))))
    done = subprocess.run(
        [*command, *map(json.dumps, arguments)], env={**os.environ, "PYTHONPATH": paths, **variables},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    line = next(line for line in done.stdout.splitlines() if line.startswith("RESULTS "))
    return json.loads(line.removeprefix("RESULTS "))


def test_gradients_and_norms_equal_one_gpu() -> None:
    cases = list(itertools.product(range(4), (False, True), (False, True)))
    for case, error in zip(cases, launch("parity", *cases), strict=True):
        assert error < 1e-5, case


def test_bf16_training_is_the_same_under_every_strategy() -> None:
    cases = list(itertools.product(range(4), ("float32", "bfloat16")))
    curves = launch("low_precision", *cases)
    for case, curve in zip(cases, curves, strict=True):
        assert curve[-1] < 0.9 * curve[0], case  # a gradient lost on its way would leave the loss where it was
        # Numbers that are rounded to bf16 on their way differ; weights and gradients are otherwise the same.
        torch.testing.assert_close(torch.tensor(curve), torch.tensor(curves[0]), rtol=2e-3, atol=0, msg=str(case))


def test_gradients_of_linear_layers_are_computed_where_they_are_reduced_from() -> None:
    in_bf16, in_fp32 = launch("in_place", ("bfloat16",), ("float32",))
    for found in (in_bf16, in_fp32):
        assert found["lent"]["weights"] == 6 * (1 + 1)  # the embedding's and, in the root, the output layer's
        assert found["copied"]["weights"] == 6 * (1 + 2 * 6 + 1)
    assert in_bf16["lent"]["losses"] == in_bf16["copied"]["losses"]  # the same products
    # These are not rounded to bf16 before they are summed.
    torch.testing.assert_close(*(torch.tensor(in_fp32[way]["losses"]) for way in in_fp32), rtol=2e-3, atol=0)


def test_low_precision_gradients_are_scaled_in_fp32_and_rounded_once() -> None:
    assert launch("scaled", ("clip_grad_norm_",), ("scale_gradients",)) == [0, 0]


def test_a_step_is_bitwise_reproducible() -> None:
    first, second = launch("low_precision", (3, "bfloat16"), (3, "bfloat16"))
    assert first == second


def test_the_overlap_report_reads_the_streams() -> None:
    for strategy, figures in zip((1, 3), launch("overlap", (1,), (3,)), strict=True):
        assert figures["compute_ms"] > 0 and figures["gather_ms"] > 0 and figures["reduce_ms"] > 0, (strategy, figures)
        assert figures["least_ms"] >= 0 and figures["allocated"] > 0, (strategy, figures)
        assert figures["compute_ms"] + figures["exposed_ms"] <= figures["elapsed_ms"], (strategy, figures)


def test_between_steps_a_rank_holds_its_buffers_and_nothing_else() -> None:
    for strategy, memory in zip(range(4), launch("resting_memory", (0,), (1,), (2,), (3,)), strict=True):
        assert memory["excess"] < 0.02, (strategy, memory)
        # Under strategy 3: two gathered units, two with gradients on their way in fp32, one with autograd's gradients.
        if strategy == 3:
            assert memory["peak_units"] < 2 + 2 * 2 + 1 + 1, memory
