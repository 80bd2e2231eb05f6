"""The loss on data that is not trained on; leaves training as if nothing had happened."""

import math
from dataclasses import dataclass

import torch

from megatron.training.data import DataStream
from megatron.training.state import Run
from megatron.training.step import forward_backward, loss_of
from megatron.training.stopping import Stopper

MAX_EXPONENT = 20
"""As in Megatron-LM: a perplexity above exp(20) says no more than that."""


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """One pass over validation or test data."""

    split: str
    """validation or test."""
    place: str
    """Point of the run, for the log: 'iteration 40'."""
    loss: float
    """Per token."""
    is_final: bool
    """After training, not in between."""

    @property
    def perplexity(self) -> float:
        """exp(loss)."""
        return math.exp(min(MAX_EXPONENT, self.loss))


def evaluate(run: Run, stream: DataStream, stopper: Stopper) -> float | None:
    """The loss per token over the next `--eval-iters` global batches of `stream`. **Collective.**

    None if a signal came that is to end the run.
    """
    run.model.eval()
    total = torch.zeros(2, dtype=torch.float64, device=run.world.device)
    is_cut_short = False
    with torch.no_grad():
        for _ in range(run.config.validation.eval_iters):
            total += forward_backward(run, stream, forward_only=True)
            is_cut_short = stopper.signalled(run) is not None
            if is_cut_short:
                break
    # megatron-core's schedules leave the weights gathered after a forward without a backward.
    run.model.synchronize_param_gather()
    run.model.train()
    return None if is_cut_short else float(loss_of(total))


def validate(run: Run, stopper: Stopper, *, is_final: bool = False) -> Evaluation | None:
    """The loss on the next part of the validation set; None if there is none, or no time. **Collective.**"""
    if run.streams.valid is None or run.config.validation.eval_iters == 0:
        return None
    loss = evaluate(run, run.streams.valid, stopper)
    # Those that were not read count too: what comes after a resume then sees the samples that it would have seen.
    run.state.consumed_valid_samples += run.config.validation.eval_iters * run.plan.global_batch_size
    if loss is None:
        return None
    return Evaluation(split="validation", place=_place(run, "validation", is_final), loss=loss, is_final=is_final)


def test(run: Run, stopper: Stopper) -> Evaluation | None:
    """The loss on the test set; None if there is none, or no time. **Collective.**"""
    if run.streams.test is None or run.config.validation.eval_iters == 0:
        return None
    loss = evaluate(run, run.streams.test, stopper)
    if loss is None:
        return None
    return Evaluation(split="test", place=_place(run, "test", True), loss=loss, is_final=True)


def _place(run: Run, split: str, is_final: bool) -> str:
    place = f"iteration {run.state.iteration}"
    return f"{place} on {split} set" if is_final else place
