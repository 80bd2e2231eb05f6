"""Rules about what Megatron-FSDP allows, what this machine can do, and what is not here yet."""

from collections.abc import Iterator

from megatron.training.config.flags import all_flags
from megatron.training.config.plan import ffn_hidden_size, query_groups
from megatron.training.config.rule_book import Setting, flag_of, is_given, rule, spelled, value_of
from megatron.training.config.schema import RunConfig

NOT_YET: dict[str, tuple[tuple[object, ...], str]] = {
    "dist.pipeline_model_parallel_size": ((1,), "only data, tensor and expert parallelism are supported"),
    "dist.context_parallel_size": ((1,), "only data, tensor and expert parallelism are supported"),
    "dist.use_torch_fsdp2": ((False,), "use --use-megatron-fsdp"),
    "model.moe_router_load_balancing_type": (("aux_loss", "none"), "use aux_loss or none"),
    "model.moe_token_dispatcher_type": (("allgather", "alltoall"), "use allgather or alltoall"),
    "model.moe_grouped_gemm": ((False,), "leave it out; experts are multiplied one by one"),
    "model.use_mcore_models": ((True,), "megatron-core's models are the only ones"),
    "model.position_embedding_type": (("learned_absolute", "rope", "none"), "use rope, learned_absolute or none"),
    "model.transformer_impl": ((None, "local", "transformer_engine"), "use transformer_engine or local"),
    "model.gradient_accumulation_fusion": (
        (None, False),
        "the sharding engine accumulates gradients itself; leave it out",
    ),
    "model.init_model_with_meta_device": (
        (False,),
        "megatron-core's layers cannot initialise themselves one unit at a time; leave it out",
    ),
    "precision.fp16_lm_cross_entropy": ((False,), "leave it out; megatron-core's GPT takes it and computes in fp32"),
    "precision.fp8": ((None,), "use --bf16"),
    "ddp.fp8_param_gather": ((False,), "use --bf16"),
    "data.dataloader_type": ((None, "single", "cyclic"), "use single or cyclic"),
}
"""Fields that exist for their messages: the values that work, and what to do about the others."""


@rule
def not_here_yet(config: RunConfig, setting: Setting) -> Iterator[str]:
    """A value that would have no effect, or a wrong one, is refused."""
    for path, (allowed, advice) in NOT_YET.items():
        value = value_of(config, path)
        if value not in allowed:
            number = "" if isinstance(value, bool) else f" {value}"
            yield f"{spelled(path, config)}{number} is not supported here; {advice}"


@rule
def tensor_parallel_ranks_share_evenly(config: RunConfig, setting: Setting) -> Iterator[str]:
    """Every tensor-parallel rank has as much of each layer."""
    ranks, model = config.dist.tensor_model_parallel_size, config.model
    if ranks <= 1:
        return
    parts = {
        f"{setting.world_size} ranks": setting.world_size,
        f"--num-attention-heads {model.num_attention_heads}": model.num_attention_heads,
        f"--num-query-groups {model.num_query_groups}": query_groups(model),
        "the width of the MLP (--ffn-hidden-size)": ffn_hidden_size(model) if model.hidden_size else None,
    }
    for name, number in parts.items():
        if number and number % ranks:
            yield f"--tensor-model-parallel-size {ranks} does not divide {name}"


@rule
def experts_are_shared_out(config: RunConfig, setting: Setting) -> Iterator[str]:
    """Expert-parallel ranks, some of the data-parallel ones, have equally many experts, which have no biases."""
    model, dist = config.model, config.dist
    ranks, instances = dist.expert_model_parallel_size, config.ddp.num_distributed_optimizer_instances
    if model.num_experts is None:
        if ranks > 1:
            yield "--expert-model-parallel-size needs --num-experts"
        return
    if ranks > 1 and setting.data_parallel_size % (ranks * instances):
        each = f" of each of the {instances} instances" if instances > 1 else ""
        yield f"--expert-model-parallel-size {ranks} does not divide the data-parallel ranks{each}"
    if ranks > 0 and model.num_experts % ranks:
        yield f"--expert-model-parallel-size {ranks} does not divide --num-experts {model.num_experts}"
    if model.moe_router_topk > model.num_experts:
        yield f"--moe-router-topk {model.moe_router_topk} is more than --num-experts {model.num_experts}"
    if model.moe_router_topk == 1 and not model.moe_router_pre_softmax:
        yield "--moe-router-topk 1 needs --moe-router-pre-softmax: the softmax over one expert is 1"
    if model.add_bias_linear:
        yield "--num-experts needs --disable-bias-linear: experts have no biases"
    if dist.tensor_model_parallel_size > 1:
        yield "--num-experts does not go with --tensor-model-parallel-size above 1 here; use expert-parallel ranks"


