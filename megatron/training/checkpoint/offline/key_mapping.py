"""Three ways to name what a checkpoint holds: as it is stored, as Megatron-LM stores it, and as plain PyTorch would.

In the plain form `model.<name>` is the bare model's state dict: gated and fused weights are whole, and no wrapper is
named.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from megatron.training.checkpoint.offline.lazy_reader import ARGUMENTS, Entry, Source
from megatron_fsdp.mcore.stored_names import (
    GATED_ENDS,
    NamingContext,
    Part,
    canonical,
    in_order,
    part_name,
    stored_pieces,
)

MODEL = "model."
STATE = "optimizer.state."
GROUP = "optimizer.param_to_group_meta."
GATED = "gated_weights"
"""In the plain form, the names of the weights that are stored as two."""
FUSED = "fused_weights"
"""In the plain form, of each other weight that is stored as several: its name, and {part: rows}."""
_OURS_ONLY = ("progress.", "rng_state.rank_")
"""Beginnings of names that Megatron-LM has no use for."""


class _ParameterKey(NamedTuple):
    """A name in three parts; `key` is empty for what is no parameter's or is the parameter itself."""

    part: str
    parameter: str
    key: str

    def joined(self) -> str:
        return self.part + self.parameter + (f".{self.key}" if self.key else "")

    def stored(self) -> str:
        """As `--load` reads it."""
        return self._replace(parameter=f"module.{self.parameter}").joined() if self.part == MODEL else self.joined()


def _parameter_key(name: str) -> _ParameterKey | None:
    """None for what belongs to no parameter."""
    if name.startswith(MODEL):
        return _ParameterKey(MODEL, canonical(name.removeprefix(MODEL)), "")
    for part in (STATE, GROUP):
        if name.startswith(part):
            parameter, _, key = canonical(name.removeprefix(part)).rpartition(".")
            return _ParameterKey(part, parameter, key)
    return None


def to_plain(source: Source) -> dict[str, Any]:
    """A checkpoint of any form in the plain one."""
    rest, split = _split_weights(source)
    gated, fused = set(source.get(GATED, ())), dict(source.get(FUSED, ()))
    plain = {place.joined() if (place := _parameter_key(name)) else name: value for name, value in rest.items()}
    for place, parts in split.items():
        plain[place.joined()] = _joined(place.joined(), parts)
        if GATED_ENDS[0] in parts:
            gated.add(place.parameter)
        elif place.part == MODEL:
            fused[place.parameter] = {end.removeprefix("."): part.shape[0] for end, part in parts.items()}
    lists = {GATED: sorted(gated), FUSED: [[name, fused[name]] for name in sorted(fused)]}
    return plain | {name: value for name, value in lists.items() if value}


def _split_weights(source: Source) -> tuple[dict[str, Any], dict[_ParameterKey, dict[str, Any]]]:
    """The values of `source` that are whole; and of each other weight its parts, by the ends of their names, in order.

    Raises:
        ValueError: parts are missing.
    """
    rest: dict[str, Any] = {}
    split: dict[_ParameterKey, dict[str, Any]] = {}
    for name, value in source.items():
        place = _parameter_key(name)
        part = part_name(place.parameter) if place else None
        if part is None:
            rest[name] = value
        else:
            split.setdefault(place._replace(parameter=part.whole), {})[part.end] = value
    for place, parts in split.items():
        ends = in_order(place.parameter, parts)
        if ends is None:
            name = place.joined()
            raise ValueError(f"{name} has only some of its parts: {', '.join(f'{name}{end}' for end in parts)}")
        split[place] = {end: parts[end] for end in ends}
    return rest, split


def _joined(name: str, parts: Mapping[str, Any], ranks: int = 1) -> Any:
    """The parts one after the other, as a model has them on each of so many tensor-parallel ranks."""
    first, *_ = parts.values()
    if not isinstance(first, Entry) or not first.shape:  # a count of steps, which all have
        return first
    rows = [part.shape[0] for part in parts.values()]
    if any(count % ranks for count in rows):
        raise ValueError(f"{name} has parts of {rows} rows, which {ranks} tensor-parallel ranks cannot share")
    shape = torch.Size([sum(rows), *first.shape[1:]])
    return Entry(shape, first.dtype, lambda: _by_rank([part.read() for part in parts.values()], ranks))


