"""The whole configuration of one training run, as a frozen tree of dataclasses: `RunConfig`.

A field is the command-line flag, the YAML key, the help text (the string below it), the type check and the default.
Names and meanings are Megatron-LM's; `spellings.py` holds what a name alone cannot say.

Here: the run itself, from batch to checkpoint.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from megatron.training.config.schema_model import DataConfig, ModelConfig, RecomputeConfig, TokenizerConfig
from megatron.training.config.schema_parallel import DdpConfig, DistConfig


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Batch sizes, length of the run, and reasons to stop."""

    micro_batch_size: int | None = None
    """Samples per rank in one forward and backward pass."""

    global_batch_size: int | None = None
    """Samples per optimizer step over all ranks; default micro-batch size x data-parallel ranks."""

    train_iters: int | None = None
    """Optimizer steps to train for; or use --train-samples."""

    train_samples: int | None = None
    """Samples to train for; or use --train-iters."""

    exit_interval: int | None = None
    """Save and exit when the iteration is divisible by this."""

    exit_duration_in_mins: int | None = None
    """Save and exit after this many minutes."""

    exit_signal_handler: bool = False
    """Save and exit on SIGTERM or SIGUSR1."""

    check_for_nan_in_loss_and_grad: bool = True
    """Stop when a loss or a gradient norm is not finite; never with dynamic loss scaling, which skips such steps."""

    manual_gc: bool = False
    """Collect Python garbage only every --manual-gc-interval steps, on all ranks together."""

    manual_gc_interval: int = 0
    """Steps between collections with --manual-gc; 0: never."""

    manual_gc_eval: bool = True
    """With --manual-gc: collect after evaluations too."""


@dataclass(frozen=True, kw_only=True)
class ValidationConfig:
    """Evaluation during and after training."""

    eval_iters: int = 100
    """Global batches per evaluation; 0: no evaluation."""

    eval_interval: int | None = None
    """Iterations between evaluations; default only after training."""

    skip_train: bool = False
    """Load, evaluate and exit."""


@dataclass(frozen=True, kw_only=True)
class PrecisionConfig:
    """Dtype of the compute weights (fp32 without a flag) and loss scaling."""

    bf16: bool = False
    """Compute in bfloat16."""

    fp16: bool = False
    """Compute in float16, with loss scaling."""

    loss_scale: float | None = None
    """Constant loss scale for fp16, a power of two; default a dynamic one."""

    initial_loss_scale: float = 4294967296
    """Dynamic loss scale at the start."""

    min_loss_scale: float = 1.0
    """Smallest dynamic loss scale."""

    loss_scale_window: float = 1000
    """Good steps in a row before the dynamic scale doubles."""

    hysteresis: int = 2
    """Overflowing steps before the dynamic scale halves."""

    fp16_lm_cross_entropy: bool = False
    """Compute the loss in float16, instead of fp32. Not supported here."""

    fp8: Literal["e4m3", "hybrid"] | None = None
    """Compute in fp8. Not supported here yet."""


