"""Gathers and reductions of flat tensors: in place and not, scaled and averaged, alone and among others."""

import dataclasses
import itertools

import pytest
import torch
import torch.distributed as dist

from megatron_fsdp.machine import collectives
from megatron_fsdp.machine.collectives import NO_SCALE, SOLO, Axis, GradScale, all_gather, all_reduce, reduce_scatter
from tests.unit_tests.harness.communication import Communicated, collectives_heard, no_collectives
from tests.unit_tests.harness.rank_pool import results_agree

DTYPES = [torch.float32, torch.bfloat16, torch.float64]
SCALES = [NO_SCALE, GradScale(0.5, average=False), GradScale(0.5, average=False, fused=False)]
PIECE = 5


def axis() -> Axis:
    return Axis.of(dist.group.WORLD)


def mine(dtype: torch.dtype, rank: int, numel: int) -> torch.Tensor:
    """Small integers, different on every rank: their sums are exact in every dtype."""
    return ((torch.arange(numel) * 3 + rank * 7) % 5 - 2).to(dtype)


def gather_both_ways(dtype):
    size, rank = dist.get_world_size(), dist.get_rank()
    shard = mine(dtype, rank, PIECE)
    apart = torch.empty(size * PIECE, dtype=dtype)
    all_gather(apart, shard, axis())
    in_place = torch.full((size * PIECE,), float("nan"), dtype=dtype)
    own = in_place[rank * PIECE : (rank + 1) * PIECE]
    own.copy_(shard)
    all_gather(in_place, own, axis())
    return apart, in_place


def reduce_all_ways(dtype, scale):
    size, rank = dist.get_world_size(), dist.get_rank()
    apart, full = torch.empty(PIECE, dtype=dtype), mine(dtype, rank, size * PIECE)
    reduce_scatter(apart, full.clone(), axis(), scale)
    own = full[rank * PIECE : (rank + 1) * PIECE]
    reduce_scatter(own, full, axis(), scale)
    whole = mine(dtype, rank, size * PIECE)
    all_reduce(whole, axis(), scale)
    return apart, own.clone(), whole


def every_way(way, cases):
    return [way(*case) for case in cases]


@pytest.mark.parametrize("world", [2, 3])
def test_a_gather_puts_shards_in_rank_order(rank_pools, world):
    for by_dtype in rank_pools[world].run(every_way, gather_both_ways, [(dtype,) for dtype in DTYPES]):
        for dtype, (apart, in_place) in zip(DTYPES, by_dtype, strict=True):
            expected = torch.cat([mine(dtype, rank, PIECE) for rank in range(world)])
            assert torch.equal(apart, expected) and torch.equal(in_place, expected)


@pytest.mark.parametrize("world", [2, 3])
def test_reductions_scale_and_sum(rank_pools, world):
    cases = list(itertools.product(DTYPES, SCALES))
    for rank, by_case in enumerate(rank_pools[world].run(every_way, reduce_all_ways, cases)):
        for (dtype, scale), reduced in zip(cases, by_case, strict=True):
            sums = torch.stack([mine(dtype, r, world * PIECE) for r in range(world)]).sum(0)
            assert_reduced(reduced, sums * scale.pre, rank)


def assert_reduced(reduced, expected, rank):
    apart, own, whole = reduced
    piece = expected[rank * PIECE : (rank + 1) * PIECE]
    assert torch.equal(apart, piece) and torch.equal(own, piece) and torch.equal(whole, expected)


@pytest.mark.parametrize("factor", [1.0, 2.0])
def test_averages_divide_by_the_axis_after_the_factor(ranks2, factor):
    expected = torch.stack([mine(torch.float32, rank, 2 * PIECE) for rank in range(2)]).mean(0) * factor
    for rank, reduced in enumerate(ranks2.run(reduce_all_ways, torch.float32, GradScale(factor, average=True))):
        assert_reduced(reduced, expected, rank)


