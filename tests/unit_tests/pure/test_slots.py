"""Double buffers: the storages that alternate in them."""

from unittest import mock

from megatron_fsdp.build.storage import plan_buffers
from megatron_fsdp.config import EngineConfig
from megatron_fsdp.plan.double_buffer import Needs, PersistentBuffer, assign_buffers


def units(*sizes: tuple[int, ...]) -> list[Needs]:
    """Needs of units 0, 1, ... with storages "0.0", "0.1", ..."""
    return [tuple((f"{unit}.{i}", nbytes) for i, nbytes in enumerate(each)) for unit, each in enumerate(sizes)]


def assigned(needs: list[Needs], *, only_alike: bool = True) -> dict[str, str]:
    buffers = assign_buffers("w", needs, only_alike=only_alike)
    return {key: f"{buffer.name}: {buffer.nbytes}" for key, buffer in buffers.items()}


def test_alike_units_alternate_in_two_buffers() -> None:
    assert assigned(units((9,), (4, 2), (4, 2), (8,), (2, 4))) == {
        "1.0": "w 0.0: 4", "1.1": "w 0.1: 2", "2.0": "w 1.0: 4", "2.1": "w 1.1: 2",
        "4.0": "w 0.1: 2", "4.1": "w 0.0: 4",
    }  # fmt: skip


def test_of_two_sets_equally_large_the_one_with_more_bytes_shares() -> None:
    assert set(assigned(units((1,), (1,), (5,), (5,)))) == {"2.0", "3.0"}


def test_unlike_units_share_buffers_as_large_as_the_largest() -> None:
    assert assigned(units((1, 7), (4, 2), (5,)), only_alike=False) == {
        "0.0": "w 0.1: 2", "0.1": "w 0.0: 7", "1.0": "w 1.0: 7", "1.1": "w 1.1: 2", "2.0": "w 0.0: 7",
    }  # fmt: skip


def test_units_without_storages_count_for_nothing() -> None:
    assert assigned(units((), (), (), (2,))) == {"3.0": "w 0.0: 2"}
    assert assigned([]) == assigned(units(())) == assigned([], only_alike=False) == {}


def built_unit(fqn: str) -> mock.Mock:
    """A unit of one group whose gathered weights take 3 bytes, and whose gradients none."""
    group = mock.Mock(weight_key=f"{fqn}.0", gathered_nbytes=3, main_grad=None)
    unit = mock.Mock(groups=[group], is_root=not fqn)
    unit.fqn = fqn
    return unit


def test_a_unit_around_others_never_shares_but_may_keep() -> None:
    nested = [built_unit(fqn) for fqn in ("outer", "outer.first", "outer.second")]
    for option in ("fsdp_double_buffer", "megatron_fsdp_max_pool_double_buffer"):
        buffers = plan_buffers(nested, EngineConfig(**{option: True}))
        assert set(buffers) == {"outer.first.0", "outer.second.0"}
    keeping = EngineConfig(fsdp_double_buffer=True, fsdp_db_use_persist_buf_on_alloc_fail=True)
    buffers = plan_buffers(nested, keeping)
    assert buffers["outer.0"] == PersistentBuffer("own outer.0", 3, is_shared=False)
