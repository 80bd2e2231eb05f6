"""The order in which units gather and reduce, on units that are only names."""

import dataclasses

from megatron_fsdp.runtime.order import Order


@dataclasses.dataclass(eq=False)
class Named:
    """As much of a unit as an order reads."""

    fqn: str
    joins_backward: bool = True


def orders(*names: str, frozen: str = "") -> tuple[Order, dict[str, Named]]:
    units = {name: Named(name, joins_backward=name != frozen) for name in ("", *names)}
    return Order([units[name] for name in names], units[""]), units


def script(order: Order) -> list[str]:
    return [("+" if step.is_entry else "-") + (step.unit.fqn or "root") for step in order.backward]


def test_backward_mirrors_forward_and_the_root_is_around_it():
    order, units = orders("a", "b")
    assert script(order) == ["+root", "+b", "-b", "+a", "-a", "-root"]
    assert [unit.fqn for unit in order.exits] == ["b", "a", ""]
    assert order.backward[order.entry[units["a"]]].unit is units["a"]
    assert order.exit_number[units["a"]] == 1 and order.forward_index[units["b"]] == 1


def test_units_inside_a_unit_lie_between_its_entry_and_exit():
    order, _ = orders("a", "a.0", "a.0.x", "a.1", "ab", "b.c")
    assert script(order) == [
        *("+root", "+b.c", "-b.c", "+ab", "-ab"),
        *("+a", "+a.1", "-a.1", "+a.0", "+a.0.x", "-a.0.x", "-a.0", "-a"),
        "-root",
    ]


def test_what_comes_next_leaves_out_who_does_not_join():
    order, units = orders("a", "b", "c", frozen="b")
    assert list(order.entries_after(units[""])) == [units["c"], units["a"]]
    assert list(order.entries_after(units["c"])) == [units["a"]]
    assert list(order.entries_after(units["a"])) == []
