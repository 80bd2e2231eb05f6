"""Reading a checkpoint into a run that is built, saved on any number of ranks under any sharding strategy."""

import io
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException, DefaultLoadPlanner, FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem

from megatron.training.agree import on_every_rank, on_first_rank
from megatron.training.checkpoint.contents import Parts, contents, flattened, rank_key
from megatron.training.checkpoint.damage import changed_files, in_words, what_failed
from megatron.training.checkpoint.paths import damaged, folder_to_load
from megatron.training.checkpoint.random_state import restore
from megatron.training.checkpoint.schedule import load_schedule
from megatron.training.launch import RunError
from megatron.training.ranks import ON_EVERY_RANK
from megatron.training.state import Run

logger = logging.getLogger(__name__)

_UNEXPECTED_MATTERS = ("model.", "optimizer.state.")
"""What a checkpoint may not hold in vain; the rest depends on flags, ranks and precision."""


_MODEL = "model.module."
_PER_PARAMETER = ("optimizer.state.", "optimizer.param_to_group_meta.")
"""Parts with several values for each parameter."""
_ROWS_OF_VOCABULARY = (".word_embeddings.weight", ".output_layer.weight")
"""Ends of the names of parameters with one row for each id."""


class MissingCheckpointError(RunError):
    """`--load` has no checkpoint, and `--exit-on-missing-checkpoint` says that there must be one."""

    is_on_every_rank = True


class DataOnlyPlanner(DefaultLoadPlanner):
    """Reads tensors and plain values, and refuses values whose unpickling would run code."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Takes over one value that is no tensor."""
        torch.load(value, weights_only=True)
        value.seek(0)
        super().load_bytes(read_item, value)


@dataclass(frozen=True, kw_only=True)
class Difference:
    """How a checkpoint differs from what the run would read."""

    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    shapes: tuple[str, ...]

    def __bool__(self) -> bool:
        return bool(self.missing or self.unexpected or self.shapes)

    def __str__(self) -> str:
        lines = []
        for title, names in (("missing", self.missing), ("unexpected", self.unexpected), ("shape", self.shapes)):
            if names:
                shown = _by_parameter(names)
                lines += [f"{title} ({len(shown)}):", *(f"  {name}" for name in shown)]
        return "\n".join(lines)


def _by_parameter(names: Sequence[str]) -> list[str]:
    """`names` with one entry for all of a parameter's optimizer state, and none if the parameter is named itself."""
    shown: dict[str, None] = {}
    all_names = set(names)
    for name in names:
        part = next((part for part in _PER_PARAMETER if name.startswith(part)), None)
        if part is None:
            shown[name] = None
        elif _MODEL + (parameter := name.removeprefix(part).rpartition(".")[0]) not in all_names:
            shown[f"{part}{parameter}.*"] = None
    return list(shown)


def load_checkpoint(run: Run) -> bool:
    """Reads `--load` into `run`, if there is something; whether there was. **Collective.**

    Raises:
        MissingCheckpointError: there was nothing, and that is not allowed.
        ValueError: the checkpoint does not fit the run; every name that differs is listed.
        AgreedError: there is no such checkpoint, or it is damaged.
    """
    checkpoint = run.config.checkpoint
    if checkpoint.load is None:
        return False
    folder = on_first_rank(lambda: folder_to_load(checkpoint.load, checkpoint.ckpt_step), run.world.device)
    if folder is None:
        if checkpoint.exit_on_missing_checkpoint:
            raise MissingCheckpointError(f"--load {checkpoint.load} has no checkpoint")
        logger.warning("--load %s has no checkpoint; starting anew", checkpoint.load, extra=ON_EVERY_RANK)
        return False
    if checkpoint.verify_checksums:
        _verify(folder, run)
    _read(run, folder, parts_to_load(run))
    logger.info("loaded %s, at iteration %d", folder, run.state.iteration)
    return True


def parts_to_load(run: Run) -> Parts:
    """What the configuration wants of a checkpoint."""
    checkpoint = run.config.checkpoint
    resumes = not checkpoint.finetune
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


