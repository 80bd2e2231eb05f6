"""Flat buffers: views, pieces and the transitions between placements, on one axis and on two."""

import itertools

import pytest
import torch
import torch.distributed as dist

from megatron_fsdp.machine.collectives import SOLO, Axis, GradScale
from megatron_fsdp.plan.layout import plan_layout
from megatron_fsdp.plan.strategy import PARTIAL, REPLICATED, AxisPair, Placement, plan_for
from megatron_fsdp.state.flat_buffer import FlatBuffer, FlatSpan, local_bounds
from tests.unit_tests.harness.sharded import hybrid_mesh

R, S, P = Placement.REPLICATE, Placement.SHARD, Placement.PARTIAL
SHAPES = [(5, 3), (7,), (1,), (1, 4), (3, 2, 2)]


def axes() -> tuple[Axis, Axis]:
    """2 outer ranks times 2 inner ones among four, else no outer axis."""
    if dist.get_world_size() == 4:
        mesh = hybrid_mesh()
        return Axis.of(mesh["outer"].get_group()), Axis.of(mesh["dp"].get_group())
    return SOLO, Axis.of(dist.group.WORLD)


def global_values(layout, dtype, seed=0):
    """Integers; padding is NaN, so that reading it cannot go unnoticed."""
    torch.manual_seed(seed)
    values = torch.full((layout.size,), float("nan"))
    for slot in layout.slots:
        values[slot.start : slot.end] = torch.randint(-4, 5, (slot.numel,)).float()
    return values.to(dtype)


@pytest.mark.parametrize("shape", [(3, 2, 2), (5,), (), (0, 4, 3), (2, 0)])
def test_a_span_is_a_slice_in_a_shape(shape) -> None:
    data = torch.arange(40.0)[7:]  # as a part of a buffer begins: inside its storage
    span = FlatSpan.of(shape, 4)
    expected = data[4 : 4 + torch.Size(shape).numel()].view(shape)
    assert torch.equal(span.view(data), expected) and span.stride == expected.stride()
    assert span.view(data).data_ptr() == expected.data_ptr()


def empty(layout, axes, pair, dtype):
    """A buffer with memory, whose contents are undefined."""
    buffer = FlatBuffer(layout, axes, pair, torch.empty(0, dtype=dtype))
    buffer.allocate()
    return buffer


def buffer_of(values, layout, pair, dtype):
    buffer = empty(layout, axes(), pair, dtype)
    lo, hi = buffer.bounds
    buffer.data.copy_(values[lo:hi])
    return buffer


def layout_here():
    return plan_layout(SHAPES, dist.get_world_size())


def gather_from_every_placement(dtype):
    """Gathers into separate storage and into the buffer that holds the piece."""
    layout = layout_here()
    values = global_values(layout, dtype)
    sources = [AxisPair(R, S)] + ([AxisPair(S, S)] if dist.get_world_size() == 4 else [])
    wholes = []
    for pair in sources:
        target = empty(layout, axes(), REPLICATED, dtype)
        target.gather_from(buffer_of(values, layout, pair, dtype))
        in_place = empty(layout, axes(), REPLICATED, dtype)
        part = in_place.part(pair)
        part.data.copy_(values[slice(*part.bounds)])
        in_place.gather_from(in_place.part(pair))
        wholes += [[buffer.view(slot).float() for slot in range(len(SHAPES))] for buffer in (target, in_place)]
    return wholes


def reduce_to_every_placement(scale):
    layout = layout_here()
    rank = dist.get_rank()
    rows = []
    for pair in [AxisPair(R, R), AxisPair(R, S)] + ([AxisPair(S, S)] if dist.get_world_size() == 4 else []):
        buffer = buffer_of(global_values(layout, torch.float32, seed=rank), layout, PARTIAL, torch.float32)
        reduced = buffer.reduce_to(pair, scale)
        assert reduced.data.untyped_storage().data_ptr() == buffer.data.untyped_storage().data_ptr()
        rows.append([(reduced.rows(s).first, reduced.view(s).clone()) for s in range(len(SHAPES))])
    return rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn])
