"""Grouping: parameters that may travel together do, unless padding would pass its bound."""

import dataclasses

from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_fsdp.plan.layout import GroupKey, ParamSpec, padding_is_acceptable, plan_groups, plan_layout

DENSE = GroupKey(codec="plain", dtype="bf16", requires_grad=True, is_expert=False, is_replicated=False)
KEYS = [
    DENSE,
    dataclasses.replace(DENSE, dtype="fp32"),
    dataclasses.replace(DENSE, requires_grad=False),
    dataclasses.replace(DENSE, is_expert=True),
    dataclasses.replace(DENSE, is_replicated=True),
    dataclasses.replace(DENSE, codec="other"),
]
SHARDS = {False: 4, True: 2}

specs = st.builds(
    ParamSpec,
    st.one_of(
        st.tuples(st.integers(1, 400)),
        st.tuples(st.integers(1, 60), st.integers(1, 200)),
        st.tuples(st.integers(1, 3), st.integers(1, 6000)),
    ),
    st.sampled_from(KEYS),
    st.sampled_from([1, 1, 1, 8, 32, 128]),
    st.sampled_from([False, False, False, True]),
)


def fuzz(test):
    many = st.lists(specs, min_size=1, max_size=12)
    buckets = st.one_of(st.none(), st.integers(1, 20_000))
    return settings(max_examples=100, deadline=None, derandomize=True, database=None)(given(many, buckets)(test))


@fuzz
def test_every_parameter_is_in_one_group_of_its_own_kind(chosen, bucket):
    groups = plan_groups(chosen, SHARDS, bucket)
    assert sorted(index for group in groups for index in group.members) == list(range(len(chosen)))
    for group in groups:
        assert {chosen[index].key for index in group.members} == {group.key}
        assert list(group.members) == sorted(group.members)
        assert [slot.shape for slot in group.layout.slots] == [chosen[index].shape for index in group.members]
    assert [group.members[0] for group in groups] == sorted(group.members[0] for group in groups)


@fuzz
def test_padding_stays_in_its_bound_where_more_than_one_parameter_shares(chosen, bucket):
    for group in plan_groups(chosen, SHARDS, bucket):
        alone = [
            plan_layout([chosen[i].shape], group.layout.shard_count, [rows])
            for i, rows in zip(group.members, group.atom_rows)
        ]
        # Parameters that waste memory by themselves may do so together, if that is not more.
        wasted = sum(0 if padding_is_acceptable(layout) else layout.size - layout.used for layout in alone)
        assert padding_is_acceptable(group.layout) or group.layout.size - group.layout.used <= wasted


@fuzz
def test_groups_are_deterministic_and_know_their_mesh(chosen, bucket):
    groups = plan_groups(chosen, SHARDS, bucket)
    assert groups == plan_groups([*chosen], SHARDS, bucket)
    for group in groups:
        assert group.layout.shard_count == (1 if group.key.is_replicated else SHARDS[group.key.is_expert])


@fuzz
def test_buckets_are_cut_as_soon_as_they_are_full(chosen, bucket):
    if bucket is None:
        return
    for group in plan_groups(chosen, SHARDS, bucket):
        used = [plan_layout([chosen[index].shape], 1).used for index in group.members]
        assert sum(used) - max(used) < bucket or len(used) == 1


@fuzz
def test_a_group_says_which_rows_it_keeps_together(chosen, bucket):
    for group in plan_groups(chosen, SHARDS, bucket):
        layout = group.layout
        for number, (index, rows) in enumerate(zip(group.members, group.atom_rows, strict=True)):
            slot, spec = layout.slots[number], chosen[index]
            # A wish for a single owner is never given up, one for blocks only for row atoms.
            assert rows == (spec.shape[0] if spec.has_single_owner else rows) and rows in (1, spec.whole_rows)
            for boundary in range(layout.shard_size, layout.size, layout.shard_size):
                assert not slot.start < boundary < slot.end or (boundary - slot.start) % (slot.row * rows) == 0


def test_blocks_of_rows_are_kept_where_they_fit_and_given_up_where_they_would_be_padding():
    layer = [ParamSpec(shape, DENSE, 128) for shape in [(6144, 64), (4096, 64), (4096, 128)]]
    (few,) = plan_groups(layer, {False: 8})
    assert few.atom_rows == (128, 128, 128) and padding_is_acceptable(few.layout)
    many = plan_groups(layer, {False: 256})
    assert {rows for group in many for rows in group.atom_rows} == {1}
    assert sum(group.layout.size - group.layout.used for group in many) < 0.05 * sum(g.layout.used for g in many)


def test_a_single_owner_keeps_its_matrix_whatever_it_costs():
    specs = [ParamSpec((4096, 128), DENSE, has_single_owner=True), ParamSpec((64, 128), DENSE)]
    groups = plan_groups(specs, SHARDS)
    assert [rows for group in groups for rows in group.atom_rows if group.members[0] == 0][0] == 4096


def test_equal_parameters_share_one_group():
    layer = [ParamSpec(shape, DENSE) for shape in [(64,), (192, 64), (64, 64), (64,), (256, 64), (64, 256)]]
    (group,) = plan_groups(layer, SHARDS)
    assert group.members == (0, 1, 2, 3, 4, 5)


def test_rows_that_do_not_divide_each_other_are_kept_apart():
    wide, odd = ParamSpec((2, 40_009), DENSE), ParamSpec((3, 30_011), DENSE)
    together = plan_layout([wide.shape, odd.shape], 4)
    assert not padding_is_acceptable(together)
    groups = plan_groups([wide, odd, *[ParamSpec((512, 128), DENSE)] * 4], SHARDS)
    assert sum(group.layout.size for group in groups) <= together.size + 4 * 512 * 128 * 1.05


def test_nothing_gives_no_groups():
    assert plan_groups([], SHARDS) == ()
