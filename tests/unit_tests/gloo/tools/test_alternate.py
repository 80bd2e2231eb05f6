"""The benchmark that times engines in turns, on a tiny model."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.unit_tests.harness.rank_pool import RankPool

SCRIPT = Path(__file__).parents[4] / "benchmarks/alternate.py"
TINY = ("--size", "tiny", "--seq", "8")


def script() -> Any:
    """The benchmark as a module."""
    spec = importlib.util.spec_from_file_location("alternate", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def measured() -> dict[str, dict[str, Any]]:
    module = script()
    arguments = {
        "nocomm": ("--engine", "nocomm", *TINY),
        "ours": ("--engine", "ours", *TINY, "--accum", "2"),
        "ours-pairs": ("--engine", "ours", *TINY, "--unit-layers", "2"),
    }
    subjects = {name: module.Subject(told, torch.device("cpu")) for name, told in arguments.items()}
    units = {name: len(subject._model._schedule.units) for name, subject in subjects.items() if name != "nocomm"}
    assert units == {"ours": 4, "ours-pairs": 3}, "three layers and the root, and a pair, what is left, and the root"
    return module.measure(subjects, rounds=3, steps=1)


def test_engines_are_timed_in_turns(ranks2: RankPool) -> None:
    found, other = ranks2.run(measured)
    assert found == other
    for figures in found.values():
        assert len(figures["rounds_ms"]) == 3
        phases = [figures[f"{phase}_ms"] for phase in ("forward", "backward", "optimizer")]
        assert all(phase > 0 for phase in phases)
        assert max(phases) <= figures["step_ms"]
        assert figures["ratios"][0] <= figures["ratio"] <= figures["ratios"][1]
    assert found["nocomm"]["ratios"] == [1, 1]


def test_options_that_would_measure_nothing_are_refused(capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit):
        script().parse(["--rounds", "0"])
    assert "--rounds 0 and --steps 12 should be at least 1" in capsys.readouterr().err
