"""Unevenly sharded DTensors: where the shards lie, how they come together, how torch's checkpointing sees them."""

import functools
import multiprocessing.reduction
import pickle
import random
import warnings

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from megatron_fsdp import uneven_dtensor as uneven
from megatron_fsdp.dtensor.chunk_metadata import CREATE_CHUNK_LIST, CREATE_WRITE_ITEMS, attached_chunk
from megatron_fsdp.machine.torch_compat import local_tensor, strided_shard
from tests.unit_tests.harness.communication import collectives_heard
from tests.unit_tests.harness.uneven import (
    DTYPES,
    MESH_SHAPES,
    mesh_of,
    random_cuts,
    rows,
    same,
    sharded,
    values,
)


def fuzz_job(mesh_shapes: list[tuple[int, ...]], cases: int) -> None:
    for case in range(cases):
        generator = random.Random(case)
        mesh = mesh_of(*generator.choice(mesh_shapes))
        shape = [generator.choice([0, 1, 2, 5, 7, 16]) for _ in range(generator.randint(1, 3))]
        full = values(shape, generator.choice(DTYPES), seed=case)
        dtensor, box = sharded(full, mesh, random_cuts(generator, len(shape), mesh), seed=case)
        chunk = uneven.gather_and_compute_chunk_metadata(dtensor)
        assert tuple(chunk.offsets) == tuple(low for low, _ in box), (case, chunk, box)
        assert tuple(chunk.sizes) == tuple(local_tensor(dtensor).shape)
        if case % 2:
            uneven.update_uneven_dtensor_chunk_metadata(dtensor)
            assert attached_chunk(dtensor) == chunk == dtensor.__create_chunk_list__()[0]
            uneven.validate_uneven_dtensor(dtensor)
        assert same(uneven.uneven_dtensor_to_full_tensor(dtensor), full), case


@pytest.mark.parametrize("world", [2, 3, 4])
def test_any_cut_of_any_dtype_is_found_and_gathered(rank_pools, world: int) -> None:
    rank_pools[world].run(fuzz_job, MESH_SHAPES[world], 25)


def even_job() -> None:
    full = values((6, 4))
    for placement in (Shard(0), Shard(1), Shard(-1), Replicate()):
        dtensor = distribute_tensor(full, mesh_of(2), [placement])
        uneven.validate_uneven_dtensor(dtensor)
        assert same(uneven.uneven_dtensor_to_full_tensor(dtensor), dtensor.full_tensor())
    scalar = distribute_tensor(torch.tensor(3.0), mesh_of(2), [Replicate()])
    assert uneven.uneven_dtensor_to_full_tensor(scalar).item() == 3.0
    param = torch.nn.Parameter(rows(full, [1, 5]))
    gathered = uneven.uneven_dtensor_to_full_tensor(param)
    assert same(gathered, full) and not gathered.requires_grad


def test_even_shards_replicas_scalars_and_parameters(ranks2) -> None:
    ranks2.run(even_job)


def torch_is_wrong_job() -> list[bool]:
    full = torch.arange(5.0)
    dtensor = rows(full, [5, 0])
    return [same(dtensor.full_tensor(), full), same(uneven.uneven_dtensor_to_full_tensor(dtensor), full)]


def test_torch_alone_gets_uneven_rows_wrong(ranks2) -> None:
    """The reason for this module; if torch ever gets it right, say so in the docs."""
    assert ranks2.run(torch_is_wrong_job) == [[False, True]] * 2


def replicated_job() -> None:
    full = values((7, 3))
    dtensor = rows(full, [0, 6, 1])
    for redistribute in (uneven.redistribute_uneven_dtensor_to_replicated, deprecated):
        result = redistribute(dtensor)
        assert list(result.placements) == [Replicate()] and same(result.to_local(), full)


def deprecated(dtensor: DTensor) -> DTensor:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = uneven.gather_uneven_dtensor_to_full_tensor(dtensor)
    assert [w.category for w in caught if "gather_uneven" in str(w.message)] == [DeprecationWarning]
    return result


def test_replicated_copy_and_its_deprecated_name(ranks3) -> None:
    ranks3.run(replicated_job)


# ---- one exchange for a whole state dict ----