def _read(run: Run, folder: Path, parts: Parts) -> None:
    saved = on_every_rank(lambda: FileSystemReader(str(folder)).read_metadata(), run.world.device)
    _check_parts(folder, parts, saved)
    values = contents(run, parts)
    if parts.rng:
        source = _rng_source(run, saved)
        values["rng_state"] = {source: values["rng_state"][rank_key(run.world.ranks.rank)]}
    difference, is_strict = compare(values, saved), run.config.checkpoint.strict_fsdp_dtensor_load
    if difference and (is_strict or difference.shapes):
        raise ValueError(f"{folder} does not fit the run:\n{difference}")
    if difference:
        logger.warning(
            "%s does not fit the run, which keeps its own values:\n%s", folder, difference, extra=ON_EVERY_RANK
        )
        values = _without(values, set(difference.missing))
    try:
        dcp.load(values, checkpoint_id=str(folder), planner=DataOnlyPlanner())
    except CheckpointException as error:  # Raised on every rank, whichever failed.
        raise ValueError(damaged(folder, what_failed(error))) from error
    run.model.load_state_dict(values["model"], strict=False)
    if parts.optimizer:
        own_groups = [dict(group) for group in run.optimizer.param_groups]
        run.optimizer.load_fqn_state_dict(_with_own_state(run.optimizer.fqn_state_dict(), values["optimizer"]))
        load_schedule(run, values["opt_param_scheduler"], own_groups)
    if parts.progress:
        run.state.load_state_dict({**run.state.state_dict(), **values["progress"]})
    if parts.rng:
        restore(values["rng_state"][source])


def _check_parts(folder: Path, parts: Parts, saved: Metadata) -> None:
    """Raises ValueError, with the flag to use, if whole parts were not saved."""
    names = {name.split(".")[0] for name in saved.state_dict_metadata}
    for is_wanted, name, flag in (
        (parts.optimizer, "optimizer", "--no-load-optim"),
        (parts.rng, "rng_state", "--no-load-rng"),
    ):
        if is_wanted and name not in names:
            raise ValueError(f"{folder} was saved without {name}; pass {flag}, or --finetune to start at iteration 0")


def compare(values: Mapping[str, Any], saved: Metadata) -> Difference:
    """What of `values` the checkpoint lacks, has in vain, or has in another shape."""
    wanted, there = flattened(values), saved.state_dict_metadata
    matters = tuple(prefix for prefix in _UNEXPECTED_MATTERS if any(name.startswith(prefix) for name in wanted))
    shapes = [
        f"{name}: {tuple(there[name].size)} in the checkpoint, {tuple(value.shape)} in the run"
        + _padding_to_ask_for(name, there[name].size, value.shape)
        for name, value in wanted.items()
        if isinstance(value, torch.Tensor)
        and not name.startswith(_PER_PARAMETER)  # as the parameter itself
        and isinstance(there.get(name), TensorStorageMetadata)
        and there[name].size != value.shape
    ]
    return Difference(
        missing=tuple(sorted(wanted.keys() - there.keys())),
        unexpected=tuple(sorted(name for name in there.keys() - wanted.keys() if name.startswith(matters))),
        shapes=tuple(sorted(shapes)),
    )


def _padding_to_ask_for(name: str, saved: torch.Size, wanted: torch.Size) -> str:
    """What to do about a table of the vocabulary that has other rows."""
    if not name.endswith(_ROWS_OF_VOCABULARY) or saved[1:] != wanted[1:]:
        return ""
    return f"; if the tokenizer is the same, pass --padded-vocab-size {saved[0]}"


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
    rank = run.world.ranks.rank
    choices = (rank_key(rank), rank_key(rank % run.config.dist.tensor_model_parallel_size))
    return next((choice for choice in choices if choice in there), rank_key(0))


def _without(values: Mapping[str, Any], names: set[str], prefix: str = "") -> dict[str, Any]:
    """A copy without the leaves of these names."""
    kept = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            kept[key] = _without(value, names, f"{prefix}{key}.")
        elif prefix + key not in names:
            kept[key] = value
    return kept


def _with_own_state(own: dict[str, Any], read: Mapping[str, Any]) -> dict[str, Any]:
    """`read`, and of `own` the parameters that it lacks, whose options become those of their group as it was read."""
    options = dict(read["param_to_group_meta"])
    for name, current in own["param_to_group_meta"].items():
        if not options.get(name):
            group = [other for other, value in own["param_to_group_meta"].items() if value == current]
            options[name] = next((options[other] for other in group if options.get(other)), current)
    state = {name: read["state"].get(name) or value for name, value in own["state"].items()}
    return {**own, **read, "state": state, "param_to_group_meta": options}
