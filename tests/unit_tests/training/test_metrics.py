"""The log line, character by character; sums between reports; TensorBoard's points; words of the live progress."""

import dataclasses
from datetime import datetime

import pytest
import torch

from megatron.training.config.schema import LoggerConfig
from megatron.training.evaluate import Evaluation
from megatron.training.reporting.metrics import Console, Record, Totals, format_evaluation, format_line
from megatron.training.reporting.progress import LiveProgress, figures
from megatron.training.reporting.tensorboard import points
from megatron.training.step import StepResult

RECORD = Record(
    iteration=40,
    train_iters=40,
    consumed_samples=1280,
    step_time_s=0.1437,
    tflops_per_gpu=24.6,
    learning_rate=3e-5,
    global_batch_size=32,
    loss=8.729829e-02,
    loss_scale=1.0,
    grad_norm=0.418,
    num_zeros=0,
    params_norm=None,
    skipped=0,
    not_finite=0,
    tokens_per_s=228_000.0,
)
NOW = datetime(2026, 11, 21, 1, 22, 9, 339653)


def test_the_log_line_is_megatron_lms():
    assert format_line(RECORD, NOW) == (
        " [2026-11-21 01:22:09.339653] iteration       40/      40 | consumed samples:         1280 | "
        "elapsed time per iteration (ms): 143.7 | throughput per GPU (TFLOP/s/GPU): 24.6 | "
        "learning rate: 3.000000E-05 | global batch size:    32 | lm loss: 8.729829E-02 | "
        "loss scale: 1.0 | grad norm: 0.418 | num zeros: 0 | "
        "number of skipped iterations:   0 | number of nan iterations:   0 |"
    )


def test_fields_that_are_off_are_left_out_and_the_order_stays():
    off = dataclasses.replace(RECORD, tflops_per_gpu=None, loss=None, grad_norm=None, num_zeros=None, params_norm=7.25)
    assert format_line(off, NOW) == (
        " [2026-11-21 01:22:09.339653] iteration       40/      40 | consumed samples:         1280 | "
        "elapsed time per iteration (ms): 143.7 | learning rate: 3.000000E-05 | global batch size:    32 | "
        "loss scale: 1.0 | params norm: 7.250 | number of skipped iterations:   0 | number of nan iterations:   0 |"
    )


def test_the_line_of_an_evaluation():
    evaluation = Evaluation(split="validation", place="iteration 40", loss=0.087, is_final=False)
    assert format_evaluation(evaluation) == (
        " validation loss at iteration 40 | lm loss value: 8.700000E-02 | lm loss PPL: 1.090897E+00 |"
    )
    assert dataclasses.replace(evaluation, loss=1e6).perplexity < 1e9


def result(loss: float, *, is_skipped: bool = False) -> StepResult:
    return StepResult(loss=torch.tensor(loss), is_skipped=is_skipped, grad_norm=None, num_zeros=None)


def test_totals_average_over_the_steps_that_updated():
    totals = Totals(torch.device("cpu"))
    for each in (result(1.0), result(float("inf"), is_skipped=True), result(2.0)):
        totals.add(each)
    assert (totals.steps, totals.updates, totals.loss(), totals.not_finite()) == (3, 2, 1.5, 1)
    totals.reset()
    assert (totals.steps, totals.loss(), totals.not_finite()) == (0, None, 0)


def test_tensorboard_leaves_out_what_is_off():
    plain = dict(points(RECORD, LoggerConfig(log_loss_scale_to_tensorboard=False)))
    assert "loss-scale" not in plain and plain["params-norm"] is None
    assert plain["iteration-time"] == pytest.approx(0.1437) and plain["tokens-per-second"] == 228_000
    assert dict(points(RECORD, LoggerConfig()))["loss-scale"] == 1.0


def test_live_progress_says_loss_speed_and_time_left():
    half = dataclasses.replace(RECORD, iteration=20, train_iters=7220)
    assert figures(half, 0.5) == "loss 0.0873  228,000 tokens/s  1:00:00 left"
    assert figures(dataclasses.replace(RECORD, loss=None), 0.5).startswith("skipped")


def test_log_lines_go_above_the_live_progress(capsys):
    console = Console()
    console.line(" a line | with [brackets] |")
    assert capsys.readouterr().out == " a line | with [brackets] |\n"
    progress = LiveProgress(console)
    console.display = progress
    console.line(" a line | with [brackets] |" + 200 * "x")
    assert capsys.readouterr().out == " a line | with [brackets] |" + 200 * "x" + "\n"
