"""Reading the schedule of learning rate and weight decay: what of it may differ, and whose holds then."""

from collections.abc import Iterator, Mapping
from typing import Any

from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from megatron.training.state import Run

_FLAGS = {
    "max_lr": "--lr",
    "min_lr": "--min-lr",
    "lr_warmup_steps": "--lr-warmup-",
    "lr_decay_steps": "--lr-decay-",
    "lr_decay_style": "--lr-decay-style",
    "start_wd": "--start-weight-decay",
    "end_wd": "--end-weight-decay",
    "wd_incr_steps": "--train-",
    "wd_incr_style": "--weight-decay-incr-style",
}
"""The flag of each part of the schedule; one that ends in a dash counts iterations or samples, as the run does."""

_OF_GROUPS = ("max_lr", "min_lr")
"""Parts of the schedule that every group of the optimizer has of its own."""


def load_schedule(run: Run, saved: Mapping[str, Any], own_groups: list[dict[str, Any]]) -> None:
    """Takes over how far `saved` has come; whose schedule holds, if it differs, is the configuration's to say.

    `own_groups`: the optimizer's options before the checkpoint's were read.

    Raises:
        ValueError: it differs where it matters, and the configuration does not say whose holds.
    """
    config, scheduler = run.config.scheduler, run.scheduler
    own = scheduler.state_dict()
    saved = {**saved, **{name: own[name] for name in _without_effect(scheduler, saved)}}
    different = [name for name in _FLAGS if name in saved and saved[name] != own[name]]
    if different and not (config.override_opt_param_scheduler or config.use_checkpoint_opt_param_scheduler):
        # A constant weight decay is two parts of the schedule and one flag.
        parts = "; ".join(dict.fromkeys(_difference(run, name, own[name], saved[name]) for name in different))
        raise ValueError(
            f"the schedule is not the checkpoint's: {parts}; pass the checkpoint's values, or "
            "--override-opt-param-scheduler to take this run's schedule, or --use-checkpoint-opt-param-scheduler to "
            "take the checkpoint's"
        )
    if config.override_opt_param_scheduler:
        for group, before in zip(run.optimizer.param_groups, own_groups, strict=True):
            group.update({name: before[name] for name in _OF_GROUPS if name in before})
    scheduler.load_state_dict(saved)
    scheduler.step(increment=0)  # megatron-core reads the weight decay only after it has set the groups'.


def _without_effect(scheduler: OptimizerParamScheduler, saved: Mapping[str, Any]) -> Iterator[str]:
    """Parts that say nothing about any step to come."""
    if scheduler.wd_incr_style == saved.get("wd_incr_style") == "constant":
        yield "wd_incr_steps"
    if scheduler.lr_decay_style == saved.get("lr_decay_style") == "constant":
        yield from ("lr_decay_steps", "min_lr")
        if saved["num_steps"] > max(scheduler.lr_warmup_steps, saved["lr_warmup_steps"]):
            yield "lr_warmup_steps"


def _difference(run: Run, name: str, own: object, saved: object) -> str:
    flag = _FLAGS[name]
    if not flag.endswith("-"):
        if name in ("start_wd", "end_wd") and run.config.scheduler.weight_decay_incr_style == "constant":
            flag = "--weight-decay"
        return f"{flag} is {own}, the checkpoint's is {saved}"
    counts_samples = run.config.train.train_samples is not None
    unit, size = ("samples", 1) if counts_samples else ("iters", run.plan.global_batch_size)
    return f"{flag}{unit} is {own / size:.12g}, the checkpoint's is {saved / size:.12g}"
