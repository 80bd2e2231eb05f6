"""One optimizer step over all micro-batches, and the same without gradients."""

import functools
import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.core.pipeline_parallel import get_forward_backward_func

from megatron.training.data import DataStream
from megatron.training.errors import NotFiniteError
from megatron.training.state import Run
from megatron_fsdp.diagnostics.nan_report import NonFiniteGradientError

LOSS = "lm loss"
"""Name of the loss in a task's report."""


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """Result of one step; tensors are scalars on the device, equal on every rank."""

    loss: torch.Tensor
    """Per token, over all ranks and micro-batches, before the update."""
    is_skipped: bool
    """Nothing was updated, because a gradient overflowed in fp16."""
    grad_norm: torch.Tensor | None
    """Before clipping; None if the step was skipped."""
    num_zeros: torch.Tensor | int | None
    """Zeros in the gradient, if they are counted."""


def train_step(run: Run) -> StepResult:
    """One update of the weights from the next global batch. **Collective.**

    Raises:
        NotFiniteError: on every rank, if the configuration asks for the check.
    """
    run.optimizer.zero_grad()
    try:
        loss = loss_of(forward_backward(run, run.streams.train, forward_only=False))
    except NonFiniteGradientError as error:  # on every rank, and only if the configuration asks for the check
        raise _not_finite(run, f"a gradient of iteration {run.state.iteration + 1} is not finite: {error}") from error
    if run.plan.checks_for_nan:
        _check_finite(run, "loss", loss)
    norms: list[torch.Tensor] = []
    run.optimizer.on_grad_norm = functools.partial(_note_norm, run, norms)
    is_updated, _, num_zeros = run.optimizer.step()
    if is_updated:
        run.scheduler.step(run.plan.global_batch_size)
    return StepResult(
        loss=loss,
        is_skipped=not is_updated,
        grad_norm=norms[0] if norms else None,
        # megatron-core says 0 when it has not counted.
        num_zeros=num_zeros if run.config.logger.log_num_zeros_in_grad else None,
    )


def forward_backward(run: Run, stream: DataStream, *, forward_only: bool) -> torch.Tensor:
    """The next global batch of `stream`: (sum of losses, number of tokens) over all ranks, fp64. **Collective.**"""
    reports = get_forward_backward_func()(
        forward_step_func=run.task.forward_step,
        data_iterator=stream,
        model=[run.model],
        num_microbatches=get_num_microbatches(),
        seq_length=run.config.data.seq_length,
        micro_batch_size=run.config.train.micro_batch_size,
        forward_only=forward_only,
    )
    # fp32 would stop counting tokens one by one at 2**24.
    total = torch.stack([report[LOSS] for report in reports]).double().sum(dim=0)
    dist.all_reduce(total, group=run.world.data_parallel_group)
    return total


def loss_of(total: torch.Tensor) -> torch.Tensor:
    """The loss per token of (sum of losses, number of tokens)."""
    return total[0] / total[1].clamp(min=1)


def _note_norm(run: Run, norms: list[torch.Tensor], norm: torch.Tensor) -> None:
    # Read here, if at all: while the weights are updated, the host goes on to the next iteration and need not wait.
    if run.plan.checks_for_nan:
        _check_finite(run, "gradient norm", norm)
    norms.append(norm)


def _check_finite(run: Run, name: str, value: torch.Tensor | float) -> None:
    # Every rank has the same value and so comes to the same end.
    if not math.isfinite(float(value)):
        raise _not_finite(run, f"the {name} of iteration {run.state.iteration + 1} is {float(value)}")


def _not_finite(run: Run, what: str) -> NotFiniteError:
    return NotFiniteError(
        f"{what}, with learning rate {run.optimizer.param_groups[0]['lr']:.3E}; lower --lr, or look at the data "
        f"(samples from {run.state.consumed_train_samples} on). --no-check-for-nan-in-loss-and-grad goes on anyway"
    )
