"""What a checkpoint holds: tensors and plain values under names, no code.

- `checkpoint_version`; `progress.*`: counts of the run
- `model.module.<name>`: main weights and buffers
- `optimizer.state.<name>.*`: moments and step; `optimizer.param_to_group_meta.<name>.*`: options of its group
- `optimizer.grad_scaler.*`: loss scale, if it changes
- `opt_param_scheduler.*`: learning rate and weight decay
- `rng_state.rank_00000.*`: random states of each rank
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron.training.checkpoint.random_state import current_state
from megatron.training.state import Run

VERSION = 3.0
"""Megatron-LM's number for this layout."""


@dataclass(frozen=True, kw_only=True)
class Parts:
    """Which parts of a run are written or read; the model always is."""

    progress: bool
    optimizer: bool
    rng: bool


def contents(run: Run, parts: Parts) -> dict[str, Any]:
    """The parts of `run` by name. Tensors are the run's own: reading into them in place is loading. **Collective.**"""
    run.model.stop_communication()
    values: dict[str, Any] = {"checkpoint_version": VERSION, "model": run.model.state_dict()}
    if parts.progress:
        values["progress"] = run.state.state_dict()
    if parts.optimizer and run.optimizer is not None:
        values["optimizer"] = run.optimizer.fqn_state_dict()
        values["opt_param_scheduler"] = run.scheduler.state_dict()
    if parts.rng:
        values["rng_state"] = {rank_key(run.world.ranks.rank): current_state()}
    return values


def rank_key(rank: int) -> str:
    """What the random states of a rank are called."""
    return f"rank_{rank:05d}"


def flattened(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested names joined by dots, as torch's distributed checkpoint stores them."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            flat |= flattened(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = value
    return flat