@rule
def sequence_parallelism_has_ranks(config: RunConfig, setting: Setting) -> Iterator[str]:
    """Tensor-parallel ranks share the sequence between their layers, where norms must know of it."""
    ranks, model = config.dist.tensor_model_parallel_size, config.model
    if not config.dist.sequence_parallel:
        return
    if ranks <= 1:
        yield "--sequence-parallel needs --tensor-model-parallel-size above 1"
    elif config.data.seq_length and config.data.seq_length % ranks:
        yield f"--tensor-model-parallel-size {ranks} does not divide --seq-length {config.data.seq_length}"
    has_apex_norm = setting.machine.has_apex_layer_norm and model.normalization == "LayerNorm"
    if setting.kernels.transformer_impl == "local" and not has_apex_norm:
        yield "--sequence-parallel needs norms of TransformerEngine, or Apex's LayerNorm; leave it out"


@rule
def megatron_fsdp_wraps_the_model(config: RunConfig, setting: Setting) -> str | None:
    """Megatron-FSDP is the only data parallelism here; its no_shard is plain data parallelism."""
    if not config.ddp.use_megatron_fsdp:
        return (
            "training here is always with --use-megatron-fsdp; for plain data parallelism add "
            "--data-parallel-sharding-strategy no_shard"
        )
    return None


@rule
def fsdp_needs_its_checkpoint_format(config: RunConfig, setting: Setting) -> str | None:
    """Megatron-FSDP writes and reads only the fsdp_dtensor format."""
    given = config.checkpoint.ckpt_format
    if given not in (None, "fsdp_dtensor"):
        return f"--ckpt-format is {given}; Megatron-FSDP needs fsdp_dtensor (or leave it out)"
    return None


@rule
def format_of_fsdp_needs_fsdp(config: RunConfig, setting: Setting) -> str | None:
    """Only Megatron-FSDP has the fsdp_dtensor format."""
    if config.checkpoint.ckpt_format == "fsdp_dtensor" and not config.ddp.use_megatron_fsdp:
        return "--ckpt-format fsdp_dtensor needs --use-megatron-fsdp"
    return None


@rule
def engines_exclude_each_other(config: RunConfig, setting: Setting) -> str | None:
    """One engine shards the model."""
    if config.dist.use_torch_fsdp2 and config.ddp.use_megatron_fsdp:
        return "--use-megatron-fsdp and --use-torch-fsdp2 exclude each other"
    return None


@rule
def fsdp_orders_ranks_itself(config: RunConfig, setting: Setting) -> str | None:
    """Megatron-FSDP's mesh has tensor-parallel ranks next to each other, data-parallel ones outside."""
    if config.dist.use_tp_pp_dp_mapping:
        return "--use-tp-pp-dp-mapping is not supported with Megatron-FSDP"
    return None


@rule
def fsdp_shards_the_optimizer(config: RunConfig, setting: Setting) -> str | None:
    """With Megatron-FSDP the sharding strategy decides; there is no way without its distributed optimizer."""
    if config.ddp.use_distributed_optimizer is False and config.ddp.use_megatron_fsdp:
        return "--no-use-distributed-optimizer: with Megatron-FSDP use --data-parallel-sharding-strategy no_shard"
    return None


@rule
def outer_sharding_needs_inner(config: RunConfig, setting: Setting) -> Iterator[str]:
    """Sharding over the outer dimension needs that dimension, and everything sharded inside."""
    ddp = config.ddp
    if not ddp.shards_outer:
        return
    if not ddp.shards_weights:
        yield "--outer-dp-sharding-strategy optim needs --data-parallel-sharding-strategy optim_grads_params"
    if ddp.num_distributed_optimizer_instances == 1:
        yield "--outer-dp-sharding-strategy optim needs --num-distributed-optimizer-instances above 1"


@rule
def instances_divide_ranks(config: RunConfig, setting: Setting) -> str | None:
    """Copies of the sharded model have equally many ranks."""
    copies, ranks = config.ddp.num_distributed_optimizer_instances, setting.data_parallel_size
    if copies < 1 or ranks % copies:
        return f"--num-distributed-optimizer-instances {copies} does not divide the {ranks} data-parallel ranks"
    return None


