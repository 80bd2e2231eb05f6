"""Reading a checkpoint into a run that is built, saved on any number of ranks under any sharding strategy."""

import copy
import logging
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata

from megatron.training.checkpoint.format.flatten import flattened, with_leaves
from megatron.training.checkpoint.format.integrity import checksum_errors, read_error, summarized
from megatron.training.checkpoint.format.metadata import read_arguments, read_metadata, read_value
from megatron.training.checkpoint.format.paths import check_format, damage_message, folder_to_load, iteration_of
from megatron.training.checkpoint.load.compatibility import (
    check_architecture,
    check_components,
    check_names,
    check_tensor_parallel_size,
)
from megatron.training.checkpoint.load.lr_schedule import load_schedule
from megatron.training.checkpoint.load.match_keys import (
    Stored,
    compare,
    with_saved_rows,
)
from megatron.training.checkpoint.load.storage_reader import DataOnlyPlanner, SafeReader, duplicate_reads
from megatron.training.checkpoint.run_state.contents import Components, rank_key, tensors, without_garbage_collection
from megatron.training.checkpoint.run_state.rng_state import restore
from megatron.training.collective_errors import gather_if_any, on_every_rank, on_first_rank
from megatron.training.config.schema import CheckpointConfig
from megatron.training.errors import MissingCheckpointError
from megatron.training.ranks import ON_EVERY_RANK
from megatron.training.state import Run
from megatron_fsdp.mcore.stored_state import StoredState

logger = logging.getLogger(__name__)


def load_checkpoint(run: Run) -> bool:
    """Reads `--load` into `run`, if there is something; whether there was. **Collective.**

    Raises:
        MissingCheckpointError: there was nothing, and that is not allowed.
        ValueError: the checkpoint does not fit the run; every name that differs is listed.
        CollectiveError: there is no such checkpoint, or it is damaged.
    """
    checkpoint = run.config.checkpoint
    if checkpoint.load is None and checkpoint.pretrained_checkpoint is None:
        return False
    found = on_first_rank(lambda: _find(checkpoint), run.world.device)
    if found is None:
        if checkpoint.exit_on_missing_checkpoint:
            raise MissingCheckpointError(f"--load {checkpoint.load} has no checkpoint")
        logger.warning("--load %s has no checkpoint; starting anew", checkpoint.load, extra=ON_EVERY_RANK)
        return False
    if checkpoint.verify_checksums:
        _verify(found.folder, run)
    _read(run, found.folder, components_to_load(run, is_pretrained=found.is_pretrained))
    logger.info("loaded %s, at iteration %d", found.folder, run.state.iteration)
    return True


class _Found(NamedTuple):
    folder: Path
    is_pretrained: bool


def _find(checkpoint: CheckpointConfig) -> _Found | None:
    """The checkpoint to read; None if `--load` has none and there is none to begin with."""
    for root, step in ((checkpoint.load, checkpoint.ckpt_step), (checkpoint.pretrained_checkpoint, None)):
        if root is None:
            continue
        check_format(root, step)
        if (folder := folder_to_load(root, step)) is not None:
            return _Found(folder, is_pretrained=root is not checkpoint.load)
    if checkpoint.pretrained_checkpoint is not None:
        raise ValueError(f"--pretrained-checkpoint {checkpoint.pretrained_checkpoint} has no checkpoint")
    return None


def components_to_load(run: Run, *, is_pretrained: bool = False) -> Components:
    """The components that the configuration wants of a checkpoint; of a pre-trained one, the weights alone."""
    checkpoint = run.config.checkpoint
    resumes = not (checkpoint.finetune or is_pretrained)
    return Components(
        progress=resumes,
        optimizer=resumes and checkpoint.load_optim and run.optimizer is not None,
        rng=resumes and checkpoint.load_rng and run.optimizer is not None,
    )


