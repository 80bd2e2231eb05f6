"""Configuration of the model, its recomputation, the data and the tokenizer.

A field is the command-line flag, the YAML key, the help text, the type check and the default, all at once. `None` where
the text says *auto* means: chosen for this machine (see `kernels.py`).
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The GPT model: its shape, its operators and how its weights start."""

    num_layers: int | None = None
    """Number of transformer layers."""

    hidden_size: int | None = None
    """Width of the residual stream."""

    ffn_hidden_size: int | None = None
    """Width of the MLP; default 4 x hidden size, or 2/3 of that, rounded down to a multiple of 64, with --swiglu."""

    num_attention_heads: int | None = None
    """Number of attention heads."""

    kv_channels: int | None = None
    """Width of one attention head; default hidden size / attention heads."""

    group_query_attention: bool = False
    """Share keys and values among groups of query heads."""

    num_query_groups: int = 1
    """Number of key/value heads; needs --group-query-attention."""

    max_position_embeddings: int | None = None
    """Longest sequence that the positions can express; default the sequence length."""

    position_embedding_type: Literal["learned_absolute", "rope", "yarn", "mrope", "relative", "none"] = (
        "learned_absolute"
    )
    """Position embedding. Here: learned_absolute, rope or none."""

    rotary_base: int = 10000
    """Base of the rotary frequencies."""

    rotary_percent: float = 1.0
    """Share of each head's width that is rotated."""

    rotary_interleaved: bool = False
    """Rotate even and odd channels in pairs, not the two halves."""

    rotary_seq_len_interpolation_factor: int | None = None
    """Divide rotary positions by this, to stretch a trained model to longer sequences."""

    use_rope_scaling: bool = False
    """Scale the rotary frequencies as Llama 3.1 does."""

    rope_scaling_factor: float = 8.0
    """The factor of --use-rope-scaling."""

    normalization: Literal["LayerNorm", "RMSNorm"] = "LayerNorm"
    """Normalization in front of attention, MLP and output layer."""

    layernorm_epsilon: float = 1e-5
    """Added to the variance in normalizations."""

    layernorm_zero_centered_gamma: bool = False
    """Store normalization weights minus one, so that they decay towards the identity. Needs TransformerEngine."""

    qk_layernorm: bool = False
    """Normalize queries and keys."""

    swiglu: bool = False
    """Gated MLP with SiLU, instead of GELU."""

    squared_relu: bool = False
    """Squared ReLU in the MLP, instead of GELU."""

    add_bias_linear: bool = True
    """Give the linear layers a bias."""

    add_qkv_bias: bool = False
    """Give only the query/key/value projection a bias."""

    untie_embeddings_and_output_weights: bool = False
    """Give the output layer weights of its own, instead of the embedding's."""

    attention_dropout: float = 0.1
    """Dropout after the attention's softmax."""

    hidden_dropout: float = 0.1
    """Dropout in the residual stream."""

    init_method_std: float = 0.02
    """Standard deviation of the initial weights."""

    init_method_xavier_uniform: bool = False
    """Start with Xavier-uniform weights, instead of normal ones."""

    use_cpu_initialization: bool | None = None
    """Draw the initial weights on the CPU; auto: on a machine without CUDA."""

    init_model_with_meta_device: bool = False
    """Build the model without memory and let the sharding engine materialize it unit by unit."""

    calculate_per_token_loss: bool = False
    """Average the loss over all tokens of the global batch, not first within each micro-batch."""

    use_mcore_models: bool = True
    """Build megatron-core's models; there are no others."""

    transformer_impl: Literal["local", "transformer_engine", "inference_optimized"] | None = None
    """Layers of transformer_engine, or local ones (plain PyTorch); auto: transformer_engine where it is installed."""

    attention_backend: Literal["flash", "fused", "unfused", "local", "auto"] = "auto"
    """TransformerEngine's attention kernels; local layers know auto and local."""

    attention_softmax_in_fp32: bool = False
    """Compute the attention's softmax in fp32 (local layers)."""

    apply_query_key_layer_scaling: bool = False
    """Divide attention scores by the layer number, against overflow in fp16. Turns on --attention-softmax-in-fp32."""

    bias_gelu_fusion: bool | None = None
    """Compile bias and GELU into one kernel; auto: with CUDA, where the MLP is bias + GELU."""

    bias_swiglu_fusion: bool | None = None
    """Compile bias and SwiGLU into one kernel; auto: with CUDA and --swiglu."""

    bias_dropout_fusion: bool | None = None
    """Compile bias, dropout and residual addition into one kernel; auto: with CUDA."""

    masked_softmax_fusion: bool | None = None
    """Apex's fused scale, mask and softmax for local layers; auto: where it is installed, with CUDA."""

    apply_rope_fusion: bool | None = None
    """TransformerEngine's fused rotary embedding; auto: where it is installed, with CUDA and rope."""

    persist_layer_norm: bool | None = None
    """Apex's persistent LayerNorm kernel for local layers; auto: where it is installed, with CUDA and LayerNorm."""

    gradient_accumulation_fusion: bool | None = None
    """Add weight gradients inside the matrix product; auto: off, the sharding engine adds them itself."""

    cross_entropy_loss_fusion: bool = False
    """Fused cross-entropy of the vocabulary-sized logits."""

    cross_entropy_fusion_impl: Literal["native", "te"] = "native"
    """Implementation of the fused cross-entropy; te needs TransformerEngine."""

    num_experts: int | None = None
    """Experts of every layer, all ranks together; default: the layers have one MLP each."""

    moe_ffn_hidden_size: int | None = None
    """Width of each expert; default --ffn-hidden-size."""

    moe_router_topk: int = 2
    """Experts that each token goes to."""

    moe_router_pre_softmax: bool = False
    """Take the softmax over all experts, before the best are chosen, not over these; needed for --moe-router-topk 1."""

    moe_router_load_balancing_type: Literal[
        "aux_loss", "seq_aux_loss", "global_aux_loss", "sinkhorn", "quantile_balancing", "none"
    ] = "aux_loss"
    """Means of keeping experts equally busy. Here: aux_loss or none."""

    moe_aux_loss_coeff: float = 0.0
    """Weight of the loss that keeps experts equally busy."""

    moe_token_dispatcher_type: Literal["allgather", "alltoall", "flex"] = "allgather"
    """Way of tokens to experts of other ranks. Here: allgather or alltoall."""

    moe_grouped_gemm: bool = False
    """Multiply by the weights of all experts at once. Not supported here yet."""


