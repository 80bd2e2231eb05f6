"""Gathers by copies out of the peers' memory: bit for bit what collectives gather, in an order without races."""

import contextlib
import dataclasses
import gc
import re
import threading
import weakref
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megatron_fsdp.machine import copy_engine
from megatron_fsdp.machine.collectives import Axis
from megatron_fsdp.machine.copy_engine import PeerGather, RankLocation, problem_between
from megatron_fsdp.machine.device import Device
from tests.unit_tests.gloo.build.test_experts import Case as ExpertCase
from tests.unit_tests.gloo.build.test_experts import train
from tests.unit_tests.gloo.build.test_summary import summaries
from tests.unit_tests.harness.communication import collectives_heard
from tests.unit_tests.harness.mixture import Topology
from tests.unit_tests.harness.parity import TASKS, Case, run_cases
from tests.unit_tests.harness.peer_files import FileMemory, peer_files
from tests.unit_tests.harness.races import FakeStream, Races, races_watched
from tests.unit_tests.harness.rank_pool import RankPool, results_agree
from tests.unit_tests.harness.reference import DtypePolicy
from tests.unit_tests.harness.sharded import Sharding, build_sharded, train_sharded

BF16 = DtypePolicy(compute=torch.bfloat16, main_grads=torch.float32, grad_comm=torch.bfloat16)
BF16_MAIN = DtypePolicy(compute=torch.bfloat16, main_params=None, main_grads=torch.bfloat16)
COPIES = {"copy_engine_gather": True}


def case(task: str, strategy: int = 3, outer: int | str | None = None, **given: Any) -> Case:
    """Two steps of two micro-batches, gathered by copies."""
    options = COPIES | given.pop("options", {})
    sharding = Sharding(strategy=strategy, outer=outer, units=(TASKS[task].unit,), options=options)
    return Case(task=task, microbatches=2, sharding=sharding, **given)


def without(one: Case) -> Case:
    """The same with collectives."""
    options = {name: value for name, value in one.sharding.options.items() if name not in COPIES}
    return dataclasses.replace(one, sharding=dataclasses.replace(one.sharding, options=options))


def job_both_ways(cases: list[Case]) -> list[tuple[bool, int, int]]:
    """Of each case: both ways trained the same bit for bit; gathers by copies; collective gathers saved by them."""
    found = []
    for one in cases:
        with peer_files(), collectives_heard() as heard:
            with mock.patch.object(PeerGather, "gather", autospec=True, side_effect=PeerGather.gather) as copies:
                ours = run_cases([one], dist.get_world_size())
        by_copies = heard.count("allgather_base")
        with collectives_heard() as heard:
            theirs = run_cases([without(one)], dist.get_world_size())
        facts = [[(step.losses, *map(_values, (step.grads, step.weights))) for step in run] for run in (*ours, *theirs)]
        found.append((results_agree(facts), copies.call_count, heard.count("allgather_base") - by_copies))
    return found


