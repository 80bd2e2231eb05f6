"""The benchmark of what an open overlap report costs, on a tiny model."""

import importlib.util
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from tests.unit_tests.harness.rank_pool import RankPool

SCRIPT = Path(__file__).parents[4] / "benchmarks/report_cost.py"


def measured() -> tuple[dict[str, Any], int]:
    """The result, and how many reports were opened."""
    from megatron_fsdp.diagnostics.overlap_report import OverlapReport

    spec = importlib.util.spec_from_file_location("report_cost", SCRIPT)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    script.WARMUP, script.PAIRS = 1, 3
    args = script.fsdp_bench.parser().parse_args(["--engine", "ours", "--size", "tiny", "--seq", "8"])
    with mock.patch.object(OverlapReport, "__enter__", autospec=True, side_effect=OverlapReport.__enter__) as opened:
        return script.measure(args, torch.device("cpu")), opened.call_count


def test_steps_with_a_report_and_without_are_timed_in_turns(ranks2: RankPool) -> None:
    (result, opened), (other, _) = ranks2.run(measured)
    assert result == other and result["ranks"] == 2 and opened == result["pairs"] == 3
    for name, quartiles in result["quartiles"].items():
        assert 0 < quartiles[0] <= quartiles[1] == result[f"{name}_ms"] <= quartiles[2]
