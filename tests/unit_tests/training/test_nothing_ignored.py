"""No option is accepted and ignored, alone or beside others.

Every field gets other values in several runs: each changes what the run computes or writes, or is refused, or has a
line in the log that says that there is nothing to do, or is in one of the two tables here.
"""

import dataclasses
import itertools
import re
import shlex
from pathlib import Path

import pytest

from megatron.training.config import ConfigError, Machine, RunConfig, choose_kernels, load_config
from megatron.training.config.flags import all_flags
from megatron.training.config.notes import NOTHING_TO_DO, notes
from megatron.training.config.rule_book import Setting, value_of
from megatron.training.config.rules import violations
from tests.unit_tests.training.runs import Outcome, train_config

SAME_NUMBERS = {
    "dist.distributed_timeout_minutes": "time limit",
    "ddp.average_in_collective": "rounding; tests/unit_tests/gloo/equivalence/test_parity.py",
    "ddp.create_all_gather_group": "speed",
    "ddp.data_parallel_sharding_strategy": "memory",
    "ddp.fsdp_db_use_persist_buf_on_alloc_fail": "memory",
    "ddp.fsdp_double_buffer": "memory",
    "ddp.fsdp_residency_bytes": "memory",
    "ddp.fsdp_unit_modules": "memory",
    "ddp.megatron_fsdp_enable_fine_grained_param_gather": "memory",
    "ddp.megatron_fsdp_grad_comm_dtype": "rounding between ranks; tests/unit_tests/gloo/gradients/test_dtypes.py",
    "ddp.megatron_fsdp_max_pool_double_buffer": "memory",
    "ddp.suggested_communication_unit_size": "speed",
    "recompute.recompute_granularity": "memory",
    "recompute.recompute_method": "memory",
    "recompute.recompute_modules": "memory",
    "recompute.recompute_num_layers": "memory",
    "model.apply_query_key_layer_scaling": "rounding of fp16: divides scores, and multiplies them again",
    "model.apply_rope_fusion": "speed",
    "model.attention_backend": "speed",
    "model.bias_dropout_fusion": "speed",
    "model.bias_gelu_fusion": "speed",
    "model.bias_swiglu_fusion": "speed",
    "model.cross_entropy_fusion_impl": "speed",
    "model.cross_entropy_loss_fusion": "speed",
    "model.gradient_accumulation_fusion": "speed",
    "model.masked_softmax_fusion": "speed",
    "model.moe_token_dispatcher_type": "speed",
    "model.persist_layer_norm": "speed",
    "model.transformer_impl": "speed",
    "model.use_cpu_initialization": "draws on the device, which is the CPU here",
    "model.use_mcore_models": "on, and refused otherwise",
    "data.create_attention_mask_in_dataloader": "speed: without it attention makes the same mask",
    "data.data_cache_path": "place of index files",
    "data.mid_level_dataset_surplus": "a margin, so that no set of a blend runs out",
    "data.mmap_bin_files": "speed",
    "data.num_dataset_builder_threads": "speed",
    "data.num_workers": "speed",
    "train.manual_gc": "speed",
    "train.manual_gc_eval": "speed",
    "train.manual_gc_interval": "speed",
    "logger.log_memory_to_tensorboard": "logging",
    "logger.log_overlap": "logging",
    "logger.log_validation_ppl_to_tensorboard": "logging",
    "logger.log_loss_scale_to_tensorboard": "logging",
    "logger.logging_level": "logging, by launch()",
    "logger.tensorboard_dir": "logging",
    "logger.tensorboard_log_interval": "logging",
    "logger.tensorboard_queue_size": "logging",
    "rng.deterministic_mode": "kernels of GPUs; a CPU computes the same bits each time",
}
"""Fields that change speed, memory, logging or at most rounding."""

