"""Rules that hold for every run: sizes, lengths, schedules, data, checkpoints, recomputation."""

from collections.abc import Callable, Iterator

from megatron.training.config.kernels import DETERMINISTIC
from megatron.training.config.rule_book import Setting, flag_of, is_given, rule, spelled, value_of
from megatron.training.config.schema import RunConfig

REQUIRED = ("model.num_layers", "model.hidden_size", "model.num_attention_heads", "data.seq_length",
            "train.micro_batch_size", "tokenizer.tokenizer_type")  # fmt: skip

POSITIVE = (*REQUIRED[:5], "model.ffn_hidden_size", "model.kv_channels", "model.num_query_groups",
            "model.max_position_embeddings", "train.global_batch_size", "train.train_iters", "train.train_samples",
            "train.exit_interval", "train.exit_duration_in_mins", "validation.eval_interval",
            "checkpoint.save_interval", "checkpoint.save_retain_interval", "logger.log_interval",
            "logger.tensorboard_log_interval", "data.num_dataset_builder_threads",
            "tokenizer.make_vocab_size_divisible_by", "tokenizer.vocab_size", "tokenizer.padded_vocab_size",
            "recompute.recompute_num_layers", "dist.distributed_timeout_minutes",
            "dist.tensor_model_parallel_size", "dist.expert_model_parallel_size", "model.num_experts",
            "model.moe_ffn_hidden_size", "model.moe_router_topk", "scheduler.lr_decay_iters",
            "scheduler.lr_decay_samples", "scheduler.lr_wsd_decay_iters",
            "scheduler.lr_wsd_decay_samples", "ddp.suggested_communication_unit_size")  # fmt: skip

NOT_NEGATIVE = ("validation.eval_iters", "data.num_workers", "optimizer.lr", "optimizer.min_lr",
                "optimizer.weight_decay", "optimizer.clip_grad", "scheduler.lr_warmup_iters",
                "scheduler.lr_warmup_samples", "scheduler.lr_warmup_init", "checkpoint.ckpt_step",
                "train.manual_gc_interval", "model.moe_aux_loss_coeff", "logger.log_overlap")  # fmt: skip

TOKENIZER_FILES = {
    "NullTokenizer": ("vocab_size",),
    "HuggingFaceTokenizer": ("tokenizer_model",),
    "SentencePieceTokenizer": ("tokenizer_model",),
    "GPTSentencePieceTokenizer": ("tokenizer_model",),
    "Llama2Tokenizer": ("tokenizer_model",),
    "TikTokenizer": ("tokenizer_model",),
    "GPT2BPETokenizer": ("vocab_file", "merge_file"),
}
"""Options that each tokenizer type needs."""

