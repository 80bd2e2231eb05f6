"""The engine under megatron-core's interfaces; the only package here that imports `megatron.core`.

Names load on first use, so that `megatron_fsdp.mcore.cpu_compat` can be imported before, and without, megatron-core.
"""

import importlib

_HOME = {
    "FullyShardedDataParallel": "adapter",
    "unwrap_model": "adapter",
    "DistributedDataParallelConfig": "ddp_config",
    "resolve_ddp_config": "ddp_config",
    "FullyShardedOptimizer": "optimizer",
    "get_megatron_optimizer": "optimizer",
    "build_dist_index": "process_groups",
    "create_all_gather_groups": "process_groups",
    "with_all_gather_groups": "process_groups",
    "StoredState": "stored_state",
}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return __all__