AS_DEFAULT = {
    "checkpoint.ckpt_format": "fsdp_dtensor",
    "data.dataloader_type": "single",
    "ddp.megatron_fsdp_main_params_dtype": "auto",
    "ddp.megatron_fsdp_main_grads_dtype": "fp32",
    "ddp.use_distributed_optimizer": True,
    "dist.distributed_backend": "gloo",
}
"""Values that say what the default, auto, means in these runs."""

ONLY_WHEN_IT_HAPPENS = {
    "train.check_for_nan_in_loss_and_grad": "a loss is not finite: test_loop.py",
    "train.exit_duration_in_mins": "minutes pass: test_signals.py",
    "train.exit_signal_handler": "a signal comes: test_signals.py",
    "validation.skip_train": "its run has no training at all: test_checkpoint.py",
    "precision.min_loss_scale": "the scale falls so far",
    "precision.loss_scale_window": "so many steps are good",
    "precision.hysteresis": "steps overflow",
}
"""Fields that act on events that a run of four steps does not have."""

VALUES = {
    "checkpoint.save_interval": 2, "checkpoint.save_retain_interval": 2, "checkpoint.ckpt_step": 2,
    "ddp.num_distributed_optimizer_instances": 2, "dist.tensor_model_parallel_size": 2,
    "dist.pipeline_model_parallel_size": 2, "dist.context_parallel_size": 2, "dist.expert_model_parallel_size": 2,
    "tokenizer.tokenizer_model": "absent", "tokenizer.vocab_file": Path("absent"),
    "tokenizer.merge_file": Path("absent"), "tokenizer.vocab_size": 200, "tokenizer.padded_vocab_size": 256,
    "tokenizer.make_vocab_size_divisible_by": 7, "tokenizer.tokenizer_special_tokens": ("a",),
    "tokenizer.tiktoken_num_special_tokens": 5,
    "model.num_layers": 1, "model.hidden_size": 48, "model.ffn_hidden_size": 40, "model.num_attention_heads": 2,
    "model.kv_channels": 4, "model.num_query_groups": 2, "model.max_position_embeddings": 20, "model.rotary_base": 500,
    "model.rotary_percent": 0.5, "model.rotary_seq_len_interpolation_factor": 2, "model.rope_scaling_factor": 2.0,
    "model.layernorm_epsilon": 1e-2, "model.attention_dropout": 0.2, "model.hidden_dropout": 0.2,
    "model.init_method_std": 0.5, "model.num_experts": 2, "model.moe_ffn_hidden_size": 24, "model.moe_router_topk": 3,
    "model.moe_aux_loss_coeff": 0.5, "data.split": "50,30,20", "data.seq_length": 8, "train.micro_batch_size": 1,
    "train.global_batch_size": 8, "train.train_iters": 3, "train.train_samples": 8, "train.exit_interval": 2,
    "validation.eval_iters": 2, "validation.eval_interval": 3, "precision.loss_scale": 8.0,
    "precision.initial_loss_scale": 16.0, "optimizer.lr": 2e-2, "optimizer.min_lr": 8e-3,
    "optimizer.weight_decay": 0.5, "optimizer.clip_grad": 0.01, "optimizer.adam_beta1": 0.5,
    "optimizer.adam_beta2": 0.5, "optimizer.adam_eps": 1e-2, "optimizer.sgd_momentum": 0.5,
    "scheduler.lr_decay_iters": 3, "scheduler.lr_decay_samples": 14, "scheduler.lr_warmup_fraction": 0.5,
    "scheduler.lr_warmup_iters": 2, "scheduler.lr_warmup_samples": 6, "scheduler.lr_warmup_init": 1e-3,
    "scheduler.lr_wsd_decay_iters": 1, "scheduler.lr_wsd_decay_samples": 4, "scheduler.start_weight_decay": 0.2,
    "scheduler.end_weight_decay": 0.3, "logger.log_interval": 2, "rng.seed": 5,
}  # fmt: skip
"""Another value for each field that is neither a switch nor a choice."""