def count_exchanges_job() -> list[int]:
    mesh = mesh_of(2, 2)
    state = {f"w{i}": sharded(values((i + 3, 2)), mesh, {0: [1, 0]}, seed=i)[0] for i in range(20)}
    state |= {f"inner{i}": sharded(values((i + 3, 2)), mesh, {0: [1]}, seed=i)[0] for i in range(20)}
    with collectives_heard() as heard:
        uneven.preprocess_state_dict_for_uneven_dtensor({"model": state})
    return [len(heard), sum(attached_chunk(dtensor) is not None for dtensor in state.values())]


def test_a_state_dict_costs_two_exchanges_per_axis(ranks4) -> None:
    assert ranks4.run(count_exchanges_job) == [[4, 40]] * 4  # of names and of shapes, on both axes


def nested_job() -> None:
    """Any nesting, any insertion order; what is not a DTensor is left alone."""
    full = values((5, 2))
    a, b, c = rows(full, [4, 1]), rows(full, [0, 5]), rows(full, [5, 0])
    entries = [("x", {"a": a, "n": 3}), ("y", [{"b": b}, c]), ("t", torch.ones(2)), ("none", None)]
    state = dict(entries if dist.get_rank() else reversed(entries))
    assert uneven.preprocess_state_dict_for_uneven_dtensor(state) is state
    for dtensor, start in ((a, (0, 4)), (b, (0, 0)), (c, (0, 5))):
        assert attached_chunk(dtensor).offsets[0] == start[dist.get_rank()]


def test_preprocess_finds_nested_dtensors_in_any_order(ranks2) -> None:
    ranks2.run(nested_job)


def different_keys_job() -> None:
    full = values((5, 2))
    state = {"a": rows(full, [4, 1])}
    if dist.get_rank() == 0:
        state["only_here"] = rows(full, [5, 0])
    uneven.preprocess_state_dict_for_uneven_dtensor(state)


def inferred_shape_job() -> None:
    local = torch.ones(dist.get_rank() + 1, 2)
    uneven.update_uneven_dtensor_chunk_metadata(DTensor.from_local(local, mesh_of(2), [Shard(0)], run_check=False))


def wrong_uncut_dim_job() -> None:
    local = torch.ones(2, 3 - dist.get_rank())
    dtensor = DTensor.from_local(local, mesh_of(2), [Shard(0)], run_check=False, shape=(4, 3), stride=(3, 1))
    uneven.update_uneven_dtensor_chunk_metadata(dtensor)


def wrong_total_job() -> None:
    local = torch.ones(2, 3)
    dtensor = DTensor.from_local(local, mesh_of(2), [Shard(0)], run_check=False, shape=(5, 3), stride=(3, 1))
    uneven.update_uneven_dtensor_chunk_metadata(dtensor)


def partial_job() -> None:
    uneven.uneven_dtensor_to_full_tensor(DTensor.from_local(torch.ones(2), mesh_of(2), [Partial()], run_check=False))


def strided_nonsense_job() -> None:
    placements = [strided_shard(0, 3), Shard(0)]
    dtensor = DTensor.from_local(torch.ones(2), mesh_of(1, 2), placements, run_check=False, shape=(4,), stride=(1,))
    uneven.gather_and_compute_chunk_metadata(dtensor)


@pytest.mark.parametrize(
    ("job", "match"),
    [
        (different_keys_job, "hold different DTensors"),
        (inferred_shape_job, "hold different DTensors"),
        (wrong_uncut_dim_job, "no mesh axis cuts"),
        (wrong_total_job, "do not add up"),
        (partial_job, "Expected Shard or Replicate"),
        (strided_nonsense_job, "split factor 3"),
    ],
)
def test_every_rank_refuses_what_cannot_be_right(ranks2, job, match: str) -> None:
    ranks2.run_expecting(ValueError, match, job)


# ---- attached chunks ----


