"""State of a run: its progress, and all objects that it consists of."""

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

import torch
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from megatron.training.config import RunConfig, RunPlan
from megatron.training.data import Datasets, DataStream
from megatron.training.initialize import World
from megatron.training.job import Job
from megatron_fsdp.mcore import FullyShardedDataParallel, FullyShardedOptimizer

LossFunction = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]]
"""Model output to (sum of losses, number of tokens, report); a report is a pair (sum, tokens) for each name."""


class ModelProvider(Protocol):
    """Builds the bare model."""

    def __call__(self, job: Job, core_config: Any) -> torch.nn.Module:
        """The model for megatron-core's configuration `core_config`."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """The three functions that a training script defines."""

    model_provider: ModelProvider
    forward_step: Callable[[Iterator, torch.nn.Module], tuple[torch.Tensor, LossFunction]]
    """A micro-batch of the stream through the model: (output, loss function), as megatron-core's schedules call it."""
    datasets_provider: Callable[[Job], Datasets]
    """The sets for training, validation and test. **Collective.**"""


@dataclass(kw_only=True)
class TrainState:
    """Counts of a run; saved with every checkpoint."""

    iteration: int = 0
    """Optimizer steps, skipped ones included."""
    consumed_train_samples: int = 0
    """Samples of the training set that all ranks have read."""
    consumed_valid_samples: int = 0
    """Samples of the validation set that all ranks have read."""
    skipped_iterations: int = 0
    """Steps without an update, because a gradient overflowed."""
    floating_point_operations: int = 0
    """Of all steps, over all ranks, forward and backward."""

    def advance(self, plan: RunPlan, *, is_skipped: bool) -> None:
        """Counts one step."""
        self.iteration += 1
        self.consumed_train_samples += plan.global_batch_size
        self.floating_point_operations += plan.flops_per_step
        self.skipped_iterations += is_skipped

    def state_dict(self) -> dict[str, int]:
        """All counts by name."""
        return asdict(self)

    def load_state_dict(self, saved: dict[str, int]) -> None:
        """Takes over the counts of a `state_dict()`."""
        for name in asdict(self):
            setattr(self, name, int(saved[name]))


@dataclass(kw_only=True)
class Streams:
    """Micro-batches of this rank; None where there is no such set."""

    train: DataStream | None = None
    valid: DataStream | None = None
    test: DataStream | None = None

    def close(self) -> None:
        """Ends the reading processes."""
        for stream in (self.train, self.valid, self.test):
            if stream is not None:
                stream.close()


@dataclass(kw_only=True)
class Run:
    """Everything that one training run consists of."""

    job: Job
    task: Task
    world: World
    model: FullyShardedDataParallel
    optimizer: FullyShardedOptimizer | None
    """None if the run only evaluates."""
    scheduler: OptimizerParamScheduler | None
    state: TrainState = field(default_factory=TrainState)
    streams: Streams = field(default_factory=Streams)

    @property
    def config(self) -> RunConfig:
        """The checked configuration."""
        return self.job.config

    @property
    def plan(self) -> RunPlan:
        """The plan that follows from it."""
        return self.job.plan


def is_due(interval: int | None, run: Run) -> bool:
    """True if the current iteration is one of every `interval`."""
    return interval is not None and run.state.iteration % interval == 0
