"""Live progress on a terminal: iterations, loss, tokens per second, time left."""

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from megatron.training.evaluate import Evaluation
from megatron.training.reporting.metrics import Console, Record, Reporter
from megatron.training.state import Run

_SMOOTHING = 0.9
"""Share of the past in the step time that the time left is computed from."""


class LiveProgress(Reporter):
    """A bar below the log lines; only for a terminal."""

    def __init__(self, console: Console) -> None:
        super().__init__(interval=1)
        self._console = console
        self._step_time_s: float | None = None
        self._progress = Progress(
            TextColumn("iteration"),
            MofNCompleteColumn(),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[figures]}"),
            TimeElapsedColumn(),
            expand=True,
        )
        self._task = None

    def open(self, run: Run) -> None:
        self._task = self._progress.add_task(
            "", total=run.plan.train_iters, completed=run.state.iteration, figures="starting"
        )
        self._console.display = self
        self._progress.start()

    def print_above(self, text: str) -> None:
        """Writes a line that stays, as it is."""
        self._progress.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def report(self, record: Record) -> None:
        before = self._step_time_s
        self._step_time_s = (
            record.step_time_s if before is None else _SMOOTHING * before + (1 - _SMOOTHING) * record.step_time_s
        )
        self._progress.update(self._task, completed=record.iteration, figures=figures(record, self._step_time_s))

    def report_evaluation(self, run: Run, evaluation: Evaluation) -> None:
        self._progress.refresh()

    def close(self) -> None:
        self._console.display = None
        self._progress.stop()


def figures(record: Record, step_time_s: float) -> str:
    """Loss, speed and time left in a few words."""
    loss = "skipped" if record.loss is None else f"loss {record.loss:.4f}"
    left_s = int((record.train_iters - record.iteration) * step_time_s)
    hours, minutes, seconds = left_s // 3600, left_s // 60 % 60, left_s % 60
    return f"{loss}  {record.tokens_per_s:,.0f} tokens/s  {hours}:{minutes:02}:{seconds:02} left"
