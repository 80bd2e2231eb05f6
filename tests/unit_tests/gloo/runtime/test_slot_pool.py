"""Communication buffers that units share: the same training, in no more memory than the double buffers have."""

import collections
import contextlib
import dataclasses
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron_fsdp import DistributedDataParallelConfig, FSDPDistributedIndex, MegatronFSDP, fully_shard_optimizer
from megatron_fsdp.machine.allocator import DoubleBufferPool
from megatron_fsdp.machine.user_buffers import Memory
from megatron_fsdp.plan.double_buffer import PersistentBuffer
from tests.unit_tests.gloo.runtime.test_prefetch import SixBlocks
from tests.unit_tests.harness.counting_pool import CountingPool, counted_pool
from tests.unit_tests.harness.parity import TASKS, Case, check, compare
from tests.unit_tests.harness.poison_pool import PoisonPool
from tests.unit_tests.harness.rank_pool import RankPool
from tests.unit_tests.harness.sharded import Sharding, build_sharded, flat_mesh, train_step

ALIKE = {"fsdp_double_buffer": True}
LARGEST = {"maxpool_double_buffer": True}
KEPT = ALIKE | {"fsdp_db_use_persist_buf_on_alloc_fail": True}
FINE = {"enable_fine_grained_param_gather": True}
#: Tied, frozen, nested, recomputed and unused units, and units that only some ranks run.
TRIED = {
    "tied": ALIKE,
    "whole_non_reentrant": ALIKE,
    "frozen_embedding": LARGEST,
    "choosy": LARGEST,
    "lending_skipped": KEPT,
    "float8": KEPT,
    "unused": KEPT | FINE,
    "odd": LARGEST | FINE,
}


def case(task: str, options: dict[str, bool], **sharding: Any) -> Case:
    return Case(task=task, microbatches=2, sharding=Sharding(units=(TASKS[task].unit,), options=options, **sharding))


def test_units_that_share_buffers_train_like_one_process(ranks2: RankPool) -> None:
    once = [dataclasses.replace(case(task, options), steps=1) for task, options in TRIED.items()]
    check(ranks2, [*once, case("integers", KEPT, strategy=1), case("integers", KEPT, strategy=2)])


# ---- memory that is really shared ----