def bad_cover_job(kind: str) -> None:
    rank = dist.get_rank()
    dtensor = rows(values((6, 2)), [3, 3], attach=True)
    if kind == "overlap":
        uneven.attach_chunk_metadata(dtensor, (rank * 2, 0), (3, 2))
    elif kind == "gap":
        dtensor = rows(values((6, 2))[:4], [2, 2])
        dtensor = DTensor.from_local(dtensor.to_local(), mesh_of(2), [Shard(0)], shape=(6, 2), stride=(2, 1))
        uneven.attach_chunk_metadata(dtensor, (rank * 4, 0), (2, 2))
    elif kind == "torch":  # Nothing attached: torch's own idea is put to the test.
        dtensor = rows(values((6, 2)), [5, 1])
    uneven.validate_uneven_dtensor(dtensor)


def test_validate_names_overlaps_gaps_and_wrong_guesses(ranks2) -> None:
    ranks2.run(bad_cover_job, "nothing")
    ranks2.run_expecting(AssertionError, "overlap", bad_cover_job, "overlap")
    ranks2.run_expecting(AssertionError, "uncovered", bad_cover_job, "gap")
    ranks2.run_expecting(AssertionError, "outside", bad_cover_job, "torch")


def bad_attach_job(offsets: tuple, sizes: tuple) -> None:
    uneven.attach_chunk_metadata(rows(values((6, 2)), [3, 3]), offsets, sizes)


def two_chunks_job() -> None:
    dtensor = rows(values((6, 2)), [3, 3], attach=True)
    chunk = attached_chunk(dtensor)
    dtensor.__create_chunk_list__ = lambda: [chunk, chunk]
    uneven.uneven_dtensor_to_full_tensor(dtensor)


def test_attach_refuses_wrong_boxes(ranks2) -> None:
    ranks2.run_expecting(ValueError, "local shape", bad_attach_job, (0, 0), (2, 2))
    ranks2.run_expecting(ValueError, "outside", bad_attach_job, (4, 0), (3, 2))
    ranks2.run_expecting(ValueError, "outside", bad_attach_job, (0,), (3, 2))
    ranks2.run_expecting(ValueError, "exactly one chunk", two_chunks_job)


def copies_job() -> None:
    """A DTensor as asynchronous checkpointing treats it: copied for staging, pickled for another process."""
    from torch.distributed.checkpoint._state_dict_stager import StateDictStager  # noqa: PLC0415

    dtensor = rows(values((6, 2)), [6, 0], attach=True)
    expected = attached_chunk(dtensor), dtensor.__create_write_items__("w", dtensor)
    staged = StateDictStager().stage({"w": dtensor})["w"]
    sent = pickle.loads(multiprocessing.reduction.ForkingPickler.dumps(staged))
    for copy in (staged, sent):
        assert copy is not dtensor and same(copy.to_local(), dtensor.to_local())
        assert (copy.__create_chunk_list__()[0], copy.__create_write_items__("w", copy)) == expected


def test_chunks_survive_staging_and_pickling(ranks2) -> None:
    ranks2.run(copies_job)


def writers_job() -> list[int]:
    """This rank's write items for: Shard x Replicate, Replicate x Shard, Replicate, no elements, an empty shard."""
    mesh = mesh_of(2, 2)
    cuts = [{0: [0]}, {0: [1]}, {}, {0: [0]}]
    tensors = [sharded(values((4, 2)), mesh, c, seed=1)[0] for c in cuts[:3]] + [
        sharded(values((0, 2)), mesh, cuts[3], seed=1)[0],
        rows(values((4, 2)), [4, 0], mesh),
    ]
    for dtensor in tensors:
        uneven.update_uneven_dtensor_chunk_metadata(dtensor)
        assert len(dtensor.__create_chunk_list__()) == len(local_tensor(dtensor).__create_chunk_list__()) == 1
        for owner in (dtensor, local_tensor(dtensor)):
            assert {CREATE_CHUNK_LIST, CREATE_WRITE_ITEMS} <= vars(owner).keys()
    return [len(dtensor.__create_write_items__("w", dtensor)) for dtensor in tensors]


def test_one_replica_writes(ranks4) -> None:
    by_rank = ranks4.run(writers_job)
    assert [list(column) for column in zip(*by_rank, strict=True)] == [
        [1, 0, 1, 0],
        [1, 1, 0, 0],
        [1, 0, 0, 0],
        [1, 0, 0, 0],
        [1, 0, 0, 0],
    ]


# ---- split ----


