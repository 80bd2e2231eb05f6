"""Three ways to name what a checkpoint holds: as it is stored, as Megatron-LM stores it, and as plain PyTorch would.

In the plain form `model.<name>` is the bare model's state dict: gated weights are whole, and no wrapper is named.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from megatron.training.checkpoint.entries import ARGUMENTS, Entry, Source
from megatron_fsdp.mcore.stored_names import Surroundings, canonical, joined_name, stored_pieces

MODEL = "model."
STATE = "optimizer.state."
GROUP = "optimizer.param_to_group_meta."
GATED = "gated_weights"
"""In the plain form, the names of the weights that are stored as two."""
_OURS_ONLY = ("progress.", "rng_state.rank_")
"""Beginnings of names that Megatron-LM has no use for."""


class _Place(NamedTuple):
    """A name in three parts; `key` is empty for what is no parameter's or is the parameter itself."""

    part: str
    parameter: str
    key: str

    def joined(self) -> str:
        return self.part + self.parameter + (f".{self.key}" if self.key else "")


def _place(name: str) -> _Place | None:
    """None for what belongs to no parameter."""
    if name.startswith(MODEL):
        return _Place(MODEL, canonical(name.removeprefix(MODEL)), "")
    for part in (STATE, GROUP):
        if name.startswith(part):
            parameter, _, key = canonical(name.removeprefix(part)).rpartition(".")
            return _Place(part, parameter, key)
    return None


def to_plain(source: Source) -> dict[str, Any]:
    """A checkpoint of any form in the plain one."""
    plain: dict[str, Any] = {}
    halves: dict[str, list[Any]] = {}
    gated = set(source.get(GATED, ()))
    for name, value in source.items():
        place = _place(name)
        half = joined_name(place.parameter) if place else None
        if half is None:
            plain[place.joined() if place else name] = value
            continue
        gated.add(half[0])
        whole = place._replace(parameter=half[0]).joined()
        halves.setdefault(whole, [None, None])[half[1]] = value
    plain.update({name: _joined(name, *values) for name, values in halves.items()})
    return {**plain, GATED: sorted(gated)} if gated else plain


def _joined(name: str, gate: Any, up: Any) -> Any:
    if gate is None or up is None:
        raise ValueError(f"{name} has only one of the two parts {name}_w and {name}_v")
    if not isinstance(gate, Entry) or not gate.shape:  # a count of steps, which both have
        return gate
    shape = torch.Size([gate.shape[0] + up.shape[0], *gate.shape[1:]])
    return Entry(shape, gate.dtype, lambda: torch.cat([gate.read(), up.read()]))


def to_stored(source: Source, *, is_gated: bool = False) -> dict[str, Any]:
    """A checkpoint of any form under the names that `--load` reads; `is_gated`: all MLPs are, whatever it says."""
    plain = to_plain(source)
    gated = set(plain.pop(GATED, ()))
    return _renamed(plain, lambda parameter: is_gated or parameter in gated)


def _renamed(plain: Mapping[str, Any], is_gated: Callable[[str], bool]) -> dict[str, Any]:
    stored: dict[str, Any] = {}
    for name, value in plain.items():
        place = _place(name)
        if place is None:
            stored[name] = value
        elif place.part == GROUP:
            stored[place.joined()] = value
        else:
            around = Surroundings(is_gated=is_gated(place.parameter), renames_mtp=False)
            rows = value.shape[0] if isinstance(value, Entry) and value.shape else 0
            pieces = stored_pieces(place.parameter, rows, around)
            for piece in pieces:
                is_cut = len(pieces) > 1 and rows
                prefix = "module." if place.part == MODEL else ""
                new = place._replace(parameter=prefix + piece.name).joined()
                stored[new] = value.rows(piece.first, piece.count) if is_cut else value
    return stored


def to_megatron_lm(source: Source, *, is_gated: bool = False) -> dict[str, Any]:
    """A checkpoint of any form as Megatron-LM's `--load` with `--ckpt-format fsdp_dtensor` wants it.

    Wrappers are named in the optimizer's keys, how many tells the precision. Random states, which it has by other
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
    for name, value in stored.items():
        part = next((part for part in (STATE, GROUP) if name.startswith(part)), None)
        if part is not None:
            found[part + wrappers + name.removeprefix(part)] = value
        elif not name.startswith(_OURS_ONLY):
            found[name] = value
    return found


def nested(plain: Source) -> dict[str, Any]:
    """The plain form as a file has it: `model`, `optimizer.state` and the like are dicts by parameter."""
    tree: dict[str, Any] = {}
    for name, value in plain.items():
        place = _place(name)
        if place is None:
            path = name.split(".")
        else:
            path = [*place.part.rstrip(".").split("."), place.parameter, *([place.key] if place.key else [])]
        branch = tree
        for key in path[:-1]:
            branch = branch.setdefault(key, {})
        branch[path[-1]] = vars(value) if name == ARGUMENTS else value
    return tree
