"""Programs of random models: what building and every rewrite promise, without torch.distributed or a process."""

import random

import pytest

from megatron_fsdp.plan.program import (
    AGAIN,
    AT,
    BEGINS,
    DRAIN,
    ENTER,
    EXIT,
    FINALIZE,
    GATHER,
    GRAD,
    KEEP,
    OVER,
    REDUCE,
    RELEASE,
    WAIT,
    Ahead,
    InFlight,
    Op,
    UnitFacts,
    build,
    carry,
    choose_resident,
    completed,
    limit_in_flight,
    prefetch,
    resident,
    simulate,
    union,
)
from tests.unit_tests.harness.traces import random_model

SEEDS = range(300)
ROOT = UnitFacts("root", None, gathers=True, numel=1, nbytes=4, staged_numel=1, staged_nbytes=4)


def plain(count):
    """A root and `count` units of one element."""
    return [ROOT, *(ROOT._replace(label=f"u{unit}", parent=0) for unit in range(1, count + 1))]


def forward_of(*units):
    return ((ENTER, 0), *((event, unit) for unit in units for event in (ENTER, EXIT)), (KEEP, 0))


def backward_of(*units):
    return ((GRAD, 0), *((event, unit) for unit in units for event in (GRAD, OVER)), (OVER, 0))


def script(program):
    """Operations as short words."""
    words = {GATHER: "+", RELEASE: "-", REDUCE: "r", DRAIN: "d"}
    return [f"{words[op.kind]}{op.unit}" for op in program.ops if op.kind in words]


def kept_order(program):
    return [op for op in program.ops if op.kind in (AT, GATHER, REDUCE, FINALIZE)]


def cases():
    for seed in SEEDS:
        chance = random.Random(seed)
        model = random_model(chance)
        yield chance, model, build(model.forward(), model.facts), build(model.backward(), model.facts)


# ---- building ----


def test_everything_in_place():
    assert script(build(forward_of(1, 2), plain(2))) == ["+0", "+1", "-1", "+2", "-2"]
    assert script(build(backward_of(2, 1), plain(2))) == ["+0", "+2", "-2", "r2", "+1", "-1", "r1", "-0", "r0"]


def test_a_unit_that_is_called_again_is_reduced_after_its_last_backward():
    assert script(build(backward_of(1, 2, 1), plain(2))) == [
        *("+0", "+1", "-1", "+2", "-2", "r2", "+1", "-1", "r1"),
        *("-0", "r0"),
    ]


def test_a_unit_inside_another_is_gathered_inside_it():
    trace = ((ENTER, 0), (ENTER, 1), (ENTER, 2), (EXIT, 2), (EXIT, 1), (EXIT, 0))
    assert script(build(trace, plain(2))) == ["+0", "+1", "+2", "-2", "-1", "-0"]


def test_what_nobody_used_is_reduced_at_the_end_and_frozen_units_never():
    facts = plain(3)
    facts[3] = facts[3]._replace(reduces=False)
    program = build(backward_of(3, 1), facts)
    assert [op.unit for op in program.ops if op.kind == REDUCE] == [1, 0, 2]
    assert [op.unit for op in program.ops if op.kind == GATHER] == [0, 3, 1]


def test_weights_that_rest_whole_are_gathered_and_never_resharded():
    facts = [fact._replace(numel=0, nbytes=0) for fact in plain(2)]
    assert script(build(forward_of(1, 2), facts)) == ["+0", "+1", "+2"]
    facts = [fact._replace(gathers=False) for fact in facts]
    assert script(build(forward_of(1, 2), facts)) == []


def test_every_use_is_covered_and_everything_is_let_go():
    for _, model, forward, backward in cases():
        _, left = simulate(forward, model.facts)
        assert left == {0} - {0 for _ in range(not model.facts[0].numel)}
        assert simulate(backward, model.facts, left)[1] == frozenset()
        reduced = [op.unit for op in backward.ops if op.kind == REDUCE]
        assert sorted(reduced) == [unit for unit, fact in enumerate(model.facts) if fact.reduces]


def test_no_unit_is_gathered_beside_those_that_are_open():
    for _, model, forward, _ in cases():
        whole, open_units = set(), []
        for op in forward.ops:
            if op.kind == AT and op.event == ENTER:
                open_units.append(op.unit)
            elif op.kind == AT:
                open_units.remove(op.unit)
            elif op.kind == GATHER and model.facts[op.unit].numel:
                whole.add(op.unit)
                assert whole <= {*open_units, op.unit, 0}
            elif op.kind == RELEASE:
                whole.discard(op.unit)


# ---- ranks that differ ----


