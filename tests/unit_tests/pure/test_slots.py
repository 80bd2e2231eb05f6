"""Sharing of slots among storages."""

from megatron_fsdp.plan.double_buffer import Footprint, PoolSlot, assign_slots


def units(*sizes: tuple[int, ...], within: tuple[int, ...] = ()) -> list[Footprint]:
    """Footprints of units 0, 1, ... with storages "0.0", "0.1", ..."""
    return [
        Footprint(tuple((f"{unit}.{i}", nbytes) for i, nbytes in enumerate(each)), takes_turns=unit not in within)
        for unit, each in enumerate(sizes)
    ]


def assigned(footprints: list[Footprint], *, only_alike: bool = True, keeps_misfits: bool = False) -> dict[str, str]:
    slots = assign_slots("w", footprints, only_alike=only_alike, keeps_misfits=keeps_misfits)
    return {key: f"{slot.name}: {slot.nbytes}" for key, slot in slots.items()}


def test_alike_units_take_turns_in_two_slots() -> None:
    slots = assigned(units((9,), (4, 2), (4, 2), (8,), (2, 4)))
    assert slots == {
        "1.0": "w 0.0: 4", "1.1": "w 0.1: 2", "2.0": "w 1.0: 4", "2.1": "w 1.1: 2",
        "4.0": "w 0.1: 2", "4.1": "w 0.0: 4",
    }  # fmt: skip


def test_of_two_sets_equally_large_the_one_with_more_bytes_shares() -> None:
    assert set(assigned(units((1,), (1,), (5,), (5,)))) == {"2.0", "3.0"}


def test_unlike_units_share_slots_as_large_as_the_largest() -> None:
    slots = assigned(units((1, 7), (4, 2), (5,)), only_alike=False)
    assert slots == {
        "0.0": "w 0.1: 2", "0.1": "w 0.0: 7", "1.0": "w 1.0: 7", "1.1": "w 1.1: 2", "2.0": "w 0.0: 7",
    }  # fmt: skip


def test_a_unit_around_others_never_shares_but_may_keep() -> None:
    footprints = units((3,), (3,), (3,), within=(0,))
    assert set(assigned(footprints)) == set(assigned(footprints, only_alike=False)) == {"1.0", "2.0"}
    slots = assign_slots("w", footprints, only_alike=True, keeps_misfits=True)
    assert slots["0.0"] == PoolSlot("own 0.0", 3, is_shared=False)


def test_units_without_storages_count_for_nothing() -> None:
    assert assigned(units((), (), (), (2,))) == {"3.0": "w 0.0: 2"}
    assert assigned([]) == assigned(units(())) == {}