BELONGS: tuple[tuple[tuple[str, ...], str, Callable[[RunConfig], object]], ...] = (
    (
        ("model.moe_ffn_hidden_size", "model.moe_router_topk", "model.moe_router_pre_softmax",
         "model.moe_router_load_balancing_type", "model.moe_aux_loss_coeff", "model.moe_token_dispatcher_type"),
        "--num-experts",
        lambda config: config.model.num_experts is not None,
    ),
    (
        ("model.moe_aux_loss_coeff",),
        "--moe-router-load-balancing-type aux_loss",
        lambda config: config.model.moe_router_load_balancing_type != "none",
    ),
    (
        ("model.rope_scaling_factor",),
        "--use-rope-scaling",
        lambda config: config.model.use_rope_scaling,
    ),
    (
        ("model.init_method_std",),
        "normal initial weights, without --init-method-xavier-uniform",
        lambda config: not config.model.init_method_xavier_uniform,
    ),
    (
        ("model.add_qkv_bias",),
        "--disable-bias-linear: without it every linear layer has a bias",
        lambda config: not config.model.add_bias_linear,
    ),
    (
        ("data.reset_position_ids",),
        "--position-embedding-type learned_absolute, which alone reads positions from the samples",
        lambda config: config.model.position_embedding_type == "learned_absolute",
    ),
    (
        ("data.reset_attention_mask",),
        "the masks that --no-create-attention-mask-in-dataloader drops",
        lambda config: config.data.create_attention_mask_in_dataloader,
    ),
    (
        ("tokenizer.make_vocab_size_divisible_by",),
        "rows to count, which --padded-vocab-size gives",
        lambda config: config.tokenizer.padded_vocab_size is None,
    ),
    (
        ("tokenizer.tokenizer_hf_no_include_special_tokens",),
        "--tokenizer-type HuggingFaceTokenizer",
        lambda config: config.tokenizer.tokenizer_type == "HuggingFaceTokenizer",
    ),
    (
        ("tokenizer.tiktoken_num_special_tokens",),
        "--tokenizer-type TikTokenizer",
        lambda config: config.tokenizer.tokenizer_type == "TikTokenizer",
    ),
    (
        ("optimizer.adam_beta1", "optimizer.adam_beta2", "optimizer.adam_eps"),
        "--optimizer adam",
        lambda config: config.optimizer.optimizer == "adam",
    ),
    (
        ("optimizer.sgd_momentum",),
        "--optimizer sgd",
        lambda config: config.optimizer.optimizer == "sgd",
    ),
    (
        ("optimizer.weight_decay",),
        "a constant weight decay, without --weight-decay-incr-style",
        lambda config: config.scheduler.weight_decay_incr_style == "constant",
    ),
    (
        ("optimizer.min_lr",),
        "a --lr-decay-style other than constant",
        lambda config: config.scheduler.lr_decay_style != "constant",
    ),
    (
        ("scheduler.lr_decay_iters", "scheduler.lr_decay_samples"),
        "a --lr-decay-style other than constant, or --lr-warmup-fraction",
        lambda config: config.scheduler.lr_decay_style != "constant" or config.scheduler.lr_warmup_fraction,
    ),
    (
        ("scheduler.lr_warmup_init",),
        "a warm-up: --lr-warmup-iters, --lr-warmup-samples or --lr-warmup-fraction",
        lambda config: (
            config.scheduler.lr_warmup_iters
            or config.scheduler.lr_warmup_samples
            or config.scheduler.lr_warmup_fraction
        ),
    ),
    (
        ("scheduler.lr_wsd_decay_style",),
        "--lr-decay-style WSD",
        lambda config: config.scheduler.lr_decay_style == "WSD",
    ),
    (
        ("precision.initial_loss_scale", "precision.min_loss_scale", "precision.loss_scale_window",
         "precision.hysteresis"),
        "a dynamic loss scale, without --loss-scale",
        lambda config: config.precision.loss_scale is None,
    ),
    (
        ("scheduler.use_checkpoint_opt_param_scheduler", "scheduler.override_opt_param_scheduler"),
        "--load DIRECTORY",
        lambda config: config.checkpoint.load is not None,
    ),
    (
        ("checkpoint.strict_fsdp_dtensor_load",),
        "--load or --pretrained-checkpoint DIRECTORY",
        lambda config: config.checkpoint.load is not None or config.checkpoint.pretrained_checkpoint is not None,
    ),
    (
        ("checkpoint.dist_ckpt_strictness",),
        "--no-strict-fsdp-dtensor-load",
        lambda config: not config.checkpoint.strict_fsdp_dtensor_load,
    ),
    (
        ("logger.log_memory_to_tensorboard", "logger.log_validation_ppl_to_tensorboard",
         "logger.log_loss_scale_to_tensorboard", "logger.tensorboard_log_interval", "logger.tensorboard_queue_size"),
        "--tensorboard-dir",
        lambda config: config.logger.tensorboard_dir is not None,
    ),
    (
        ("train.manual_gc_interval", "train.manual_gc_eval"),
        "--manual-gc",
        lambda config: config.train.manual_gc,
    ),
)  # fmt: skip
"""Options that say nothing without another one: their fields, that option, and a test for it."""


@rule
def required_fields_are_given(config: RunConfig, setting: Setting) -> Iterator[str]:
    """A run cannot guess its model's size, sequence length, batch size or tokenizer."""
    yield from (f"{flag_of(path)} is missing" for path in REQUIRED if value_of(config, path) is None)


@rule
def counts_are_in_range(config: RunConfig, setting: Setting) -> Iterator[str]:
    """Sizes and intervals are at least 1, rates and optional counts at least 0."""
    for paths, least in ((POSITIVE, 1), (NOT_NEGATIVE, 0)):
        for path in paths:
            value = value_of(config, path)
            if value is not None and not value >= least:
                yield f"{flag_of(path)} is {value}; it should be at least {least}"