def test_a_union_holds_all_traces_in_their_order():
    chance = random.Random(0)
    for _ in range(200):
        traces = [tuple((ENTER, chance.randrange(4)) for _ in range(chance.randrange(7))) for _ in range(3)]
        whole = union(traces)
        assert all(_is_within(trace, whole) for trace in traces)
        assert whole == union(reversed(traces)) == union([*traces, *traces])
        assert len(whole) <= sum(map(len, traces))


def test_what_no_two_ranks_share_comes_in_the_order_of_registration():
    forwards = [forward_of(1, 3), forward_of(2), forward_of(4)]
    assert [unit for event, unit in union(forwards) if event == ENTER] == [0, 1, 2, 3, 4]
    backwards = [backward_of(3, 1), backward_of(2), backward_of(4)]
    assert [unit for event, unit in union(backwards) if event == GRAD] == [0, 4, 3, 2, 1]


def test_many_ranks_that_leave_out_some_of_a_thousand_units_share_one_program_without_repeats():
    chance = random.Random(0)
    ranks = [[unit for unit in range(1, 1000) if chance.random() < 0.8] for _ in range(32)]
    ran = sorted(set().union(*ranks))
    assert union(forward_of(*rank) for rank in ranks) == forward_of(*ran)
    assert union(backward_of(*reversed(rank)) for rank in ranks) == backward_of(*reversed(ran))


def _is_within(part, whole):
    rest = iter(whole)
    return all(token in rest for token in part)


def test_units_that_no_rank_called_get_a_place_beside_their_neighbours():
    facts = plain(4)
    forward = completed(forward_of(1, 3), facts)
    assert [unit for event, unit in forward if event == ENTER] == [0, 1, 2, 3, 4]
    backward = completed(backward_of(3, 1), facts)
    assert [unit for event, unit in backward if event == OVER] == [4, 3, 2, 1, 0]
    assert [event for event, unit in backward if unit == 2] == [AGAIN, GRAD, AGAIN, OVER]
    facts[2] = facts[2]._replace(parent=1)
    inside = completed(forward_of(1, 3), facts)
    assert inside[1:5] == ((ENTER, 1), (ENTER, 2), (EXIT, 2), (EXIT, 1))
    facts[4] = facts[4]._replace(reduces=False)
    assert (GRAD, 4) not in completed(backward_of(3, 1), facts, ran={1, 3, 4}), "frozen, and no gradients flow"


def test_the_union_of_what_ranks_left_out_covers_the_uses_of_each():
    for chance, model, *_ in cases():
        ranks = [tuple(call for call in model.calls if chance.random() < 0.7) for _ in range(3)]
        for traces in ([model.forward(rank) for rank in ranks], [model.backward(rank) for rank in ranks]):
            program = build(completed(union(traces), model.facts), model.facts, is_spmd=False)
            simulate(program, model.facts)
            markers = [(op.event, op.unit) for op in program.ops if op.kind == AT]
            for trace in traces:
                assert _is_within([token for token in trace if token[0] not in (KEEP, OVER)], markers)


# ---- rewrites ----


def test_prefetching_by_one_unit():
    program = prefetch(build(forward_of(1, 2, 3), plain(3)), Ahead(1), plain(3))
    order = [f"{op.kind} {op.unit}" if op.kind != AT else f"{op.event} {op.unit}:" for op in program.ops]
    assert order[:9] == [
        *("all-gather 0", "wait 0", "all-gather 1", "enter 0:"),
        *("wait 1", "all-gather 2", "enter 1:"),
        *("reshard 1", "exit 1:"),
    ]


def test_prefetching_moves_gathers_only_and_no_farther_than_it_may():
    for chance, model, *programs in cases():
        ahead = Ahead(chance.randint(0, 3), chance.choice((None, None, 2, 4)), chance.choice((None, 1)))
        for program in programs:
            moved = prefetch(program, ahead, model.facts)
            assert sorted(moved.ops) == sorted(program.ops) and kept_order(moved) != []
            for kinds in ((AT,), (GATHER,), (REDUCE, FINALIZE), (RELEASE,), (WAIT, AT)):
                assert [op for op in moved.ops if op.kind in kinds] == [op for op in program.ops if op.kind in kinds]
            (before, _), (after, _) = simulate(program, model.facts), simulate(moved, model.facts)
            most = max(fact.nbytes for fact in model.facts) * (ahead.depth if ahead.numel is None else 99)
            assert after.weights <= before.weights + (most if ahead.numel is None else 2 * ahead.numel)
            assert prefetch(program, Ahead(0), model.facts) == program


def test_a_unit_is_not_prefetched_before_its_earlier_use_is_over():
    program = prefetch(build(forward_of(1, 1, 2), plain(2)), Ahead(9), plain(2))
    assert script(program) == ["+0", "+1", "-1", "+1", "+2", "-1", "-2"]


