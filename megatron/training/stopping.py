"""Reasons to stop before the last iteration, agreed over all ranks."""

import contextlib
import signal
import time
from collections.abc import Iterator
from types import FrameType

from megatron.training.collective_errors import any_rank, largest
from megatron.training.config.schema import TrainConfig
from megatron.training.state import Run

_SECONDS_PER_MINUTE = 60
SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
"""Signals of launchers and schedulers to a run that is to end."""


class Stopper:
    """Knows when this process was started to train and whether it was asked to end."""

    def __init__(self, train: TrainConfig) -> None:
        self._train = train
        self._started_s = time.monotonic()
        self._received = 0  # The number of the signal that this process got.

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Inside, with `--exit-signal-handler`, `SIGNALS` are remembered instead of ending the process."""
        if not self._train.exit_signal_handler:
            yield
            return
        before = {number: signal.signal(number, self._remember) for number in SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _remember(self, number: int, frame: FrameType | None) -> None:
        self._received = number

    def signalled(self, run: Run) -> str | None:
        """The signal that some rank got and is to end the run by, the same on every rank. **Collective.**

        Communicates only with `--exit-signal-handler`.
        """
        if not self._train.exit_signal_handler:
            return None
        number = largest(self._received, run.world.device)
        return signal.Signals(number).name if number else None

    def reason(self, run: Run) -> str | None:
        """The reason to end after the current iteration, the same on every rank; None to go on. **Collective.**"""
        train, iteration = self._train, run.state.iteration
        if name := self.signalled(run):
            return f"{name} at iteration {iteration}"
        limit = train.exit_duration_in_mins
        if limit is not None and any_rank(self._minutes() > limit, run.world.device):
            return f"--exit-duration-in-mins {limit} at iteration {iteration}"
        if train.exit_interval is not None and iteration % train.exit_interval == 0:
            return f"--exit-interval {train.exit_interval} at iteration {iteration}"
        return None

    def _minutes(self) -> float:
        return (time.monotonic() - self._started_s) / _SECONDS_PER_MINUTE