@rule
def attention_divides(config: RunConfig, setting: Setting) -> Iterator[str]:
    """Heads share the hidden size evenly, and query groups the heads."""
    model = config.model
    heads = model.num_attention_heads
    if not heads or heads < 1:
        return
    if model.hidden_size and model.kv_channels is None and model.hidden_size % heads:
        yield f"--hidden-size {model.hidden_size} is not divisible by --num-attention-heads {heads}; pass --kv-channels"
    if model.group_query_attention and model.num_query_groups > 0 and heads % model.num_query_groups:
        yield f"--num-attention-heads {heads} is not divisible by --num-query-groups {model.num_query_groups}"
    if model.num_query_groups != 1 and not model.group_query_attention:
        yield "--num-query-groups needs --group-query-attention"


@rule
def activation_is_one(config: RunConfig, setting: Setting) -> str | None:
    """The MLP has one activation function."""
    if config.model.swiglu and config.model.squared_relu:
        return "--swiglu and --squared-relu exclude each other"
    return None


@rule
def dropout_is_a_probability(config: RunConfig, setting: Setting) -> Iterator[str]:
    """Dropout lies in [0, 1)."""
    for path in ("model.attention_dropout", "model.hidden_dropout"):
        if not 0 <= value_of(config, path) < 1:
            yield f"{flag_of(path)} is {value_of(config, path)}; it should be from 0 to below 1"


@rule
def positions_reach_the_sequence(config: RunConfig, setting: Setting) -> str | None:
    """The model has a position for every token of a sample."""
    most, length = config.model.max_position_embeddings, config.data.seq_length
    if most is not None and length is not None and length > most:
        return f"--seq-length {length} is longer than --max-position-embeddings {most}"
    return None


@rule
def rotary_flags_need_rope(config: RunConfig, setting: Setting) -> str | None:
    """Rotary settings say nothing to other position embeddings."""
    if config.model.position_embedding_type == "rope":
        return None
    names = ("rotary_base", "rotary_percent", "rotary_interleaved", "rotary_seq_len_interpolation_factor",
             "use_rope_scaling", "rope_scaling_factor")  # fmt: skip
    paths = [f"model.{name}" for name in names]
    given = [path for path in paths if is_given(config, path)]
    if given:
        return f"{', '.join(map(flag_of, given))}: only with --position-embedding-type rope"
    return None


@rule
def precision_is_one(config: RunConfig, setting: Setting) -> str | None:
    """Weights compute in one dtype."""
    if config.precision.bf16 and config.precision.fp16:
        return "--bf16 and --fp16 exclude each other"
    return None


@rule
def loss_scaling_needs_fp16(config: RunConfig, setting: Setting) -> Iterator[str]:
    """Only fp16 gradients need a loss scale."""
    precision = config.precision
    if precision.fp16:
        if precision.initial_loss_scale < precision.min_loss_scale:
            yield "--initial-loss-scale is below --min-loss-scale"
        return
    for name in ("loss_scale", "initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis"):
        if is_given(config, path := f"precision.{name}"):
            yield f"{flag_of(path)} needs --fp16"


@rule
def data_has_one_source(config: RunConfig, setting: Setting) -> Iterator[str]:
    """Samples come from --data-path, or from paths per split, or are made up."""
    data = config.data
    per_split = (data.train_data_path, data.valid_data_path, data.test_data_path)
    sources = [data.data_path is not None, any(path is not None for path in per_split), data.mock_data]
    if sum(sources) > 1:
        yield "--data-path, --train-data-path (with --valid- and --test-data-path) and --mock-data exclude each other"
    if not any(sources):
        yield "there is no data; pass --data-path PREFIX, --train-data-path PREFIX or --mock-data"
    if sources[1] and data.train_data_path is None and not config.validation.skip_train:
        yield "--valid-data-path and --test-data-path need --train-data-path"
    if data.split is not None and sources[1]:
        yield "--split divides --data-path or --mock-data; it says nothing to --train-data-path"


@rule
def tokenizer_has_its_files(config: RunConfig, setting: Setting) -> Iterator[str]:
    """A tokenizer is read from disk, or told its size."""
    tokenizer = config.tokenizer
    for name in TOKENIZER_FILES.get(tokenizer.tokenizer_type or "", ()):
        if getattr(tokenizer, name) is None:
            yield f"{tokenizer.tokenizer_type} needs {flag_of(f'tokenizer.{name}')}"


