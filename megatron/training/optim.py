"""Optimizer, its schedule, and what megatron-core's schedules call back."""

from megatron.core.distributed import finalize_model_grads
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from megatron.training.config import RunConfig, RunPlan
from megatron.training.config.to_core import to_optimizer_config
from megatron_fsdp.mcore import FullyShardedDataParallel, FullyShardedOptimizer, get_megatron_optimizer


def build_optimizer(config: RunConfig, model: FullyShardedDataParallel) -> FullyShardedOptimizer:
    """The optimizer of `model`, also told to megatron-core's schedules. **Collective.**"""
    optimizer = get_megatron_optimizer(to_optimizer_config(config), [model])
    model.config.grad_scale_func = optimizer.scale_loss
    model.config.finalize_model_grads_func = finalize_model_grads
    model.config.no_sync_func = model.no_sync
    return optimizer


def build_scheduler(config: RunConfig, plan: RunPlan, optimizer: FullyShardedOptimizer) -> OptimizerParamScheduler:
    """Learning rate and weight decay over the samples that were trained on."""
    scheduler, schedule = config.scheduler, plan.schedule
    return OptimizerParamScheduler(
        optimizer,
        init_lr=scheduler.lr_warmup_init,
        max_lr=config.optimizer.lr,
        min_lr=config.optimizer.min_lr,
        lr_warmup_steps=schedule.warmup_samples,
        lr_decay_steps=schedule.decay_samples,
        lr_decay_style=scheduler.lr_decay_style,
        start_wd=schedule.start_weight_decay,
        end_wd=schedule.end_weight_decay,
        wd_incr_steps=schedule.weight_decay_samples,
        wd_incr_style=scheduler.weight_decay_incr_style,
        use_checkpoint_opt_param_scheduler=scheduler.use_checkpoint_opt_param_scheduler,
        override_opt_param_scheduler=scheduler.override_opt_param_scheduler,
        wsd_decay_steps=schedule.wsd_decay_samples,
        lr_wsd_decay_style=scheduler.lr_wsd_decay_style,
    )


def current_lr(optimizer: FullyShardedOptimizer) -> float:
    """The learning rate that the next step uses."""
    return float(optimizer.param_groups[0]["lr"])
