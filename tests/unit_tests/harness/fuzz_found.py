"""Small programs in which ranks, or forwards, run different units; each once came out of step or read what was gone."""

from typing import Any

from tests.unit_tests.harness.fuzz_programs import Plan, Program
from tests.unit_tests.harness.fuzz_tree import Call, Leaf, Node


def _node(kinds: str, *calls: Call, cls: str = "A", **options: Any) -> Node:
    leaves = tuple(Leaf(kind=kind, seed=number, size=2) for number, kind in enumerate(kinds.split(), start=1))
    return Node(cls=cls, children=leaves, calls=calls, **options)


def _around(node: Node, *calls: Call) -> Node:
    return Node(cls="B", children=(node,), calls=calls)


def _program(tree: Node, units: str, **options: Any) -> Program:
    plan = Plan(strategy=3, units=tuple(units.split()))
    return Program(**{"seed": 0, "ranks": 2, "width": 4, "tree": tree, "has_stem": True, "plan": plan} | options)


def _span(outer: str, inner: str = "") -> Program:
    """Three Linears that some ranks recompute as one, the last two perhaps inside a checkpoint of their own."""
    node = _node("linear bottleneck", Call(child=0), Call(child=1, recompute=inner))
    return _program(_around(node, Call(child=0, skip="rank", recompute=outer)), "_Linear", steps=1)


def _behind(recompute: str) -> Program:
    """A unit runs without a graph behind one that some ranks recompute, with one between them that never runs."""
    node = _node(
        "linear embedding conv", Call(child=0, skip="rank", recompute=recompute), Call(child=2, mode="no_grad")
    )
    return _program(node, "_Linear _Embedding _Conv", steps=1)


_IN_TURN = (Call(child=0), Call(child=1))

FOUND: dict[str, Program] = {
    "the_last_turn_of_a_table_is_left_out": _program(
        _node("table", Call(child=0, mode="no_grad"), Call(child=0, skip="rank")), "Table", microbatches=2
    ),
    "a_unit_hands_on_what_a_unit_inside_it_returned": _program(
        _node(
            "norm conv linear",
            Call(child=0),
            Call(child=1, skip="step", site=3),
            Call(child=2, skip="rank", site=5),
            cls="C",
        ),
        "NormPart LinearPart BlockC",
        seed=220555,
        width=7,
    ),
    "no_graph_behind_plain": _behind("plain"),
    "no_graph_behind_reentrant": _behind("reentrant"),
    "some_ranks_recompute_several_plain": _span("plain"),
    "some_ranks_recompute_several_reentrant": _span("reentrant"),
    "plain_in_plain": _span("plain", "plain"),
    "reentrant_in_plain": _span("plain", "reentrant"),
    "reentrant_in_reentrant": _span("reentrant", "reentrant"),
    "a_unit_runs_others_inside_than_at_first": _program(
        _around(_node("linear conv odd", *_IN_TURN, is_rotating=True), Call(child=0), Call(child=0)),
        "BlockA LinearPart ConvPart",
    ),
    "a_unit_runs_others_inside_and_then_not_again": _program(
        _around(_node("linear conv odd", *_IN_TURN, is_rotating=True), Call(child=0), Call(child=0, skip="step")),
        "BlockA LinearPart ConvPart",
        seed=1,
    ),
}

#: Ranks run different units, and then in another order than any of them did at first.
REFUSED: dict[str, Program] = {
    "a_table_is_left_out_and_what_runs_rotates": _program(
        _around(_node("table linear", *_IN_TURN, is_rotating=True), Call(child=0, skip="rank")),
        "LinearPart Table",
        microbatches=3,
    ),
    "what_ran_in_another_order_has_no_backward_on_a_rank": _program(
        _node("choosy embedding conv", Call(child=0), Call(child=2), is_rotating=True),
        "ChoosyPart ConvPart _Embedding",
    ),
}