@rule
def training_has_one_length(config: RunConfig, setting: Setting) -> str | None:
    """A run is as long as its iterations or as its samples say."""
    train = config.train
    if train.train_iters is not None and train.train_samples is not None:
        return "--train-iters and --train-samples exclude each other"
    if train.train_iters is None and train.train_samples is None and not config.validation.skip_train:
        return "--train-iters is missing (or --train-samples)"
    return None


@rule
def schedule_counts_as_training_does(config: RunConfig, setting: Setting) -> Iterator[str]:
    """With --train-iters the schedule counts iterations, with --train-samples samples."""
    counts_samples = config.train.train_samples is not None
    wrong, right = ("iters", "samples") if counts_samples else ("samples", "iters")
    for stem in ("lr_decay", "lr_warmup", "lr_wsd_decay"):
        if getattr(config.scheduler, f"{stem}_{wrong}"):
            flag = flag_of(f"scheduler.{stem}_{wrong}")
            yield f"{flag} does not go with --train-{right}; use {flag_of(f'scheduler.{stem}_{right}')}"


@rule
def warmup_has_one_length(config: RunConfig, setting: Setting) -> Iterator[str]:
    """The warm-up is a fraction or a count, and ends before the decay."""
    scheduler = config.scheduler
    fraction, count = scheduler.lr_warmup_fraction, scheduler.lr_warmup_iters or scheduler.lr_warmup_samples
    if fraction is not None and count:
        yield "--lr-warmup-fraction and --lr-warmup-iters (or -samples) exclude each other"
    if fraction is not None and not 0 <= fraction < 1:
        yield f"--lr-warmup-fraction is {fraction}; it should be from 0 to below 1"
    if config.train.train_samples is None:
        decay, unit = scheduler.lr_decay_iters or config.train.train_iters, "iters"
    else:
        decay, unit = scheduler.lr_decay_samples or config.train.train_samples, "samples"
    if decay and count >= decay:
        yield f"--lr-warmup-{unit} {count} leaves nothing of the decay's {decay} {unit}; take fewer than {decay}"


@rule
def learning_rate_has_its_range(config: RunConfig, setting: Setting) -> Iterator[str]:
    """There is a learning rate; it starts and ends no higher."""
    optimizer, start = config.optimizer, config.scheduler.lr_warmup_init
    if optimizer.lr is None:
        if not config.validation.skip_train:
            yield "--lr is missing"
        return
    if optimizer.min_lr > optimizer.lr:
        yield f"--min-lr {optimizer.min_lr} is above --lr {optimizer.lr}"
    if start > optimizer.lr:
        yield f"--lr-warmup-init {start} is above --lr {optimizer.lr}"


@rule
def wsd_has_its_last_phase(config: RunConfig, setting: Setting) -> Iterator[str]:
    """WSD decays in its last phase, whose length is given; no other style has one."""
    scheduler = config.scheduler
    length = scheduler.lr_wsd_decay_iters or scheduler.lr_wsd_decay_samples
    if scheduler.lr_decay_style == "WSD" and not length:
        yield "--lr-decay-style WSD needs --lr-wsd-decay-iters (or -samples)"
    if scheduler.lr_decay_style != "WSD" and length:
        yield "--lr-wsd-decay-iters and -samples need --lr-decay-style WSD"


@rule
def weight_decay_has_its_range(config: RunConfig, setting: Setting) -> Iterator[str]:
    """A changing weight decay has a start and a higher end; a constant one has neither."""
    scheduler = config.scheduler
    start, end = scheduler.start_weight_decay, scheduler.end_weight_decay
    if scheduler.weight_decay_incr_style == "constant":
        if start is not None or end is not None:
            yield "--start-weight-decay and --end-weight-decay need --weight-decay-incr-style linear or cosine"
    elif start is None or end is None:
        yield "--weight-decay-incr-style needs --start-weight-decay and --end-weight-decay"
    elif not 0 <= start <= end:
        yield f"--start-weight-decay {start} should be from 0 to --end-weight-decay {end}"


@rule
def schedule_has_one_owner(config: RunConfig, setting: Setting) -> str | None:
    """On resume the schedule is the checkpoint's or this run's."""
    if config.scheduler.override_opt_param_scheduler and config.scheduler.use_checkpoint_opt_param_scheduler:
        return "--override-opt-param-scheduler and --use-checkpoint-opt-param-scheduler exclude each other"
    return None