@pytest.mark.parametrize("world", [3, 4])
def test_a_gather_gives_every_parameter_back_whole(rank_pools, world, dtype):
    layout = plan_layout(SHAPES, world)
    values = global_values(layout, dtype)
    for wholes in rank_pools[world].run(gather_from_every_placement, dtype):
        for views in wholes:
            for slot, view in zip(layout.slots, views, strict=True):
                assert view.shape == slot.shape
                assert torch.equal(view.flatten(), values[slot.start : slot.end].float())


@pytest.mark.parametrize("world", [3, 4])
def test_a_reduction_leaves_each_rank_its_rows_of_the_sum_scaled_once(rank_pools, world):
    layout = plan_layout(SHAPES, world)
    total = torch.stack([global_values(layout, torch.float32, seed=rank) for rank in range(world)]).sum(0) / 2
    by_rank = rank_pools[world].run(reduce_to_every_placement, GradScale(0.5, average=False))
    for slot, by_placement in itertools.product(range(len(SHAPES)), zip(*by_rank, strict=True)):
        expected = total[layout.slots[slot].start : layout.slots[slot].end].view(SHAPES[slot])
        seen = set()
        for views in by_placement:
            first, rows = views[slot]
            assert torch.equal(rows, expected[first : first + len(rows)])
            seen |= set(range(first, first + len(rows)))
        assert seen == set(range(layout.slots[slot].rows))


def two_axes(outer, inner):
    return Axis(None, None, outer, 2), Axis(None, None, inner, 3)


def test_pieces_are_numbered_inner_first():
    layout = plan_layout([(60, 2)], 6)
    starts = {}
    for outer, inner in itertools.product(range(2), range(3)):
        starts[outer, inner] = local_bounds(layout, two_axes(outer, inner), AxisPair(S, S))[0] // layout.shard_size
        assert local_bounds(layout, two_axes(outer, inner), AxisPair(R, S))[0] == inner * 2 * layout.shard_size
        assert local_bounds(layout, two_axes(outer, inner), REPLICATED) == (0, layout.size)
    assert starts == {(outer, inner): inner * 2 + outer for outer, inner in starts}


@pytest.mark.parametrize("place", [AxisPair(S, S), AxisPair(R, S), PARTIAL])
def test_views_and_parts_share_the_buffer_s_storage(place):
    layout = plan_layout(SHAPES, 6)
    buffer = empty(layout, two_axes(1, 1), place, torch.float32)
    buffer.data.zero_()
    for slot in range(len(SHAPES)):
        buffer.view(slot).add_(slot + 1)
        assert buffer.view(slot).shape == (buffer.rows(slot).count, *SHAPES[slot][1:])
    piece = buffer.part(AxisPair(S, S))
    lo, base = piece.bounds[0], buffer.bounds[0]
    assert torch.equal(piece.data, buffer.data[lo - base : lo - base + layout.shard_size])
    piece.data.fill_(9)
    assert (buffer.data == 9).sum() == layout.shard_size
    assert buffer.is_data_distributed == (place != PARTIAL)
    assert buffer.nbytes == 4 * buffer.data.numel()


def test_a_rank_without_rows_has_an_empty_view_of_the_right_width():
    layout = plan_layout([(1, 7), (8, 7)], 3)
    places = [(SOLO, Axis(None, None, rank, 3)) for rank in range(3)]
    buffers = [empty(layout, at, AxisPair(R, S), torch.float32) for at in places]
    assert sorted(buffer.view(0).shape for buffer in buffers) == [(0, 7), (0, 7), (1, 7)]


def test_a_parameter_without_dims_is_viewed_where_it_is_whole():
    layout = plan_layout([(2,), ()], 1)
    buffer = FlatBuffer(layout, two_axes(1, 2), REPLICATED, torch.tensor([1.0, 2.0, 3.0])[: layout.size])
    assert buffer.view(1).shape == () and buffer.view(1) == 3.0


def test_impossible_transitions_are_our_own_bugs():
    layout = plan_layout(SHAPES, 1)
    plan = plan_for("no_shard", inner_size=1)
    buffer = empty(layout, (SOLO, SOLO), plan.weight, torch.float32)
    partial = FlatBuffer(layout, (SOLO, SOLO), PARTIAL, buffer.data)
    with pytest.raises((AssertionError, KeyError)):
        buffer.gather_from(partial)
    with pytest.raises((AssertionError, KeyError)):
        buffer.reduce_to(AxisPair(R, S))
