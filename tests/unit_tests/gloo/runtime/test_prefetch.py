"""Amounts gathered ahead and reduced at a time, and modules that are gathered one by one."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron_fsdp import DistributedDataParallelConfig, FSDPDistributedIndex, MegatronFSDP, fully_shard_optimizer
from tests.unit_tests.harness.communication import collectives_heard
from tests.unit_tests.harness.counting_pool import CountingPool, counted_pool
from tests.unit_tests.harness.models import MLPBlock, TransformerBlock
from tests.unit_tests.harness.parity import TASKS, Case, check, compare
from tests.unit_tests.harness.rank_pool import RankPool
from tests.unit_tests.harness.sharded import Sharding, flat_mesh, train_step


class SixBlocks(nn.Module):
    """Six alike units; the root has nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(6)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks(x)


def job_cap(cap: int | None) -> tuple[int, int]:
    """Most units gathered, and most gradient buffers alive, in a step."""
    torch.manual_seed(0)
    config = DistributedDataParallelConfig(
        data_parallel_sharding_strategy="optim_grads_params", suggested_communication_unit_size=cap
    )
    with counted_pool():
        model = MegatronFSDP(
            SixBlocks(), FSDPDistributedIndex(flat_mesh(), "dp"), config, fsdp_unit_modules=[nn.Linear]
        )
    pool = CountingPool.latest
    for _ in range(2):
        pool.most_gathered = pool.most_scratches = 0
        model(torch.ones(2, 16)).sum().backward()
        model.finish_grad_sync()
        model.zero_grad()
    return pool.most_gathered, pool.most_scratches


#: A unit has 256 elements. cap -> units gathered: the one that computes and what fits; gradient buffers on their way.
CAPS = {None: (2, 2), 1: (1, 1), 255: (1, 1), 256: (2, 1), 512: (3, 2), 1000: (4, 3), 10**9: (6, 6)}


@pytest.mark.parametrize("cap", CAPS)
def test_the_communication_unit_size_is_a_cap(ranks2: RankPool, cap: int | None) -> None:
    assert ranks2.run(job_cap, cap) == [CAPS[cap]] * 2


def job_capped(case: Case, cap: int) -> list:
    """A training run under a cap."""
    torch.manual_seed(0)
    config = DistributedDataParallelConfig(
        data_parallel_sharding_strategy="optim_grads_params", suggested_communication_unit_size=cap
    )
    index = FSDPDistributedIndex(flat_mesh(), "dp")
    model = MegatronFSDP(TASKS[case.task].build(), index, config, fsdp_unit_modules=case.sharding.units)
    optimizer = fully_shard_optimizer(case.recipe.build_optimizer(model))
    return [train_step(model, optimizer, case.recipe, batch) for batch in case.batches(dist.get_world_size())]


@pytest.mark.parametrize("cap", [1, 10**9])
def test_a_cap_changes_no_number(ranks2: RankPool, cap: int) -> None:
    case = Case(task="integers", microbatches=2, sharding=Sharding(units=(MLPBlock,)))
    compare(case, ranks2.run(job_capped, case, cap))


# ---- modules one by one ----

FINE = {"enable_fine_grained_param_gather": True}


@pytest.mark.parametrize(
    "task", ["transformer", "tied", "odd", "reentrant", "non_reentrant", "frozen_embedding", "unused"]
)
def test_modules_gathered_one_by_one_train_like_one_process(ranks2: RankPool, task: str) -> None:
    check(
        ranks2,
        [
            Case(task=task, microbatches=2, sharding=Sharding(strategy=strategy, units=units, options=FINE))
            for strategy, units in ((3, (TASKS[task].unit,)), (3, None), (1, (TASKS[task].unit,)))
        ],
    )


def job_granularity(options: dict) -> tuple[list[str], int, int]:
    """Labels of units, gathers in a forward, and most bytes of one gather."""
    from megatron_fsdp import fully_shard_model

    torch.manual_seed(0)
    sharding = {"device_mesh": flat_mesh(), "dp_shard_dim": "dp", "fsdp_unit_modules": [TransformerBlock], **options}
    model = fully_shard_model(TASKS["transformer"].build(), **sharding)
    with torch.no_grad(), collectives_heard() as heard:
        model(torch.zeros(1, 4, dtype=torch.int64))
    units = model._schedule.units
    return [unit.label for unit in units], len(heard), max(unit.gathered_numel for unit in units[1:])


def test_fine_grained_gathers_are_more_and_smaller(ranks2: RankPool) -> None:
    coarse_units, coarse_count, coarse_most = ranks2.run(job_granularity, {})[0]
    fine_units, fine_count, fine_most = ranks2.run(job_granularity, FINE)[0]
    assert coarse_units == ["(root)", "blocks.0", "blocks.1"]
    assert {"(root)", "blocks.0.qkv", "blocks.1.up"} <= set(fine_units)
    assert fine_count > coarse_count and fine_most < coarse_most


class Holder(nn.Module):
    """Reads the parameters of a container that is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.ParameterList([nn.Parameter(torch.ones(3, 4)), nn.Parameter(torch.ones(4))])
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x @ self.table[0].T @ self.table[0] + self.table[1])


def job_containers(inside: list[type] | None) -> list[str]:
    index = FSDPDistributedIndex(flat_mesh(), "dp")
    model = MegatronFSDP(
        nn.Sequential(Holder(), nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))),
        index,
        fsdp_unit_modules=[Holder, nn.Sequential],
        enable_fine_grained_param_gather_hook=True,
        fine_grained_recurse_module_types=inside,
    )
    model(torch.ones(2, 4)).sum().backward()
    model.finish_grad_sync()
    assert all(param.grad is not None for param in model.parameters())
    return [unit.label for unit in model._schedule.units]


def test_containers_of_parameters_are_never_units_and_types_limit_the_cut(ranks2: RankPool) -> None:
    everywhere, limited = ranks2.run(job_containers, None)[0], ranks2.run(job_containers, [Holder])[0]
    assert everywhere == ["(root)", "0", "0.linear", "1.0", "1.1"]
    assert limited == ["(root)", "0", "0.linear", "1"]