@dataclass(frozen=True, kw_only=True)
class RecomputeConfig:
    """Activation recomputation: less memory for more arithmetic."""

    recompute_granularity: Literal["full", "selective"] | None = None
    """Recompute whole layers (full) or parts of them (selective)."""

    recompute_method: Literal["uniform", "block"] | None = None
    """With full: checkpoint every n-th layer boundary (uniform), or only the first n layers (block)."""

    recompute_num_layers: int | None = None
    """With full: layers per recomputed chunk (uniform), or number of recomputed layers (block)."""

    recompute_modules: tuple[str, ...] | None = None
    """With selective: which parts, of core_attn, mlp, layernorm; default core_attn."""


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Source of the samples.

    Fields are named as in `DatasetRequest`.
    """

    data_path: tuple[str, ...] | None = None
    """Prefixes of indexed datasets, split by --split: PREFIX, or a blend WEIGHT PREFIX WEIGHT PREFIX ..."""

    split: str | None = None
    """Shares of train, validation and test, as in 969,30,1."""

    train_data_path: tuple[str, ...] | None = None
    """Like --data-path, for training only."""

    valid_data_path: tuple[str, ...] | None = None
    """Like --data-path, for validation only."""

    test_data_path: tuple[str, ...] | None = None
    """Like --data-path, for the test after training only."""

    data_cache_path: Path | None = None
    """Directory for the datasets' index files; default beside the data."""

    mock_data: bool = False
    """Train on made-up samples."""

    seq_length: int | None = None
    """Tokens per sample."""

    num_workers: int = 2
    """Loader processes per rank."""

    dataloader_type: Literal["single", "cyclic", "external"] | None = None
    """single: once through the samples in the dataset's order; cyclic: shuffled anew in every epoch; default single."""

    reset_position_ids: bool = False
    """Restart positions after each end of document."""

    reset_attention_mask: bool = False
    """Let no token see across an end of document."""

    eod_mask_loss: bool = False
    """Leave the end-of-document tokens out of the loss."""

    create_attention_mask_in_dataloader: bool = True
    """Make the attention mask in the loader; without it the attention's own causal mask is used."""

    mmap_bin_files: bool = True
    """Map the .bin files into memory, instead of reading them."""

    num_dataset_builder_threads: int = 1
    """Threads that build the datasets' indices."""

    mid_level_dataset_surplus: float = 0.005
    """Extra share of samples that each dataset of a blend prepares, so that none runs out."""


@dataclass(frozen=True, kw_only=True)
class TokenizerConfig:
    """Text to tokens; everything is read from disk, nothing is downloaded.

    Fields are named as in `TokenizerRequest`.
    """

    tokenizer_type: (
        Literal[
            "ByteLevelTokenizer",
            "NullTokenizer",
            "HuggingFaceTokenizer",
            "SentencePieceTokenizer",
            "GPTSentencePieceTokenizer",
            "Llama2Tokenizer",
            "TikTokenizer",
            "GPT2BPETokenizer",
        ]
        | None
    ) = None
    """Kind of tokenizer. ByteLevelTokenizer (one token per byte) and NullTokenizer (numbers) need no file."""

    tokenizer_model: str | None = None
    """File or directory of the tokenizer."""

    vocab_file: Path | None = None
    """Vocabulary of GPT2BPETokenizer (JSON)."""

    merge_file: Path | None = None
    """Merges of GPT2BPETokenizer (text)."""

    vocab_size: int | None = None
    """Number of ids: NullTokenizer needs it, end of document not counted; the others know theirs and compare."""

    padded_vocab_size: int | None = None
    """Rows of the embedding; default the vocabulary rounded up by --make-vocab-size-divisible-by."""

    make_vocab_size_divisible_by: int = 128
    """Round the embedding's rows up to a multiple of this."""

    tokenizer_special_tokens: tuple[str, ...] | None = None
    """Tokens to add (HuggingFaceTokenizer), or the first special tokens (TikTokenizer)."""

    tokenizer_hf_no_include_special_tokens: bool = False
    """HuggingFaceTokenizer: leave out the tokens that it puts around a text by itself."""

    tiktoken_pattern: Literal["v1", "v2"] | None = None
    """TikTokenizer's splitting pattern; default v2."""

    tiktoken_num_special_tokens: int = 1000
    """Special tokens at the start of TikTokenizer's vocabulary."""
