"""Reading a checkpoint into a run that is built, saved on any number of ranks under any sharding strategy."""

import copy
import io
import logging
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException, DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import ReadItem

from megatron.training.checkpoint.format.flatten import flattened, with_leaves
from megatron.training.checkpoint.format.integrity import changed_files, in_words, what_failed
from megatron.training.checkpoint.format.paths import check_format, damaged, folder_to_load, iteration_of
from megatron.training.checkpoint.format.safe_unpickle import PlainReader, read_arguments, read_metadata, read_value
from megatron.training.checkpoint.load.check_architecture import differences
from megatron.training.checkpoint.load.lr_schedule import load_schedule
from megatron.training.checkpoint.load.match_keys import MODEL, Difference, Stored, compare, of_all_ranks
from megatron.training.checkpoint.load.vocab_padding import with_saved_rows
from megatron.training.checkpoint.run_state.contents import Parts, rank_key, tensors
from megatron.training.checkpoint.run_state.rng_state import restore
from megatron.training.checkpoint.save.dedup_planner import same_places, without_collection
from megatron.training.collective_errors import any_rank, on_every_rank, on_first_rank
from megatron.training.config.schema import CheckpointConfig
from megatron.training.errors import MissingCheckpointError
from megatron.training.ranks import ON_EVERY_RANK
from megatron.training.state import Run
from megatron_fsdp.mcore.stored_state import StoredState

logger = logging.getLogger(__name__)


_RAISING = ("assume_ok_unexpected", "raise_unexpected", "raise_all")
"""Values of `--dist-ckpt-strictness` that insist on every weight, as in Megatron-LM."""


