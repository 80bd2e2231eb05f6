"""Grouping: parameters that may travel together do, unless padding would pass its bound."""

import dataclasses

from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_fsdp.plan.grouping import GroupKey, ParamSpec, padding_is_acceptable, plan_groups
from megatron_fsdp.plan.layout import plan_layout

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
    st.sampled_from([1, 1, 1, 8]),
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
        alone = [plan_layout([chosen[i].shape], group.layout.shard_count, [chosen[i].atom_rows]) for i in group.members]
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