RUN = (
    "--use-megatron-fsdp --num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --micro-batch-size 2 "
    "--global-batch-size 4 --lr 1e-2 --train-iters 4 --tokenizer-type NullTokenizer --vocab-size 100 --eval-iters 1 "
    "--num-workers 0 --log-interval 1 --lr-warmup-iters 1 --split 60,20,20 --eod-mask-loss "
)
MODEL, SCHEDULE = ("model",), ("optimizer", "scheduler")
RUNS: dict[str, tuple[str, tuple[str, ...]]] = {
    "plain": ("", ()),
    "rope": ("--position-embedding-type rope", (*MODEL, "data")),
    "scaled rope": ("--position-embedding-type rope --use-rope-scaling", ("model.rope_scaling_factor",)),
    "no positions": ("--position-embedding-type none", ("model.rotary", "data")),
    "experts": ("--num-experts 4 --disable-bias-linear --moe-aux-loss-coeff 0.01", MODEL),
    "experts without balance": ("--num-experts 4 --disable-bias-linear --moe-router-load-balancing-type none",
                                ("model.moe_aux", "model.moe_router_topk", "model.moe_router_pre")),
    "no biases": ("--disable-bias-linear --group-query-attention", MODEL),
    "xavier": ("--init-method-xavier-uniform", ("model.init",)),
    "sgd": ("--optimizer sgd", ("optimizer",)),
    "constant": ("--lr-decay-style constant --lr-warmup-iters 0", SCHEDULE),
    "WSD": ("--lr-decay-style WSD --lr-wsd-decay-iters 2", SCHEDULE),
    "inverse root": ("--lr-decay-style inverse-square-root", SCHEDULE),
    "changing decay": ("--weight-decay-incr-style linear --start-weight-decay 0.01 --end-weight-decay 0.1", SCHEDULE),
    "samples": ("--train-samples 16 --lr-warmup-iters 0 --lr-warmup-samples 4", (*SCHEDULE, "train")),
    "fp16": ("--fp16", ("precision",)),
    "fp16, constant scale": ("--fp16 --loss-scale 8", ("precision",)),
    "documents": ("--reset-attention-mask", ("data",)),
}  # fmt: skip
"""Flags beside `RUN`, and the fields that are tried with them, by the beginnings of their paths; none: all."""


def base_config(flags: str, data: str) -> RunConfig:
    config = load_config(shlex.split(f"{RUN} {flags} --data-path {data}"))
    if config.train.train_samples is not None:
        config = replaced(config, "train.train_iters", None)
    return config


def replaced(config: RunConfig, path: str, value: object) -> RunConfig:
    section, name = path.split(".")
    return dataclasses.replace(config, **{section: dataclasses.replace(getattr(config, section), **{name: value})})


def tabled(path: str) -> bool:
    return path in ONLY_WHEN_IT_HAPPENS or path in SAME_NUMBERS


def other_values(config: RunConfig, path: str) -> list[object]:
    flag, now = all_flags()[path], value_of(config, path)
    if flag.base is bool:
        return [not now]
    if flag.choices:
        return [choice for choice in flag.choices if choice != now and AS_DEFAULT.get(path) != choice]
    return [VALUES[path]] if path in VALUES and VALUES[path] != now else []


def is_answered(config: RunConfig, base: RunConfig) -> bool:
    """True if `config` is refused, or has a line in the log that `base` has not."""
    kernels = choose_kernels(config, Machine())
    setting = Setting(world_size=1, tensor_parallel_size=1, machine=Machine(), kernels=kernels)
    return bool(violations(config, setting)) or notes(config, kernels) != notes(base, choose_kernels(base, Machine()))


def print_of(outcome: Outcome) -> tuple:
    """All that a run computes and says, without times."""
    lines = re.sub(r"\[.*?\]|elapsed time per iteration \(ms\): [0-9.]+", "", outcome.output)
    lines = re.sub(r"(?m)^.*(seconds|ms\)|elapsed).*$", "", lines)
    weights = {name: (tuple(weight.shape), weight.double().sum().item()) for name, weight in outcome.weights.items()}
    return outcome.losses, outcome.norms, outcome.evaluations, outcome.state, weights, lines