def split_job(cases: int) -> None:
    mesh = mesh_of(2, 2) if dist.get_world_size() == 4 else mesh_of(dist.get_world_size())
    for case in range(cases):
        generator = random.Random(case)
        shape = [generator.choice([1, 4, 6, 9]) for _ in range(generator.randint(1, 3))]
        full = values(shape, seed=case)
        dtensor, box = sharded(full, mesh, random_cuts(generator, len(shape), mesh), seed=case)
        dim = generator.randint(-len(shape), len(shape) - 1)
        sections: int | list[int] = generator.randint(1, 5)
        if case % 2:
            middle = generator.randint(0, shape[dim])
            sections = [middle, 0, shape[dim] - middle]
        pieces = uneven.split_dtensor(dtensor, sections, dim, update_uneven_dtensor_chunk_meta=case % 3 == 0)
        expected = full.split(sections, dim)
        assert len(pieces) == len(expected)
        storage = local_tensor(dtensor).untyped_storage().data_ptr()
        for piece, part in zip(pieces, expected, strict=True):
            assert piece.shape == part.shape and piece.placements == dtensor.placements
            assert local_tensor(piece).untyped_storage().data_ptr() == storage
            assert case % 3 or attached_chunk(piece) is not None
            assert same(uneven.uneven_dtensor_to_full_tensor(piece), part), (case, sections, dim, box)
            if attached_chunk(piece) is not None:
                uneven.validate_uneven_dtensor(piece)


@pytest.mark.parametrize("world", [2, 4])
def test_split_is_torch_split_of_the_full_tensor(rank_pools, world: int) -> None:
    rank_pools[world].run(split_job, 30)


def split_known_job() -> None:
    """With an attached chunk nothing is communicated: one rank may do it alone."""
    full = torch.arange(12.0).view(6, 2)
    dtensor = rows(full, [5, 1], attach=True)
    if dist.get_rank() == 1:
        first, second = uneven.split_dtensor(dtensor, [3, 3])
        assert first.to_local().shape == (0, 2) and tuple(attached_chunk(first).offsets) == (3, 0)
        assert same(second.to_local(), full[5:]) and tuple(attached_chunk(second).offsets) == (2, 0)
        second.to_local().fill_(-1)
        assert same(dtensor.to_local(), torch.full((1, 2), -1.0))
    for bad in ([3, 2], [7, -1], 0):
        with pytest.raises(RuntimeError, match="split"):
            uneven.split_dtensor(dtensor, bad)
    with pytest.raises(IndexError, match="Dimension out of range"):
        uneven.split_dtensor(dtensor, 3, dim=2)


def test_split_of_a_known_chunk_is_local(ranks2) -> None:
    ranks2.run(split_known_job)


# ---- without ranks ----


def test_only_dtensors_are_accepted() -> None:
    for function in (
        uneven.gather_and_compute_chunk_metadata,
        uneven.update_uneven_dtensor_chunk_metadata,
        uneven.validate_uneven_dtensor,
        uneven.uneven_dtensor_to_full_tensor,
        uneven.redistribute_uneven_dtensor_to_replicated,
        functools.partial(uneven.split_dtensor, split_size_or_sections=1),
    ):
        with pytest.raises(TypeError, match="Expected a DTensor; got Tensor"):
            function(torch.ones(2))


def test_paths_into_a_nested_state_dict() -> None:
    state = {"a": {"b": 1, "c": "x"}, "d": [2, {"e": 3}], 5: 4}
    paths = uneven.filter_unflattened_state_dict(state, visit_condition=lambda value: isinstance(value, int))
    assert paths == [["a", "b"], ["d", 0], ["d", 1, "e"], [5]]
    assert [uneven.get_unflattened_state_dict(state, path) for path in paths] == [1, 2, 3, 4]
    assert uneven.filter_unflattened_state_dict(state) == []
    assert uneven.filter_unflattened_state_dict({"b": 1}, ["a"], lambda value: value == 1) == [["a", "b"]]
    assert uneven.get_unflattened_state_dict(state, []) is state
    for path in (["nothing"], ["a", "b", "c"], ["d", 2]):
        with pytest.raises(KeyError, match="path"):
            uneven.get_unflattened_state_dict(state, path)
