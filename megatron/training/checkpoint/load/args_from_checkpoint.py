"""`--use-checkpoint-args`: the model and its tokenizer as the checkpoint has them, before anything is built."""

import dataclasses

from megatron.training.checkpoint.format.metadata import read_arguments, read_metadata
from megatron.training.checkpoint.format.paths import folder_to_load
from megatron.training.config import RunConfig
from megatron.training.config.flags import all_flags
from megatron.training.errors import ConfigError

_TAKEN = {
    "model": (
        "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "kv_channels", "group_query_attention",
        "num_query_groups", "max_position_embeddings", "position_embedding_type", "rotary_base", "rotary_percent",
        "rotary_interleaved", "use_rope_scaling", "rope_scaling_factor", "normalization", "layernorm_epsilon",
        "layernorm_zero_centered_gamma", "qk_layernorm", "swiglu", "squared_relu", "add_bias_linear", "add_qkv_bias",
        "untie_embeddings_and_output_weights", "attention_dropout", "hidden_dropout", "apply_query_key_layer_scaling",
        "num_experts", "moe_ffn_hidden_size", "moe_router_topk", "moe_router_pre_softmax",
    ),
    "data": ("seq_length",),
    "tokenizer": ("tokenizer_type", "tokenizer_model", "vocab_size", "padded_vocab_size", "vocab_file", "merge_file"),
}  # fmt: skip
"""Fields that the checkpoint decides, by section."""


def with_saved_arguments(config: RunConfig) -> RunConfig:
    """`config` with the model, sequence length and tokenizer of the checkpoint that it loads, whatever it says itself.

    Without a checkpoint, where one may be missing, it is left as it is.

    Raises:
        ConfigError: the checkpoint cannot be read, has no arguments, or some that this program does not know.
    """
    checkpoint = config.checkpoint
    try:
        folder = folder_to_load(checkpoint.load, checkpoint.ckpt_step)
        if folder is None:
            return config
        saved = read_arguments(folder, read_metadata(folder))
    except (ValueError, OSError) as error:
        raise ConfigError([f"--use-checkpoint-args: {error}"]) from error
    if not saved:
        raise ConfigError([f"--use-checkpoint-args: {folder} has no arguments; give the model's flags instead"])
    problems, sections = [], {}
    for section, names in _TAKEN.items():
        values = {}
        for name in names:
            if saved.get(name) is None:
                continue
            try:
                values[name] = all_flags()[f"{section}.{name}"].parse(saved[name])
            except ValueError as error:
                problems.append(f"--use-checkpoint-args: {name} in {folder}: {error}")
        sections[section] = dataclasses.replace(getattr(config, section), **values)
    if problems:
        raise ConfigError(problems)
    return dataclasses.replace(config, **sections)
