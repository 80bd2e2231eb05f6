"""The story of a run: initialize, build, load, train, evaluate, save."""

import contextlib
import logging
from collections.abc import Iterator, Sequence

import megatron.training
import megatron_fsdp
from megatron.training.build import build_callbacks, build_run, build_streams
from megatron.training.callbacks import Callback, Callbacks
from megatron.training.checkpoint.load.loader import load_checkpoint
from megatron.training.collective_errors import on_every_rank
from megatron.training.errors import CannotStartError, CollectiveError
from megatron.training.evaluate import test
from megatron.training.files import make_output_folders
from megatron.training.initialize import initialized
from megatron.training.job import Job
from megatron.training.loop import report_validation, train
from megatron.training.ranks import Ranks
from megatron.training.state import Run, Task
from megatron.training.stopping import Stopper

logger = logging.getLogger(__name__)


@contextlib.contextmanager
def as_cannot_start(*, is_on_every_rank: bool) -> Iterator[None]:
    """Turns errors inside whose message is for the user into CannotStartError, which shows no traceback."""
    try:
        yield
    except (ValueError, CollectiveError) as error:
        failure = CannotStartError(str(error))
        failure.is_on_every_rank = is_on_every_rank or isinstance(error, CollectiveError)
        raise failure from error


def pretrain(job: Job, task: Task, ranks: Ranks, callbacks: Sequence[Callback] = ()) -> None:
    """Trains `task` as `job` says. **Collective**: every rank calls it alike.

    `callbacks` are called after those that the configuration asks for.

    Raises:
        RunError: the run cannot begin or go on.
    """
    check_versions()
    stopper = Stopper(job.config.train)
    with initialized(job.config, job.plan, ranks) as world, stopper.listening():
        with as_cannot_start(is_on_every_rank=True):
            on_every_rank(lambda: make_output_folders(job.config), world.device)
        run = build_run(job, task, world)
        with as_cannot_start(is_on_every_rank=True):
            load_checkpoint(run)
        with as_cannot_start(is_on_every_rank=False):
            build_streams(run)
        try:
            work(run, Callbacks([*build_callbacks(run), *callbacks]), stopper)
        finally:
            run.streams.close()


def work(run: Run, callbacks: Callback, stopper: Stopper) -> None:
    """Trains and evaluates a run that is built and loaded. **Collective.**"""
    callbacks.start(run)
    try:
        reason = None if run.config.validation.skip_train else train(run, callbacks, stopper)
        if reason is not None:
            logger.info("exiting: %s", reason)
            return
        report_validation(run, callbacks, stopper, is_final=True)
        name = stopper.signalled(run)
        tested = test(run, stopper) if name is None else None
        if tested is not None:
            callbacks.after_eval(run, tested)
        if name := name or stopper.signalled(run):
            logger.info("exiting: %s after the last iteration", name)
    finally:
        callbacks.end(run)


def check_versions() -> None:
    """Raises RuntimeError if training loop and engine have different versions, as of a checkout and of a wheel."""
    ours, engines = megatron.training.__version__, megatron_fsdp.__version__
    if ours != engines:
        raise RuntimeError(
            f"megatron.training {ours} ({megatron.training.__path__[0]}) and megatron_fsdp {engines} "
            f"({megatron_fsdp.__path__[0]}) are of different versions; install one of them only, or put the checkout's "
            "megatron/core/distributed/fsdp/src on PYTHONPATH"
        )
