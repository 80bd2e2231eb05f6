"""Reasons to stop before the last iteration, agreed over all ranks."""

import contextlib
import signal
import time
from collections.abc import Iterator
from types import FrameType

from megatron.training.agree import any_rank
from megatron.training.config.schema import TrainConfig
from megatron.training.state import Run

_SECONDS_PER_MINUTE = 60


class Stopper:
    """Knows when this process was started to train and whether it was asked to end."""

    def __init__(self, train: TrainConfig) -> None:
        self._train = train
        self._started_s = time.monotonic()
        self.was_signalled = False
        """This process got SIGTERM."""

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Inside, with `--exit-signal-handler`, SIGTERM is remembered instead of ending the process."""
        if not self._train.exit_signal_handler:
            yield
            return
        before = signal.signal(signal.SIGTERM, self._remember)
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, before)

    def _remember(self, number: int, frame: FrameType | None) -> None:
        self.was_signalled = True

    def reason(self, run: Run) -> str | None:
        """Why the run ends after the current iteration, the same on every rank; None to go on. **Collective.**"""
        train, iteration = self._train, run.state.iteration
        if train.exit_signal_handler and any_rank(self.was_signalled, run.world.device):
            return f"SIGTERM at iteration {iteration}"
        limit = train.exit_duration_in_mins
        if limit is not None and any_rank(self._minutes() > limit, run.world.device):
            return f"--exit-duration-in-mins {limit} at iteration {iteration}"
        if train.exit_interval is not None and iteration % train.exit_interval == 0:
            return f"--exit-interval {train.exit_interval} at iteration {iteration}"
        return None

    def _minutes(self) -> float:
        return (time.monotonic() - self._started_s) / _SECONDS_PER_MINUTE
