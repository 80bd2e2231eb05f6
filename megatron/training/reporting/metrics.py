"""Metrics of a run: one record per report, and the log line that it makes."""

import sys
import time
from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime
from typing import Protocol

import torch

from megatron.training.callbacks import Callback
from megatron.training.evaluate import Evaluation
from megatron.training.optim import current_lr
from megatron.training.state import Run, is_due
from megatron.training.step import LOSS, StepResult
from megatron_fsdp.optim.grad_norm import counted_here, total_norm


@dataclass(frozen=True, kw_only=True)
class Record:
    """The steps since the last report; fields are off if None."""

    iteration: int
    train_iters: int
    consumed_samples: int
    step_time_s: float
    """Per step; evaluations and checkpoints do not count."""
    tflops_per_gpu: float | None
    """TFLOP/s per GPU."""
    learning_rate: float
    """Of the next step, as Megatron-LM reports it."""
    global_batch_size: int
    loss: float | None
    """Mean over the steps that updated; None if there was none."""
    loss_scale: float
    grad_norm: float | None
    """Of the last step, before clipping; None if it was skipped."""
    num_zeros: int | None
    params_norm: float | None
    skipped: int
    """Steps without an update."""
    not_finite: int
    """Steps whose loss was NaN or infinite."""
    tokens_per_s: float
    """Over all ranks."""


def format_line(record: Record, now: datetime) -> str:
    """Megatron-LM's log line; tools read it, so every blank counts."""
    parts = [
        f" [{now.strftime('%Y-%m-%d %H:%M:%S.%f')}] iteration {record.iteration:8d}/{record.train_iters:8d}",
        f"consumed samples: {record.consumed_samples:12d}",
        f"elapsed time per iteration (ms): {record.step_time_s * 1000:.1f}",
        _part("throughput per GPU (TFLOP/s/GPU): {:.1f}", record.tflops_per_gpu),
        f"learning rate: {record.learning_rate:.6E}",
        f"global batch size: {record.global_batch_size:5d}",
        _part(LOSS + ": {:.6E}", record.loss),
        f"loss scale: {record.loss_scale:.1f}",
        _part("grad norm: {:.3f}", record.grad_norm),
        _part("num zeros: {:d}", record.num_zeros),
        _part("params norm: {:.3f}", record.params_norm),
        f"number of skipped iterations: {record.skipped:3d}",
        f"number of nan iterations: {record.not_finite:3d}",
    ]
    return " | ".join(part for part in parts if part) + " |"


def _part(template: str, value: float | None) -> str:
    return "" if value is None else template.format(value)


def format_evaluation(evaluation: Evaluation) -> str:
    """Megatron-LM's line for an evaluation."""
    return (
        f" validation loss at {evaluation.place} | {LOSS} value: {evaluation.loss:.6E} | "
        f"{LOSS} PPL: {evaluation.perplexity:.6E} |"
    )