class MappedPool(PoisonPool):
    """Storages of one buffer are different objects and the same memory, poisoned whenever it changes hands."""

    buffers: dict[str, PersistentBuffer] = {}
    folder: Path

    def reserve(self, key: str, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        if key not in self.buffers:
            return super().reserve(key, numel, dtype, device)
        buffer = self.buffers[key]
        path = self.folder / f"{dist.get_rank()} {buffer.name}".replace(":", "")
        storage = torch.UntypedStorage.from_file(str(path), shared=True, nbytes=buffer.nbytes)
        return torch.empty(0, dtype=dtype).set_(storage, 0, (numel,))


@contextlib.contextmanager
def mapped(buffers: dict[str, PersistentBuffer], folder: str) -> Iterator[None]:
    with (
        mock.patch.object(MegatronFSDP, "pool_class", MappedPool),
        mock.patch.object(MappedPool, "buffers", buffers),
        mock.patch.object(MappedPool, "folder", Path(folder), create=True),
    ):
        yield


def job_mapped(one: Case, folder: str, is_careful: bool = True) -> tuple[list, int, int]:
    """A training run in shared memory, units that share it, and storages that found theirs taken."""
    build = TASKS[one.task].build
    with mapped({}, folder):
        buffers = pool_of(build_sharded(build, one.recipe, one.sharding)[0]).buffers
    with mapped(buffers, folder):
        model, optimizer = build_sharded(build, one.recipe, one.sharding)
    with contextlib.ExitStack() as stack:
        if not is_careful:
            stack.enter_context(mock.patch.object(DoubleBufferPool, "_is_free", lambda *_: True))
        steps = [train_step(model, optimizer, one.recipe, batch) for batch in one.batches(dist.get_world_size())]
    assert pool_of(model).buffers == buffers
    return steps, sum(buffer.name.startswith("weights") for buffer in buffers.values()), pool_of(model).overflows


def pool_of(model: Any) -> DoubleBufferPool:
    pool = model.param_and_grad_buffer.parameter_groups[0]._pool
    assert isinstance(pool, DoubleBufferPool)
    return pool


@pytest.mark.parametrize(("task", "options"), [("integers", ALIKE), ("non_reentrant", ALIKE), ("transformer", LARGEST)])
def test_autograd_reads_the_right_weights_in_shared_memory(
    ranks2: RankPool, task: str, options: dict, tmp_path: Path
) -> None:
    one = case(task, options, is_poisoned=False)
    runs = ranks2.run(job_mapped, one, str(tmp_path))
    assert all(sharing >= 2 and overflows == 0 for _, sharing, overflows in runs)
    compare(one, [steps for steps, _, _ in runs])
    assert any(tmp_path.iterdir())


def test_a_buffer_with_two_occupants_is_seen_in_shared_memory(ranks2: RankPool, tmp_path: Path) -> None:
    one = case("whole_non_reentrant", ALIKE, is_poisoned=False)
    runs = ranks2.run(job_mapped, one, str(tmp_path), False)
    with pytest.raises(AssertionError, match="whole_non_reentrant"):
        compare(one, [steps for steps, _, _ in runs])


# ---- which storage is in which buffer ----


class WatchedMemory(Memory):
    """Notes the regions that allocations are made in."""

    def __init__(self) -> None:
        self.entered: collections.Counter = collections.Counter()
        self.lasted: dict[str, int] = {}
        self.registered = 0

    def region(self, name: str) -> contextlib.AbstractContextManager:
        self.entered[name] += 1
        return super().region(name)

    def lasting(self, name: str, nbytes: int) -> contextlib.AbstractContextManager:
        self.lasted[name] = nbytes
        return super().lasting(name, nbytes)

    def register(self) -> None:
        self.registered += 1


def job_watched(
    task: str, options: dict, strategy: int = 3, steps: int = 1
) -> tuple[dict[str, int], dict[str, int], int, list[str]]:
    """Regions and how often each was used, lasting buffers, overflows, and warnings."""
    one = case(task, options, strategy=strategy, is_poisoned=False)
    memory, warnings, handler = WatchedMemory(), [], logging.Handler(logging.WARNING)
    handler.emit = lambda record: warnings.append(record.getMessage())
    logging.getLogger("megatron_fsdp").addHandler(handler)
    try:
        with mock.patch("megatron_fsdp.build.storage.memory_for", lambda *_: memory):
            model, optimizer = build_sharded(TASKS[task].build, one.recipe, one.sharding)
        memory.entered.clear()
        for batch in one.batches(dist.get_world_size())[:steps]:
            train_step(model, optimizer, one.recipe, batch)
    finally:
        logging.getLogger("megatron_fsdp").removeHandler(handler)
    return dict(memory.entered), memory.lasted, pool_of(model).overflows, warnings


def test_units_take_turns_and_others_keep_what_they_have(ranks2: RankPool) -> None:
    regions, _, overflows, warnings = ranks2.run(job_watched, "integers", KEPT)[0]
    assert {name for name in regions} == {
        "weights 0.0", "weights 1.0", "own root:0.weight", "gradients 0.0", "gradients 1.0",
    }  # fmt: skip
    # Two micro-batches, each with the gradients of three blocks and of the head, which is one more like them.
    assert regions["gradients 0.0"] == regions["gradients 1.0"] == 4
    assert overflows == 0 and warnings == []


def job_capped() -> tuple[int, int, int]:
    """Most units gathered, most gradients alive and overflows with a cap that lets everything through."""
    config = DistributedDataParallelConfig(
        data_parallel_sharding_strategy=3, suggested_communication_unit_size=10**9, fsdp_double_buffer=True
    )
    with counted_pool():
        model = MegatronFSDP(
            SixBlocks(), FSDPDistributedIndex(flat_mesh(), "dp"), config, fsdp_unit_modules=[nn.Linear]
        )
    counts = CountingPool.latest
    for _ in range(2):  # the first step is recorded, and prefetches nothing
        counts.most_gathered = 0
        model(torch.ones(2, 16)).sum().backward()
        model.finish_grad_sync()
    return counts.most_gathered, counts.most_scratches, pool_of(model).overflows


def test_no_more_is_gathered_ahead_than_there_are_buffers(ranks2: RankPool) -> None:
    assert ranks2.run(job_capped) == [(2, 2, 0)] * 2


class Crossed(nn.Module):
    """Four units, of which the middle two run in the other order than they are registered."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number in (0, 2, 1, 3):
            x = self.layers[number](x)
        return x


def job_crossed() -> tuple[list[int], list[float]]:
    """Overflows after each of three steps, and their losses."""
    config = DistributedDataParallelConfig(data_parallel_sharding_strategy=3, fsdp_double_buffer=True)
    torch.manual_seed(0)
    model = MegatronFSDP(Crossed(), FSDPDistributedIndex(flat_mesh(), "dp"), config, fsdp_unit_modules=[nn.Linear])
    optimizer = fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=1e-3))
    overflows, losses = [], []
    for _ in range(3):
        loss = model(torch.ones(2, 16)).square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        overflows.append(pool_of(model).overflows)
        losses.append(loss.item())
    return overflows, losses


def test_buffers_follow_the_order_in_which_units_run(ranks2: RankPool) -> None:
    for overflows, losses in ranks2.run(job_crossed):
        assert overflows == [0, 0, 0]
        assert losses[2] < losses[1] < losses[0]


def test_units_that_are_recomputed_together_get_memory_elsewhere_and_say_so(ranks2: RankPool) -> None:
    _, _, overflows, warnings = ranks2.run(job_watched, "whole_non_reentrant", ALIKE, 3, 2)[0]
    assert overflows > 0
    assert len(warnings) == 1 and "finds its communication buffer taken by blocks." in warnings[0]


def test_buffers_that_nothing_needs_are_told(ranks2: RankPool) -> None:
    first, second = (warnings for *_, warnings in ranks2.run(job_watched, "integers", ALIKE, 1))
    assert len(first) == 1 and first[0].startswith("double buffers have no effect") and second == []


def test_what_lasts_and_is_communicated_is_named_to_the_memory(ranks2: RankPool) -> None:
    lasting = {strategy: ranks2.run(job_watched, "integers", ALIKE, strategy)[0][1] for strategy in (1, 2, 3)}
    assert all(nbytes > 0 for nbytes in lasting[1].values()) and "blocks.0:0.main_grad" in lasting[1]
    assert lasting[2]["blocks.0:0.weight"] > 0 and lasting[2]["blocks.0:0.main_grad"] == 0
    assert lasting[3]["blocks.0:0.weight"] == lasting[2]["blocks.0:0.weight"] // 2
