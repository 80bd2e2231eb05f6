"""Records as TensorBoard points, under Megatron-LM's tags where it has one."""

import importlib
from collections.abc import Iterator

import torch

from megatron.training.config.schema import LoggerConfig
from megatron.training.evaluate import Evaluation
from megatron.training.reporting.metrics import Record, Reporter
from megatron.training.state import Run
from megatron.training.step import LOSS


class TensorBoard(Reporter):
    """Writes points to `--tensorboard-dir`; on rank 0 only."""

    def __init__(self, logger: LoggerConfig) -> None:
        super().__init__(logger.tensorboard_log_interval)
        self._logger = logger

    def open(self, run: Run) -> None:
        # A second to import, and only here.
        writer = importlib.import_module("torch.utils.tensorboard").SummaryWriter
        self._writer = writer(str(self._logger.tensorboard_dir), max_queue=self._logger.tensorboard_queue_size)

    def report(self, record: Record) -> None:
        for tag, value in points(record, self._logger):
            if value is not None:
                self._writer.add_scalar(tag, value, record.iteration)
                self._writer.add_scalar(f"{tag} vs samples", value, record.consumed_samples)

    def report_evaluation(self, run: Run, evaluation: Evaluation) -> None:
        tag = f"{LOSS} {evaluation.split}"
        values = {tag: evaluation.loss}
        if self._logger.log_validation_ppl_to_tensorboard:
            values[f"{tag} ppl"] = evaluation.perplexity
        for name, value in values.items():
            self._writer.add_scalar(name, value, run.state.iteration)
            self._writer.add_scalar(f"{name} vs samples", value, run.state.consumed_train_samples)

    def close(self) -> None:
        self._writer.close()


def points(record: Record, logger: LoggerConfig) -> Iterator[tuple[str, float | None]]:
    """(tag, value) of everything in `record` that the configuration wants."""
    yield LOSS, record.loss
    yield "learning-rate", record.learning_rate
    yield "batch-size", record.global_batch_size
    yield "grad-norm", record.grad_norm
    yield "num-zeros", record.num_zeros
    yield "params-norm", record.params_norm
    yield "iteration-time", record.step_time_s
    yield "tokens-per-second", record.tokens_per_s
    yield "throughput", record.tflops_per_gpu
    if logger.log_loss_scale_to_tensorboard:
        yield "loss-scale", record.loss_scale
    if logger.log_memory_to_tensorboard:
        yield from _memory()


def _memory() -> Iterator[tuple[str, float]]:
    """The allocator's own figures; nothing without CUDA."""
    if not torch.cuda.is_available():
        return
    stats = torch.cuda.memory_stats()
    yield "mem-reserved-bytes", stats["reserved_bytes.all.current"]
    yield "mem-allocated-bytes", stats["allocated_bytes.all.current"]
    yield "mem-max-allocated-bytes", stats["allocated_bytes.all.peak"]
    yield "mem-allocated-count", stats["allocation.all.current"]
