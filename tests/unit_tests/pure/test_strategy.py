"""The strategy table: all twelve combinations against a plain mean on simulated ranks."""

import itertools

import pytest

from megatron_fsdp.config import strategy_name
from megatron_fsdp.plan.strategy import (
    COLLECTIVE,
    NO_SHARD,
    OUTER_STRATEGIES,
    PARTIAL,
    REPLICATED,
    RESTING,
    AxisPair,
    Placement,
    Resting,
    collective_steps,
    plan_for,
    shards_are_contiguous,
    strategies_that,
)
from tests.unit_tests.harness.simulate import MOVES, SimulatedMesh, train_simulated

R, S, P = Placement.REPLICATE, Placement.SHARD, Placement.PARTIAL

#: (outer, inner) -> collectives of install, unshard, reduce (each micro-batch), finalize (once). No outer axis: None.
EXPECTED = {
    (None, "no_shard"): ((), (), (), ("all_reduce",)),
    (None, "optim"): (("all_gather",), (), (), ("reduce_scatter",)),
    (None, "optim_grads"): (("all_gather",), (), ("reduce_scatter",), ()),
    (None, "optim_grads_params"): ((), ("all_gather",), ("reduce_scatter",), ()),
    ("no_shard", "no_shard"): ((), (), (), ("all_reduce", "all_reduce_outer")),
    ("no_shard", "optim"): (("all_gather",), (), (), ("reduce_scatter", "all_reduce_outer")),
    ("no_shard", "optim_grads"): (("all_gather",), (), ("reduce_scatter",), ("all_reduce_outer",)),
    ("no_shard", "optim_grads_params"): ((), ("all_gather",), ("reduce_scatter",), ("all_reduce_outer",)),
    ("optim", "no_shard"): None,
    ("optim", "optim"): (("all_gather_outer", "all_gather"), (), (), ("reduce_scatter", "reduce_scatter_outer")),
    ("optim", "optim_grads"): (
        ("all_gather_outer", "all_gather"),
        (),
        ("reduce_scatter",),
        ("reduce_scatter_outer",),
    ),
    ("optim", "optim_grads_params"): (
        ("all_gather_outer",),
        ("all_gather",),
        ("reduce_scatter",),
        ("reduce_scatter_outer",),
    ),
}


def plan(outer, inner, mesh):
    return plan_for(inner, outer or NO_SHARD, inner_size=mesh.inner, outer_size=mesh.outer)


def test_the_table_has_all_twelve_combinations():
    assert set(EXPECTED) == set(itertools.product((None, *OUTER_STRATEGIES), RESTING))


@pytest.mark.parametrize("inner_size", [2, 3])
@pytest.mark.parametrize(("outer", "inner"), [pair for pair, logs in EXPECTED.items() if logs is not None])
def test_simulated_ranks_train_like_a_plain_mean(outer, inner, inner_size):
    mesh = SimulatedMesh(1 if outer is None else 2, inner_size)
    logs = train_simulated(mesh, plan(outer, inner, mesh))
    install, unshard, reduce, finalize = EXPECTED[outer, inner]
    assert logs == {"install": install, "unshard": unshard, "reduce": reduce, "finalize": finalize}


@pytest.mark.parametrize(("outer", "inner"), [pair for pair, logs in EXPECTED.items() if logs is not None])
def test_the_plan_answers_what_the_simulation_shows(outer, inner):
    mesh = SimulatedMesh(1 if outer is None else 2, 2)
    answers = plan(outer, inner, mesh)
    install, unshard, reduce, finalize = EXPECTED[outer, inner]
    assert answers.gathers_after_install == bool(install)
    assert answers.gathers_weights == bool(unshard)
    assert answers.reduces_each_microbatch == bool(reduce)
    assert answers.defers_reduction == bool(finalize)
    assert answers.shards_anything == (inner != "no_shard" or outer == "optim")
    assert answers.finalized_grad() == answers.main_weight


@pytest.mark.parametrize("inner", RESTING)
def test_an_axis_of_one_rank_needs_nothing(inner):
    alone = plan_for(inner, inner_size=1, outer_size=1)
    assert alone.weight == alone.main_grad == alone.main_weight == REPLICATED
    assert not alone.gathers_weights and not alone.reduces_each_microbatch and not alone.defers_reduction


@pytest.mark.parametrize("outer", ["optim", "optim_grads", "optim_grads_params"])
def test_shards_outside_an_unsharded_inner_axis_are_refused(outer):
    with pytest.raises(ValueError, match=f"outer_dp_sharding_strategy='{outer}' shards .*use zero_dp_strategy"):
        plan_for("no_shard", outer, outer_size=2)


def test_every_accepted_plan_has_contiguous_pieces():
    for outer, inner in itertools.product(RESTING, RESTING):
        try:
            accepted = plan_for(inner, outer, outer_size=2)
        except ValueError:
            continue
        assert all(map(shards_are_contiguous, (accepted.weight, accepted.main_grad, accepted.main_weight)))


def test_unknown_strategies_are_named():
    with pytest.raises(ValueError, match="unknown inner sharding strategy 'zero3'"):
        plan_for("zero3")
    with pytest.raises(ValueError, match="unknown outer sharding strategy 'hsdp'"):
        plan_for("optim", "hsdp")


def test_each_strategy_keeps_less_than_the_one_before():
    def replicated(name):
        row = RESTING[name]
        return [row.weight is S, row.main_grad is S, row.main_weight is S]

    sharded = [sum(replicated(strategy_name(number, "zero_dp_strategy"))) for number in range(4)]
    assert sharded == [0, 1, 2, 3]


def test_steps_cut_inner_first_and_gather_outer_first():
    cut = (1, "reduce_scatter", AxisPair(P, S)), (0, "reduce_scatter", AxisPair(S, S))
    assert collective_steps(PARTIAL, AxisPair(S, S)) == cut
    gathered = (0, "all_gather", AxisPair(R, S)), (1, "all_gather", REPLICATED)
    assert collective_steps(AxisPair(S, S), REPLICATED) == gathered
    assert collective_steps(AxisPair(P, S), AxisPair(R, S)) == ((0, "all_reduce", AxisPair(R, S)),)
    assert collective_steps(REPLICATED, REPLICATED) == ()


def test_the_simulation_knows_the_same_collectives():
    assert {before.value + after.value: name for (before, after), name in COLLECTIVE.items()} == MOVES


def test_messages_name_strategies_from_the_table(monkeypatch):
    def gathers(plan):
        return plan.gathers_weights

    assert strategies_that(gathers) == "'optim_grads_params' (3)"
    assert strategies_that(lambda plan: not gathers(plan)) == "'no_shard' (0), 'optim' (1) or 'optim_grads' (2)"
    monkeypatch.setitem(RESTING, "params", Resting(Placement.SHARD, Placement.PARTIAL, Placement.SHARD))
    assert strategies_that(gathers) == "'optim_grads_params' (3) or 'params' (4)"
