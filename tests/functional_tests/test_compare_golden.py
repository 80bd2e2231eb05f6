"""The comparison with recorded losses, on made-up logs."""

import json

import pytest

from megatron.training.config import load_config
from tests.functional_tests.compare_golden import GOLDEN, main, read_golden, read_log

LINE = (
    " [2026-11-21 01:22:09.339653] iteration {:8d}/      20 | consumed samples:            8 | elapsed time per "
    "iteration (ms): 43.6 | learning rate: 6.000000E-05 | global batch size:     8 | lm loss: {:.6E} | "
    "loss scale: 1.0 | grad norm: {:.3f} | number of skipped iterations:   0 | number of nan iterations:   0 |"
)


def fake_log(tmp_path, factor=1.0, leave_out=()):
    """The log of a run that is off by `factor` everywhere."""
    golden = read_golden(GOLDEN, "tiny_fsdp")
    lines = [
        LINE.format(iteration, step.loss * factor, step.grad_norm)
        for iteration, step in golden.items()
        if iteration not in leave_out
    ]
    path = tmp_path / "log"
    path.write_text("\n".join(["W1121 some warning", *lines, " validation loss at iteration 20 | lm loss value: 1 |"]))
    return path


def test_reads_every_line_of_a_log(tmp_path):
    assert read_log(fake_log(tmp_path).read_text()) == pytest.approx(read_golden(GOLDEN, "tiny_fsdp"))


def test_accepts_what_is_within_the_tolerance(tmp_path, capsys):
    assert main([str(fake_log(tmp_path, factor=1.0015))]) == 0
    assert "tiny_fsdp: 10 iterations compared, largest deviation 1.5e-03" in capsys.readouterr().out


def test_names_what_is_off_and_what_is_missing(tmp_path, capsys):
    assert main([str(fake_log(tmp_path, factor=1.003, leave_out=(4,))), "--iterations", "5"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 6 and "iteration 4 is missing" in lines
    assert lines[0].startswith("iteration 1: lm loss 6.979702, expected 6.958826; off by 3.0e-03")


def test_an_empty_log_is_not_good_enough(tmp_path):
    (tmp_path / "log").write_text("Traceback (most recent call last):")
    assert main([str(tmp_path / "log")]) == 1


def test_the_recorded_flags_are_still_accepted(capsys):
    for run in json.loads(GOLDEN.read_text())["runs"]:
        assert main(["--show-flags", run]) == 0
        load_config(capsys.readouterr().out.split())
