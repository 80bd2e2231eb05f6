"""Spellings of flags and YAML keys that do not follow from a field's name, and differences from Megatron-LM.

Plain rule: field `a_b` is the flag `--a-b` (a boolean also `--no-a-b`) and the YAML key `a_b`. Everything else stands
here, as data.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from megatron.training.config.schema import (
    CheckpointConfig,
    LoggerConfig,
    PrecisionConfig,
    SchedulerConfig,
    TrainConfig,
)
from megatron.training.config.schema_model import ModelConfig, RecomputeConfig, TokenizerConfig
from megatron.training.config.schema_parallel import DdpConfig


@dataclass(frozen=True, kw_only=True)
class Spelling:
    """Spellings of one field besides the plain rule."""

    stem: str | None = None
    """The flag's name without dashes in front; default the field's name with dashes."""

    also: tuple[str, ...] = ()
    """More flags with the same meaning."""

    off: tuple[str, ...] = ()
    """More flags that turn a boolean off."""

    keys: tuple[str, ...] = ()
    """More YAML keys with the same meaning."""

    inverse_keys: tuple[str, ...] = ()
    """YAML keys that mean the opposite of a boolean."""

    constants: Mapping[str, object] = field(default_factory=dict)
    """Flags without a value (and, in YAML, keys that may be true) that set the field to a value."""


ALIASES: dict[tuple[type, str], Spelling] = {
    (ModelConfig, "position_embedding_type"): Spelling(constants={"--use-rotary-position-embeddings": "rope"}),
    (ModelConfig, "layernorm_epsilon"): Spelling(stem="norm-epsilon", keys=("norm_epsilon",)),
    (ModelConfig, "layernorm_zero_centered_gamma"): Spelling(stem="apply-layernorm-1p", keys=("apply_layernorm_1p",)),
    (ModelConfig, "add_bias_linear"): Spelling(stem="bias-linear", off=("--disable-bias-linear",)),
    (ModelConfig, "apply_rope_fusion"): Spelling(stem="rope-fusion"),
    (ModelConfig, "persist_layer_norm"): Spelling(inverse_keys=("no_persist_layer_norm",)),
    (ModelConfig, "num_experts"): Spelling(keys=("num_moe_experts",)),
    (ModelConfig, "use_mcore_models"): Spelling(keys=("deprecated_use_mcore_models",)),
    (RecomputeConfig, "recompute_granularity"): Spelling(constants={"--recompute-activations": "selective"}),
    (TokenizerConfig, "tokenizer_special_tokens"): Spelling(keys=("special_tokens",)),
    (TrainConfig, "manual_gc_eval"): Spelling(off=("--disable-manual-gc-eval",)),
    (SchedulerConfig, "override_opt_param_scheduler"): Spelling(also=("--override-opt_param-scheduler",)),
    (PrecisionConfig, "fp8"): Spelling(stem="fp8-format"),
    (SchedulerConfig, "use_checkpoint_opt_param_scheduler"): Spelling(also=("--use-checkpoint-opt_param-scheduler",)),
    (DdpConfig, "average_in_collective"): Spelling(
        stem="ddp-average-in-collective", keys=("ddp_average_in_collective",)
    ),
    (DdpConfig, "nccl_ub"): Spelling(stem="use-nccl-ub", keys=("use_nccl_ub",)),
    (CheckpointConfig, "save_interval"): Spelling(also=("--persistent-save-interval",)),
    (CheckpointConfig, "save_optim"): Spelling(inverse_keys=("no_save_optim",)),
    (CheckpointConfig, "save_rng"): Spelling(inverse_keys=("no_save_rng",)),
    (CheckpointConfig, "load_optim"): Spelling(inverse_keys=("no_load_optim",)),
    (CheckpointConfig, "load_rng"): Spelling(inverse_keys=("no_load_rng",)),
    (CheckpointConfig, "strict_fsdp_dtensor_load"): Spelling(off=("--disable-strict-fsdp-dtensor-load",)),
    (LoggerConfig, "log_loss_scale_to_tensorboard"): Spelling(off=("--disable-log-loss-scale-to-tensorboard",)),
}
"""Fields that have more than the plain spelling."""

OTHER_PLACES: dict[str, str] = {
    "dist.use_megatron_fsdp": "ddp.use_megatron_fsdp",
}
"""Nested YAML keys that recipes for Megatron-Bridge write in another section than ours."""

INSTEAD: dict[str, str] = {
    "--accumulate-allreduce-grads-in-fp32": "use --megatron-fsdp-main-grads-dtype fp32",
    "--grad-reduce-in-bf16": "use --megatron-fsdp-grad-comm-dtype bf16",
    "--rampup-batch-size": "the global batch size is constant",
    "--use-flash-attn": "use --attention-backend flash",
    "--encoder-seq-length": "use --seq-length",
    "--encoder-num-layers": "use --num-layers",
    "--batch-size": "use --micro-batch-size (of a rank) or --global-batch-size (of a step)",
    "--warmup": "use --lr-warmup-fraction",
    "--model-parallel-size": "only data parallelism is supported",
    "--checkpoint-activations": "use --recompute-activations, or --recompute-granularity full",
    "--use-dist-ckpt": "use --ckpt-format fsdp_dtensor",
    "--enable-full-sharding-in-hsdp": "use --outer-dp-sharding-strategy optim",
    "--exit-signal": "--exit-signal-handler listens to SIGTERM and SIGUSR1",
    "--async-strategy": "there is one way; leave it out",
    "--use-persistent-ckpt-worker": "the writing process is kept between saves; leave it out",
    "--zero-dp-strategy": "use --data-parallel-sharding-strategy",
}
"""Advice for each flag of Megatron-LM that is not here."""

OTHER_NAMES: dict[str, str] = {
    "--learning-rate": "--lr", "--max-lr": "--lr", "--min-learning-rate": "--min-lr",
    "--warmup-steps": "--lr-warmup-iters", "--warmup-iters": "--lr-warmup-iters",
    "--steps": "--train-iters", "--num-steps": "--train-iters", "--max-steps": "--train-iters",
    "--iterations": "--train-iters", "--max-iters": "--train-iters",
    "--train-batch-size": "--global-batch-size", "--per-device-train-batch-size": "--micro-batch-size",
    "--layers": "--num-layers", "--num-hidden-layers": "--num-layers",
    "--heads": "--num-attention-heads", "--num-heads": "--num-attention-heads",
    "--hidden-dim": "--hidden-size", "--d-model": "--hidden-size",
    "--sequence-length": "--seq-length", "--context-length": "--seq-length", "--block-size": "--seq-length",
    "--dropout": "--hidden-dropout", "--max-grad-norm": "--clip-grad", "--gradient-clipping": "--clip-grad",
    "--dataset": "--data-path", "--tokenizer": "--tokenizer-type",
    "--output-dir": "--save", "--checkpoint-dir": "--save", "--save-dir": "--save", "--resume": "--load",
    "--sharding-strategy": "--data-parallel-sharding-strategy", "--config": "--yaml-cfg",
}  # fmt: skip
"""Names of our flags in other programs; only to suggest ours."""

OURS: dict[str, str] = {
    "ddp.fsdp_unit_modules": "Megatron-LM has it in code only",
    "ddp.fsdp_residency_bytes": "Megatron-LM's engine gathers every unit again in backward",
    "ddp.fsdp_copy_engine_gather": "Megatron-LM's engine gathers with NCCL only",
    "checkpoint.verify_checksums": "Megatron-LM's checkpoints have no checksums",
    "logger.log_overlap": "Megatron-LM's timers do not see streams",
}
"""Fields that Megatron-LM has no flag for, and why they are here."""

_AUTO = "on where the packages and devices that it needs are there, so that a plain machine needs no list of --no flags"

DEVIATIONS: dict[str, str] = {
    "model.transformer_impl": "transformer_engine if it is installed and CUDA is there, else local",
    "model.masked_softmax_fusion": _AUTO,
    "model.apply_rope_fusion": _AUTO,
    "model.persist_layer_norm": _AUTO,
    "model.bias_gelu_fusion": _AUTO,
    "model.bias_swiglu_fusion": _AUTO,
    "model.bias_dropout_fusion": _AUTO,
    "model.gradient_accumulation_fusion": "off unless asked for: the sharding engine accumulates gradients itself",
    "model.use_mcore_models": "on: megatron-core's models are the only ones (there the flag has no effect)",
    "model.moe_router_load_balancing_type": "one kind, not a list of several",
    "model.moe_aux_loss_coeff": "one number, not a list of several",
    "tokenizer.tokenizer_type": "only tokenizers of text that need no download; ByteLevelTokenizer is new",
    "optimizer.optimizer": "only adam and sgd",
    "ddp.use_distributed_optimizer": "follows --use-megatron-fsdp, as Megatron-LM sets it later",
    "dist.distributed_backend": "nccl with CUDA, else gloo",
    "checkpoint.ckpt_format": "fsdp_dtensor, so that --use-megatron-fsdp needs no second flag",
    "checkpoint.save_optim": "on; Megatron-LM stores the opposite, no_save_optim",
    "checkpoint.save_rng": "on; Megatron-LM stores the opposite, no_save_rng",
    "checkpoint.load_optim": "on; Megatron-LM stores the opposite, no_load_optim",
    "checkpoint.load_rng": "on; Megatron-LM stores the opposite, no_load_rng",
}
"""Fields whose default, type or choices differ from Megatron-LM's, and why. A test keeps this complete and minimal."""