@rule
def gather_overlaps_only_with_reduce(config: RunConfig, setting: Setting) -> str | None:
    """Gathering weights ahead relies on the schedule that reduces gradients ahead."""
    if config.ddp.overlap_param_gather and not config.ddp.overlap_grad_reduce:
        return "--overlap-param-gather needs --overlap-grad-reduce"
    return None


@rule
def meta_device_needs_sharding(config: RunConfig, setting: Setting) -> str | None:
    """The engine materializes only what it shards."""
    if config.model.init_model_with_meta_device and not config.ddp.shards_inner:
        return "--init-model-with-meta-device does not go with --data-parallel-sharding-strategy no_shard"
    return None


@rule
def buffers_are_there_to_be_kept_or_registered(config: RunConfig, setting: Setting) -> Iterator[str]:
    """Registered memory is NCCL's, and options about buffers need the buffers."""
    ddp = config.ddp
    if ddp.nccl_ub and (not setting.machine.has_cuda or config.dist.distributed_backend == "gloo"):
        yield "--use-nccl-ub registers memory with NCCL, which needs CUDA; leave it out"
    for name in ("disable_symmetric_registration", "fsdp_manual_registration"):
        if getattr(ddp, name) and not ddp.nccl_ub:
            yield f"{flag_of(f'ddp.{name}')} needs --use-nccl-ub"
    has_slots = ddp.nccl_ub or ddp.fsdp_double_buffer or ddp.megatron_fsdp_max_pool_double_buffer
    if ddp.fsdp_db_use_persist_buf_on_alloc_fail and not has_slots:
        yield "--fsdp-db-use-persist-buf-on-alloc-fail needs --fsdp-double-buffer"
    residency = ddp.fsdp_residency_bytes
    if residency != "auto" and not residency.isdecimal():
        yield f"--fsdp-residency-bytes {residency} is neither a number of bytes nor auto"
    elif residency != "0" and has_slots:
        yield "--fsdp-residency-bytes lets units keep memory in which double buffers let them take turns; leave out one"
    if "expandable_segments:true" in setting.machine.allocator_conf.replace(" ", "").lower() and ddp.nccl_ub:
        yield "--use-nccl-ub needs memory segments that stay: take expandable_segments out of PYTORCH_CUDA_ALLOC_CONF"


@rule
def copies_have_gathers_to_make(config: RunConfig, setting: Setting) -> Iterator[str]:
    """GPUs copy weights out of each other's memory in place of NCCL's gathers."""
    ddp = config.ddp
    if not ddp.fsdp_copy_engine_gather:
        return
    if not setting.machine.has_cuda or config.dist.distributed_backend == "gloo":
        yield "--fsdp-copy-engine-gather copies between GPUs, which needs CUDA; leave it out"
    if not ddp.shards_inner:
        yield "--fsdp-copy-engine-gather is about gathers; --data-parallel-sharding-strategy no_shard makes none"
    if ddp.nccl_ub:
        yield "--fsdp-copy-engine-gather gathers without NCCL, with which --use-nccl-ub registers memory; leave out one"


@rule
def gathers_have_a_communicator_to_use(config: RunConfig, setting: Setting) -> Iterator[str]:
    """Gathers over a communicator of their own are made, and by it."""
    ddp = config.ddp
    if ddp.create_all_gather_group and not ddp.shards_inner:
        yield "--create-all-gather-group is about gathers; --data-parallel-sharding-strategy no_shard makes none"
    if ddp.create_all_gather_group and ddp.fsdp_copy_engine_gather:
        yield "--create-all-gather-group has no effect with --fsdp-copy-engine-gather, which needs none; leave out one"


@rule
def averages_have_one_meaning(config: RunConfig, setting: Setting) -> str | None:
    """The per-token loss divides by tokens after a plain sum; an average in the collective would divide twice."""
    if config.ddp.average_in_collective and config.model.calculate_per_token_loss:
        return "--ddp-average-in-collective and --calculate-per-token-loss exclude each other"
    return None


@rule
def kernels_have_their_packages(config: RunConfig, setting: Setting) -> Iterator[str]:
    """A kernel that was asked for is there."""
    machine = setting.machine
    needs = {
        "masked_softmax_fusion": (machine.has_apex_softmax, "Apex's softmax kernels and CUDA"),
        "apply_rope_fusion": (machine.has_transformer_engine, "TransformerEngine and CUDA"),
        "persist_layer_norm": (machine.has_apex_layer_norm, "Apex's LayerNorm and CUDA"),
    }
    for name, (is_there, package) in needs.items():
        if getattr(config.model, name) and not is_there:
            flag = all_flags()[f"model.{name}"]
            yield f"{flag.on[0]} needs {package}, which are not here; leave it out or pass {flag.off[0]}"
    if config.model.transformer_impl == "transformer_engine" and not machine.has_transformer_engine:
        yield "--transformer-impl transformer_engine needs TransformerEngine and CUDA, which are not here; pass local"
    if config.model.cross_entropy_fusion_impl == "te":
        if not machine.has_transformer_engine:
            yield "--cross-entropy-fusion-impl te needs TransformerEngine and CUDA, which are not here; use native"
        if not config.model.cross_entropy_loss_fusion:
            yield "--cross-entropy-fusion-impl needs --cross-entropy-loss-fusion"


