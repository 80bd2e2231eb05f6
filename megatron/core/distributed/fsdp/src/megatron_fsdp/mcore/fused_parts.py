"""Row counts of the parts of fused projections and convolutions, as the layer itself says."""

from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from megatron_fsdp.mcore.stored_names import DELTA_NET, MAMBA, Part

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
    """(name of a parameter, the parts that this tensor-parallel rank's rows consist of), where there are several.

    Layers may lack the one or other of these parameters.
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
