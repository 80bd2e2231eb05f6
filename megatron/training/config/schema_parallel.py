"""Configuration of ranks: processes and groups, and the sharding engine."""

from dataclasses import dataclass
from typing import Literal

ShardingStrategy = Literal["no_shard", "optim", "optim_grads", "optim_grads_params"]
"""Sharding over data-parallel ranks; also written as its position, 0 to 3."""

OuterShardingStrategy = Literal["no_shard", "optim"]
"""Sharding over the outer data-parallel dimension; also written as its position, 0 or 1."""

DtypeOrAuto = Literal["fp32", "bf16", "fp16", "auto"]
"""A dtype of the engine's buffers; also written as torch spells it (float32, torch.bfloat16)."""


@dataclass(frozen=True, kw_only=True)
class DistConfig:
    """Processes and their groups."""

    distributed_backend: Literal["nccl", "gloo"] | None = None
    """Communication library; auto: nccl with CUDA, else gloo."""

    distributed_timeout_minutes: int = 10
    """Minutes that a collective may take before the run is aborted."""

    tensor_model_parallel_size: int = 1
    """Ranks that split each layer, next to each other; the others are data-parallel."""

    pipeline_model_parallel_size: int = 1
    """Ranks that split the stack of layers. Only 1 here yet."""

    context_parallel_size: int = 1
    """Ranks that split each sequence. Only 1 here yet."""

    expert_model_parallel_size: int = 1
    """Data-parallel ranks that split the experts of --num-experts among themselves."""

    sequence_parallel: bool = False
    """Split activations between layers over tensor-parallel ranks; needs TransformerEngine or Apex."""

    use_tp_pp_dp_mapping: bool = False
    """Order ranks tensor-pipeline-data. Not supported with Megatron-FSDP."""

    use_torch_fsdp2: bool = False
    """Shard with PyTorch's fully_shard. Not supported; excludes --use-megatron-fsdp."""


@dataclass(frozen=True, kw_only=True)
class DdpConfig:
    """Data parallelism: what is sharded, in which dtypes, and when it is communicated."""

    use_megatron_fsdp: bool = False
    """Train with Megatron-FSDP."""

    data_parallel_sharding_strategy: ShardingStrategy = "optim_grads_params"
    """State that each data-parallel rank keeps only a shard of: no_shard or 0 (nothing), optim or 1 (optimizer
    state and main weights), optim_grads 2 (gradients too), optim_grads_params 3 (compute weights too)."""

    outer_dp_sharding_strategy: OuterShardingStrategy = "no_shard"
    """Sharding over the outer dimension of hybrid sharding; optim needs optim_grads_params inside."""

    num_distributed_optimizer_instances: int = 1
    """Copies of the sharded model: the size of the outer dimension of hybrid sharding."""

    use_distributed_optimizer: bool | None = None
    """Shard the optimizer state; auto: as the sharding strategy says, Megatron-FSDP always goes this way."""

    overlap_grad_reduce: bool = False
    """Reduce gradients during the backward pass; always so under optim_grads and optim_grads_params."""

    overlap_param_gather: bool = False
    """Gather weights during the forward pass; always so under optim_grads_params."""

    megatron_fsdp_main_params_dtype: DtypeOrAuto = "fp32"
    """Dtype of the weights that the optimizer steps; auto: the compute weights themselves, no copy."""

    megatron_fsdp_main_grads_dtype: DtypeOrAuto = "auto"
    """Dtype that gradients are accumulated in; auto: the compute weights' dtype."""

    megatron_fsdp_grad_comm_dtype: DtypeOrAuto = "auto"
    """Dtype that gradients travel in; auto: that of the main gradients."""

    average_in_collective: bool = False
    """Let the collective average, instead of scaling gradients before a sum."""

    fsdp_unit_modules: tuple[str, ...] | None = None
    """Import paths of the module classes that are gathered and released as units; default the transformer layers."""

    suggested_communication_unit_size: int | None = None
    """Most elements of weights gathered ahead, and of gradients being reduced, at a time; default one unit ahead."""

    megatron_fsdp_enable_fine_grained_param_gather: bool = False
    """Gather and reduce every module inside a unit by itself: less memory, more and smaller collectives."""

    fsdp_double_buffer: bool = False
    """Gather, and reduce, units that are alike in two fixed buffers in turn."""

    megatron_fsdp_max_pool_double_buffer: bool = False
    """As --fsdp-double-buffer, for units of all sizes, in buffers as large as the largest needs."""

    fsdp_db_use_persist_buf_on_alloc_fail: bool = False
    """Give units that do not fit the double buffer, as the embedding, a buffer of their own."""

    fsdp_residency_bytes: str = "0"
    """Memory for weights that stay gathered until the optimizer steps; auto: what the first step leaves free."""

    fsdp_copy_engine_gather: bool = False
    """Gather weights within one host by copies out of the other GPUs' memory, without NCCL."""

    create_all_gather_group: bool = False
    """Gather weights over a communicator of their own: over one with gradients, gathers wait for earlier reductions."""

    nccl_ub: bool = False
    """Register communication buffers with NCCL, after the first step; implies --fsdp-double-buffer."""

    disable_symmetric_registration: bool = False
    """With --use-nccl-ub, register locally, not as symmetric windows."""

    fsdp_manual_registration: bool = False
    """Register after the first step, as --use-nccl-ub does in any case."""

    fp8_param_gather: bool = False
    """Gather weights in fp8. Not supported here yet."""

    @property
    def shards_inner(self) -> bool:
        """Each data-parallel rank keeps only a shard of something, so that something is gathered."""
        return self.data_parallel_sharding_strategy != "no_shard"

    @property
    def shards_outer(self) -> bool:
        """Something is also sharded over the outer dimension."""
        return self.outer_dp_sharding_strategy != "no_shard"

    @property
    def shards_grads(self) -> bool:
        """Gradients are sharded, and so reduced in every backward."""
        return self.data_parallel_sharding_strategy in ("optim_grads", "optim_grads_params")

    @property
    def shards_weights(self) -> bool:
        """Compute weights are sharded, and so gathered; sharding over the outer dimension needs this."""
        return self.data_parallel_sharding_strategy == "optim_grads_params"
