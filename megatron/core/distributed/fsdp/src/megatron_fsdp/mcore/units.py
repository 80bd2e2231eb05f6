"""Parts of a megatron-core model that the engine must know: units, and weights read outside their owner."""

import importlib
from collections.abc import Sequence

from torch import nn

#: Classes whose instances are gathered and released as one, by import path. Those that do not import are passed over.
_UNIT_CLASSES = (
    "megatron.core.transformer.transformer_layer.TransformerLayer",
    "megatron.core.transformer.transformer_layer.MoETransformerLayer",
    "megatron.core.ssm.mamba_layer.MambaLayer",
)


def default_unit_modules(model: nn.Module) -> list[type]:
    """Layer classes of megatron-core that occur in `model`; an empty list makes the whole model one unit."""
    classes = [found for found in map(_import_or_none, _UNIT_CLASSES) if found is not None]
    return [cls for cls in classes if any(isinstance(module, cls) for module in model.modules())]


def weights_read_elsewhere(model: nn.Module) -> list[nn.Parameter]:
    """Weights that another module than their owner computes with; no hook on the owner would see that.

    megatron-core's output layer has no weight of its own when it is tied: the model hands it the embedding's. So does
    multi-token prediction.
    """
    found = []
    for module in model.modules():
        is_tied = getattr(module, "share_embeddings_and_output_weights", False) or getattr(module, "mtp_process", False)
        if is_tied and hasattr(module, "shared_embedding_or_output_weight"):
            weight = module.shared_embedding_or_output_weight()
            if weight is not None:
                found.append(weight)
    return found


def numel_outside(model: nn.Module, unit_modules: Sequence[type | str]) -> int:
    """Elements of parameters that no unit holds."""
    classes = tuple(found for entry in unit_modules for found in [_class_of(entry)] if found is not None)
    inside = {id(param) for module in model.modules() if isinstance(module, classes) for param in module.parameters()}
    return sum(param.numel() for param in model.parameters() if id(param) not in inside)


def _class_of(entry: type | str) -> type | None:
    # A path that does not import is the engine's to report, with its reason.
    return _import_or_none(entry) if isinstance(entry, str) else entry


def _import_or_none(path: str) -> type | None:
    module, _, name = path.rpartition(".")
    try:
        return getattr(importlib.import_module(module), name, None)
    except (ImportError, ValueError):
        return None
