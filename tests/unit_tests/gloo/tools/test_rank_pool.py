"""The rank pool itself: results by rank, tagged errors, recovery from hangs, crashes and broken groups."""

import os
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.unit_tests.harness import rank_pool
from tests.unit_tests.harness.rank_pool import RankError, results_agree


@pytest.fixture(autouse=True)
def short_grace(monkeypatch):
    monkeypatch.setattr(rank_pool, "PEER_GRACE_S", 0.5)


def gather_ranks(offset):
    mine = torch.tensor([dist.get_rank() + offset])
    everyone = torch.empty(dist.get_world_size(), dtype=mine.dtype)
    dist.all_gather_into_tensor(everyone, mine)
    return everyone[dist.get_rank()], everyone


def draw():
    return torch.rand(3)


class Unreadable:
    def __reduce__(self):
        return (int, ("not a number",))


def unreadable():
    return Unreadable()


def small_view_of_a_large_storage():
    return torch.zeros(1_000_000)[5:7], torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16))


def fail_on_rank_one_while_the_others_wait():
    if dist.get_rank() == 1:
        raise ValueError("rank one is unwell")
    dist.barrier()


def fail_everywhere():
    raise KeyError("nowhere")


def hang():
    time.sleep(60)


def crash():
    os._exit(7)


def leave_a_collective_behind():
    if dist.get_rank() == 0:
        dist.all_reduce(torch.ones(1, dtype=torch.int64), async_op=True)


def make_groups(count):
    for _ in range(count):
        dist.new_group([0, 1])


def pid():
    return os.getpid()


def test_results_come_back_by_rank(ranks2):
    (first, everyone), (second, same) = ranks2.run(gather_ranks, 10)
    assert [first.item(), second.item()] == [10, 11]
    assert everyone.tolist() == same.tolist() == [10, 11]


def test_every_job_starts_from_the_same_seed(ranks2):
    first = ranks2.run(draw)
    assert results_agree([*first, *ranks2.run(draw)])


def test_tensors_travel_by_value(ranks2):
    view, parameter = ranks2.run(small_view_of_a_large_storage)[0]
    assert view.untyped_storage().nbytes() == 8
    assert isinstance(parameter, torch.nn.Parameter) and parameter.dtype == torch.bfloat16


def test_a_result_that_cannot_be_read_fails_its_own_job_only(ranks2):
    before = ranks2.run(pid)
    with pytest.raises(RankError, match="the result could not be unpickled"):
        ranks2.run(unreadable)
    assert ranks2.run(pid) == before and len(ranks2.run(gather_ranks, 0)) == 2


def test_a_failing_rank_raises_with_its_tag_and_the_pool_recovers(ranks2):
    with pytest.raises(RankError, match=r"\[rank 1/2\] ValueError: rank one is unwell") as raised:
        ranks2.run(fail_on_rank_one_while_the_others_wait)
    assert "another rank failed" in raised.value.failures[0].message
    assert len(ranks2.run(gather_ranks, 0)) == 2


def test_a_failure_on_every_rank_keeps_the_pool(ranks2):
    before = ranks2.run(pid)
    ranks2.run_expecting(KeyError, "nowhere", fail_everywhere)
    ranks2.run_expecting(LookupError, "now", fail_everywhere)
    assert ranks2.run(pid) == before


def test_expecting_the_wrong_error_fails(ranks2):
    with pytest.raises(AssertionError, match=r"\[rank 0/2\] raised builtins.KeyError, not builtins.ValueError"):
        ranks2.run_expecting(ValueError, "", fail_everywhere)
    with pytest.raises(AssertionError, match="does not match 'elsewhere'"):
        ranks2.run_expecting(KeyError, "elsewhere", fail_everywhere)
    with pytest.raises(AssertionError, match="did not raise"):
        ranks2.run_expecting(KeyError, "", draw)


def threads_after_new_groups():
    def loops():
        return [
            name
            for task in Path("/proc/self/task").iterdir()
            if (name := (task / "comm").read_text()) == "gloo_tcp_loop\n"
        ]

    before = len(loops())
    make_groups(3)
    return before, len(loops())


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="threads are counted in /proc")
def test_groups_share_one_polling_thread(ranks2):
    counts = ranks2.run(threads_after_new_groups)
    if counts == [(0, 0), (0, 0)]:
        pytest.skip("this torch does not name the thread (2.11)")
    assert counts == [(1, 1), (1, 1)]


def test_a_timeout_rebuilds_the_pool(ranks2):
    before = ranks2.run(pid)
    with pytest.raises(RankError, match=r"\[rank 0/2\] no answer \(timeout of 0.5 s\)") as raised:
        ranks2.run(hang, timeout_s=0.5)
    assert str(raised.value).count(" in hang\n") == 2, "where each rank was is told"
    for old in before:
        with pytest.raises(ProcessLookupError):
            os.kill(old, 0)
    assert set(ranks2.run(pid)).isdisjoint(before)


def test_a_crash_is_reported_with_its_exit_code(ranks2):
    with pytest.raises(RankError, match="died with exit code 7"):
        ranks2.run(crash)
    assert len(ranks2.run(draw)) == 2


def test_a_job_may_not_leave_collectives_behind(ranks2):
    with pytest.raises(RankError, match="left collectives behind|no answer|[Tt]imed out"):
        ranks2.run(leave_a_collective_behind)
    assert len(ranks2.run(gather_ranks, 0)) == 2


def count_groups():
    return len(dist.distributed_c10d._world.pg_map) - 1


def test_a_pool_full_of_leftover_groups_is_replaced(ranks2, monkeypatch):
    monkeypatch.setattr(rank_pool, "MAX_LEFTOVER_GROUPS", max(ranks2.run(count_groups)) + 5)
    before = ranks2.run(pid)
    ranks2.run(make_groups, 6)
    assert set(ranks2.run(pid)).isdisjoint(before)
