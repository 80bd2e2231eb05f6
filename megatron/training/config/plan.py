"""Derived facts of one run: open sizes, batches, lengths, schedule, arithmetic. Nothing here writes back.

Formulas and units are Megatron-LM's: schedules count samples, and floating-point operations count what the model needs,
not what recomputation adds.
"""

from dataclasses import dataclass

from megatron.training.config.kernels import Kernels, Machine, choose_kernels
from megatron.training.config.schema import RunConfig
from megatron.training.config.schema_model import ModelConfig


@dataclass(frozen=True, kw_only=True)
class SchedulePlan:
    """Learning rate and weight decay in samples, as megatron-core's OptimizerParamScheduler counts."""

    warmup_samples: float
    """Samples until the peak learning rate; a fraction of the decay may end within a sample."""
    decay_samples: int
    """Samples until the smallest learning rate, warm-up included."""
    wsd_decay_samples: int | None
    """Samples of the last phase of WSD."""
    weight_decay_samples: int
    """Samples until the last weight decay."""
    start_weight_decay: float
    end_weight_decay: float


@dataclass(frozen=True, kw_only=True)
class RunPlan:
    """Facts that follow from a configuration and a number of ranks."""

    world_size: int
    data_parallel_size: int
    """Ranks that see different samples."""
    global_batch_size: int
    """Samples per optimizer step."""
    micro_batches: int
    """Forward and backward passes per rank and step."""
    train_iters: int
    """Optimizer steps of the whole run."""
    train_samples: int
    """Samples that the training data must give."""
    valid_samples: int
    """Samples that the validation data must give: all evaluations together."""
    test_samples: int
    """Samples that the test data must give."""
    schedule: SchedulePlan
    padded_vocab_size: int
    """Rows of the embedding."""
    flops_per_step: int
    """Floating-point operations of one step over all ranks, forward and backward."""
    tokens_per_step: int
    """Tokens of one step over all ranks."""
    backend: str
    """Communication library, nccl or gloo."""
    checkpoint_format: str
    """Format of checkpoints."""
    checks_for_nan: bool
    """Stop when a loss or a gradient norm is not finite."""
    kernels: Kernels
    """Optional kernels, chosen for this machine."""


def ffn_hidden_size(model: ModelConfig) -> int:
    """Width of the MLP."""
    if model.ffn_hidden_size is not None:
        return model.ffn_hidden_size
    # The gate is a third matrix: 2/3 of the width keeps the number of weights, a multiple of 64 the kernels fast.
    return int(4 * model.hidden_size * 2 / 3) // 64 * 64 if model.swiglu else 4 * model.hidden_size


def moe_ffn_hidden_size(model: ModelConfig) -> int:
    """Width of one expert."""
    return model.moe_ffn_hidden_size or ffn_hidden_size(model)


def kv_channels(model: ModelConfig) -> int:
    """Width of one attention head."""
    return model.kv_channels or model.hidden_size // model.num_attention_heads


def query_groups(model: ModelConfig) -> int:
    """Number of key/value heads."""
    return model.num_query_groups if model.group_query_attention else model.num_attention_heads


def max_positions(config: RunConfig) -> int:
    """Longest sequence that the positions can express."""
    return config.model.max_position_embeddings or config.data.seq_length


def checks_for_nan(config: RunConfig) -> bool:
    """True if a loss or gradient that is not finite stops the run."""
    is_dynamic_scale = config.precision.fp16 and config.precision.loss_scale is None
    # Overflow is how a dynamic loss scale finds its size.
    return config.train.check_for_nan_in_loss_and_grad and not is_dynamic_scale


def flops_per_token(config: RunConfig, padded_vocab_size: int) -> int:
    """Floating-point operations per token of training, forward and backward.

    A multiply-add is 2, the backward pass twice the forward pass: 6 per weight and token. Causal attention sees half of
    the sequence on average, in two products.
    """
    model, length = config.model, config.data.seq_length
    width = model.hidden_size
    queries = kv_channels(model) * model.num_attention_heads
    keys_and_values = 2 * kv_channels(model) * query_groups(model)
    attention = width * (queries + keys_and_values) + queries * length + queries * width
    busy = ffn_hidden_size(model) if model.num_experts is None else moe_ffn_hidden_size(model) * model.moe_router_topk
    mlp = width * (busy * (3 if model.swiglu else 2) + (model.num_experts or 0))  # and the router's logits
    return 6 * (model.num_layers * (attention + mlp) + width * padded_vocab_size)


def plan_run(config: RunConfig, world_size: int, padded_vocab_size: int, machine: Machine | None = None) -> RunPlan:
    """The plan of a checked `config` on `world_size` ranks of `machine` (default: this one).

    `padded_vocab_size` is the tokenizer's, which alone knows its vocabulary.
    """
    machine = machine or Machine.probe()
    data_parallel_size = world_size // config.dist.tensor_model_parallel_size
    ranks_batch = config.train.micro_batch_size * data_parallel_size
    batch = config.train.global_batch_size or ranks_batch
    iters = config.train.train_iters or (config.train.train_samples or 0) // batch
    evaluations = (iters // config.validation.eval_interval if config.validation.eval_interval else 0) + 1
    eval_samples = config.validation.eval_iters * batch
    return RunPlan(
        world_size=world_size,
        data_parallel_size=data_parallel_size,
        global_batch_size=batch,
        micro_batches=batch // ranks_batch,
        train_iters=iters,
        train_samples=config.train.train_samples or iters * batch,
        valid_samples=evaluations * eval_samples,
        test_samples=eval_samples,
        schedule=plan_schedule(config, iters, batch),
        padded_vocab_size=padded_vocab_size,
        flops_per_step=batch * config.data.seq_length * flops_per_token(config, padded_vocab_size),
        tokens_per_step=batch * config.data.seq_length,
        backend=config.dist.distributed_backend or ("nccl" if machine.has_cuda else "gloo"),
        checkpoint_format=config.checkpoint.ckpt_format or "fsdp_dtensor",
        checks_for_nan=checks_for_nan(config),
        kernels=choose_kernels(config, machine),
    )


def plan_schedule(config: RunConfig, train_iters: int, global_batch_size: int) -> SchedulePlan:
    """The schedule of a run of `train_iters` steps, in samples."""
    scheduler, train = config.scheduler, config.train
    if train.train_samples is None:
        decay = (scheduler.lr_decay_iters or train_iters) * global_batch_size
        warmup = scheduler.lr_warmup_iters * global_batch_size
        total = train_iters * global_batch_size
        wsd = scheduler.lr_wsd_decay_iters and scheduler.lr_wsd_decay_iters * global_batch_size
    else:
        decay = scheduler.lr_decay_samples or train.train_samples
        warmup, total, wsd = scheduler.lr_warmup_samples, train.train_samples, scheduler.lr_wsd_decay_samples
    constant = config.optimizer.weight_decay
    return SchedulePlan(
        warmup_samples=warmup if scheduler.lr_warmup_fraction is None else scheduler.lr_warmup_fraction * decay,
        decay_samples=decay,
        wsd_decay_samples=wsd,
        weight_decay_samples=total,
        start_weight_decay=constant if scheduler.start_weight_decay is None else scheduler.start_weight_decay,
        end_weight_decay=constant if scheduler.end_weight_decay is None else scheduler.end_weight_decay,
    )
