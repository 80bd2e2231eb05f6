"""Layout of megatron-core's parameters over tensor-parallel ranks: column, row or replicated."""

from collections.abc import Iterator

import torch

from megatron_fsdp.state.tensor_parallel import PARTITION_DIM, TensorParallelMode, tagged_dim

_MODE_BY_CLASS: dict[str, TensorParallelMode] = {
    "ColumnParallelLinear": "column",
    "TEColumnParallelLinear": "column",
    "TELayerNormColumnParallelLinear": "column",
    "TEColumnParallelGroupedLinear": "column",
    "VocabParallelEmbedding": "column",
    "DotProductAttention": "column",
    "TEDotProductAttention": "column",
    "RowParallelLinear": "row",
    "TERowParallelLinear": "row",
    "TERowParallelGroupedLinear": "row",
    "TENorm": "replicated",
    "FusedLayerNorm": "replicated",
    "WrappedTorchNorm": "replicated",
    "LayerNorm": "replicated",
    "RMSNorm": "replicated",
    "L2Norm": "replicated",
    "IdentityOp": "replicated",
    "TopKRouter": "replicated",
}

#: Parameters that differ from the mode of their module: a row-parallel bias is added after the reduction, and a fused
#: norm sees the whole hidden size.
_REPLICATED_LEAVES: dict[str, tuple[str, ...]] = {
    "TELayerNormColumnParallelLinear": ("layer_norm_weight", "layer_norm_bias"),
    "RowParallelLinear": ("bias",),
    "TERowParallelLinear": ("bias",),
    "TERowParallelGroupedLinear": ("bias",),
}


def tensor_parallel_mode(module: torch.nn.Module, leaf: str, param: torch.Tensor) -> TensorParallelMode | None:
    """The split of `module`'s own parameter `leaf` over tensor-parallel ranks; None if it is unknown.

    The class name decides, then megatron-core's tags on the parameter, then hints on the module.
    """
    class_name = type(module).__name__
    mode = _MODE_BY_CLASS.get(class_name)
    if mode is not None:
        is_replicated = any(leaf.startswith(prefix) for prefix in _REPLICATED_LEAVES.get(class_name, ()))
        return "replicated" if is_replicated else mode
    tagged = _mode_by_dim(tagged_dim(param))
    if tagged is not None:
        return tagged
    if "Norm" in class_name:
        return "replicated"
    declared = getattr(module, "parallel_mode", None)
    return declared if declared in ("column", "row") else None


def partition_dim(param: torch.Tensor, mode: TensorParallelMode | None) -> int | None:
    """The dim of `param` that is split over tensor-parallel ranks; None if it is whole everywhere."""
    return tagged_dim(param) if mode is None else PARTITION_DIM[mode]


def modes_of(model: torch.nn.Module) -> Iterator[tuple[torch.nn.Parameter, TensorParallelMode | None]]:
    """Each parameter of `model` once, with its tensor-parallel mode."""
    seen: set[int] = set()
    for module in model.modules():
        for leaf, param in module.named_parameters(recurse=False):
            if id(param) not in seen:
                seen.add(id(param))
                yield param, tensor_parallel_mode(module, leaf, param)


def tag_modes(model: torch.nn.Module) -> None:
    """Tags `model`'s parameters with their tensor-parallel modes, for the engine."""
    for param, mode in modes_of(model):
        if mode is not None:
            vars(param)["_tensor_parallel_mode"] = mode


def _mode_by_dim(dim: int | None) -> TensorParallelMode | None:
    return "column" if dim == 0 else "row" if dim == 1 else None
