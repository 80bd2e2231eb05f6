"""megatron-core's configurations say what ours says."""

import pytest
import torch

from megatron.training.config import load_config
from megatron.training.config.to_core import to_ddp_config, to_optimizer_config, to_transformer_config
from tests.unit_tests.training.test_rules import CPU, CUDA, GOLDEN, RUN


def test_golden_model() -> None:
    config = to_transformer_config(load_config(GOLDEN.split()), CUDA)
    assert (config.num_layers, config.hidden_size, config.ffn_hidden_size) == (8, 1024, 2816)
    assert (config.kv_channels, config.num_query_groups) == (64, 16)
    assert config.gated_linear_unit and config.activation_func is torch.nn.functional.silu
    assert config.bias_activation_fusion and not config.add_bias_linear
    assert (config.normalization, config.params_dtype, config.bf16) == ("RMSNorm", torch.bfloat16, True)
    # megatron-core's own default is True; Megatron-LM's flag, and so its losses, are without it.
    assert not config.attention_softmax_in_fp32


def test_cpu_gets_no_kernel_that_fails_or_compiles() -> None:
    config = to_transformer_config(load_config(RUN.split()), CPU)
    names = ("bias_activation_fusion", "bias_dropout_fusion", "cross_entropy_loss_fusion", "masked_softmax_fusion",
             "apply_rope_fusion", "persist_layer_norm", "gradient_accumulation_fusion")  # fmt: skip
    assert [name for name in names if getattr(config, name)] == []
    assert config.use_cpu_initialization


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ("--recompute-activations", ("selective", None, None, ["core_attn"])),
        ("--recompute-granularity selective --recompute-modules mlp", ("selective", None, None, ["mlp"])),
        (
            "--recompute-granularity full --recompute-method block --recompute-num-layers 1",
            ("full", "block", 1, ["core_attn"]),
        ),
    ],
)
def test_recompute(argv: str, expected: tuple[object, ...]) -> None:
    config = to_transformer_config(load_config(f"{RUN} {argv}".split()), CPU)
    names = ("recompute_granularity", "recompute_method", "recompute_num_layers", "recompute_modules")
    assert tuple(getattr(config, name) for name in names) == expected


def test_squared_relu_and_xavier() -> None:
    config = to_transformer_config(load_config(f"{RUN} --squared-relu --init-method-xavier-uniform".split()), CPU)
    assert config.activation_func(torch.tensor([-2.0, 3.0])).tolist() == [0.0, 9.0]
    assert config.init_method is torch.nn.init.xavier_uniform_


@pytest.mark.parametrize(
    ("argv", "dtype"), [("", torch.float32), ("--bf16", torch.bfloat16), ("--fp16", torch.float16)]
)
def test_optimizer(argv: str, dtype: torch.dtype) -> None:
    config = to_optimizer_config(load_config(f"{RUN} --min-lr 1e-5 --optimizer sgd {argv}".split()))
    assert (config.optimizer, config.lr, config.min_lr, config.params_dtype) == ("sgd", 1e-3, 1e-5, dtype)
    assert config.use_distributed_optimizer


def test_ddp() -> None:
    argv = f"{RUN} --data-parallel-sharding-strategy 1 --ddp-average-in-collective --megatron-fsdp-grad-comm-dtype bf16"
    ddp = to_ddp_config(load_config(argv.split()))
    assert ddp.use_megatron_fsdp and ddp.average_in_collective
    assert ddp.data_parallel_sharding_strategy == "optim"
    assert not ddp.fsdp_copy_engine_gather
    assert to_ddp_config(load_config(f"{RUN} --fsdp-copy-engine-gather".split())).fsdp_copy_engine_gather
    assert ddp.megatron_fsdp_main_params_dtype is torch.float32
    assert ddp.megatron_fsdp_main_grads_dtype is None
    assert ddp.megatron_fsdp_grad_comm_dtype is torch.bfloat16


def test_buffers_are_registered_after_the_first_step() -> None:
    ddp = to_ddp_config(load_config(f"{RUN} --use-nccl-ub --disable-symmetric-registration".split()))
    assert ddp.nccl_ub and ddp.fsdp_manual_registration and ddp.disable_symmetric_registration
    ddp = to_ddp_config(load_config(f"{RUN} --fsdp-double-buffer".split()))
    assert ddp.fsdp_double_buffer and not ddp.fsdp_manual_registration


@pytest.mark.parametrize(
    ("argv", "is_checked"),
    [("", True), ("--no-check-for-nan-in-loss-and-grad", False), ("--fp16", False), ("--fp16 --loss-scale 8", True)],
)
def test_gradients_are_checked_unless_overflow_finds_the_loss_scale(argv: str, is_checked: bool) -> None:
    assert to_ddp_config(load_config(f"{RUN} {argv}".split())).check_for_nan_in_grad is is_checked
