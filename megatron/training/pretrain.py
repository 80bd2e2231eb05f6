"""The story of a run: initialize, build, load, train, evaluate, save."""

import logging
from collections.abc import Sequence

from megatron.training.build import build_callbacks, build_run, build_streams
from megatron.training.callbacks import Callback, Callbacks
from megatron.training.checkpoint.load import MissingCheckpointError, load_checkpoint
from megatron.training.evaluate import test
from megatron.training.initialize import initialized
from megatron.training.launch import Job
from megatron.training.loop import report_validation, train
from megatron.training.ranks import Ranks
from megatron.training.state import Run, Task
from megatron.training.stopping import Stopper
from megatron.training.versions import check_versions

logger = logging.getLogger(__name__)

EXIT_MISSING_CHECKPOINT = 1


def pretrain(job: Job, task: Task, ranks: Ranks, callbacks: Sequence[Callback] = ()) -> int:
    """Trains `task` as `job` says; gives back the process's exit code. **Collective**: every rank calls it alike.

    `callbacks` are called after those that the configuration asks for.
    """
    check_versions()
    stopper = Stopper(job.config.train)
    with initialized(job.config, job.plan, ranks) as world, stopper.listening():
        run = build_run(job, task, world)
        try:
            load_checkpoint(run)
        except MissingCheckpointError as error:
            logger.error("%s", error)
            return EXIT_MISSING_CHECKPOINT
        build_streams(run)
        try:
            work(run, Callbacks([*build_callbacks(run), *callbacks]), stopper)
        finally:
            run.streams.close()
    return 0


def work(run: Run, callbacks: Callback, stopper: Stopper) -> None:
    """Trains and evaluates a run that is built and loaded. **Collective.**"""
    callbacks.start(run)
    try:
        reason = None if run.config.validation.skip_train else train(run, callbacks, stopper)
        if reason is not None:
            logger.info("exiting: %s", reason)
            return
        report_validation(run, callbacks, is_final=True)
        tested = test(run)
        if tested is not None:
            callbacks.after_eval(run, tested)
    finally:
        callbacks.end(run)
