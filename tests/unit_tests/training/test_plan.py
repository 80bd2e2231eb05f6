"""The plan: derived sizes, batches, lengths, schedule and arithmetic."""

import pytest

from megatron.training.config import Machine, choose_kernels, load_config, plan_run
from megatron.training.config.plan import RunPlan, ffn_hidden_size, flops_per_token, kv_channels, max_positions
from tests.unit_tests.training.test_rules import CPU, CUDA, FULL, GOLDEN, RUN


def plan_of(argv: str, world_size: int = 2, machine: Machine = CPU) -> RunPlan:
    return plan_run(load_config(argv.split()), world_size, 512, machine)


def test_golden_run() -> None:
    plan = plan_of(GOLDEN, world_size=8)
    assert (plan.global_batch_size, plan.micro_batches, plan.train_samples) == (32, 2, 1280)
    assert (plan.schedule.warmup_samples, plan.schedule.decay_samples) == (160, 1280)
    assert (plan.valid_samples, plan.test_samples) == (0, 0)


def test_batch_defaults_to_one_micro_batch_per_rank() -> None:
    plan = plan_of(RUN, world_size=3)
    assert (plan.global_batch_size, plan.micro_batches, plan.tokens_per_step) == (6, 1, 6 * 32)


def test_samples_make_iterations() -> None:
    plan = plan_of(
        f"{RUN} --lr-decay-samples 20 --lr-warmup-samples 3".replace("--train-iters 8", "--train-samples 30")
    )
    assert (plan.train_iters, plan.train_samples) == (7, 30)
    assert (plan.schedule.decay_samples, plan.schedule.warmup_samples) == (20, 3)
    assert plan.schedule.weight_decay_samples == 30


def test_warmup_fraction_is_of_the_decay() -> None:
    assert plan_of(f"{RUN} --lr-warmup-fraction 0.3 --lr-decay-iters 5").schedule.warmup_samples == pytest.approx(6.0)


def test_evaluations_need_samples() -> None:
    plan = plan_of(f"{RUN} --eval-iters 5 --eval-interval 3")
    assert (plan.valid_samples, plan.test_samples) == (3 * 5 * 4, 5 * 4)


def test_weight_decay_may_change() -> None:
    argv = f"{RUN} --weight-decay-incr-style cosine --start-weight-decay 0.1 --end-weight-decay 0.2"
    schedule = plan_of(argv).schedule
    assert (schedule.start_weight_decay, schedule.end_weight_decay) == (0.1, 0.2)
    assert plan_of(RUN).schedule.start_weight_decay == plan_of(RUN).schedule.end_weight_decay == 0.01


@pytest.mark.parametrize(
    ("argv", "expected"),
    [("", 256), ("--swiglu", 128), ("--ffn-hidden-size 100", 100)],
)
def test_mlp_width(argv: str, expected: int) -> None:
    assert ffn_hidden_size(load_config(f"{RUN} {argv}".split()).model) == expected


def test_open_sizes_follow() -> None:
    config = load_config(RUN.split())
    assert (kv_channels(config.model), max_positions(config)) == (16, 32)


@pytest.mark.parametrize(
    ("argv", "weights"),
    [
        ("", 64 * 64 * 4 + 2 * 64 * 256),
        ("--swiglu", 64 * 64 * 4 + 3 * 64 * 128),
        ("--group-query-attention --num-query-groups 1", 64 * (64 + 2 * 16 + 64) + 2 * 64 * 256),
    ],
)
def test_flops_are_six_per_weight_and_half_the_attention(argv: str, weights: int) -> None:
    attention = 2 * 64 * 32 // 2
    expected = 6 * (2 * (weights + attention) + 64 * 512)
    assert flops_per_token(load_config(f"{RUN} {argv}".split()), 512) == expected
    assert plan_of(f"{RUN} {argv}").flops_per_step == expected * 4 * 32


def test_backend_and_nan_check_follow() -> None:
    assert (plan_of(RUN).backend, plan_of(RUN, machine=CUDA).backend) == ("gloo", "nccl")
    assert plan_of(RUN).checks_for_nan
    assert not plan_of(f"{RUN} --fp16").checks_for_nan
    assert plan_of(f"{RUN} --fp16 --loss-scale 8").checks_for_nan


def test_kernels_follow_the_machine() -> None:
    config = load_config(f"{RUN} --position-embedding-type rope".split())
    on_cpu, on_cuda, on_full = (choose_kernels(config, machine) for machine in (CPU, CUDA, FULL))
    assert (on_cpu.transformer_impl, on_cuda.transformer_impl, on_full.transformer_impl) == (
        "local",
        "local",
        "transformer_engine",
    )
    assert on_cpu.use_cpu_initialization and not on_cuda.use_cpu_initialization
    assert on_cuda.bias_dropout_fusion and on_cuda.bias_activation_fusion
    assert not (on_cpu.bias_dropout_fusion or on_cpu.bias_activation_fusion)
    assert on_full.apply_rope_fusion and on_full.masked_softmax_fusion and on_full.persist_layer_norm
    assert not (on_cuda.apply_rope_fusion or on_cuda.masked_softmax_fusion or on_cuda.persist_layer_norm)
    asked = load_config(f"{RUN} --bias-dropout-fusion".split())
    assert choose_kernels(asked, CPU).bias_dropout_fusion