def _by_rank(parts: Sequence[torch.Tensor], ranks: int) -> torch.Tensor:
    return torch.cat([part.chunk(ranks)[rank] for rank in range(ranks) for part in parts])


def to_stored(source: Source, *, is_gated: bool = False) -> dict[str, Any]:
    """A checkpoint of any form under the names that `--load` reads; `is_gated`: all MLPs are, whatever it says."""
    plain = to_plain(source)
    gated = set(plain.pop(GATED, ()))
    fused = {name: tuple(Part(*part) for part in parts.items()) for name, parts in plain.pop(FUSED, ())}

    def around(parameter: str) -> NamingContext:
        parts = fused.get(parameter, ())
        return NamingContext(is_gated=is_gated or parameter in gated, parts=parts, renames_mtp=False)

    return _renamed(plain, around)


def _renamed(plain: Mapping[str, Any], around: Callable[[str], NamingContext]) -> dict[str, Any]:
    stored: dict[str, Any] = {}
    for name, value in plain.items():
        place = _parameter_key(name)
        if place is None:
            stored[name] = value
        elif place.part == GROUP:
            stored[place.joined()] = value
        else:
            rows = value.shape[0] if isinstance(value, Entry) and value.shape else 0
            pieces = stored_pieces(place.parameter, rows, around(place.parameter))
            for piece in pieces:
                is_cut = len(pieces) > 1 and rows
                new = place._replace(parameter=piece.name).stored()
                stored[new] = value.rows(piece.first, piece.row_count) if is_cut else value
    return stored


def to_megatron_lm(source: Source, *, is_gated: bool = False) -> dict[str, Any]:
    """A checkpoint of any form as Megatron-LM's `--load` with `--ckpt-format fsdp_dtensor` wants it.

    Wrappers are named in the optimizer's keys, how many tells the precision. Fused weights, which it does not store in
    parts, are whole, as the tensor-parallel ranks that `args` tell of have them. Random states, which it has by other
    ranks, and counts that it reads from `args` are left out.

    Raises:
        ValueError: there are no arguments, which it cannot do without.
    """
    stored = to_stored(source, is_gated=is_gated)
    if ARGUMENTS not in stored:
        raise ValueError("there are no arguments (args) in the checkpoint, which Megatron-LM asks for when it loads")
    arguments = vars(stored[ARGUMENTS])
    wrappers = "module." * (3 if arguments.get("bf16") or arguments.get("fp16") else 2)
    found = {"checkpoint_version": 3.0}
    for name, value in _fused(stored, arguments.get("tensor_model_parallel_size") or 1).items():
        part = next((part for part in (STATE, GROUP) if name.startswith(part)), None)
        if part is not None:
            found[part + wrappers + name.removeprefix(part)] = value
        elif not name.startswith(_OURS_ONLY):
            found[name] = value
    return found


def _fused(stored: Mapping[str, Any], ranks: int) -> dict[str, Any]:
    """`stored` with all but gated weights whole."""
    found, split = _split_weights(stored)
    for place, parts in split.items():
        if GATED_ENDS[0] in parts:
            found |= {place._replace(parameter=place.parameter + end).stored(): part for end, part in parts.items()}
        else:
            found[place.stored()] = _joined(place.joined(), parts, ranks)
    return found


def as_nested(plain: Source) -> dict[str, Any]:
    """The plain form as a file has it: `model`, `optimizer.state` and the like are dicts by parameter."""
    tree: dict[str, Any] = {}
    for name, value in plain.items():
        place = _parameter_key(name)
        if place is None:
            path = name.split(".")
        else:
            path = [*place.part.rstrip(".").split("."), place.parameter, *([place.key] if place.key else [])]
        branch = tree
        for key in path[:-1]:
            branch = branch.setdefault(key, {})
        branch[path[-1]] = vars(value) if name == ARGUMENTS else value
    return tree
