"""User buffers without NCCL: what is registered, when, with whom, and what happens where NCCL cannot."""

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron_fsdp import DistributedDataParallelConfig, FSDPDistributedIndex, MegatronFSDP
from megatron_fsdp.machine.user_buffers import RegionMemory, UserBuffers
from tests.unit_tests.gloo.runtime.test_prefetch import SixBlocks
from tests.unit_tests.harness.rank_pool import RankPool
from tests.unit_tests.harness.sharded import flat_mesh

MODULE = "megatron_fsdp.machine.user_buffers"


class FakeBackend:
    """NCCL's side, as far as it is used."""

    mem_allocator = "NCCL's"

    def __init__(self, refusal: Exception | None = None):
        self.refusal = refusal
        self.registered: list[tuple[str, bool]] = []

    def register_mem_pool(self, pool: str, symm: bool = False) -> None:
        if symm and self.refusal is not None:
            raise self.refusal
        self.registered.append((pool, symm))


@contextlib.contextmanager
def nccl(version: tuple[int, ...], refusal: Exception | None = None) -> Iterator[dict[Any, FakeBackend]]:
    """Backends by group of what runs inside."""
    backends: dict[Any, FakeBackend] = {}
    with (
        mock.patch(f"{MODULE}.nccl_backend", lambda group, _: backends.setdefault(group, FakeBackend(refusal))),
        mock.patch("torch.cuda.MemPool", lambda *allocator: ("pool", *allocator)),
        mock.patch("torch.cuda.use_mem_pool", lambda *_: contextlib.nullcontext()),
        mock.patch("torch.cuda.synchronize", lambda *_: None),
        mock.patch("torch.cuda.nccl.version", lambda: version),
    ):
        yield backends


def job_register(version: tuple[int, ...], symmetric: bool, refusal: Exception | None) -> tuple[int, int, list]:
    device, groups = torch.device("cpu"), [dist.group.WORLD, dist.new_group()]
    with nccl(version, refusal) as backends:
        memory = UserBuffers(device, groups, symmetric=symmetric)
        for name in ("one", "two", "one"):
            with memory.region(name):
                torch.empty(1)
        with memory.lasting("large", 10 * 2**20), memory.lasting("small", 10 * 2**20 - 1):
            torch.empty(1)
        memory.register()
        return memory.registrations, memory.windows, [backend.registered for backend in backends.values()]


POOL = ("pool", "NCCL's")
REGISTRATIONS = [
    ((2, 27, 5), True, None, 6),
    ((2, 26, 2), True, None, 0),
    ((2, 28, 0), False, None, 0),
    ((2, 28, 0), True, dist.DistBackendError("no windows here"), 0),
]


@pytest.mark.parametrize(("version", "symmetric", "refusal", "windows"), REGISTRATIONS)
def test_every_region_is_registered_with_every_communicator(
    ranks2: RankPool, version: tuple, symmetric: bool, refusal: Exception | None, windows: int
) -> None:
    for registrations, came, by_group in ranks2.run(job_register, version, symmetric, refusal):
        assert (registrations, came) == (6, windows)
        assert by_group == [[(POOL, windows > 0)] * 3] * 2


def test_regions_without_registration_are_torchs_own() -> None:
    with nccl((2, 27)) as backends:
        memory = RegionMemory()
        with memory.region("one"), memory.lasting("large", 2**30):
            pass
        memory.register()
        assert backends == {} and memory._pools == {"one": ("pool",)}


def job_model(options: dict, strategy: int = 3) -> list[Any]:
    """Registrations after build and, by hand, after a step; what a second one says."""
    config = DistributedDataParallelConfig(data_parallel_sharding_strategy=strategy, **options)
    index = FSDPDistributedIndex(flat_mesh(), "dp")
    with (
        nccl((2, 27, 5)),
        mock.patch("megatron_fsdp.build.check_arguments._check_device", lambda *_: None),
        mock.patch(f"{MODULE}._LEAST_LASTING_NBYTES", 1),
    ):
        model = MegatronFSDP(SixBlocks(), index, config, fsdp_unit_modules=[nn.Linear])
        memory = model.param_and_grad_buffer._pool.memory
        found: list[Any] = [memory.registrations]
        model(torch.ones(2, 16)).sum().backward()
        model.finish_grad_sync()
        for _ in range(2):
            try:
                model.param_and_grad_buffer.manual_buffer_registration()
            except RuntimeError as error:
                found.append(str(error))
            else:
                found.append(memory.registrations)
        return [*found, memory.windows, sorted(memory._pools)]


#: Two slots for weights, two for gradients, one communicator.
SLOTS = ["gradients 0.0", "gradients 1.0", "weights 0.0", "weights 1.0"]
#: Buffers that gathers read where main weights have the weights' dtype.
SHARDS = [f"lasting blocks.{number}:0.weight" for number in range(6)]


def test_buffers_are_registered_at_build(ranks2: RankPool) -> None:
    by_hand = "manual_buffer_registration() needs nccl_ub=True and fsdp_manual_registration=True."
    assert ranks2.run(job_model, {"nccl_ub": True}) == [[10, by_hand, by_hand, 10, sorted(SLOTS + SHARDS)]] * 2


@pytest.mark.parametrize(("strategy", "kinds"), [(0, {"main_grad"}), (1, {"weight", "main_grad"}), (2, {"weight"})])
def test_what_lasts_and_is_communicated_is_registered_too(ranks2: RankPool, strategy: int, kinds: set[str]) -> None:
    for registrations, *_, regions in ranks2.run(job_model, {"nccl_ub": True}, strategy):
        lasting = [region for region in regions if region.startswith("lasting")]
        assert {region.rpartition(".")[2] for region in lasting} == kinds
        assert len(lasting) == 6 * len(kinds) and registrations == len(regions)


def test_windows_can_be_declined(ranks2: RankPool) -> None:
    for registrations, *_, windows, _ in ranks2.run(
        job_model, {"nccl_ub": True, "disable_symmetric_registration": True}
    ):
        assert (registrations, windows) == (10, 0)


def test_buffers_are_registered_by_hand_once(ranks2: RankPool) -> None:
    for before, after, again, _, regions in ranks2.run(job_model, {"nccl_ub": True, "fsdp_manual_registration": True}):
        assert (before, after, regions) == (0, 10, sorted(SLOTS + SHARDS))
        assert "are registered already" in again