@dataclass(frozen=True, kw_only=True)
class OptimizerSettings:
    """The optimizer."""

    optimizer: Literal["adam", "sgd"] = "adam"
    """adam is AdamW: its weight decay is decoupled."""

    lr: float | None = None
    """Peak learning rate."""

    min_lr: float = 0.0
    """Learning rate at the end of the decay."""

    weight_decay: float = 0.01
    """Weight decay; biases and 1-D weights are left out."""

    clip_grad: float = 1.0
    """Scale gradients down to this global norm; 0: never."""

    adam_beta1: float = 0.9
    """Decay of Adam's mean of gradients."""

    adam_beta2: float = 0.999
    """Decay of Adam's mean of squared gradients."""

    adam_eps: float = 1e-8
    """Added to Adam's denominator."""

    sgd_momentum: float = 0.9
    """Momentum of SGD."""


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """Learning rate and weight decay over time."""

    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"] = "linear"
    """Shape of the decay after the warm-up."""

    lr_decay_iters: int | None = None
    """Iterations until the smallest learning rate, warm-up included; default all."""

    lr_decay_samples: int | None = None
    """The same in samples, with --train-samples."""

    lr_warmup_fraction: float | None = None
    """Warm up over this share of the decay's length."""

    lr_warmup_iters: int = 0
    """Warm up over this many iterations."""

    lr_warmup_samples: int = 0
    """Warm up over this many samples, with --train-samples."""

    lr_warmup_init: float = 0.0
    """Learning rate at the start of the warm-up."""

    lr_wsd_decay_style: Literal["exponential", "linear", "cosine", "minus_sqrt"] = "exponential"
    """Shape of the last phase of WSD (warm-up, stable, decay)."""

    lr_wsd_decay_iters: int | None = None
    """Iterations of the last phase of WSD."""

    lr_wsd_decay_samples: int | None = None
    """The same in samples, with --train-samples."""

    start_weight_decay: float | None = None
    """Weight decay at the start, if it changes; default --weight-decay."""

    end_weight_decay: float | None = None
    """Weight decay at the end, if it changes; default --weight-decay."""

    weight_decay_incr_style: Literal["constant", "linear", "cosine"] = "constant"
    """Shape of the weight decay's way from its start to its end."""

    override_opt_param_scheduler: bool = False
    """On resume, take this run's schedule, not the checkpoint's."""

    use_checkpoint_opt_param_scheduler: bool = False
    """On resume, take the checkpoint's schedule, not this run's."""


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Saving and loading."""

    save: Path | None = None
    """Directory to write checkpoints to."""

    save_interval: int | None = None
    """Iterations between checkpoints; one is written after the last iteration in any case."""

    save_retain_interval: int | None = None
    """Keep checkpoints whose iteration is divisible by this, and the latest; delete the others. Default: keep all."""

    save_optim: bool = True
    """Write the optimizer's state."""

    save_rng: bool = True
    """Write the random states."""

    load: Path | None = None
    """Directory to read a checkpoint from; the run starts anew if there is none."""

    load_optim: bool = True
    """Read the optimizer's state."""

    load_rng: bool = True
    """Read the random states."""

    finetune: bool = False
    """Read only the weights, and start at iteration 0."""

    ckpt_step: int | None = None
    """Load this iteration, not the latest."""

    exit_on_missing_checkpoint: bool = False
    """Fail if --load holds no checkpoint."""

    ckpt_format: Literal["torch", "torch_dist", "torch_dcp", "fsdp_dtensor"] | None = None
    """Format of checkpoints; auto: fsdp_dtensor, the only one of Megatron-FSDP."""

    verify_checksums: bool = True
    """Read all files once before loading, to compare them with the checksums that were saved; sizes always are."""

    strict_fsdp_dtensor_load: bool = True
    """Fail if the checkpoint lacks a value, instead of keeping the run's own."""

    dist_ckpt_strictness: Literal[
        "assume_ok_unexpected", "log_unexpected", "log_all", "raise_unexpected", "raise_all", "return_unexpected",
        "return_all", "ignore_all",
    ] = "assume_ok_unexpected"  # fmt: skip
    """With --no-strict-fsdp-dtensor-load: log_* and return_* keep also weights that the checkpoint lacks, with a
    warning, ignore_all without; raise_all refuses also what is in it in vain."""

    pretrained_checkpoint: Path | None = None
    """Directory to read weights from, as --finetune does, while --load has no checkpoint."""

    use_checkpoint_args: bool = False
    """Take the model, the sequence length and the tokenizer from the checkpoint, whatever other flags say."""

    auto_detect_ckpt_format: bool = False
    """Changes nothing: the format is always looked at, and fsdp_dtensor is the only one that is read."""

    async_save: bool = False
    """Copy what is saved to host memory, and write it in a process of its own while training goes on."""


@dataclass(frozen=True, kw_only=True)
class LoggerConfig:
    """Reports: log lines and TensorBoard."""

    log_interval: int = 100
    """Iterations between log lines."""

    log_throughput: bool = False
    """Report TFLOP/s per GPU."""

    log_num_zeros_in_grad: bool = False
    """Report the number of zeros in the gradient."""

    log_params_norm: bool = False
    """Report the norm of the weights."""

    log_overlap: int = 0
    """Iterations between tables of what a step of rank 0 spent on computation and communication; 0: none."""

    logging_level: int | None = None
    """Python logging level; 10 debug, 20 info, 30 warning; default info."""

    tensorboard_dir: Path | None = None
    """Directory for TensorBoard files."""

    tensorboard_log_interval: int = 1
    """Iterations between TensorBoard points."""

    tensorboard_queue_size: int = 1000
    """Points that TensorBoard keeps before it writes them."""

    log_memory_to_tensorboard: bool = False
    """Also write memory use to TensorBoard."""

    log_loss_scale_to_tensorboard: bool = True
    """Also write the loss scale to TensorBoard."""

    log_validation_ppl_to_tensorboard: bool = False
    """Also write the validation perplexity to TensorBoard."""


@dataclass(frozen=True, kw_only=True)
class RngConfig:
    """Seeds, and whether the same seed gives the same bits."""

    seed: int = 1234
    """Seed of weights, dropout and data order."""

    deterministic_mode: bool = False
    """Take only kernels that compute the same bits each time; slower. Sets CUBLAS_WORKSPACE_CONFIG, NCCL_ALGO and
    NVTE_ALLOW_NONDETERMINISTIC_ALGO where they are not set."""


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """One training run. Sections are the YAML's sections and the groups of --help."""

    model: ModelConfig = ModelConfig()
    recompute: RecomputeConfig = RecomputeConfig()
    data: DataConfig = DataConfig()
    tokenizer: TokenizerConfig = TokenizerConfig()
    train: TrainConfig = TrainConfig()
    validation: ValidationConfig = ValidationConfig()
    precision: PrecisionConfig = PrecisionConfig()
    optimizer: OptimizerSettings = OptimizerSettings()
    scheduler: SchedulerConfig = SchedulerConfig()
    ddp: DdpConfig = DdpConfig()
    dist: DistConfig = DistConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    logger: LoggerConfig = LoggerConfig()
    rng: RngConfig = RngConfig()
