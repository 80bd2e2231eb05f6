"""The comparison of loss curves, from curves."""

import importlib
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


@pytest.fixture(scope="module")
def losses():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        yield importlib.import_module("losses")


def test_each_curve_is_compared_with_fsdp2_and_with_the_plain_schedule(losses):
    plain = [12.0, 8.0, 4.4]
    runs = {"fsdp2": [12.0, 8.0, 4.0], "plain": plain, "ours": plain, "ours-resident": [12.0, 8.1, 4.0]}
    lines = losses.table({"bf16": runs, "fp32": runs | {"fsdp2": [12.0, 8.0, 3.0]}}).splitlines()
    assert lines[2:6] == [
        "| bf16 | fsdp2 | 12.00000, 8.00000, 4.00000 |  |  |",
        "| bf16 | plain | 12.00000, 8.00000, 4.40000 | 1.0e-01 |  |",
        "| bf16 | ours | 12.00000, 8.00000, 4.40000 | 1.0e-01 | all |",
        "| bf16 | ours-resident | 12.00000, 8.10000, 4.00000 | 1.2e-02 | no |",
    ]
    assert lines[-1] == "fsdp2 with bf16 and fp32 gradients: 3.3e-01 apart."


def test_what_each_run_is_told_is_understood(losses):
    for told in losses.RUNS.values():
        assert losses.bench_parser().parse_args(list(told)).engine in ("fsdp2", "ours")
