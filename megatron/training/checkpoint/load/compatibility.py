"""Checks that a checkpoint fits the run, before anything is read into it."""

import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata

from megatron.training.checkpoint.load.match_keys import MODEL, Difference, of_all_ranks
from megatron.training.checkpoint.run_state.contents import Components, rank_key
from megatron.training.collective_errors import any_rank, gather_if_any
from megatron.training.config import RunConfig
from megatron.training.config.flags import all_flags
from megatron.training.config.plan import kv_channels
from megatron.training.config.rule_book import flag_of, value_of
from megatron.training.ranks import ON_EVERY_RANK
from megatron.training.state import Run

logger = logging.getLogger(__name__)

_RAISING = ("assume_ok_unexpected", "raise_unexpected", "raise_all")
"""Values of `--dist-ckpt-strictness` that insist on every weight, as in Megatron-LM."""


def check_components(folder: Path, components: Components, saved: Metadata) -> None:
    """Raises ValueError, with the flag to use, if whole parts were not saved."""

    def has(start: str) -> bool:
        return any(name.startswith(start) for name in saved.state_dict_metadata)

    for is_wanted, name, flag in (
        (components.optimizer, "optimizer", "--no-load-optim"),
        (components.rng, "rng_state", "--no-load-rng"),
    ):
        if is_wanted and not has(name + "."):
            raise ValueError(f"{folder} was saved without {name}; pass {flag}, or --finetune to start at iteration 0")
    if components.rng and not has(f"rng_state.{rank_key(0)}."):
        raise ValueError(
            f"the random states in {folder} are not those of this program's ranks; pass --no-load-rng to draw new ones"
        )


def check_names(run: Run, folder: Path, difference: Difference, components: Components) -> None:
    """Raises on every rank if the checkpoint fits not on one: ranks may have different experts. **Collective.**"""
    checkpoint = run.config.checkpoint
    if not (differences := gather_if_any(difference, run.world.device)):
        return
    difference = of_all_ranks(differences)
    if checkpoint.strict_fsdp_dtensor_load or difference.shapes:
        hint = "\npass --no-load-optim to go on with the weights alone" if difference.is_optimizers_only else ""
        raise ValueError(f"{folder} does not fit the run:\n{difference}{hint}")
    strictness = checkpoint.dist_ckpt_strictness
    lacks_weights = components.progress and any(name.startswith(MODEL) for name in difference.missing)
    if (lacks_weights and strictness in _RAISING) or (difference.unexpected and strictness == "raise_all"):
        raise ValueError(
            f"{folder} does not fit the run:\n{difference}\n--dist-ckpt-strictness log_all would keep the run's own"
        )
    if strictness == "ignore_all":
        return
    logger.warning("%s does not fit the run, which keeps its own values:\n%s", folder, difference, extra=ON_EVERY_RANK)


def check_architecture(run: Run, folder: Path, arguments: Mapping[str, Any], components: Components) -> None:
    """Raises ValueError if the weights fit but were trained as another model, as the saved `arguments` tell."""
    found = "; ".join(architecture_differences(run.config, arguments))
    if not found:
        return
    if components.progress and run.config.checkpoint.strict_fsdp_dtensor_load:
        raise ValueError(
            f"{folder} was trained as another model: {found}; pass the checkpoint's values or --use-checkpoint-args, "
            "or --no-strict-fsdp-dtensor-load to go on as this model"
        )
    logger.warning("%s was trained as another model: %s", folder, found, extra=ON_EVERY_RANK)


def check_tensor_parallel_size(run: Run, folder: Path, arguments: Mapping[str, Any], tied: list[str]) -> None:
    """Raises on every rank if weights in one piece, `tied` on any rank, are of another number of tensor-parallel ranks.

    **Collective.**
    """
    if not any_rank(bool(tied), run.world.device):
        return
    size = arguments.get("tensor_model_parallel_size")
    own = run.config.dist.tensor_model_parallel_size
    names = f"{', '.join(tied[:3]) or 'experts'}{' and others' if len(tied) > 3 else ''} in one piece"
    if size is None:
        logger.warning(
            "%s has %s and does not say for which --tensor-model-parallel-size; %d, as here, is taken for it",
            folder,
            names,
            own,
        )
    elif size != own:
        raise ValueError(
            f"{folder} has {names}, with rows in the order of --tensor-model-parallel-size {size}, not {own}; load it "
            f"with {size} and save it, which makes parts of it that fit any"
        )


_ALWAYS = ("model.num_attention_heads", "model.num_query_groups", "model.position_embedding_type", "model.swiglu",
           "model.squared_relu", "model.normalization", "model.layernorm_epsilon",
           "model.layernorm_zero_centered_gamma", "tokenizer.tokenizer_type")  # fmt: skip
_WITH_ROPE = ("model.rotary_base", "model.rotary_percent", "model.rotary_interleaved",
              "model.rotary_seq_len_interpolation_factor", "model.use_rope_scaling")  # fmt: skip
_WITH_EXPERTS = ("model.moe_router_topk", "model.moe_router_pre_softmax")


def architecture_differences(config: RunConfig, saved: Mapping[str, Any]) -> Iterator[str]:
    """Differences between the `saved` arguments and `config` that make another model, although every weight may fit.

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