def test_what_backward_needs_first_goes_over_from_forward():
    forward, backward = build(forward_of(1, 2), plain(2)), build(backward_of(2, 1), plain(2))
    carried = carry(forward, backward)
    assert script(carried) == ["+0", "+1", "-1", "+2"]
    assert simulate(carried, plain(2))[1] == {0, 2}
    frozen_last = build(backward_of(1), plain(2))
    assert carry(forward, frozen_last) == forward


def test_carrying_leaves_all_uses_covered():
    for _, model, forward, backward in cases():
        peak, left = simulate(carry(forward, backward), model.facts)
        assert simulate(backward, model.facts, left)[1] == frozenset()
        assert peak.weights <= simulate(forward, model.facts)[0].weights + max(f.nbytes for f in model.facts)


def test_residents_fit_the_budget_from_the_end_and_are_not_resharded():
    facts = [ROOT, *(ROOT._replace(label=str(n), nbytes=n) for n in (10, 30, 0, 20, 50))]
    assert choose_resident([1, 2, 3, 4, 5], facts, 40) == {1, 4}
    for chance, model, forward, backward in cases():
        budget = chance.randint(0, 12)
        kept = choose_resident(range(1, len(model.facts)), model.facts, budget)
        assert sum(model.facts[unit].nbytes for unit in kept) <= budget
        _, left = simulate(resident(forward, kept), model.facts)
        _, left = simulate(resident(backward, kept), model.facts, left)
        assert left <= kept


def test_reductions_wait_for_the_oldest_when_too_many_are_on_their_way():
    program = limit_in_flight(build(backward_of(3, 2, 1), plain(3)), InFlight(2), plain(3))
    assert [word for word in script(program) if word[0] in "rd"] == ["r3", "r2", "d3", "r1", "d2", "r0"]


@pytest.mark.parametrize("limit", [InFlight(1), InFlight(2), InFlight(2, 4), InFlight(2, 100, is_strict=True)])
def test_no_more_is_staged_than_the_limit(limit):
    for _, model, _, backward in cases():
        program = limit_in_flight(backward, limit, model.facts)
        assert [op for op in program.ops if op.kind != DRAIN] == list(backward.ops)
        flying = {}
        for op in program.ops:
            if op.kind == DRAIN:
                del flying[op.unit]
            elif op.kind == REDUCE and model.facts[op.unit].staged_numel:
                assert not limit.is_full(flying.values(), model.facts[op.unit].staged_numel)
                flying[op.unit] = model.facts[op.unit].staged_numel


# ---- simulating and printing ----


def test_a_wrong_program_is_found():
    trace = forward_of(1)
    facts = plain(1)
    program = build(trace, facts)
    ops = [op for op in program.ops if op != Op(GATHER, 1)]
    with pytest.raises(AssertionError, match="u1 is not gathered"):
        simulate(type(program)(trace, tuple(ops)), facts)
    twice = (*program.ops, Op(RELEASE, 1))
    with pytest.raises(AssertionError, match="u1 is resharded twice"):
        simulate(type(program)(trace, twice), facts)


def test_peaks_say_where_they_are():
    facts = plain(2)
    program = limit_in_flight(prefetch(build(backward_of(2, 1), facts), Ahead(1), facts), InFlight(2), facts)
    peak, _ = simulate(program, facts)
    assert peak.weights == 12 and program.ops[peak.weights_pc].kind == GATHER
    assert peak.grads == 8 and program.ops[peak.grads_pc].kind == REDUCE


def test_a_program_prints_markers_at_the_margin():
    lines = build(forward_of(1), plain(1)).text(["(root)", "layers.0"]).splitlines()
    assert lines[:5] == [
        "0    all-gather (root)",
        "1    wait (root)",
        "2  enter (root):",
        "3    all-gather layers.0",
        "4    wait layers.0",
    ]
    assert all(event in BEGINS for event in (ENTER, GRAD, AGAIN))


def test_units_recomputed_together_are_kept_until_all_are_over_where_ranks_differ():
    recomputed = ((AGAIN, 1), (AGAIN, 2), (GRAD, 2), (OVER, 2), (GRAD, 1), (OVER, 1))
    trace = ((GRAD, 0), (GRAD, 3), (OVER, 3), *recomputed, (OVER, 0))
    alike = ["+0", "+3", "-3", "r3", "+1", "+2", "-2", "r2", "-1", "r1", "-0", "r0"]
    assert script(build(trace, plain(3))) == alike
    kept = ["+0", "+3", "-3", "r3", "+1", "+2", "-1", "-2", "r2", "r1", "-0", "r0"]
    program = build(trace, plain(3), is_spmd=False)
    assert sorted(script(program)) == sorted(kept) and script(program)[:6] == kept[:6]
    assert program.ops.index(Op(RELEASE, 2)) > program.ops.index(Op(AT, 1, GRAD))
    assert program.ops.index(Op(REDUCE, 2)) > program.ops.index(Op(AT, 1, GRAD))