def _verify(folder: Path, run: Run) -> None:
    """Raises ValueError with every file that was changed since it was written. **Collective.**"""
    ranks = run.world.ranks
    mine = on_every_rank(lambda: checksum_errors(folder, ranks.rank, ranks.world_size), run.world.device)
    if problems := gather_if_any(mine, run.world.device):
        raise ValueError(damage_message(folder, summarized([each for of_rank in problems for each in of_rank])))


@without_garbage_collection()
def _read(run: Run, folder: Path, components: Components) -> None:
    saved = on_every_rank(lambda: read_metadata(folder), run.world.device)
    check_components(folder, components, saved)
    arguments, counts = on_first_rank(lambda: _read_values(folder, saved, components), run.world.device)
    names = Stored(saved)
    stored = StoredState(run.model, names.has_weight)
    values = tensors(run, components, stored)
    if components.rng:
        source = _rng_source(run, saved)
        values["rng_state"] = {source: values["rng_state"][rank_key(run.world.ranks.rank)]}
    leaves = with_saved_rows(flattened(values), names, run.job.tokenizer.vocab_size)
    check_names(run, folder, compare(leaves, names), components)
    check_architecture(run, folder, arguments, components)
    check_tensor_parallel_size(run, folder, arguments, stored.tied_to_ranks)
    values = with_leaves(values, _read_leaves(run, folder, saved, names, leaves))
    run.model.load_state_dict(run.model.state_dict(), strict=False)  # Read in place; compute weights follow.
    if components.optimizer:
        own_groups = [dict(group) for group in run.optimizer.param_groups]
        own = run.optimizer.fqn_state_dict()
        run.optimizer.load_fqn_state_dict(_with_own_options(own, stored.optimizer_from(values["optimizer"], own)))
        load_schedule(run, values["opt_param_scheduler"], own_groups)
    if components.progress:
        run.state.load_state_dict({**run.state.state_dict(), **counts})
    if components.rng:
        restore(values["rng_state"][source])


class _SavedValues(NamedTuple):
    arguments: dict[str, Any]
    """Of the run that saved."""
    counts: dict[str, int]
    """Fields of `TrainState`; empty if progress is not read."""


def _read_values(folder: Path, saved: Metadata, components: Components) -> _SavedValues:
    """The values that are no tensors. Raises ValueError if they are damaged or lack the progress that is to be read."""
    try:
        arguments = read_arguments(folder, saved)
        counts = _saved_counts(folder, saved, arguments) if components.progress else {}
    except ValueError as error:
        raise ValueError(damage_message(folder, str(error))) from error
    for name in ("iteration", "consumed_train_samples") if components.progress else ():
        if name not in counts:
            raise ValueError(f"{folder} does not say its {name}; pass --finetune to start at iteration 0")
    named = iteration_of(folder)
    if components.progress and named not in (None, counts["iteration"]):
        problem = f"what it holds is of iteration {counts['iteration']}, not {named}, as if it were renamed"
        raise ValueError(damage_message(folder, problem))
    return _SavedValues(arguments, counts)


def _saved_counts(folder: Path, saved: Metadata, arguments: Mapping[str, Any]) -> dict[str, int]:
    """Progress of the saved run, under Megatron-LM's names or under those of earlier versions of this package."""
    places = {
        "iteration": ("iteration", "progress.iteration"),
        "floating_point_operations": ("num_floating_point_operations_so_far", "progress.floating_point_operations"),
        "consumed_train_samples": ("progress.consumed_train_samples",),
        "consumed_valid_samples": ("progress.consumed_valid_samples",),
        "skipped_iterations": ("progress.skipped_iterations",),
    }
    counts = {name: arguments[name] for name in places if isinstance(arguments.get(name), int)}
    for name, stored in places.items():
        there = next((each for each in stored if each in saved.state_dict_metadata), None)
        if there is not None:
            counts[name] = int(read_value(folder, saved, there))
    return counts