def _values(pieces: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {name: piece.values for name, piece in pieces.items()}


def assert_the_same(pool: RankPool, cases: list[Case]) -> None:
    for by_case in pool.run(job_both_ways, cases):
        for one, (is_same, copies, saved) in zip(cases, by_case, strict=True):
            assert is_same, one
            assert saved == copies > 0, (one, saved, copies)


def test_one_axis_trains_the_same(ranks2: RankPool) -> None:
    dtypes = [case("floats", dtypes=dtypes) for dtypes in (BF16, BF16_MAIN, DtypePolicy())]
    strategies = [case("floats", strategy, dtypes=BF16) for strategy in (1, 2)]
    assert_the_same(ranks2, [*dtypes, *strategies, case("reentrant", dtypes=BF16, steps=1), case("float8", steps=1)])


def test_three_ranks_and_other_options_train_the_same(ranks3: RankPool) -> None:
    turns = {"fsdp_double_buffer": True, "fsdp_db_use_persist_buf_on_alloc_fail": True}
    kinds = ({"residency_bytes": 1 << 30}, turns, {"enable_fine_grained_param_gather": True})
    assert_the_same(ranks3, [case("floats", dtypes=BF16, options=options) for options in kinds])


def test_two_axes_train_the_same(ranks4: RankPool) -> None:
    assert_the_same(ranks4, [case("floats", outer=outer, dtypes=BF16) for outer in (0, 1)])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Copying(Topology):
    """Dense weights and experts are gathered by copies."""

    def options(self) -> dict[str, Any]:
        """Arguments of `fully_shard_model`. **Collective**, the first time."""
        return super().options() | COPIES


def job_experts() -> tuple[bool, set[int]]:
    """Experts spread over ranks train the same both ways; sizes of the axes over which copies go."""
    sizes, real = set(), PeerGather.gather

    def gather(gathers: PeerGather, *args: torch.Tensor) -> None:
        sizes.add(gathers.axis.size)
        real(gathers, *args)

    with peer_files(), mock.patch.object(PeerGather, "gather", gather):
        ours, _ = train(ExpertCase(topology=Copying(), skips=True))
    theirs, _ = train(ExpertCase(skips=True))
    return results_agree([[_values(step.weights) for step in steps] for steps in (ours, theirs)]), sizes


def test_experts_have_memory_of_their_own(ranks4: RankPool) -> None:
    assert ranks4.run(job_experts) == [(True, {2, 4})] * 4


# ---- the order in which it works ----


def job_watch(dtypes: DtypePolicy) -> list[str]:
    """The races of one rank's streams."""
    one = case("floats", dtypes=dtypes)
    sharding = dataclasses.replace(one.sharding, is_poisoned=False)
    with peer_files(), races_watched() as races:
        train_sharded(TASKS[one.task].build, one.batches(dist.get_world_size()), one.recipe, sharding)
    return sorted(set(races.found))


def test_nothing_races_on_one_ranks_streams(ranks2: RankPool) -> None:
    for dtypes in (BF16, BF16_MAIN):
        assert ranks2.run(job_watch, dtypes) == [[], []]


class Ranks:
    """Ranks as threads of one process, of which one runs at a time; their streams' clocks meet at barriers."""

    def __init__(self, size: int, nbytes: int):
        self.memory = [torch.zeros(nbytes, dtype=torch.uint8) for _ in range(size)]
        self.watches = [Races() for _ in range(size)]
        for rank, watch in enumerate(self.watches):
            watch.current = watch.compute = FakeStream(f"rank {rank}")
            for shared in ("found", "_blocks", "_starts", "_freed"):
                setattr(watch, shared, getattr(self.watches[0], shared))
        self._turn = threading.Lock()
        self._meeting = threading.Barrier(size, action=self._meet)

    def _meet(self) -> None:
        clock = FakeStream("all").clock
        for watch in self.watches:
            clock |= watch.current.clock
        for watch in self.watches:
            watch.current.clock |= clock

    def barrier(self) -> None:
        self._turn.release()
        self._meeting.wait(timeout=20)
        self._turn.acquire()

    def run(self, job: Callable[[int, Races], None]) -> list[str]:
        """Races while every rank ran the job."""

        def rank(number: int) -> None:
            with self._turn, self.watches[number]:
                job(number, self.watches[number])

        threads = [threading.Thread(target=rank, args=(number,)) for number in range(len(self.watches))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=30)
        return sorted(set(self.watches[0].found))


@dataclasses.dataclass
class RankMemory:
    """The ranks' memory as one of them sees it."""

    ranks: Ranks

    def of(self, rank: int) -> torch.Tensor:
        return self.ranks.memory[rank]

    def barrier(self) -> None:
        self.ranks.barrier()


SIZE, NUMEL = 3, 640
GATHERS = 7


def gathers_in(ranks: Ranks, axis: Axis, shard_nbytes: int) -> PeerGather:
    """Gathers in the memory of these ranks, without processes that had to agree."""
    gathers = PeerGather(axis, Device(torch.device("cpu")))
    with (
        mock.patch.object(copy_engine, "SymmetricMemory", lambda *_: RankMemory(ranks)),
        mock.patch.object(copy_engine, "_raise_on_all"),
    ):
        gathers.allocate(shard_nbytes, mock.Mock())
    return gathers


def gathered_by_threads() -> list[str]:
    """Races in gathers of alternating sizes among three ranks; every gather brings what was sent."""
    ranks = Ranks(SIZE, 8 * NUMEL)
    wrong: list[tuple[int, int]] = []

    def job(rank: int, watch: Races) -> None:
        gathers = gathers_in(ranks, Axis(None, None, rank, SIZE), 4 * NUMEL)
        for number in range(GATHERS):
            numel = NUMEL // (1 + number % 2)
            out = torch.empty(SIZE * numel)
            gathers.gather(out, torch.full((numel,), float(10 * number + rank)))
            expected = [10.0 * number + other for other in range(SIZE) for _ in range(numel)]
            if out.tolist() != expected:
                wrong.append((rank, number))

    races = ranks.run(job)
    return races or [f"wrong values {wrong}"] * bool(wrong)


SABOTAGE: dict[str, Callable[[], contextlib.AbstractContextManager]] = {
    "one buffer": lambda: mock.patch.object(copy_engine, "BUFFERS", 1),
    "no barrier": lambda: mock.patch.object(Ranks, "_meet", lambda _: None),
}


def test_two_buffers_and_one_barrier_are_enough() -> None:
    assert gathered_by_threads() == []


@pytest.mark.parametrize("sabotage", SABOTAGE)
def test_without_any_precaution_a_race_is_found(sabotage: str) -> None:
    with SABOTAGE[sabotage]():
        assert gathered_by_threads()


def test_shards_are_cast_and_their_bytes_are_kept() -> None:
    ranks = Ranks(1, 4096)

    def job(rank: int, watch: Races) -> None:
        gathers = gathers_in(ranks, Axis(None, None, 0, 1), 100)
        assert gathers.nbytes == 1024
        out = torch.empty(8, dtype=torch.bfloat16)
        shard = torch.arange(8) / 7
        gathers.gather(out, shard)
        assert torch.equal(out, shard.bfloat16())
        gathers.gather(torch.empty(0), torch.empty(0))

    assert ranks.run(job) == []


# ---- memory ----


def job_freed() -> tuple[int, bool]:
    """Bytes offered while the model lives, and whether they are gone with it."""
    offered: list[weakref.ref] = []

    class Noted(FileMemory):
        def __init__(self, *args: Any):
            super().__init__(*args)
            offered.append(weakref.ref(self))

    gc.disable()
    try:
        one = case("floats", dtypes=BF16)
        with peer_files(Noted):
            model, optimizer = build_sharded(TASKS[one.task].build, one.recipe, one.sharding)
        inputs, target = one.batches(dist.get_world_size())[0][0][dist.get_rank()]
        one.recipe.loss_fn(model(inputs), target).backward()
        nbytes = offered[0]().of(0).numel()
        del model, optimizer
        return nbytes, offered[0]() is None
    finally:
        gc.enable()


def test_memory_is_for_the_largest_shard_twice_and_goes_with_the_model(ranks2: RankPool) -> None:
    assert ranks2.run(job_freed) == [(1024, True)] * 2


def job_summary() -> list[str]:
    with peer_files():
        return summaries("mlp", 3, **COPIES)


def test_the_summary_tells_it(ranks2: RankPool) -> None:
    (text,), _ = ranks2.run(job_summary)
    assert "copies out of 1.0 MiB of symmetric memory on each rank" in text  # two halves of one MiB


# ---- where it cannot be ----

HOST = ("one", "boot 1")


@pytest.mark.parametrize(
    ("other", "problem"),
    [
        (RankLocation(1, ("two", "boot 2"), 1), r"rank 0 \(one\) and rank 1 \(two\) are on different hosts"),
        (RankLocation(1, ("one", "boot 2"), 1), "are on different hosts"),
        (RankLocation(1, HOST, 0), "both call their device cuda:0; let every process see all GPUs"),
        (RankLocation(1, HOST, 2), "have devices, cuda:0 and cuda:2, that do not reach each other"),
        (RankLocation(1, HOST, 1), None),
    ],
)
def test_ranks_that_cannot_read_each_other_are_told_apart(other: RankLocation, problem: str | None) -> None:
    own = RankLocation(0, HOST, 0)
    found = problem_between(own, [own, other], lambda number: number == 1)
    assert found is None if problem is None else re.search(problem, found)


def job_build(what: str, options: dict[str, Any]) -> None:
    """A model, with the first rank on another host, or with memory that cannot be had on the last."""
    rank = dist.get_rank()

    class Missing(FileMemory):
        def __init__(self, *args: Any):
            super().__init__(*args)
            if rank == dist.get_world_size() - 1:
                raise RuntimeError("no descriptors")

    one = case("integers", options=options)
    names = mock.patch("socket.gethostname", lambda: "elsewhere" if rank == 0 and what == "hosts" else "here")
    with peer_files(Missing if what == "memory" else FileMemory), names:
        build_sharded(TASKS[one.task].build, one.recipe, one.sharding)


def test_every_rank_says_why_it_cannot_be(ranks2: RankPool, ranks4: RankPool) -> None:
    begin = r"copy_engine_gather=True \(fsdp_copy_engine_gather\) copies weights out of the memory of GPUs of one host"
    ranks2.run_expecting(ValueError, f"{begin}, but rank 0 .elsewhere. and rank 1 .here.", job_build, "hosts", {})
    ranks2.run_expecting(ValueError, f"{begin}, but rank 1 could not share .*: no descr", job_build, "memory", {})


def job_alone() -> list[str]:
    """Log lines about axes of one rank, which gather nothing."""
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("outer", "inner"))
    options = {"device_mesh": mesh, "dp_shard_dim": "inner", "dp_outer_dim": "outer"}
    with peer_files(), mock.patch("megatron_fsdp.machine.copy_engine.logger.warning") as warned:
        summaries("mlp", 3, **COPIES, **options, hybrid_fsdp_group=dist.group.WORLD)
    return [call.args[0] for call in warned.call_args_list]


def test_an_axis_of_one_rank_is_said_to_gather_nothing(ranks2: RankPool) -> None:
    (warning,), on_the_second = ranks2.run(job_alone)
    assert "has no effect" in warning and on_the_second == []