@rule
def batch_divides(config: RunConfig, setting: Setting) -> str | None:
    """Every rank runs the same whole number of micro-batches per step."""
    micro, batch, ranks = config.train.micro_batch_size, config.train.global_batch_size, setting.data_parallel_size
    if micro is None or batch is None or micro < 1 or batch < 1 or batch % (micro * ranks) == 0:
        return None
    below, step = batch // (micro * ranks), micro * ranks
    nearest = f"{below * step} or {(below + 1) * step}" if below else str(step)
    return (
        f"--global-batch-size {batch} is not divisible by --micro-batch-size {micro} x {ranks} data-parallel ranks; "
        f"take {nearest}"
    )


@rule
def checkpoint_flags_have_their_directory(config: RunConfig, setting: Setting) -> Iterator[str]:
    """Flags of saving need --save, flags of loading --load."""
    for needed, paths in (
        ("save", ("save_interval", "save_retain_interval", "save_optim", "save_rng", "async_save")),
        (
            "load",
            (
                "ckpt_step",
                "load_optim",
                "load_rng",
                "finetune",
                "exit_on_missing_checkpoint",
                "verify_checksums",
                "use_checkpoint_args",
            ),
        ),
    ):
        if getattr(config.checkpoint, needed) is not None:
            continue
        if needed == "load" and config.checkpoint.pretrained_checkpoint is not None:
            paths = tuple(name for name in paths if name != "verify_checksums")
        for name in paths:
            if is_given(config, path := f"checkpoint.{name}"):
                yield f"{spelled(path, config)} needs --{needed} DIRECTORY"


@rule
def retained_checkpoints_are_saved(config: RunConfig, setting: Setting) -> str | None:
    """Checkpoints that are kept are among those that are written."""
    save, retain = config.checkpoint.save_interval, config.checkpoint.save_retain_interval
    if retain is None or (save and retain % save == 0):
        return None
    return f"--save-retain-interval {retain} should be a multiple of --save-interval, which is {save or 'not given'}"


@rule
def skip_train_has_something_to_do(config: RunConfig, setting: Setting) -> str | None:
    """--skip-train only evaluates."""
    if config.validation.skip_train and config.validation.eval_iters == 0:
        return "--skip-train leaves only evaluation, and --eval-iters is 0"
    return None


@rule
def recompute_is_complete(config: RunConfig, setting: Setting) -> Iterator[str]:
    """Full recomputation has a method and a number of layers; selective has parts."""
    recompute, layers = config.recompute, config.model.num_layers
    full_flags = [name for name in ("recompute_method", "recompute_num_layers") if getattr(recompute, name) is not None]
    if recompute.recompute_granularity == "full":
        if len(full_flags) < 2:
            yield "--recompute-granularity full needs --recompute-method and --recompute-num-layers"
        if recompute.recompute_num_layers and layers and recompute.recompute_num_layers > layers:
            yield f"--recompute-num-layers {recompute.recompute_num_layers} is more than --num-layers {layers}"
    elif full_flags:
        flags = ", ".join(flag_of(f"recompute.{name}") for name in full_flags)
        yield f"{flags}: only with --recompute-granularity full"
    if recompute.recompute_modules is None:
        return
    if recompute.recompute_granularity != "selective":
        yield "--recompute-modules needs --recompute-granularity selective"
    unknown = sorted(set(recompute.recompute_modules) - {"core_attn", "mlp", "layernorm"})
    if unknown:
        yield f"--recompute-modules {' '.join(unknown)}: expected core_attn, mlp or layernorm"


@rule
def options_have_what_they_belong_to(config: RunConfig, setting: Setting) -> Iterator[str]:
    """An option that would say nothing is not given."""
    for paths, needed, is_there in BELONGS:
        if not is_there(config):
            yield from (f"{spelled(path, config)} needs {needed}" for path in paths if is_given(config, path))


@rule
def nothing_undoes_determinism(config: RunConfig, setting: Setting) -> Iterator[str]:
    """Libraries that read the environment are not told the contrary of --deterministic-mode."""
    if not config.rng.deterministic_mode:
        return
    for name, value in setting.machine.determinism.items():
        if value.lower() not in (allowed.lower() for allowed in DETERMINISTIC[name]):
            wanted = " or ".join(DETERMINISTIC[name])
            yield f"--deterministic-mode needs {name} to be {wanted}, or not set; it is {value!r}"
