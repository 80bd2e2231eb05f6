"""State dicts under the names of `stored_names.py`; their tensors alias the model's, so that reading is loading."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from megatron_fsdp.dtensor.shard_spec import ShardSpec
from megatron_fsdp.mcore.fused_parts import fused_parts
from megatron_fsdp.mcore.parallel_layout import partition_dim
from megatron_fsdp.mcore.stored_names import Piece, Surroundings, stored_name, stored_pieces
from megatron_fsdp.mcore.unwrap import unwrap_model

_MODEL = "module."
"""The model's own name in a checkpoint."""


@dataclass(frozen=True, kw_only=True)
class _Entry:
    spec: ShardSpec
    group_name: str
    pieces: tuple[Piece, ...]


class StoredState:
    """The state of a `FullyShardedDataParallel` model and its optimizer in the form of checkpoints.

    Args:
        model: the sharded model.
        is_stored: tells whether a checkpoint that is about to be read has this weight, named without wrappers; what it
            has only in one piece is then read so. None: everything is named as it is written.

    Raises:
        ValueError: a layer says that a parameter, which it fuses, has other rows than it has.
    """

    def __init__(self, model: nn.Module, is_stored: Callable[[str], bool] | None = None):
        inner = unwrap_model(model)
        surroundings = _Finder(inner)
        self._entries: dict[str, _Entry] = {}
        self.tied_to_ranks: list[str] = []
        """Weights split over tensor-parallel ranks and read in one piece, which fits only as many ranks as wrote it."""
        for name, param in inner.named_parameters(remove_duplicate=False):
            spec, around = param.megatron_fsdp_spec, surroundings(name)
            _check_parts(name, spec.part_rows, around)
            pieces = stored_pieces(name, spec.part_rows, around)
            if is_stored is not None and not all(is_stored(piece.name) for piece in pieces):
                whole = stored_pieces(name, spec.part_rows, around, unsplit=True)
                if is_stored(whole[0].name):
                    pieces = whole
                    self.tied_to_ranks += [name] if _is_split(param) else []
            self._entries[name] = _Entry(spec=spec, group_name=stored_name(name, around), pieces=tuple(pieces))

    def model(self, state_dict: Mapping[str, Any]) -> dict[str, Any]:
        """The model's `state_dict()` under stored names."""
        stored: dict[str, Any] = {}
        for key, value in state_dict.items():
            entry = self._entries.get(key.removeprefix(_MODEL))
            parts = [(key, value)] if entry is None else _parts(entry, value, _MODEL)
            stored.update(parts)
        return stored

    def optimizer(self, state_dict: Mapping[str, Any]) -> dict[str, Any]:
        """The optimizer's `fqn_state_dict()` under stored names; what is no tensor of rows stands at every piece."""
        stored = dict(state_dict)
        stored["state"] = {}
        for name, values in state_dict["state"].items():
            entry = self._entries[name]
            stored["state"].update({piece.name: {} for piece in entry.pieces})
            for key, value in values.items():
                for piece, part in _parts(entry, value):
                    stored["state"][piece][key] = part
        stored["param_to_group_meta"] = {
            self._entries[name].group_name: options for name, options in state_dict["param_to_group_meta"].items()
        }
        return stored

    def optimizer_from(self, stored: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
        """A `fqn_state_dict()` out of `stored`, whose tensors were read in place; `own` is the current one."""
        state = {}
        for name, values in own["state"].items():
            first = stored["state"].get(self._entries[name].pieces[0].name, {})
            state[name] = {
                key: value if isinstance(value, torch.Tensor) else first.get(key, value)
                for key, value in values.items()
            }
        meta = {
            name: options
            for name in own["param_to_group_meta"]
            if (options := stored["param_to_group_meta"].get(self._entries[name].group_name))
        }
        return {**own, **stored, "state": state, "param_to_group_meta": meta}


def _parts(entry: _Entry, value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(name, this rank's share) of each piece."""
    is_cut = len(entry.pieces) > 1 and entry.spec.fits(value)
    for piece in entry.pieces:
        yield prefix + piece.name, entry.spec.rows_of_parts(value, piece.first, piece.count) if is_cut else value


def _check_parts(name: str, rows: int, around: Surroundings) -> None:
    expected = sum(part.rows for part in around.parts)
    if around.parts and expected != rows:
        raise ValueError(
            f"{name} has {rows} rows on each tensor-parallel rank, but its layer fuses {expected}: "
            f"{', '.join(f'{part.rows} of {part.name}' for part in around.parts)}. Derive a layer that fuses something "
            "else than megatron-core's from another class than megatron-core's."
        )


def _is_split(param: nn.Parameter) -> bool:
    return partition_dim(param, getattr(param, "_tensor_parallel_mode", None)) is not None


class _Finder:
    """Finds what is around a parameter: the configuration of the nearest module above it that has one."""

    def __init__(self, model: nn.Module):
        self._parts = dict(fused_parts(model))
        self._configs, self._first_experts = {}, {}
        for name, module in model.named_modules():
            if hasattr(module, "config"):
                self._configs[name] = module.config
            if hasattr(module, "num_local_experts") and hasattr(module, "ep_group"):
                self._first_experts[name] = module.ep_group.rank() * module.num_local_experts

    def __call__(self, name: str) -> Surroundings:
        config = _nearest(self._configs, name)
        query_rows = getattr(config, "q_lora_rank", None) if getattr(config, "multi_latent_attention", False) else None
        return Surroundings(
            is_gated=getattr(config, "gated_linear_unit", True),
            first_expert=_nearest(self._first_experts, name) or 0,
            query_latent_rows=query_rows,
            parts=self._parts.get(name, ()),
            renames_mtp=not getattr(config, "mtp_layer_pattern", None),
        )


def _nearest(values: Mapping[str, Any], name: str) -> Any:
    """The value of the longest of `name`'s prefixes that has one."""
    while name:
        name = name.rpartition(".")[0]
        if name in values:
            return values[name]
    return None