class Totals:
    """Sums over the steps since the last report, on the device until they are asked for."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.reset()

    def reset(self) -> None:
        """Starts anew."""
        self.steps = self.updates = 0
        self.elapsed_s = 0.0
        self._loss = torch.zeros((), dtype=torch.float64, device=self._device)
        self._not_finite = torch.zeros((), dtype=torch.int64, device=self._device)

    def add(self, result: StepResult) -> None:
        """Counts one step."""
        self.steps += 1
        self.updates += not result.is_skipped
        self._not_finite += ~result.loss.isfinite()
        if not result.is_skipped:
            self._loss += result.loss

    def loss(self) -> float | None:
        """Mean loss of the steps that updated. Waits for the device."""
        return float(self._loss) / self.updates if self.updates else None

    def not_finite(self) -> int:
        """Steps whose loss was NaN or infinite. Waits for the device."""
        return int(self._not_finite)


class Meter(Callback):
    """Measures steps, and hands records and evaluations to this rank's reporters."""

    def __init__(self, reporters: list["Reporter"], params_norm_intervals: Collection[int]) -> None:
        """`params_norm_intervals`: when the norm of the weights is taken, which all ranks must do together."""
        self._reporters = reporters
        self._params_norm_intervals = params_norm_intervals
        self._started_s = 0.0

    def start(self, run: Run) -> None:
        self._totals = {interval: Totals(run.world.device) for interval in {r.interval for r in self._reporters}}
        for reporter in self._reporters:
            reporter.open(run)

    def before_step(self, run: Run) -> None:
        self._started_s = time.perf_counter()

    def after_step(self, run: Run, result: StepResult) -> None:
        due = [interval for interval in self._totals if is_due(interval, run)]
        for totals in self._totals.values():
            totals.add(result)
        if due:
            float(result.loss)  # Work that is still queued on the device belongs to this step.
        elapsed_s = time.perf_counter() - self._started_s
        for totals in self._totals.values():
            totals.elapsed_s += elapsed_s
        params_norm = _params_norm(run) if any(is_due(each, run) for each in self._params_norm_intervals) else None
        for interval in due:
            record = _record(run, result, self._totals[interval], params_norm)
            for reporter in self._reporters:
                if reporter.interval == interval:
                    reporter.report(record)
            self._totals[interval].reset()

    def after_eval(self, run: Run, evaluation: Evaluation) -> None:
        for reporter in self._reporters:
            reporter.report_evaluation(run, evaluation)

    def end(self, run: Run) -> None:
        for reporter in self._reporters:
            reporter.close()


class Reporter:
    """Shows records somewhere; this one shows nothing."""

    def __init__(self, interval: int) -> None:
        self.interval = interval
        """Iterations between records."""

    def open(self, run: Run) -> None:
        """The run begins."""

    def report(self, record: Record) -> None:
        """Shows a record."""

    def report_evaluation(self, run: Run, evaluation: Evaluation) -> None:
        """Shows an evaluation."""

    def close(self) -> None:
        """The run is over."""


class LiveDisplay(Protocol):
    """Something that redraws itself at the bottom of the terminal."""

    def print_above(self, text: str) -> None:
        """Writes a line that stays."""


class Console:
    """Writes lines on standard output."""

    def __init__(self) -> None:
        self.display: LiveDisplay | None = None
        """The display below the lines, while there is one."""

    def line(self, text: str) -> None:
        """Writes one line, at once."""
        if self.display is not None:
            self.display.print_above(text)
            return
        sys.stdout.write(text + "\n")
        sys.stdout.flush()


class LogLines(Reporter):
    """Megatron-LM's lines on standard output."""

    def __init__(self, interval: int, console: Console) -> None:
        super().__init__(interval)
        self._console = console

    def report(self, record: Record) -> None:
        self._console.line(format_line(record, datetime.now()))

    def report_evaluation(self, run: Run, evaluation: Evaluation) -> None:
        self._console.line(format_evaluation(evaluation))


def _record(run: Run, result: StepResult, totals: Totals, params_norm: float | None) -> Record:
    step_time_s = totals.elapsed_s / totals.steps
    plan, logger = run.plan, run.config.logger
    tflops = plan.flops_per_step / (step_time_s * plan.world_size * 1e12)
    return Record(
        iteration=run.state.iteration,
        train_iters=plan.train_iters,
        consumed_samples=run.state.consumed_train_samples,
        step_time_s=step_time_s,
        tflops_per_gpu=tflops if logger.log_throughput else None,
        learning_rate=current_lr(run.optimizer),
        global_batch_size=plan.global_batch_size,
        loss=totals.loss(),
        loss_scale=float(run.optimizer.get_loss_scale()),
        grad_norm=None if result.grad_norm is None else float(result.grad_norm),
        num_zeros=None if result.num_zeros is None else int(result.num_zeros),
        params_norm=params_norm,
        skipped=totals.steps - totals.updates,
        not_finite=totals.not_finite(),
        tokens_per_s=plan.tokens_per_step / step_time_s,
    )


def _params_norm(run: Run) -> float:
    """The 2-norm of all main weights. **Collective.**"""
    weights = counted_here(run.model.parameters())
    return float(total_norm(weights, [run.optimizer.get_grad_stats_parallel_group()], run.world.device))
