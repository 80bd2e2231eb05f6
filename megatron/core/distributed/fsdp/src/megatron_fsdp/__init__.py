"""Fully sharded data parallelism for PyTorch: shard a model and its optimizer in two lines."""

from megatron_fsdp.config import DistributedDataParallelConfig, MixedPrecisionPolicy, ShardingStrategy
from megatron_fsdp.fully_shard import fully_shard, fully_shard_model, fully_shard_optimizer
from megatron_fsdp.machine.mesh import FSDPDistributedIndex
from megatron_fsdp.megatron_fsdp import MegatronFSDP
from megatron_fsdp.package_info import (
    __contact_emails__,
    __contact_names__,
    __description__,
    __download_url__,
    __homepage__,
    __keywords__,
    __license__,
    __package_name__,
    __repository_url__,
    __shortversion__,
    __version__,
)
from megatron_fsdp.state.param_tags import fsdp_no_shard, fsdp_single_owner

__all__ = [
    "DistributedDataParallelConfig",
    "FSDPDistributedIndex",
    "MegatronFSDP",
    "MixedPrecisionPolicy",
    "ShardingStrategy",
    "__contact_emails__",
    "__contact_names__",
    "__description__",
    "__download_url__",
    "__homepage__",
    "__keywords__",
    "__license__",
    "__package_name__",
    "__repository_url__",
    "__shortversion__",
    "__version__",
    "fsdp_no_shard",
    "fsdp_single_owner",
    "fully_shard",
    "fully_shard_model",
    "fully_shard_optimizer",
]
