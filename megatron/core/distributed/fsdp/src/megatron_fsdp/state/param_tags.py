"""Parameter tags: attributes of a Parameter that survive its replacement, and the users' marks for sharding."""

from __future__ import annotations

import torch

NO_SHARD_TAG = "_fsdp_no_shard"
SINGLE_OWNER_TAG = "_fsdp_single_owner"
SPEC_TAG = "megatron_fsdp_spec"
"""On a sharded parameter: its layout, a `ShardSpec`."""
OWNER_TAG = "_megatron_fsdp_owner"
"""On a sharded parameter: a weak reference to its model, by which an optimizer finds it."""
#: Read by megatron-core, TransformerEngine or optimizers from whatever object stands for the parameter.
PARAM_TAGS: tuple[str, ...] = (
    NO_SHARD_TAG,
    SINGLE_OWNER_TAG,
    "tensor_model_parallel",
    "partition_dim",
    "partition_stride",
    "partition_sizes",
    "sequence_parallel",
    "shared",
    "shared_embedding",
    "is_embedding_parameter",
    "is_embedding_or_output_parameter",
    "allreduce",
    "average_gradients_across_tp_domain",
    "_tensor_parallel_mode",
)


def copy_tags(source: torch.Tensor, target: torch.Tensor) -> None:
    """Copies every tag that `source` carries to `target`."""
    for tag in PARAM_TAGS:
        if hasattr(source, tag):
            setattr(target, tag, getattr(source, tag))


def fsdp_no_shard(module_or_param: torch.nn.Module | torch.nn.Parameter) -> None:
    """Keeps a parameter, or every parameter of a module, whole on every rank: it is never gathered.

    Call it before sharding; it holds for parameters that exist now.

    Raises:
        TypeError: `module_or_param` is neither a module nor a parameter.
    """
    _tag(module_or_param, NO_SHARD_TAG, "fsdp_no_shard")


def fsdp_single_owner(module_or_param: torch.nn.Module | torch.nn.Parameter) -> None:
    """Shards by whole parameters: all rows of this one, or of each one of a module, lie on one rank, its owner.

    For optimizers that need whole matrices (Muon, SOAP, Shampoo, Adafactor): the owner updates a matrix alone, without
    communication. Matrices of one unit are spread over the ranks by size; what that costs in padding is in the table
    that is logged after sharding. Call it before sharding; it holds for parameters that exist now.

    Raises:
        TypeError: `module_or_param` is neither a module nor a parameter.
    """
    _tag(module_or_param, SINGLE_OWNER_TAG, "fsdp_single_owner")


def _tag(module_or_param: torch.nn.Module | torch.nn.Parameter, tag: str, function: str) -> None:
    if not isinstance(module_or_param, (torch.nn.Module, torch.nn.Parameter)):
        raise TypeError(f"{function} expects a Module or a Parameter, got {type(module_or_param).__name__}.")
    for param in [module_or_param] if isinstance(module_or_param, torch.nn.Parameter) else module_or_param.parameters():
        setattr(param, tag, True)


def is_no_shard(param: torch.Tensor) -> bool:
    """True if `fsdp_no_shard` marked this parameter."""
    return getattr(param, NO_SHARD_TAG, False)


def has_single_owner(param: torch.Tensor) -> bool:
    """True if `fsdp_single_owner` marked this parameter."""
    return getattr(param, SINGLE_OWNER_TAG, False)


def is_expert_param(param: torch.Tensor) -> bool:
    """True if `allreduce=False` marks this parameter as an expert's, which lives on the expert mesh."""
    return not getattr(param, "allreduce", True)
