"""The user's model inside the wrappers of megatron-core and of this engine."""

from typing import TypeVar

import torch
from megatron.core.distributed import DistributedDataParallel, TorchFullyShardedDataParallel
from megatron.core.transformer.module import Float16Module

from megatron_fsdp.megatron_fsdp import MegatronFSDP

WRAPPERS = (MegatronFSDP, DistributedDataParallel, TorchFullyShardedDataParallel, Float16Module)

Model = TypeVar("Model", torch.nn.Module, list)


def unwrap_model(model: Model, wrappers: tuple[type, ...] = WRAPPERS) -> Model:
    """The innermost module of `model`, or of each model in a list.

    megatron-core's function of this name knows only its own wrapper classes.
    """
    if isinstance(model, list):
        return [unwrap_model(chunk, wrappers) for chunk in model]
    while isinstance(model, wrappers):
        model = model.module
    return model
