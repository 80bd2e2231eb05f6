"""Layouts: whatever the shapes, every row lives on exactly one rank and no shard boundary cuts what must stay whole."""

import dataclasses
import math
import random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megatron_fsdp.plan.layout import ALIGN, Layout, RowRange, Slot, plan_layout

lengths = st.one_of(st.integers(1, 9), st.sampled_from([16, 31, 64, 257, 1000]))
shapes = st.one_of(
    st.just(()),
    st.tuples(st.integers(0, 3000)),
    st.tuples(lengths, lengths),
    st.tuples(lengths, lengths, st.integers(1, 5)),
    st.tuples(st.just(1), st.integers(1, 4000)),  # one huge row
    st.tuples(st.integers(0, 3), st.just(0)),  # rows without elements
)
shard_counts = st.sampled_from([1, 2, 3, 4, 7, 8, 64])


@st.composite
def problems(draw):
    """Shapes, a number of shards, and how many rows of each parameter must stay together."""
    chosen = draw(st.lists(shapes, min_size=1, max_size=9))
    atoms = [draw(st.sampled_from([1, 1, 1, 2, 32, max(1, shape[0] if shape else 1)])) for shape in chosen]
    return chosen, draw(shard_counts), atoms


def fuzz(test):
    return settings(max_examples=120, deadline=None, derandomize=True, database=None)(given(problems())(test))


def bounds_of(layout, shard):
    """Elements [lo, hi) of a shard."""
    return shard * layout.shard_size, (shard + 1) * layout.shard_size


def padding_ratio(layout):
    """Padding elements over used elements."""
    return (layout.size - layout.used) / layout.used


@fuzz
@example(([(1,), (7, 1), (5, 7), (3, 5, 7)], 3, [1, 1, 1, 1]))
def test_slots_are_disjoint_and_inside_equal_shards(problem):
    chosen, shard_count, atoms = problem
    layout = plan_layout(chosen, shard_count, atoms)
    assert layout.size == layout.shard_size * layout.shard_count and layout.shard_count == shard_count
    taken = sorted((slot.start, slot.end) for slot in layout.slots if slot.numel)
    assert all(end <= start for (_, end), (start, _) in zip(taken, taken[1:], strict=False))
    assert not taken or (taken[0][0] >= 0 and taken[-1][1] <= layout.size)
    assert [slot.shape for slot in layout.slots] == chosen
    assert layout.used == sum(math.prod(shape) for shape in chosen)


@fuzz
def test_no_shard_boundary_cuts_an_atom(problem):
    chosen, shard_count, atoms = problem
    layout = plan_layout(chosen, shard_count, atoms)
    for slot, atom_rows in zip(layout.slots, atoms, strict=True):
        for boundary in range(layout.shard_size, layout.size, layout.shard_size):
            if slot.start < boundary < slot.end:
                assert (boundary - slot.start) % (slot.row * atom_rows) == 0


@fuzz
def test_every_row_is_on_exactly_one_rank(problem):
    chosen, shard_count, atoms = problem
    layout = plan_layout(chosen, shard_count, atoms)
    for number, slot in enumerate(layout.slots):
        pieces = [layout.rows_on(number, *bounds_of(layout, shard)) for shard in range(shard_count)]
        following = 0
        for piece in pieces:
            if piece.count:
                assert piece.first == following
                assert slot.numel == 0 or piece.start == slot.start + piece.first * slot.row
                following += piece.count
            assert 0 <= piece.first <= slot.rows
        assert following == slot.rows


@fuzz
def test_cutting_again_gives_the_same_rows_as_cutting_finer(problem):
    """An outer axis cuts what the inner one has cut: rank (outer o, inner i) of 2 x k holds piece i * 2 + o of 2k."""
    chosen, inner, atoms = problem
    layout = plan_layout(chosen, 2 * inner, atoms)
    half = layout.shard_size
    for number in range(len(chosen)):
        for i in range(inner):
            low = i * 2 * half
            whole = layout.rows_on(number, low, low + 2 * half)
            parts = [layout.rows_on(number, low + o * half, low + (o + 1) * half) for o in range(2)]
            assert sum(part.count for part in parts) == whole.count
            assert not whole.count or min(part.first for part in parts if part.count) == whole.first


