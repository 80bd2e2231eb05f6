"""The run's configuration as Megatron-LM stores it: an `argparse.Namespace` of plain values under its names."""

import argparse
from typing import Any

from megatron.training.config.flags import all_flags
from megatron.training.config.plan import ffn_hidden_size, kv_channels, max_positions
from megatron.training.config.rule_book import value_of
from megatron.training.config.sources import plain
from megatron.training.state import Run

_OTHER_NAMES = {
    "ddp.average_in_collective": "ddp_average_in_collective",
    "ddp.nccl_ub": "use_nccl_ub",
    "model.use_mcore_models": "deprecated_use_mcore_models",
}
"""Fields that Megatron-LM's arguments have under another name."""
_OPPOSITES = ("checkpoint.save_optim", "checkpoint.save_rng", "checkpoint.load_optim", "checkpoint.load_rng")
"""Fields whose opposite it has, with `no_` in front."""


def to_arguments(run: Run) -> argparse.Namespace:
    """The configuration of `run`, sizes that follow from it, and the samples it has read; equal on all ranks."""
    config, plan, state = run.config, run.plan, run.state
    values: dict[str, Any] = {}
    for path in all_flags():
        name, value = path.rpartition(".")[2], plain(value_of(config, path))
        if path in _OPPOSITES:
            values[f"no_{name}"] = None if value else True
        else:
            values[_OTHER_NAMES.get(path, name)] = value
    return argparse.Namespace(
        **{
            **values,
            "ffn_hidden_size": ffn_hidden_size(config.model),
            "kv_channels": kv_channels(config.model),
            "max_position_embeddings": max_positions(config),
            "add_position_embedding": config.model.position_embedding_type == "learned_absolute",
            "padded_vocab_size": plan.padded_vocab_size,
            "global_batch_size": plan.global_batch_size,
            "data_parallel_size": plan.data_parallel_size,
            "world_size": run.world.ranks.world_size,
            "iteration": state.iteration,
            "consumed_train_samples": state.consumed_train_samples,
            "consumed_valid_samples": state.consumed_valid_samples,
            "skipped_train_samples": 0,
        }
    )
