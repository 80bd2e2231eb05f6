"""Device, process groups and seeds of this process."""

import contextlib
import os
import random
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta

import numpy
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.num_microbatches_calculator import (
    destroy_num_microbatches_calculator,
    init_num_microbatches_calculator,
)
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

from megatron.training.config import RunConfig, RunPlan
from megatron.training.config.kernels import DETERMINISTIC
from megatron.training.ranks import Ranks
from megatron_fsdp.mcore import cpu_compat

_SEED_STEP_PER_STAGE = 100


@dataclass(frozen=True, kw_only=True)
class World:
    """This process and its groups."""

    ranks: Ranks
    device: torch.device
    """The device on which this rank computes and communicates."""
    data_parallel_group: dist.ProcessGroup
    """Ranks that see different samples."""

    @property
    def is_first(self) -> bool:
        """Rank 0 speaks for all."""
        return self.ranks.is_first

    @property
    def data_parallel_rank(self) -> int:
        """This rank among those that see different samples."""
        return dist.get_rank(self.data_parallel_group)


@contextlib.contextmanager
def initialized(config: RunConfig, plan: RunPlan, ranks: Ranks) -> Iterator[World]:
    """megatron-core's groups and seeds inside the context. **Collective.**

    A default process group that exists already is used and left alone.
    """
    device = torch.device("cuda", ranks.local_rank) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    cpu_compat.install()
    owns_group = not dist.is_initialized()
    with _deterministic() if config.rng.deterministic_mode else contextlib.nullcontext():
        if owns_group:
            _init_process_group(config, plan, ranks)
        try:
            _init_megatron_core(config, plan, ranks)
            set_seeds(config.rng.seed)
            yield World(ranks=ranks, device=device, data_parallel_group=parallel_state.get_data_parallel_group())
        finally:
            parallel_state.destroy_model_parallel()
            destroy_num_microbatches_calculator()
            if owns_group:
                dist.destroy_process_group()


@contextlib.contextmanager
def _deterministic() -> Iterator[None]:
    """Only kernels that compute the same bits each time. Libraries read the variables later, before any work."""
    before = torch.get_deterministic_debug_mode(), torch.utils.deterministic.fill_uninitialized_memory
    added = {name: value for name, (value, *_) in DETERMINISTIC.items() if name not in os.environ}
    os.environ.update(added)
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # costs time, and every number is written before read
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(before[0])
        torch.utils.deterministic.fill_uninitialized_memory = before[1]
        for name in added:
            os.environ.pop(name, None)


def _init_process_group(config: RunConfig, plan: RunPlan, ranks: Ranks) -> None:
    timeout = timedelta(minutes=config.dist.distributed_timeout_minutes)
    # A process that torchrun did not start meets nobody and needs no address.
    alone = {"store": dist.HashStore()} if not dist.is_torchelastic_launched() and ranks.world_size == 1 else {}
    dist.init_process_group(
        plan.backend,
        rank=ranks.rank,
        world_size=ranks.world_size,
        timeout=timeout,
        **alone,
    )


def _init_megatron_core(config: RunConfig, plan: RunPlan, ranks: Ranks) -> None:
    sizes, train = config.dist, config.train
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=sizes.tensor_model_parallel_size,
        pipeline_model_parallel_size=sizes.pipeline_model_parallel_size,
        context_parallel_size=sizes.context_parallel_size,
        expert_model_parallel_size=sizes.expert_model_parallel_size,
        distributed_timeout_minutes=sizes.distributed_timeout_minutes,
        # Second, host-side communicators for parts of megatron-core that are not used here.
        create_gloo_process_groups=False,
    )
    destroy_num_microbatches_calculator()
    init_num_microbatches_calculator(
        ranks.rank, None, plan.global_batch_size, train.micro_batch_size, plan.data_parallel_size
    )


def set_seeds(seed: int) -> None:
    """Seeds every generator as Megatron-LM does, so that weights and dropout equal its for the same seed."""
    seed += _SEED_STEP_PER_STAGE * parallel_state.get_pipeline_model_parallel_rank()
    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed, force_reset_rng=True)
