"""State dicts under the names of `stored_names.py`; their tensors alias the model's, so that reading is loading."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from megatron_fsdp.dtensor.shard_spec import ShardSpec, spec_of
from megatron_fsdp.mcore.adapter import MODEL_PREFIX, unwrap_model
from megatron_fsdp.mcore.parallel_layout import partition_dim
from megatron_fsdp.mcore.stored_names import DELTA_NET, MAMBA, NamingContext, Part, Piece, stored_name, stored_pieces


@dataclass(frozen=True, kw_only=True)
class _Entry:
    spec: ShardSpec
    group_name: str
    pieces: tuple[Piece, ...]


class StoredState:
    """Names and pieces of a `FullyShardedDataParallel` model and its optimizer in a checkpoint.

    Args:
        model: the sharded model.
        is_stored: true for names, without wrappers, of weights in the checkpoint that is about to be read: a weight
            that it has in one piece only is read so. None: everything is named as it is written.

    Raises:
        ValueError: the parts that a layer reports for a fused parameter do not add up to its rows.
    """

    def __init__(self, model: nn.Module, is_stored: Callable[[str], bool] | None = None):
        inner = unwrap_model(model)
        context_of = _ContextFinder(inner)
        self._entries: dict[str, _Entry] = {}
        self.tied_to_ranks: list[str] = []
        """Tensor-parallel parameters that are read in one piece: only as many ranks as wrote them can."""
        for name, param in inner.named_parameters(remove_duplicate=False):
            spec, context = spec_of(param), context_of(name)
            _check_parts(name, spec.part_rows, context)
            pieces = stored_pieces(name, spec.part_rows, context)
            if is_stored is not None and not all(is_stored(piece.name) for piece in pieces):
                whole = stored_pieces(name, spec.part_rows, context, unsplit=True)
                if is_stored(whole[0].name):
                    pieces = whole
                    self.tied_to_ranks += [name] if _is_split(param) else []
            self._entries[name] = _Entry(spec=spec, group_name=stored_name(name, context), pieces=tuple(pieces))

    def model(self, state_dict: Mapping[str, Any]) -> dict[str, Any]:
        """The model's `state_dict()` under stored names."""
        stored: dict[str, Any] = {}
        for key, value in state_dict.items():
            entry = self._entries.get(key.removeprefix(MODEL_PREFIX))
            parts = [(key, value)] if entry is None else _parts(entry, value, MODEL_PREFIX)
            stored.update(parts)
        return stored

    def optimizer(self, state_dict: Mapping[str, Any]) -> dict[str, Any]:
        """The optimizer's `fqn_state_dict()` under stored names; values without rows are repeated for every piece."""
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
        yield prefix + piece.name, entry.spec.rows_of_parts(value, piece.first, piece.row_count) if is_cut else value


def _check_parts(name: str, rows: int, context: NamingContext) -> None:
    expected = sum(part.rows for part in context.parts)
    if context.parts and expected != rows:
        raise ValueError(
            f"{name} has {rows} rows on each tensor-parallel rank, but its layer fuses {expected}: "
            f"{', '.join(f'{part.rows} of {part.name}' for part in context.parts)}. Derive a layer that fuses "
            "something else than megatron-core's from another class than megatron-core's."
        )


def _is_split(param: nn.Parameter) -> bool:
    return partition_dim(param, getattr(param, "_tensor_parallel_mode", None)) is not None


class _ContextFinder:
    """Finds a parameter's context: the configuration of the nearest module above it that has one."""

    def __init__(self, model: nn.Module):
        self._parts = dict(fused_parts(model))
        self._configs, self._first_experts = {}, {}
        for name, module in model.named_modules():
            if hasattr(module, "config"):
                self._configs[name] = module.config
            if hasattr(module, "num_local_experts") and hasattr(module, "ep_group"):
                self._first_experts[name] = module.ep_group.rank() * module.num_local_experts

    def __call__(self, name: str) -> NamingContext:
        config = _nearest(self._configs, name)
        query_rows = getattr(config, "q_lora_rank", None) if getattr(config, "multi_latent_attention", False) else None
        return NamingContext(
            is_gated=getattr(config, "gated_linear_unit", True),
            first_expert=_nearest(self._first_experts, name) or 0,
            query_latent_rows=query_rows,
            parts=self._parts.get(name, ()),
            renames_mtp=not getattr(config, "mtp_layer_pattern", None),
        )


def _nearest(values: Mapping[str, Any], name: str) -> Any:
    """The value of the longest prefix of `name` that has one; None if no prefix has."""
    while name:
        name = name.rpartition(".")[0]
        if name in values:
            return values[name]
    return None


_Rows = dict[str, tuple[int, ...]]


def _of_delta_net(layer: Any) -> _Rows:
    query, value, heads = (width // layer.tp_size for width in (layer.qk_dim, layer.v_dim, layer.num_value_heads))
    return {"in_proj": (query, query, value, value, heads, heads), "conv1d": (query, query, value)}


def _of_mamba(layer: Any) -> _Rows:
    inner, state = layer.d_inner_local_tp, layer.ngroups_local_tp * layer.d_state
    return {"in_proj": (inner, inner, state, state, layer.nheads_local_tp), "conv1d": (inner, state, state)}


# By name: megatron-core imports these classes only beside packages that few machines have.
_LAYERS: dict[str, tuple[dict[str, tuple[str, ...]], Callable[[Any], _Rows]]] = {
    "GatedDeltaNet": (DELTA_NET, _of_delta_net),
    "MambaMixer": (MAMBA, _of_mamba),
}


def fused_parts(model: nn.Module) -> Iterator[tuple[str, tuple[Part, ...]]]:
    """(name of a parameter, the parts of this tensor-parallel rank's rows) of every fused parameter.

    The parameters themselves may be missing.
    """
    for name, module in model.named_modules(remove_duplicate=False):
        kind = next((_LAYERS[cls.__name__] for cls in type(module).__mro__ if cls.__name__ in _LAYERS), None)
        if kind is None:
            continue
        names, rows_of = kind
        for child, rows in rows_of(module).items():
            parts = tuple(Part(*each) for each in zip(names[child], rows, strict=True))
            for leaf in ("weight", "bias"):
                yield f"{name}.{child}.{leaf}".removeprefix("."), parts