def ignored(name: str, data: str) -> list[str]:
    """Fields whose other values change nothing in one of `RUNS`."""
    flags, beginnings = RUNS[name]
    base = base_config(flags, data)
    before = print_of(train_config(base))
    assert print_of(train_config(base)) == before, "the run is not the same each time"
    found = []
    for path in all_flags():
        if tabled(path) or not path.startswith(beginnings or ("",)):
            continue
        for value in other_values(base, path):
            config = replaced(base, path, value)
            if not is_answered(config, base) and outcome_of(config) == before:
                found.append(f"{path}={value}")
    return found


def outcome_of(config: RunConfig) -> tuple | None:
    """`print_of` a run; None if its files or its tokenizer refuse it."""
    try:
        return print_of(train_config(config))
    except ConfigError:
        return None


@pytest.fixture(scope="module")
def documents(mcore_ranks1, tmp_path_factory) -> str:
    """Prefix of documents of four to eleven tokens, each with an end."""
    (prefix,) = mcore_ranks1.run(write_documents, tmp_path_factory.mktemp("data") / "short")
    return prefix


def write_documents(prefix: Path) -> str:
    from tests.unit_tests.training.test_data import write_indexed

    lengths = itertools.islice(itertools.cycle(range(3, 11)), 300)
    texts = [[(7 * number + at * at) % 100 for at in range(length)] + [100] for number, length in enumerate(lengths)]
    return write_indexed(prefix, texts)


@pytest.mark.parametrize("name", RUNS)
def test_nothing_is_accepted_and_ignored(mcore_ranks1, documents, name):
    assert mcore_ranks1.run(ignored, name, documents) == [[]]


def test_every_field_has_another_value_or_a_reason() -> None:
    config = base_config("", "data")
    left = [path for path in all_flags() if not tabled(path) and not other_values(config, path)]
    paths = ["data.data_path", "data.train_data_path", "data.valid_data_path", "data.test_data_path"]
    assert left == [*paths, "checkpoint.save", "checkpoint.load", "checkpoint.pretrained_checkpoint"]


def test_tables_name_fields() -> None:
    named = {*SAME_NUMBERS, *ONLY_WHEN_IT_HAPPENS, *AS_DEFAULT, *VALUES, *(path for path, *_ in NOTHING_TO_DO)}
    assert named <= set(all_flags())


@pytest.mark.parametrize("path", [path for path, *_ in NOTHING_TO_DO])
def test_what_has_nothing_to_do_is_said(path: str) -> None:
    flags = {
        "checkpoint.load_optim": "--finetune --no-load-optim",
        "checkpoint.load_rng": "--finetune --no-load-rng",
        "data.mid_level_dataset_surplus": "--mock-data --mid-level-dataset-surplus 0.1",
        "ddp.fsdp_manual_registration": "--use-nccl-ub --fsdp-manual-registration",
        "ddp.use_distributed_optimizer": "--use-distributed-optimizer",
        "model.ffn_hidden_size": "--num-experts 2 --moe-ffn-hidden-size 8 --ffn-hidden-size 8",
        "model.max_position_embeddings": "--position-embedding-type rope --max-position-embeddings 64",
        "train.check_for_nan_in_loss_and_grad": "--fp16 --no-check-for-nan-in-loss-and-grad",
        "validation.eval_interval": "--eval-iters 0 --eval-interval 5",
    }
    flag = all_flags()[path]
    config = load_config(flags.get(path, flag.on[0]).split())
    spelling = (flag.off if value_of(config, path) is False else flag.on)[0]
    assert any(
        line.startswith(f"{spelling}: nothing to do, ") for line in notes(config, choose_kernels(config, Machine()))
    )