class DataOnlyPlanner(DefaultLoadPlanner):
    """Reads a flat dict of tensors and plain values, and refuses values whose unpickling would run code."""

    def __init__(self):
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._read: dict[bytes, Any] = {}

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Takes over one value that is no tensor."""
        # Thousands of parameters have the same few options, and unpickling one takes a tenth of a millisecond.
        stored = value.getvalue()
        if stored not in self._read:
            self._read[stored] = torch.load(value, weights_only=True)
        self.original_state_dict[read_item.dest_index.fqn] = copy.deepcopy(self._read[stored])


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
    _read(run, found.folder, parts_to_load(run, is_pretrained=found.is_pretrained))
    logger.info("loaded %s, at iteration %d", found.folder, run.state.iteration)
    return True


class _Found(NamedTuple):
    folder: Path
    is_pretrained: bool


def _find(checkpoint: CheckpointConfig) -> _Found | None:
    """What to read; None if `--load` has no checkpoint and there is none to begin with."""
    for root, step in ((checkpoint.load, checkpoint.ckpt_step), (checkpoint.pretrained_checkpoint, None)):
        if root is None:
            continue
        check_format(root, step)
        if (folder := folder_to_load(root, step)) is not None:
            return _Found(folder, is_pretrained=root is not checkpoint.load)
    if checkpoint.pretrained_checkpoint is not None:
        raise ValueError(f"--pretrained-checkpoint {checkpoint.pretrained_checkpoint} has no checkpoint")
    return None


def parts_to_load(run: Run, *, is_pretrained: bool = False) -> Parts:
    """What the configuration wants of a checkpoint; of one to begin with, the weights."""
    checkpoint = run.config.checkpoint
    resumes = not (checkpoint.finetune or is_pretrained)
    return Parts(
        progress=resumes,
        optimizer=resumes and checkpoint.load_optim and run.optimizer is not None,
        rng=resumes and checkpoint.load_rng and run.optimizer is not None,
    )


def _verify(folder: Path, run: Run) -> None:
    """Raises ValueError with every file that was changed since it was written. **Collective.**"""
    ranks = run.world.ranks
    mine = on_every_rank(lambda: changed_files(folder, ranks.rank, ranks.world_size), run.world.device)
    problems: list[list[str]] = [[]] * ranks.world_size
    dist.all_gather_object(problems, mine)
    if problem := in_words([each for of_rank in problems for each in of_rank]):
        raise ValueError(damaged(folder, problem))


@without_collection()
def _read(run: Run, folder: Path, parts: Parts) -> None:
    saved = on_every_rank(lambda: read_metadata(folder), run.world.device)
    _check_parts(folder, parts, saved)
    counts = on_first_rank(lambda: _saved_counts(folder, saved), run.world.device) if parts.progress else {}
    names = Stored(saved)
    stored = StoredState(run.model, names.has_weight)
    values = tensors(run, parts, stored)
    if parts.rng:
        source = _rng_source(run, saved)
        values["rng_state"] = {source: values["rng_state"][rank_key(run.world.ranks.rank)]}
    leaves = with_saved_rows(flattened(values), names, run.job.tokenizer.vocab_size)
    _check_names(run, folder, compare(leaves, names), parts)
    _check_model(run, folder, saved, parts)
    _check_ranks(run, folder, saved, stored.tied_to_ranks)
    values = with_leaves(values, _read_leaves(run, folder, saved, names, leaves))
    run.model.load_state_dict(run.model.state_dict(), strict=False)  # Read in place; compute weights follow.
    if parts.optimizer:
        own_groups = [dict(group) for group in run.optimizer.param_groups]
        own = run.optimizer.fqn_state_dict()
        run.optimizer.load_fqn_state_dict(_with_own_options(own, stored.optimizer_from(values["optimizer"], own)))
        load_schedule(run, values["opt_param_scheduler"], own_groups)
    if parts.progress:
        run.state.load_state_dict({**run.state.state_dict(), **counts})
    if parts.rng:
        restore(values["rng_state"][source])


def _check_parts(folder: Path, parts: Parts, saved: Metadata) -> None:
    """Raises ValueError, with the flag to use, if whole parts were not saved."""

    def has(start: str) -> bool:
        return any(name.startswith(start) for name in saved.state_dict_metadata)

    for is_wanted, name, flag in (
        (parts.optimizer, "optimizer", "--no-load-optim"),
        (parts.rng, "rng_state", "--no-load-rng"),
    ):
        if is_wanted and not has(name + "."):
            raise ValueError(f"{folder} was saved without {name}; pass {flag}, or --finetune to start at iteration 0")
    if parts.rng and not has(f"rng_state.{rank_key(0)}."):
        raise ValueError(
            f"the random states in {folder} are not those of this program's ranks; pass --no-load-rng to draw new ones"
        )


def _saved_counts(folder: Path, saved: Metadata) -> dict[str, int]:
    """How far the saved run had come, under Megatron-LM's names or under those of earlier versions of this package."""
    try:
        counts = _stored_counts(folder, saved)
    except ValueError as error:
        raise ValueError(damaged(folder, str(error))) from error
    for name in ("iteration", "consumed_train_samples"):
        if name not in counts:
            raise ValueError(f"{folder} does not say its {name}; pass --finetune to start at iteration 0")
    if (named := iteration_of(folder)) not in (None, counts["iteration"]):
        raise ValueError(
            damaged(folder, f"what it holds is of iteration {counts['iteration']}, not {named}, as if it were renamed")
        )
    return counts


def _stored_counts(folder: Path, saved: Metadata) -> dict[str, int]:
    arguments = read_arguments(folder, saved)
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


def _check_names(run: Run, folder: Path, difference: Difference, parts: Parts) -> None:
    """Raises on every rank if the checkpoint fits not on one: ranks may have different experts. **Collective.**"""
    checkpoint = run.config.checkpoint
    if not any_rank(bool(difference), run.world.device):
        return
    differences: list[Difference] = [difference] * run.world.ranks.world_size
    dist.all_gather_object(differences, difference)
    difference = of_all_ranks(differences)
    if checkpoint.strict_fsdp_dtensor_load or difference.shapes:
        hint = "\npass --no-load-optim to go on with the weights alone" if difference.is_optimizers_only else ""
        raise ValueError(f"{folder} does not fit the run:\n{difference}{hint}")
    strictness = checkpoint.dist_ckpt_strictness
    lacks_weights = parts.progress and any(name.startswith(MODEL) for name in difference.missing)
    if (lacks_weights and strictness in _RAISING) or (difference.unexpected and strictness == "raise_all"):
        raise ValueError(
            f"{folder} does not fit the run:\n{difference}\n--dist-ckpt-strictness log_all would keep the run's own"
        )
    if strictness == "ignore_all":
        return
    logger.warning("%s does not fit the run, which keeps its own values:\n%s", folder, difference, extra=ON_EVERY_RANK)


