"""The parts of a run, put together in Megatron-LM's order, on which its random numbers depend."""

import sys

from megatron.training.callbacks import BufferRegistration, Callback, ManualGarbageCollection, OverlapLog
from megatron.training.data import LoaderOptions, build_data_stream
from megatron.training.initialize import World
from megatron.training.job import Job
from megatron.training.model import build_model
from megatron.training.optim import build_optimizer, build_scheduler
from megatron.training.reporting.metrics import Console, LogLines, Meter, Reporter
from megatron.training.reporting.progress import LiveProgress
from megatron.training.reporting.tensorboard import TensorBoard
from megatron.training.state import Run, Streams, Task


def build_run(job: Job, task: Task, world: World) -> Run:
    """Model, optimizer and schedule; no data yet. **Collective.**"""
    model = build_model(job, task.model_provider, world)
    run = Run(job=job, task=task, world=world, model=model, optimizer=None, scheduler=None)
    if not job.config.validation.skip_train:
        run.optimizer = build_optimizer(job.config, model)
        run.scheduler = build_scheduler(job.config, job.plan, run.optimizer)
    return run


def build_streams(run: Run) -> None:
    """Gives the run its data, from where its state says it is. **Collective.**"""
    datasets = run.task.datasets_provider(run.job)
    config, state = run.config, run.state
    options = LoaderOptions(
        micro_batch_size=config.train.micro_batch_size,
        data_parallel_rank=run.world.data_parallel_rank,
        data_parallel_size=run.plan.data_parallel_size,
        device=run.world.device,
        dataloader_type=config.data.dataloader_type or "single",
        num_workers=config.data.num_workers,
        seed=config.rng.seed,
    )
    run.streams = Streams(
        train=build_data_stream(datasets.train, "training", state.consumed_train_samples, options),
        valid=build_data_stream(datasets.valid, "validation", state.consumed_valid_samples, options),
        test=build_data_stream(datasets.test, "test", 0, options),
    )


def build_callbacks(run: Run) -> list[Callback]:
    """The callbacks that the configuration asks for, in their order."""
    train = run.config.train
    callbacks: list[Callback] = []
    if run.config.ddp.nccl_ub:
        callbacks.append(BufferRegistration())
    if train.manual_gc:
        callbacks.append(ManualGarbageCollection(train.manual_gc_interval, train.manual_gc_eval))
    logger = run.config.logger
    if logger.log_overlap:  # before the meter, whose norms and lines are no part of a step
        callbacks.append(OverlapLog(logger.log_overlap))
    intervals = {logger.log_interval, *([logger.tensorboard_log_interval] if logger.tensorboard_dir else [])}
    return [*callbacks, Meter(build_reporters(run), intervals if logger.log_params_norm else ())]


def build_reporters(run: Run) -> list[Reporter]:
    """The reporters of this rank: none but on the first."""
    if not run.world.is_first:
        return []
    logger, console = run.config.logger, Console()
    reporters: list[Reporter] = [LogLines(logger.log_interval, console)]
    if logger.tensorboard_dir is not None:
        reporters.append(TensorBoard(logger))
    if sys.stdout.isatty():
        reporters.append(LiveProgress(console))
    return reporters
