"""Configurations of megatron-core and of the sharding engine, derived from ours; alone here to import either."""

from dataclasses import asdict, fields

import torch
from megatron.core.activations import squared_relu
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import AttnBackend

from megatron.training.config.kernels import Machine, choose_kernels
from megatron.training.config.plan import (
    checks_for_nan,
    ffn_hidden_size,
    kv_channels,
    moe_ffn_hidden_size,
    query_groups,
)
from megatron.training.config.schema import PrecisionConfig, RunConfig
from megatron_fsdp.mcore import DistributedDataParallelConfig

_SAME_NAME = (
    "num_layers", "hidden_size", "num_attention_heads", "attention_dropout", "hidden_dropout", "layernorm_epsilon",
    "layernorm_zero_centered_gamma", "qk_layernorm", "add_bias_linear", "add_qkv_bias", "normalization",
    "rotary_interleaved", "init_method_std", "apply_query_key_layer_scaling", "attention_softmax_in_fp32",
    "cross_entropy_fusion_impl", "calculate_per_token_loss", "init_model_with_meta_device",
    "moe_router_topk", "moe_router_pre_softmax", "moe_router_load_balancing_type", "moe_aux_loss_coeff",
    "moe_token_dispatcher_type",
)  # fmt: skip
"""Fields of `ModelConfig` that megatron-core has under the same name and with the same meaning."""


def params_dtype(precision: PrecisionConfig) -> torch.dtype:
    """Dtype of the compute weights."""
    return torch.bfloat16 if precision.bf16 else torch.float16 if precision.fp16 else torch.float32


def _plain_squared_relu(value: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.relu(value).square()


def _activation(config: RunConfig, machine: Machine) -> dict[str, object]:
    if config.model.swiglu:
        return {"activation_func": torch.nn.functional.silu, "gated_linear_unit": True}
    if config.model.squared_relu:
        # megatron-core compiles its own at the first call, which on a CPU takes a C++ compiler and half a minute.
        return {"activation_func": squared_relu if machine.has_cuda else _plain_squared_relu}
    return {"activation_func": torch.nn.functional.gelu}


def _initialization(config: RunConfig) -> dict[str, object]:
    if not config.model.init_method_xavier_uniform:
        return {}
    xavier = torch.nn.init.xavier_uniform_
    return {"init_method": xavier, "output_layer_init_method": xavier}


def _experts(config: RunConfig) -> dict[str, object]:
    if config.model.num_experts is None:
        return {}
    return {
        "num_moe_experts": config.model.num_experts,
        "moe_ffn_hidden_size": moe_ffn_hidden_size(config.model),
        "expert_model_parallel_size": config.dist.expert_model_parallel_size,
        "expert_tensor_parallel_size": 1,
    }


def to_transformer_config(config: RunConfig, machine: Machine | None = None) -> TransformerConfig:
    """megatron-core's model configuration for a checked `config` on `machine` (default: this one)."""
    model, precision, recompute = config.model, config.precision, config.recompute
    machine = machine or Machine.probe()
    dtype = params_dtype(precision)
    return TransformerConfig(
        **{name: getattr(model, name) for name in _SAME_NAME},
        **asdict(choose_kernels(config, machine)),
        **_activation(config, machine),
        **_initialization(config),
        **_experts(config),
        tensor_model_parallel_size=config.dist.tensor_model_parallel_size,
        sequence_parallel=config.dist.sequence_parallel,
        ffn_hidden_size=ffn_hidden_size(model),
        kv_channels=kv_channels(model),
        num_query_groups=query_groups(model),
        attention_backend=AttnBackend[model.attention_backend],
        bf16=precision.bf16,
        fp16=precision.fp16,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        deterministic_mode=config.rng.deterministic_mode,
        deallocate_pipeline_outputs=True,
        recompute_granularity=recompute.recompute_granularity,
        recompute_method=recompute.recompute_method,
        recompute_num_layers=recompute.recompute_num_layers,
        recompute_modules=list(recompute.recompute_modules) if recompute.recompute_modules else None,
    )


def to_optimizer_config(config: RunConfig) -> OptimizerConfig:
    """megatron-core's optimizer configuration for a checked `config`."""
    precision = config.precision
    same = ("bf16", "fp16", "loss_scale", "initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis")
    return OptimizerConfig(
        **{field.name: getattr(config.optimizer, field.name) for field in fields(config.optimizer)},
        **{name: getattr(precision, name) for name in same},
        params_dtype=params_dtype(precision),
        # The flag that selects the optimizer's family: with Megatron-FSDP it is always the distributed one.
        use_distributed_optimizer=config.ddp.use_megatron_fsdp,
        overlap_param_gather=config.ddp.overlap_param_gather,
        log_num_zeros_in_grad=config.logger.log_num_zeros_in_grad,
    )


def to_ddp_config(config: RunConfig) -> DistributedDataParallelConfig:
    """The sharding engine's options for a checked `config`."""
    ddp = config.ddp
    same = ("data_parallel_sharding_strategy", "outer_dp_sharding_strategy", "num_distributed_optimizer_instances",
            "overlap_grad_reduce", "overlap_param_gather", "average_in_collective", "use_megatron_fsdp",
            "suggested_communication_unit_size", "megatron_fsdp_enable_fine_grained_param_gather", "nccl_ub",
            "fsdp_double_buffer", "megatron_fsdp_max_pool_double_buffer", "fsdp_db_use_persist_buf_on_alloc_fail",
            "disable_symmetric_registration", "fsdp_copy_engine_gather", "megatron_fsdp_main_params_dtype",
            "megatron_fsdp_main_grads_dtype", "megatron_fsdp_grad_comm_dtype")  # fmt: skip
    return DistributedDataParallelConfig(
        **{name: getattr(ddp, name) for name in same},
        use_distributed_optimizer=ddp.use_megatron_fsdp,
        # As in Megatron-LM: the loop registers, once and after the first step, when nothing more is allocated.
        fsdp_manual_registration=ddp.fsdp_manual_registration or ddp.nccl_ub,
        fsdp_residency_bytes=residency if (residency := ddp.fsdp_residency_bytes) == "auto" else int(residency),
        check_for_nan_in_grad=checks_for_nan(config),
    )
