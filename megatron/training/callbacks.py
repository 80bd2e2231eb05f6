"""Five moments of a run at which a feature may act, and the features that are nothing more than that."""

import contextlib
import gc
import logging
from collections.abc import Sequence

from megatron.training.evaluate import Evaluation
from megatron.training.state import Run
from megatron.training.step import StepResult
from megatron_fsdp.diagnostics.overlap_report import OverlapReport

logger = logging.getLogger(__name__)


class Callback:
    """Does nothing; features override the moments that they need. All ranks call all callbacks in the same order."""

    def start(self, run: Run) -> None:
        """Everything is built and loaded; training or evaluation begins."""

    def before_step(self, run: Run) -> None:
        """The next step begins."""

    def after_step(self, run: Run, result: StepResult) -> None:
        """A step is done and counted."""

    def after_eval(self, run: Run, evaluation: Evaluation) -> None:
        """An evaluation is done."""

    def end(self, run: Run) -> None:
        """The run is over, perhaps by an exception."""


class Callbacks(Callback):
    """Several callbacks as one, in order; `end` in the opposite order."""

    def __init__(self, callbacks: Sequence[Callback]) -> None:
        self._callbacks = list(callbacks)

    def start(self, run: Run) -> None:
        for callback in self._callbacks:
            callback.start(run)

    def before_step(self, run: Run) -> None:
        for callback in self._callbacks:
            callback.before_step(run)

    def after_step(self, run: Run, result: StepResult) -> None:
        for callback in self._callbacks:
            callback.after_step(run, result)

    def after_eval(self, run: Run, evaluation: Evaluation) -> None:
        for callback in self._callbacks:
            callback.after_eval(run, evaluation)

    def end(self, run: Run) -> None:
        for callback in reversed(self._callbacks):
            callback.end(run)


class BufferRegistration(Callback):
    """Communication buffers are registered with NCCL after the first step."""

    def __init__(self) -> None:
        self._is_done = False

    def after_step(self, run: Run, result: StepResult) -> None:
        if not self._is_done:
            run.model.param_and_grad_buffer.manual_buffer_registration()
            self._is_done = True


class ManualGarbageCollection(Callback):
    """Python collects garbage at the same steps on every rank, so that no rank makes the others wait at odd times."""

    def __init__(self, interval: int, after_evaluations: bool) -> None:
        self._interval = interval
        self._after_evaluations = after_evaluations

    def start(self, run: Run) -> None:
        gc.disable()
        gc.collect()

    def after_step(self, run: Run, result: StepResult) -> None:
        if self._interval and run.state.iteration % self._interval == 0:
            gc.collect()

    def after_eval(self, run: Run, evaluation: Evaluation) -> None:
        if self._after_evaluations:
            gc.collect()

    def end(self, run: Run) -> None:
        gc.enable()


class OverlapLog(Callback):
    """Every so many iterations the first rank logs what its step spent on computation and on communication."""

    def __init__(self, interval: int) -> None:
        self._interval = interval
        self._report: OverlapReport | None = None
        self._open = contextlib.ExitStack()

    def before_step(self, run: Run) -> None:
        if run.world.is_first and (run.state.iteration + 1) % self._interval == 0:
            self._report = run.model.overlap_report()
            self._open.enter_context(self._report)

    def after_step(self, run: Run, result: StepResult) -> None:
        if self._report is not None:
            self._open.close()
            logger.info("overlap in iteration %d: %s", run.state.iteration, self._report.short())
            self._report = None