@fuzz
def test_layouts_are_deterministic_and_hashable(problem):
    chosen, shard_count, atoms = problem
    first, second = plan_layout(chosen, shard_count, atoms), plan_layout([*chosen], shard_count, [*atoms])
    assert first == second and hash(first) == hash(second)


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(st.lists(st.tuples(st.sampled_from([256, 512, 1024]), st.sampled_from([64, 128])), min_size=1, max_size=6))
def test_ordinary_weights_cost_next_to_no_padding(chosen):
    layout = plan_layout(chosen, 4)
    assert padding_ratio(layout) <= 0.02
    assert layout.shard_size % ALIGN == 0 and all(slot.start % ALIGN == 0 for slot in layout.slots)


def test_a_transformer_layer_of_a_real_size_is_planned_quickly_and_tightly():
    width, hidden = 4096, 14336
    layer = [(width,), (6144, width), (width, width), (width,), (2 * hidden, width), (width, hidden)]
    for shard_count in (2, 8, 64, 512):
        assert padding_ratio(plan_layout(layer, shard_count)) < 0.02


def test_random_problems_with_many_ranks_and_few_rows():
    generator = random.Random(0)
    for _ in range(40):
        chosen = [(generator.randint(1, 5), generator.randint(1, 50)) for _ in range(generator.randint(1, 12))]
        layout = plan_layout(chosen, generator.randint(5, 90))
        bounds = [bounds_of(layout, shard) for shard in range(layout.shard_count)]
        counts = [sum(layout.rows_on(slot, *piece).count for piece in bounds) for slot in range(len(chosen))]
        assert counts == [shape[0] for shape in chosen]


def test_one_parameter_without_dims_lies_on_one_rank():
    layout = plan_layout([()], 3)
    assert layout.slots[0].rows == layout.slots[0].row == layout.slots[0].numel == 1
    assert [layout.rows_on(0, *bounds_of(layout, k)).count for k in range(3)] == [1, 0, 0]


def test_atoms_of_whole_matrices_keep_each_on_one_rank():
    chosen = [(6, 4), (10, 3), (2, 8), (9, 1)]
    layout = plan_layout(chosen, 3, [shape[0] for shape in chosen])
    for number, shape in enumerate(chosen):
        counts = [layout.rows_on(number, *bounds_of(layout, k)).count for k in range(3)]
        assert sorted(counts) == [0, 0, shape[0]]


def test_whole_matrices_are_balanced_over_ranks():
    layer = [(256, 64), (64, 256), (192, 64), (64, 64), (128, 64), (64, 128)]
    layout = plan_layout(layer, 4, [shape[0] for shape in layer])
    loads = [
        sum(
            layout.rows_on(slot, *bounds_of(layout, shard)).count * math.prod(shape[1:])
            for slot, shape in enumerate(layer)
        )
        for shard in range(4)
    ]
    assert padding_ratio(layout) == 0.0 and len(set(loads)) == 1


@fuzz
def test_whole_matrices_cost_at_most_a_third_more_than_the_best_assignment(problem):
    chosen, shard_count, _ = problem
    layout = plan_layout(chosen, shard_count, [max(1, shape[0]) if shape else 1 for shape in chosen])
    sizes = [math.prod(shape) for shape in chosen]
    best = max(max(sizes), -(-sum(sizes) // shard_count), 1)  # or worse
    assert layout.shard_size <= 2 * best * 33 / 32 + ALIGN
    for slot, shape in enumerate(chosen):
        counts = [layout.rows_on(slot, *bounds_of(layout, shard)).count for shard in range(shard_count)]
        assert sum(map(bool, counts)) <= 1 and sum(counts) == (shape[0] if shape else 1)


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(problems(), st.randoms(use_true_random=False))
def test_ranks_may_be_asked_in_any_order(problem, chance):
    """A shard's bounds and rows are a function of its number alone, so whichever rank asks first changes nothing."""
    chosen, shard_count, atoms = problem
    layout = plan_layout(chosen, shard_count, atoms)
    in_order = {k: [layout.rows_on(s, *bounds_of(layout, k)) for s in range(len(chosen))] for k in range(shard_count)}
    numbers = list(range(shard_count))
    chance.shuffle(numbers)
    again = plan_layout(chosen, shard_count, atoms)
    assert {k: [again.rows_on(s, *bounds_of(again, k)) for s in range(len(chosen))] for k in numbers} == in_order


def test_a_layout_is_a_value():
    slot = Slot((4, 2), 0)
    layout = Layout((slot,), 8, 2)
    assert layout.rows_on(0, 4, 8) == RowRange(2, 2, 4)
    with pytest.raises(dataclasses.FrozenInstanceError):
        layout.size = 9


def test_as_many_atoms_as_shapes_are_needed():
    with pytest.raises(ValueError):
        plan_layout([(2, 2), (3,)], 2, [1])
