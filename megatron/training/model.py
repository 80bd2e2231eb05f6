"""The model on its device, sharded."""

import logging

import torch
from megatron.core.tensor_parallel import set_defaults_if_not_set_tensor_model_parallel_attributes
from megatron.core.transformer.module import Float16Module

from megatron.training.config.schema_parallel import DistConfig
from megatron.training.config.to_core import to_ddp_config, to_transformer_config
from megatron.training.initialize import World
from megatron.training.job import Job
from megatron.training.state import ModelProvider
from megatron_fsdp.mcore import FullyShardedDataParallel, with_all_gather_groups
from megatron_fsdp.mcore.parallel_layout import modes_of, partition_dim
from megatron_fsdp.state.param_tags import is_expert_param

logger = logging.getLogger(__name__)


def build_model(job: Job, provider: ModelProvider, world: World) -> FullyShardedDataParallel:
    """The model of `provider`, sharded over the data-parallel ranks as the configuration says. **Collective.**"""
    config = job.config
    core_config = to_transformer_config(config)
    module = provider(job, core_config)
    for param in module.parameters():
        set_defaults_if_not_set_tensor_model_parallel_attributes(param)
    logger.info("%s parameters", f"{count_parameters(module, config.dist):,}")
    if job.plan.padded_vocab_size != job.tokenizer.vocab_size:
        logger.info(
            "vocabulary of %d padded to %d rows (--padded-vocab-size, --make-vocab-size-divisible-by)",
            job.tokenizer.vocab_size,
            job.plan.padded_vocab_size,
        )
    module.to(world.device)
    if config.precision.bf16 or config.precision.fp16:
        module = Float16Module(core_config, module)
    groups = None
    if config.ddp.create_all_gather_group:
        instances = config.ddp.num_distributed_optimizer_instances
        groups = with_all_gather_groups(num_distributed_optimizer_instances=instances)
    return FullyShardedDataParallel(
        core_config,
        to_ddp_config(config),
        module,
        fsdp_unit_modules=config.ddp.fsdp_unit_modules,
        device=world.device,
        pg_collection=groups,
    )


def count_parameters(module: torch.nn.Module, ranks: DistConfig) -> int:
    """Elements of all parameters of the model of which `module` is one rank's part, tied ones once."""
    return sum(
        param.numel()
        * (1 if partition_dim(param, mode) is None else ranks.tensor_model_parallel_size)
        * (ranks.expert_model_parallel_size if is_expert_param(param) else 1)
        for param, mode in modes_of(module)
    )