@rule
def kernels_fit_the_model(config: RunConfig, setting: Setting) -> Iterator[str]:
    """A kernel that was asked for has something to do."""
    model = config.model
    if model.bias_swiglu_fusion and not model.swiglu:
        yield "--bias-swiglu-fusion needs --swiglu"
    if model.bias_gelu_fusion and (model.swiglu or model.squared_relu or not model.add_bias_linear):
        yield "--bias-gelu-fusion needs an MLP of bias and GELU (no --swiglu, --squared-relu or --disable-bias-linear)"
    if model.apply_rope_fusion and model.position_embedding_type != "rope":
        yield "--rope-fusion needs --position-embedding-type rope"
    if model.persist_layer_norm and model.normalization != "LayerNorm":
        yield "--persist-layer-norm needs --normalization LayerNorm"


@rule
def layers_know_the_option(config: RunConfig, setting: Setting) -> Iterator[str]:
    """Some options belong to TransformerEngine's layers, some to the local ones."""
    model, impl = config.model, setting.kernels.transformer_impl
    if impl == "local":
        if model.attention_backend not in ("auto", "local"):
            yield f"--attention-backend {model.attention_backend} needs --transformer-impl transformer_engine"
        if model.layernorm_zero_centered_gamma:
            yield "--apply-layernorm-1p needs --transformer-impl transformer_engine"
        return
    if model.attention_backend == "local":
        yield "--attention-backend local needs --transformer-impl local"
    for name in ("masked_softmax_fusion", "persist_layer_norm"):
        if getattr(model, name):
            yield f"{flag_of(f'model.{name}')} needs --transformer-impl local"


@rule
def documents_stay_apart(config: RunConfig, setting: Setting) -> Iterator[str]:
    """Causal attention of TransformerEngine and Apex ignores the samples' masks: tokens would see across documents."""
    if not config.data.reset_attention_mask:
        return
    if setting.kernels.transformer_impl != "local":
        yield "--reset-attention-mask needs --transformer-impl local: TransformerEngine's layers ignore its masks"
    elif setting.kernels.masked_softmax_fusion:
        yield "--reset-attention-mask needs --no-masked-softmax-fusion: Apex's causal softmax ignores its masks"


@rule
def recomputed_parts_are_there(config: RunConfig, setting: Setting) -> str | None:
    """Layers of experts have no MLP to recompute."""
    if config.model.num_experts is not None and "mlp" in (config.recompute.recompute_modules or ()):
        return "--recompute-modules mlp recomputes nothing with --num-experts, which takes the place of every MLP"
    return None


@rule
def kept_weights_were_gathered(config: RunConfig, setting: Setting) -> str | None:
    """Only weights that are gathered can stay gathered."""
    if is_given(config, "ddp.fsdp_residency_bytes") and not config.ddp.shards_weights:
        return (
            "--fsdp-residency-bytes needs --data-parallel-sharding-strategy optim_grads_params, which gathers weights"
        )
    return None


@rule
def backend_fits_the_machine(config: RunConfig, setting: Setting) -> str | None:
    """NCCL moves CUDA memory only."""
    if config.dist.distributed_backend == "nccl" and not setting.machine.has_cuda:
        return "--distributed-backend nccl needs CUDA, which is not here; leave it out or use gloo"
    if config.dist.distributed_backend == "gloo" and setting.machine.has_cuda:
        return "--distributed-backend gloo cannot train on CUDA devices; leave it out, or set CUDA_VISIBLE_DEVICES="
    return None


@rule
def streams_may_overlap(config: RunConfig, setting: Setting) -> str | None:
    """With one hardware queue, communication waits for computation."""
    if config.ddp.use_megatron_fsdp and setting.machine.has_cuda and setting.machine.cuda_max_connections == "1":
        return "CUDA_DEVICE_MAX_CONNECTIONS is 1, so that nothing overlaps with Megatron-FSDP; unset it"
    return None
