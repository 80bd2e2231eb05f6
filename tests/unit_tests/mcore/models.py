"""Tiny megatron-core models and batches. Call inside a rank: megatron-core must be importable."""

import torch

LAYERS, HIDDEN, HEADS, VOCAB, SEQUENCE, BATCH = 2, 32, 4, 64, 16, 2


_groups: dict[tuple, dict[str, object]] = {}


def initialize_groups(**sizes: int) -> None:
    """megatron-core's process groups, for data parallelism alone unless `sizes` say otherwise. **Collective.**

    Made once per process and sizes: every call would leave some twenty groups behind.
    """
    from megatron.core import parallel_state

    key = tuple(sorted(sizes.items()))
    if key not in _groups:
        parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(create_gloo_process_groups=False, **sizes)
        state = vars(parallel_state).items()
        _groups[key] = {name: value for name, value in state if name[0] == "_" and name.isupper()}
    vars(parallel_state).update(_groups[key])


def gpt_config(**overrides):
    """A TransformerConfig without any part that needs CUDA, TransformerEngine, Apex or a compiler."""
    from megatron.core.transformer import TransformerConfig

    values = {
        "num_layers": LAYERS,
        "hidden_size": HIDDEN,
        "num_attention_heads": HEADS,
        "use_cpu_initialization": True,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "masked_softmax_fusion": False,
        "gradient_accumulation_fusion": False,
        "apply_rope_fusion": False,
        "persist_layer_norm": False,
        "bias_dropout_fusion": False,
        "bias_activation_fusion": False,
        "cross_entropy_loss_fusion": False,
        "attention_softmax_in_fp32": True,
        "pipeline_dtype": torch.float32,
    }
    return TransformerConfig(**{**values, **overrides})


def gpt_model(config, *, tied: bool = False, seed: int = 11) -> torch.nn.Module:
    """A GPTModel of the local spec, the same on every rank."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec, get_gpt_mtp_block_spec
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed, force_reset_rng=True)
    layer = get_gpt_layer_local_spec(num_experts=config.num_moe_experts, normalization=config.normalization)
    return GPTModel(
        config,
        layer,
        vocab_size=VOCAB,
        max_sequence_length=SEQUENCE,
        share_embeddings_and_output_weights=tied,
        position_embedding_type="rope",
        mtp_block_spec=get_gpt_mtp_block_spec(config, layer, use_transformer_engine=False)
        if config.mtp_num_layers
        else None,
    )


def tokens(rank: int, step: int = 0, microbatch: int = 0) -> torch.Tensor:
    """A batch that is a pure function of its place."""
    generator = torch.Generator().manual_seed(10_000 * step + 100 * microbatch + rank)
    return torch.randint(0, VOCAB, (BATCH, SEQUENCE), generator=generator)