def _check_model(run: Run, folder: Path, saved: Metadata, parts: Parts) -> None:
    """Raises on every rank if the weights fit but were trained as another model. **Collective.**"""

    def find() -> str:
        try:
            return "; ".join(differences(run.config, read_arguments(folder, saved)))
        except ValueError as error:
            raise ValueError(damaged(folder, str(error))) from error

    found = on_first_rank(find, run.world.device)
    if not found:
        return
    if parts.progress and run.config.checkpoint.strict_fsdp_dtensor_load:
        raise ValueError(
            f"{folder} was trained as another model: {found}; pass the checkpoint's values or --use-checkpoint-args, "
            "or --no-strict-fsdp-dtensor-load to go on as this model"
        )
    logger.warning("%s was trained as another model: %s", folder, found, extra=ON_EVERY_RANK)


def _check_ranks(run: Run, folder: Path, saved: Metadata, tied: list[str]) -> None:
    """Raises on every rank if weights in one piece are of another number of tensor-parallel ranks. **Collective.**"""
    if not any_rank(bool(tied), run.world.device):
        return

    def find() -> int | None:
        try:
            return read_arguments(folder, saved).get("tensor_model_parallel_size")
        except ValueError as error:
            raise ValueError(damaged(folder, str(error))) from error

    size, own = on_first_rank(find, run.world.device), run.config.dist.tensor_model_parallel_size
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


def _read_leaves(run: Run, folder: Path, saved: Metadata, names: Stored, leaves: Mapping[str, Any]) -> dict[str, Any]:
    """Reads into those of `leaves` that the checkpoint has; gives them back by their names here. **Collective.**"""
    places = {name: there for name in leaves if (there := names.find(name)) is not None}
    steps = {name: there for name in leaves.keys() - places.keys() if (there := names.step_of_group(name)) is not None}
    wanted = {there: leaves[name] for name, there in places.items()} | dict.fromkeys(steps.values(), 0)
    same = same_places(wanted, saved)
    read = {there: value for there, value in wanted.items() if there not in same}
    problem = _read_here(folder, saved, read) or _not_numbers(wanted, read)
    if any_rank(problem is not None, run.world.device):
        problems: list[str | None] = [None] * run.world.ranks.world_size
        dist.all_gather_object(problems, problem)
        told = next(f"rank {rank} {each}" for rank, each in enumerate(problems) if each is not None)
        raise ValueError(damaged(folder, told))
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
            dcp.load(read, storage_reader=PlainReader(folder, saved), planner=DataOnlyPlanner(), no_dist=True)
        except CheckpointException as error:
            return what_failed(error)
    return None


def _not_numbers(wanted: Mapping[str, Any], read: Mapping[str, Any]) -> str | None:
    """Which value stands where the run has a tensor that it cannot fill; only counts of steps may be plain numbers."""
    for there, found in read.items():
        value = wanted[there]
        is_number = isinstance(found, (int, float)) and isinstance(value, torch.Tensor) and value.dim() == 0
        if isinstance(value, torch.Tensor) and not isinstance(found, torch.Tensor) and not is_number:
            return f"finds {there} to be of {type(found).__name__}, not a tensor of shape {tuple(value.shape)}"
    return None


def _rng_source(run: Run, saved: Metadata) -> str:
    """Whose random states this rank takes: its own, or the first's of its data-parallel ranks, which start alike."""
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
