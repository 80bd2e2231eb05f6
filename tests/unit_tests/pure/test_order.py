"""The order in which units gather and reduce, on units that are only names."""

import dataclasses
import itertools
import random

from megatron_fsdp.runtime.order import Order, completed, merged, placed, registered


@dataclasses.dataclass(eq=False)
class Named:
    """As much of a unit as an order reads."""

    fqn: str
    joins_backward: bool = True


ROOT = Named("")


def named(*names: str, frozen: str = "") -> dict[str, Named]:
    return {name: Named(name, joins_backward=name != frozen) for name in names}


def order_of(*names: str, frozen: str = "") -> tuple[Order, dict[str, Named]]:
    units = named(*names, frozen=frozen)
    return Order([units[name] for name in names], ROOT), units


def script(order: Order) -> list[str]:
    """Begins (+) and ends (-), the last end of a unit in capitals."""
    steps = (("+" if step.is_entry else "-") + (step.unit.fqn or "root") for step in order.backward)
    return [text.upper() if step.reduces else text for text, step in zip(steps, order.backward, strict=True)]


def test_backward_mirrors_forward_and_the_root_is_around_it():
    order, units = order_of("a", "b")
    assert script(order) == ["+root", "+b", "-B", "+a", "-A", "-ROOT"]
    assert [unit.fqn for unit in order.exits] == ["b", "a", ""]
    assert order.backward[order.entry[0]].unit is units["a"]
    assert order.exit_number[units["a"]] == 1


def test_units_inside_a_unit_lie_between_its_entry_and_exit():
    order = registered(list(named("a", "a.0", "a.0.x", "a.1", "ab", "b.c").values()), ROOT)
    assert script(order) == [
        *("+root", "+b.c", "-B.C", "+ab", "-AB"),
        *("+a", "+a.1", "-A.1", "+a.0", "+a.0.x", "-A.0.X", "-A.0", "-A"),
        "-ROOT",
    ]


def test_a_unit_called_again_has_a_turn_for_each_call_and_reduces_after_the_first():
    order, units = order_of("a", "z", "a")
    assert script(order) == ["+root", "+a", "-a", "+z", "-Z", "+a", "-A", "-ROOT"]
    assert [order.next_turn(units["a"], start) for start in range(4)] == [0, 2, 2, None]
    assert [unit.fqn for unit in order.exits] == ["z", "a", ""]
    assert [unit.fqn for _, unit in order.entries_from(2)] == ["z"], "what is in use cannot be gathered ahead"
    assert [unit.fqn for _, unit in order.entries_from(3)] == ["z", "a"]


def test_what_any_rank_ran_inside_a_call_comes_before_its_end():
    units = named("a", "b", "c")
    order = Order(list(units.values()), ROOT, [1, 2, 2])  # a around b on one rank, b around c on another
    assert script(order) == ["+root", "+b", "+c", "-C", "+a", "-B", "-A", "-ROOT"]


def test_a_unit_that_is_still_needed_for_another_turn_is_not_released():
    units = named("a", "b")
    order = Order([units["a"], units["a"], units["b"]], ROOT, [1, 1, 2])  # a second turn while the first was not over
    assert script(order) == ["+root", "+b", "-B", "+a", "+a", "-a", "-A", "-ROOT"]
    assert [step.releases for step in order.backward if step.unit is units["a"]] == [False, False, False, True]


def test_what_is_recomputed_as_one_is_entered_as_one():
    units = named("a", "b", "c")
    order = Order([*units.values(), units["b"]], ROOT, firsts=[0, 0, 1, 3])
    assert script(order) == ["+root", "+b", "-b", "+c", "+b", "-C", "+a", "-B", "-A", "-ROOT"]
    order = Order([units["a"], units["b"], units["b"]], ROOT, firsts=[0, 0, 0])
    assert script(order) == ["+root", "+b", "+b", "+a", "-b", "-B", "-A", "-ROOT"]
    assert [step.unit.fqn for step in order.backward if step.opens] == ["b", "a"]


def test_what_comes_next_leaves_out_who_does_not_join():
    order, units = order_of("a", "b", "c", frozen="b")
    assert [unit for _, unit in order.entries_from(0)] == [ROOT, units["c"], units["a"]]
    assert list(order.entries_from(2)) == [(order.entry[0], units["a"])]


def test_what_nobody_asked_for_follows_its_neighbour():
    assert completed([2, 0, 2], 4) == [2, 3, 0, 1, 2]
    assert completed([], 3) == [0, 1, 2]


def test_a_merged_sequence_holds_both_in_their_order_and_is_as_short_as_can_be():
    assert merged([7, 2, 0, 1], [2, 0, 1]) == [7, 2, 0, 1]
    assert merged([0, 1], [1, 0]) in ([0, 1, 0], [1, 0, 1])
    chance = random.Random(0)
    for _ in range(200):
        one, other = ([chance.randrange(4) for _ in range(chance.randrange(7))] for _ in range(2))
        both = merged(one, other)
        assert placed(one, both) is not None and placed(other, both) is not None
        common = max(
            size for size in range(7) for part in itertools.combinations(one, size) if placed(part, other) is not None
        )
        assert len(both) == len(one) + len(other) - common


def test_items_are_placed_as_early_as_can_be():
    assert placed([1, 1], [0, 1, 1, 1]) == [1, 2] and placed([1, 0], [0, 1]) is None
