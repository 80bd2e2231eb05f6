"""Matching of stored names with those of a run, whoever wrote the checkpoint, and the differences that are left."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.tensor import DTensor

from megatron_fsdp.dtensor.chunk_metadata import with_rows
from megatron_fsdp.mcore.stored_names import canonical, part_name, without_expert

MODEL = "model.module."
STATE = "optimizer.state."
GROUP = "optimizer.param_to_group_meta."
_PER_PARAMETER = (STATE, GROUP)
"""Parts with several values for each parameter."""
_PARAMETERS = {"model.": MODEL, STATE: STATE, GROUP: GROUP}
"""Beginnings that a parameter's name follows, perhaps after wrappers' names -> as we write them."""
_UNEXPECTED_MATTERS = ("model.", STATE)
"""Beginnings of names that a checkpoint may not hold in vain; the rest depends on flags, ranks and precision."""
_LEFT_OUT = "._extra_state"
"""End of the names of what modules keep besides tensors, which is never read."""
_VOCABULARY_TABLES = (".word_embeddings.weight", ".output_layer.weight")
"""Ends of the names of parameters with one row for each id."""


class Stored:
    """The names in a checkpoint, found by those that we would write."""

    def __init__(self, metadata: Metadata):
        self.metadata = metadata.state_dict_metadata
        self._by_canonical: dict[str, str] = {}
        for name in self.metadata:
            self._by_canonical.setdefault(_canonical(name), name)

    def find(self, name: str) -> str | None:
        """The name in the checkpoint of what we write as `name`; None if it has no such thing."""
        return name if name in self.metadata else self._by_canonical.get(_canonical(name))

    def has_weight(self, name: str) -> bool:
        """True if there is a parameter of this name."""
        return self.find(MODEL + name) is not None

    def step_of_group(self, name: str) -> str | None:
        """The count of steps that stands with the options of a parameter's group, for a `....step` of its state."""
        if not (name.startswith(STATE) and name.endswith(".step")):
            return None
        parameter = name.removeprefix(STATE).removesuffix(".step")
        part = part_name(parameter)
        names = (parameter, part.whole) if part else (parameter,)
        return next((found for each in names if (found := self.find(f"{GROUP}{each}.step"))), None)

    def shape(self, name: str) -> torch.Size | None:
        """The shape of a tensor by its stored name; None for what is no tensor."""
        there = self.metadata.get(name)
        return there.size if isinstance(there, TensorStorageMetadata) else None


def _canonical(name: str) -> str:
    for beginning, ours in _PARAMETERS.items():
        if name.startswith(beginning):
            return ours + canonical(name.removeprefix(beginning))
    return name


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Differences between the names in a checkpoint and those that the run would read."""

    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    shapes: tuple[str, ...]

    def __bool__(self) -> bool:
        return bool(self.missing or self.unexpected or self.shapes)

    @property
    def is_optimizers_only(self) -> bool:
        """True if the model itself fits."""
        return not self.shapes and all(name.startswith("optimizer.") for name in (*self.missing, *self.unexpected))

    def __str__(self) -> str:
        lines = []
        for title, names in (("missing", self.missing), ("unexpected", self.unexpected), ("shape", self.shapes)):
            if names:
                shown = _by_parameter(names)
                lines += [f"{title} ({len(shown)}):", *(f"  {name}" for name in shown)]
        return "\n".join(lines)


def of_all_ranks(differences: Sequence[Difference]) -> Difference:
    """The differences of all ranks together."""
    names = {field: sorted({name for each in differences for name in getattr(each, field)}) for field in _FIELDS}
    return Difference(**{field: tuple(found) for field, found in names.items()})


_FIELDS = ("missing", "unexpected", "shapes")


def _by_parameter(names: Sequence[str]) -> list[str]:
    """`names` with one entry for all of a parameter's optimizer state, and none if the parameter is named itself."""
    shown: dict[str, None] = {}
    all_names = set(names)
    for name in names:
        part = next((part for part in _PER_PARAMETER if name.startswith(part)), None)
        if part is None:
            shown[name] = None
        elif MODEL + (parameter := name.removeprefix(part).rpartition(".")[0]) not in all_names:
            shown[f"{part}{parameter}.*"] = None
    return list(shown)


def compare(wanted: Mapping[str, Any], stored: Stored) -> Difference:
    """Names of `wanted` (flattened) that the checkpoint lacks, has in vain, or has in another shape.

    Options of an optimizer's group may be missing one by one, and experts may be other ranks'.
    """
    matters = tuple(start for start in _UNEXPECTED_MATTERS if any(name.startswith(start) for name in wanted))
    found = {name: stored.find(name) or stored.step_of_group(name) for name in wanted}
    groups = {name.rpartition(".")[0] for name, there in found.items() if there and name.startswith(GROUP)}
    missing = (name for name, there in found.items() if there is None and name.rpartition(".")[0] not in groups)
    expected = {without_expert(_canonical(name)) for name in wanted}
    unexpected = (
        name
        for name in stored.metadata
        if name.startswith(matters)
        and not name.endswith(_LEFT_OUT)
        and without_expert(_canonical(name)) not in expected
    )
    return Difference(
        missing=tuple(sorted(missing)),
        unexpected=tuple(sorted(unexpected)),
        shapes=tuple(sorted(_shapes(wanted, stored))),
    )


def _shapes(wanted: Mapping[str, Any], stored: Stored) -> Iterable[str]:
    for name, value in wanted.items():
        if not isinstance(value, torch.Tensor) or name.startswith(_PER_PARAMETER):  # state is as the parameter itself
            continue
        saved = stored.shape(stored.find(name) or "")
        if saved is not None and saved != value.shape:
            yield (
                f"{name}: {tuple(saved)} in the checkpoint, {tuple(value.shape)} in the run"
                + _padding_to_ask_for(name, saved, value.shape)
            )


def _padding_to_ask_for(name: str, saved: torch.Size, wanted: torch.Size) -> str:
    """The advice for a vocabulary table with another number of rows; empty for other tensors."""
    if not name.endswith(_VOCABULARY_TABLES) or saved[1:] != wanted[1:]:
        return ""
    return f"; if the tokenizer is the same, pass --padded-vocab-size {saved[0]}"


def with_saved_rows(leaves: Mapping[str, Any], stored: Stored, vocab_size: int) -> dict[str, Any]:
    """`leaves`, where tables of the vocabulary have as many rows as in the checkpoint, of which every id has one.

    They share memory with the run's tables; rows of padding that the checkpoint lacks are not in them, and keep their
    values. A checkpoint without a row for every id is left as it is, not to fit.
    """
    return {name: _with_saved_rows(name, value, stored, vocab_size) for name, value in leaves.items()}


def _with_saved_rows(name: str, value: Any, stored: Stored, vocab_size: int) -> Any:
    parameter = name.removeprefix(STATE).rpartition(".")[0] if name.startswith(STATE) else name
    if not isinstance(value, DTensor) or not f".{parameter}".endswith(_VOCABULARY_TABLES):
        return value
    saved = stored.shape(stored.find(name) or "")
    is_padding = saved is not None and saved[1:] == value.shape[1:] and saved[0] != value.shape[0] >= vocab_size
    return with_rows(value, saved[0]) if is_padding and saved[0] >= vocab_size else value