def reduce_random(seed):
    torch.manual_seed(seed + dist.get_rank())
    whole = torch.randn(64, dtype=torch.float32)
    all_reduce(whole, axis(), GradScale(1 / 3, average=False))
    return whole


def test_reductions_give_the_same_bits_on_all_ranks_and_again(ranks3):
    first, second = ranks3.run(reduce_random, 5), ranks3.run(reduce_random, 5)
    assert results_agree([*first, *second])


def test_an_axis_of_one_rank_copies_and_scales_without_communicating():
    full, out = torch.arange(4.0), torch.empty(4)
    all_gather(out, full, SOLO)
    assert torch.equal(out, full)
    all_gather(full, full, SOLO)
    reduce_scatter(out, full.clone(), SOLO, GradScale(0.5, average=False))
    assert torch.equal(out, full / 2)
    in_place = full.clone()
    reduce_scatter(in_place, in_place, SOLO, GradScale(2.0, average=True))
    all_reduce(in_place, SOLO)
    assert torch.equal(in_place, full * 2)


def axes_of_groups():
    both = Axis.of(dist.group.WORLD, dist.group.WORLD)
    return dataclasses.astuple(Axis.of(None))[2:], (both.rank, both.size, both.gather_group is both.group)


def test_axes_know_their_place(ranks3):
    for rank, (alone, among) in enumerate(ranks3.run(axes_of_groups)):
        assert alone == (0, 1) and among == (rank, 3, True)


@pytest.mark.parametrize(
    ("factor", "dtype", "average", "op"),
    [
        (1 / 3, torch.float32, False, ("premul", 1 / 3)),
        (0.5, torch.bfloat16, False, dist.ReduceOp.AVG),  # of two ranks, which is the same
        (1 / 3, torch.bfloat16, False, None),
        (0.5, torch.bfloat16, True, None),
        (1.0, torch.float32, False, dist.ReduceOp.SUM),
        (1.0, torch.float32, True, dist.ReduceOp.AVG),
    ],
)
def test_nccl_multiplies_only_where_it_does_so_rightly(monkeypatch, factor, dtype, average, op):
    """None: the factor is applied before."""
    monkeypatch.setattr(collectives, "_is_nccl", lambda axis: True)
    monkeypatch.setattr(collectives, "premul_sum", lambda value: ("premul", value))
    full = torch.ones(2, dtype=dtype)
    came = collectives._prepare(full, Axis(None, None, 0, 2), GradScale(factor, average))
    assert came == (op or (dist.ReduceOp.AVG if average else dist.ReduceOp.SUM))
    assert torch.equal(full, torch.full((2,), factor if op is None else 1.0, dtype=dtype))


def listen_to_everything():
    tensor, size = torch.ones(2), dist.get_world_size()
    with collectives_heard() as heard:
        all_gather(torch.empty(2 * size), tensor, axis())
        reduce_scatter(torch.empty(2), torch.ones(2 * size), axis())
        all_reduce(tensor, axis())
        dist.broadcast(tensor, 0)
        dist.all_gather_object([None] * size, "x")
        dist.barrier()
        tensor.add_(1)
    return heard


def communicate_where_forbidden(what):
    with no_collectives():
        {"all_reduce": lambda: dist.all_reduce(torch.ones(1)), "new_group": dist.new_group}[what]()


def test_the_harness_hears_every_collective(ranks2):
    for heard in ranks2.run(listen_to_everything):
        first, rest = heard[:4], heard[4:]
        assert "allgather" in first[0] and "reduce_scatter" in first[1] and first[2:] == ["allreduce", "broadcast"]
        assert any("allgather" in name for name in rest) and rest[-1] == "barrier"


@pytest.mark.parametrize("what", ["all_reduce", "new_group"])
def test_the_harness_forbids_communication(ranks2, what):
    ranks2.run_expecting(Communicated, "where nothing may be communicated", communicate_where_forbidden, what)