def _read_leaves(run: Run, folder: Path, saved: Metadata, names: Stored, leaves: Mapping[str, Any]) -> dict[str, Any]:
    """Reads into those of `leaves` that the checkpoint has; gives them back by their names here. **Collective.**"""
    places = {name: there for name in leaves if (there := names.find(name)) is not None}
    steps = {name: there for name in leaves.keys() - places.keys() if (there := names.step_of_group(name)) is not None}
    wanted = {there: leaves[name] for name, there in places.items()} | dict.fromkeys(steps.values(), 0)
    same = duplicate_reads(wanted, saved)
    read = {there: value for there, value in wanted.items() if there not in same}
    problem = _read_here(folder, saved, read) or _not_numbers(wanted, read)
    if problems := gather_if_any(problem, run.world.device):
        first = next(f"rank {rank} {each}" for rank, each in enumerate(problems) if each is not None)
        raise ValueError(damage_message(folder, first))
    for there, value in wanted.items():
        found = read[same.get(there, there)]
        if not isinstance(value, torch.Tensor):
            read[there] = copy.deepcopy(found) if there in same else found
        elif found is not value:
            value.detach().copy_(torch.as_tensor(found))
            read[there] = value
    for name, there in steps.items():
        leaves[name].fill_(float(read[there]))
    return {name: read[there] for name, there in places.items()} | {name: leaves[name] for name in steps}


def _read_here(folder: Path, saved: Metadata, read: dict[str, Any]) -> str | None:
    """Reads into the values of `read`; what failed. Every rank has the index and needs no other to plan its part."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*assuming the intent is to load in a single process")
        try:
            dcp.load(read, storage_reader=SafeReader(folder, saved), planner=DataOnlyPlanner(), no_dist=True)
        except CheckpointException as error:
            return read_error(error)
    return None


def _not_numbers(wanted: Mapping[str, Any], read: Mapping[str, Any]) -> str | None:
    """A problem if a plain value stands where the run has a tensor; only counts of steps may be plain numbers."""
    for there, found in read.items():
        value = wanted[there]
        is_number = isinstance(found, (int, float)) and isinstance(value, torch.Tensor) and value.dim() == 0
        if isinstance(value, torch.Tensor) and not isinstance(found, torch.Tensor) and not is_number:
            return f"finds {there} to be of {type(found).__name__}, not a tensor of shape {tuple(value.shape)}"
    return None


def _rng_source(run: Run, saved: Metadata) -> str:
    """The key of the random states for this rank: its own, or those of the first of its data-parallel ranks."""
    parts = (name.split(".") for name in saved.state_dict_metadata)
    there = {part[1] for part in parts if part[0] == "rng_state"}
    if len(there) < run.world.ranks.world_size:
        logger.warning(
            "the checkpoint was saved on %d ranks; the others take random states of the first",
            len(there),
            extra=ON_EVERY_RANK,
        )
    rank, sizes = run.world.ranks.rank, run.config.dist
    of_one_copy = sizes.tensor_model_parallel_size * sizes.expert_model_parallel_size
    choices = (rank_key(rank), rank_key(rank % of_one_copy))
    return next((choice for choice in choices if choice in there), rank_key(0))


def _with_own_options(own: Mapping[str, Any], read: dict[str, Any]) -> dict[str, Any]:
    """`read`, and of `own` the options that it lacks: of one parameter, or of all in a group.

    A parameter that was not saved gets the options of its group as they were read.
    """
    options = {
        name: {**current, **read["param_to_group_meta"].get(name, {})}
        for name, current in own["param_to_group_meta"].items()
    }
    known = read["param_to_group_meta"]
    for name, current in own["param_to_group_meta"].items():
        if name not in known:
            group = (other for other, value in own["param_to_group_meta"].items() if value == current)
            options[name] = next((options[other] for other in group if other in known), current)
    return {**read, "param_to_group_meta": options}
