"""Contents of a checkpoint: tensors and plain values under Megatron-LM's names, as in docs/checkpoints.md.

- `checkpoint_version`, `iteration`, `num_floating_point_operations_so_far`, `args`; `progress.*`: more counts
- `model.module.<name>`: main weights and buffers
- `optimizer.state.<name>.*`: moments and step; `optimizer.param_to_group_meta.<name>.*`: options of its group
- `optimizer.grad_scaler.*`: loss scale, if it changes
- `opt_param_scheduler.*`: learning rate and weight decay
- `rng_state.rank_00000.*`: random states of each rank
"""

import contextlib
import gc
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from megatron.training.checkpoint.run_state.args_namespace import to_arguments
from megatron.training.checkpoint.run_state.rng_state import current_state
from megatron.training.state import Run
from megatron_fsdp.mcore.stored_state import StoredState

VERSION = 3.0
"""Megatron-LM's number for this layout."""


@dataclass(frozen=True, kw_only=True)
class Components:
    """Components of a run to write or read; the model always is."""

    progress: bool
    optimizer: bool
    rng: bool


def contents(run: Run, components: Components) -> dict[str, Any]:
    """The state dict to save: `tensors`, arguments and counts. **Collective.**"""
    values: dict[str, Any] = {"checkpoint_version": VERSION, "args": to_arguments(run)}
    if components.progress:
        values |= _counts(run)
    return values | tensors(run, components, StoredState(run.model))


def tensors(run: Run, components: Components, stored: StoredState) -> dict[str, Any]:
    """The parts of `run` but its counts. Tensors are the run's own: reading into them is loading. **Collective.**"""
    run.model.stop_communication()
    values: dict[str, Any] = {"model": stored.model(run.model.state_dict())}
    if components.optimizer and run.optimizer is not None:
        values["optimizer"] = stored.optimizer(run.optimizer.fqn_state_dict())
        values["opt_param_scheduler"] = run.scheduler.state_dict()
    if components.rng:
        values["rng_state"] = {rank_key(run.world.ranks.rank): current_state()}
    return values


def _counts(run: Run) -> dict[str, Any]:
    counts = run.state.state_dict()
    return {
        "iteration": counts.pop("iteration"),
        "num_floating_point_operations_so_far": counts.pop("floating_point_operations"),
        "progress": counts,
    }


def rank_key(rank: int) -> str:
    """The key of a rank's random states."""
    return f"rank_{rank:05d}"


@contextlib.contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Python collects no garbage inside: among so many objects that live on, looking for it is half of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
