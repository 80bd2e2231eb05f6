"""Steps until the run is over, and what happens between them.

A new feature is a callback or a function call here, never a branch.
"""

import logging

from megatron.training.callbacks import Callback
from megatron.training.checkpoint.save.saver import Saver, saving
from megatron.training.evaluate import validate
from megatron.training.state import Run, is_due
from megatron.training.step import train_step
from megatron.training.stopping import Stopper

logger = logging.getLogger(__name__)


def train(run: Run, callbacks: Callback, stopper: Stopper) -> str | None:
    """Trains to the last iteration; gives back why it stopped earlier, if it did. **Collective.**"""
    with saving(run) as saver:
        return _train(run, callbacks, stopper, saver)


def _train(run: Run, callbacks: Callback, stopper: Stopper, saver: Saver) -> str | None:
    config, saved_at = run.config, run.state.iteration
    reason = None
    if saved_at >= run.plan.train_iters:
        logger.info("nothing to train: iteration %d of %d is done", saved_at, run.plan.train_iters)
    while run.state.iteration < run.plan.train_iters and reason is None:
        callbacks.before_step(run)
        result = train_step(run)
        run.state.advance(run.plan, is_skipped=result.is_skipped)
        callbacks.after_step(run, result)
        saver.poll()
        if is_due(config.validation.eval_interval, run):
            report_validation(run, callbacks, stopper)
        reason = stopper.reason(run)
        if reason is not None or is_due(config.checkpoint.save_interval, run):
            saver.save()
            saved_at = run.state.iteration
    if saved_at != run.state.iteration:
        saver.save()
    return reason


def report_validation(run: Run, callbacks: Callback, stopper: Stopper, *, is_final: bool = False) -> None:
    """Evaluates on the validation set, if there is one, and reports it. **Collective.**"""
    evaluation = validate(run, stopper, is_final=is_final)
    if evaluation is not None:
        callbacks.after_eval(run, evaluation)
