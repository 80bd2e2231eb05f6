"""Telling a model that computes something else with weights of the same names and shapes."""

from collections.abc import Iterator, Mapping
from typing import Any

from megatron.training.config import RunConfig
from megatron.training.config.flags import all_flags
from megatron.training.config.plan import kv_channels
from megatron.training.config.rule_book import flag_of, value_of

_ALWAYS = ("model.num_attention_heads", "model.num_query_groups", "model.position_embedding_type", "model.swiglu",
           "model.squared_relu", "model.normalization", "model.layernorm_epsilon",
           "model.layernorm_zero_centered_gamma", "tokenizer.tokenizer_type")  # fmt: skip
_WITH_ROPE = ("model.rotary_base", "model.rotary_percent", "model.rotary_interleaved",
              "model.rotary_seq_len_interpolation_factor", "model.use_rope_scaling")  # fmt: skip
_WITH_EXPERTS = ("model.moe_router_topk", "model.moe_router_pre_softmax")


def differences(config: RunConfig, saved: Mapping[str, Any]) -> Iterator[str]:
    """What of the `saved` arguments makes another model than `config`, although every weight may fit.

    Dropout, sequence length and kernels are the run's own business; what is not saved is taken to be the same.
    """
    for path in _that_matter(config):
        value = saved.get(path.rpartition(".")[2])
        if value is None:
            continue
        try:
            value = all_flags()[path].parse(value)
        except ValueError:  # One that only another program has.
            pass
        if value != value_of(config, path):
            yield f"{flag_of(path)} is {value_of(config, path)}, the checkpoint's is {value}"
    width = saved.get("kv_channels")
    if width is not None and width != kv_channels(config.model):
        yield f"{flag_of('model.kv_channels')} is {kv_channels(config.model)}, the checkpoint's is {width}"


def _that_matter(config: RunConfig) -> Iterator[str]:
    model = config.model
    yield from _ALWAYS
    if model.position_embedding_type == "rope":
        yield from _WITH_ROPE
        if model.use_rope_scaling:
            yield "model.rope_scaling_factor"
    if model.num_experts is not None:
        yield from _WITH_EXPERTS
