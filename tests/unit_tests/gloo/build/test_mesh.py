"""`FSDPDistributedIndex`: from dimension names to meshes and groups, hybrid, flattened, expert and wrong."""

import functools

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from megatron_fsdp import FSDPDistributedIndex, MixedPrecisionPolicy, fully_shard_model, fully_shard_optimizer
from megatron_fsdp.machine.collectives import Axis
from tests.unit_tests.harness.communication import no_collectives
from tests.unit_tests.harness.mistakes import Mistake, assert_each_raises
from tests.unit_tests.harness.models import TinyMLP, float_batches, square_loss

#: world size, shape of (dp_outer, dp_shard, cp, tp)
SHAPES = {"plain": (2, (1, 2, 1, 1)), "hybrid": (4, (2, 2, 1, 1)), "cp": (4, (1, 2, 2, 1)), "tp": (4, (1, 2, 1, 2))}


@functools.cache
def walkthrough_mesh(kind: str) -> DeviceMesh:
    """Made and flattened as the README's walkthrough does; once per process, because groups cost sockets."""
    mesh = init_device_mesh("cpu", SHAPES[kind][1], mesh_dim_names=("dp_outer", "dp_shard", "cp", "tp"))
    mesh[("dp_outer", "dp_shard")]._flatten("dp")
    mesh[("dp_shard", "cp")]._flatten("dp_shard_cp")
    mesh[("dp_outer", "dp_shard", "cp")]._flatten("hsdp")
    return mesh


@functools.cache
def expert_mesh() -> DeviceMesh:
    """Two outer ranks, of two experts each: an expert's shard dimension has one rank."""
    mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("dp_outer", "dp_shard_cp", "tp"))
    mesh[("dp_outer", "dp_shard_cp")]._flatten("hsdp")
    return mesh


@functools.cache
def mesh_of_ranks(*names, table):
    """A mesh with ranks in this order, and its first two dimensions as one."""
    mesh = DeviceMesh("cpu", torch.tensor(table), mesh_dim_names=names)
    mesh[names[:2]]._flatten("both")
    return mesh


#: Rows ascend and columns do not, the other way round, both, and a grid whose rows are not neighbours.
ROWS, COLUMNS = ((0, 3), (1, 2)), ((0, 1), (3, 2))
CROSSED, INTERLEAVED = ((3, 2), (1, 0)), ((0, 2), (1, 3))
#: Two dimensions that are flattened descend, the third one does not.
FLAT = (((2, 3),), ((0, 1),))


def ranks(group):
    return dist.get_process_group_ranks(group) if group is not None else None


def hybrid_index(**options):
    mesh = walkthrough_mesh("hybrid")
    given = {
        "dp_shard_dim": "dp_shard_cp",
        "dp_outer_dim": "dp_outer",
        "tp_dim": "tp",
        "hybrid_fsdp_group": mesh["hsdp"].get_group(),
    }
    return FSDPDistributedIndex(mesh, **{**given, **options})


def describe(kind, options):
    index = FSDPDistributedIndex(walkthrough_mesh(kind), **options)
    outer, inner = index.axes()
    return {
        "attributes": (index.dp_shard_dim, index.dp_outer_dim, index.tp_dim, index.use_hybrid_fsdp),
        "mesh": index.get_root_mesh() is index.device_mesh is walkthrough_mesh(kind),
        "fsdp": ranks(index.fsdp_group),
        "same": ranks(index.get_fsdp_group()) == ranks(index.get_dp_group()) == ranks(index.fsdp_group),
        "outer": (index.outer_fsdp_group, index.get_outer_fsdp_group(), outer.size),
        "inner": (inner.rank, inner.size),
        "library": set(index.mesh_library),
        "dp_mesh": index.dp_mesh().mesh_dim_names,
        "expert": (index.expt_device_mesh, index.expt_fsdp_group, index.get_root_mesh(True)),
    }


@pytest.mark.parametrize(
    ("kind", "shard_dim", "groups"),
    [
        ("plain", "dp_shard", [[0, 1]] * 2),
        ("cp", "dp_shard_cp", [[0, 1, 2, 3]] * 4),
        ("cp", "dp_shard", [[0, 2], [1, 3]] * 2),
        ("tp", "dp_shard", [[0, 2], [1, 3]] * 2),
    ],
)
def test_an_index_without_an_outer_axis(rank_pools, kind, shard_dim, groups):
    options = {"dp_shard_dim": shard_dim, "tp_dim": "tp"}
    for rank, came in enumerate(rank_pools[SHAPES[kind][0]].run(describe, kind, options)):
        assert came["attributes"] == (shard_dim, None, "tp", False)
        assert came["mesh"] and came["same"] and came["fsdp"] == groups[rank]
        assert came["outer"] == (None, None, 1)
        assert came["inner"] == (groups[rank].index(rank), len(groups[rank]))
        assert came["library"] == {(shard_dim, False), (shard_dim, "tp", False), ("tp", False)}
        assert came["dp_mesh"] == (shard_dim,) and came["expert"] == (None, None, None)


def describe_hybrid(outer_shards):
    index = hybrid_index(hsdp_outer_dp_shard=outer_shards)
    outer, inner = index.axes()
    submeshes = {key: index.get_submesh(key[:-1]).mesh_dim_names for key in index.mesh_library}
    rank = index.get_logical_hybrid_fsdp_rank() if outer_shards else None
    groups = [
        ranks(g) for g in (index.fsdp_group, index.outer_fsdp_group, index.hybrid_fsdp_group, index.get_dp_group())
    ]
    return groups, (outer.rank, outer.size, inner.rank, inner.size), submeshes, rank, index.dp_mesh().shape


@pytest.mark.parametrize("outer_shards", [False, True])
def test_a_hybrid_index(ranks4, outer_shards):
    for rank, (groups, places, submeshes, logical, shape) in enumerate(ranks4.run(describe_hybrid, outer_shards)):
        outer, inner = divmod(rank, 2)
        assert groups == [[2 * outer, 2 * outer + 1], [inner, inner + 2], [0, 1, 2, 3], [0, 1, 2, 3]]
        assert places == (outer, 2, inner, 2) and shape == (2, 2)
        o, s, t = "dp_outer", "dp_shard_cp", "tp"
        assert set(submeshes) == {(t, False), (o, s, t, False), (s, t, False), (o, s, False), (s, False)}
        assert all(names == key[:-1] for key, names in submeshes.items())
        # Shards are numbered inner-major: the outer axis cuts what the inner one has cut.
        assert logical == (inner * 2 + outer if outer_shards else None)


def describe_expert():
    index = hybrid_index(expt_device_mesh=expert_mesh(), hybrid_fsdp_expt_group=expert_mesh()["hsdp"].get_group())
    outer, inner = index.axes(is_expert=True)
    groups = [index.expt_fsdp_group, index.get_fsdp_group(True), index.expt_outer_fsdp_group]
    groups += [index.get_outer_fsdp_group(True), index.hybrid_fsdp_expt_group, index.get_dp_group(True)]
    dims = index.get_submesh(("dp_outer", "dp_shard_cp"), is_expert_parallel=True).shape
    return (
        [ranks(group) for group in groups],
        (outer.size, inner.size),
        dims,
        index.get_root_mesh(True) is expert_mesh(),
    )


def test_expert_parameters_have_a_mesh_of_their_own(ranks4):
    for rank, (groups, sizes, dims, is_root) in enumerate(ranks4.run(describe_expert)):
        peers = [rank % 2, rank % 2 + 2]
        assert groups == [[rank], [rank], peers, peers, peers, peers]
        assert sizes == (2, 1) and dims == (2, 1) and is_root


def describe_gather_groups():
    mesh = walkthrough_mesh("plain")
    twin = _twin()
    index = FSDPDistributedIndex(mesh, dp_shard_dim="dp_shard", fsdp_group_ag=twin)
    inner = index.axes()[1]
    return (
        index.get_fsdp_group(independent_all_gather=True) is twin,
        index.get_fsdp_group() is index.fsdp_group is inner.group,
        inner.gather_group is twin,
        Axis.of(index.fsdp_group).gather_group is index.fsdp_group,
    )


@functools.cache
def _twin():
    return dist.new_group([0, 1])


def test_gathers_may_have_a_communicator_of_their_own(ranks2):
    assert ranks2.run(describe_gather_groups) == [(True,) * 4] * 2


def walk_through(outer_strategy):
    """The README's walkthrough on a hybrid mesh: from the meta device through two steps."""
    mesh = walkthrough_mesh("hybrid")
    with torch.device("meta"):
        module = TinyMLP()
    model = fully_shard_model(
        module,
        fsdp_unit_modules=["tests.unit_tests.harness.models.MLPBlock"],
        device_mesh=mesh,
        dp_shard_dim="dp_shard_cp",
        dp_outer_dim="dp_outer",
        tp_dim="tp",
        hybrid_fsdp_group=mesh["hsdp"].get_group(),
        zero_dp_strategy=3,
        outer_dp_sharding_strategy=outer_strategy,
        init_model_with_meta_device=True,
        mixed_precision_policy=MixedPrecisionPolicy(),
        sync_model_each_microbatch=True,
        preproc_state_dict_for_dcp_ckpt=True,
    )
    optimizer = fully_shard_optimizer(torch.optim.Adam(model.parameters(), lr=1e-2))
    before = [param.full_tensor() for param in model.parameters()]
    plain = TinyMLP()
    plain.load_state_dict({name: param.full_tensor() for name, param in model.module.named_parameters()})
    reference = torch.optim.Adam(plain.parameters(), lr=1e-2)
    for ranks in float_batches(2, 1, 4):
        inputs, target = ranks[0][dist.get_rank()]
        square_loss(model(inputs), target).backward()
        optimizer.step()
        optimizer.zero_grad()
        for inputs, target in ranks[0]:
            (square_loss(plain(inputs), target) / 4).backward()
        reference.step()
        reference.zero_grad()
    after = [param.full_tensor() for param in model.parameters()]
    torch.testing.assert_close(after, [param.detach() for param in plain.parameters()], rtol=1e-5, atol=1e-6)
    return not any(map(torch.equal, before, after)), [param.to_local().numel() for param in model.parameters()]


@pytest.mark.parametrize("outer_strategy", [0, "optim"])
def test_the_walkthrough_trains(ranks4, outer_strategy):
    results = ranks4.run(walk_through, outer_strategy)
    total = sum(param.numel() for param in TinyMLP().parameters())
    assert all(has_moved for has_moved, _ in results)
    # The optimizer's shards are one of two, or of four where the outer axis cuts them too.
    assert sum(sum(numels) for _, numels in results) == total * (1 if outer_strategy == "optim" else 2)


def grid(table, *, tp_dim=False):
    """Arguments: a two-dimensional mesh of which both are used."""
    mesh = mesh_of_ranks("outer", "inner", table=table)
    if tp_dim:
        return {"device_mesh": mesh, "dp_shard_dim": "inner", "tp_dim": "outer"}
    group = mesh["both"].get_group()
    return {"device_mesh": mesh, "dp_shard_dim": "inner", "dp_outer_dim": "outer", "hybrid_fsdp_group": group}


def make_wrong(what):
    mesh = walkthrough_mesh("hybrid")
    hsdp, outer, world = mesh["hsdp"].get_group(), mesh["dp_outer"].get_group(), mesh["hsdp"].get_group()
    plain = {"device_mesh": mesh, "dp_shard_dim": "dp_shard"}
    wrong = {
        "no shard dim": {"device_mesh": mesh},
        "unknown shard dim": {**plain, "dp_shard_dim": "fsdp"},
        "unknown tp dim": {**plain, "tp_dim": "model"},
        "outer alone": {**plain, "dp_outer_dim": "dp_outer"},
        "group alone": {**plain, "hybrid_fsdp_group": hsdp},
        "unknown outer dim": {**plain, "dp_outer_dim": "dp_inter", "hybrid_fsdp_group": hsdp},
        "wrong hybrid group": {**plain, "dp_outer_dim": "dp_outer", "hybrid_fsdp_group": outer},
        "wrong gather group": {**plain, "fsdp_group_ag": world},
        "expert gather group alone": {**plain, "expt_fsdp_group_ag": outer},
        "expert mesh without the dim": {**plain, "expt_device_mesh": expert_mesh()},
        "expert mesh without its hybrid group": {
            **plain,
            "dp_shard_dim": "dp_shard_cp",
            "dp_outer_dim": "dp_outer",
            "hybrid_fsdp_group": hsdp,
            "expt_device_mesh": expert_mesh(),
        },
        "wrong expert hybrid group": {
            **plain,
            "dp_shard_dim": "dp_shard_cp",
            "dp_outer_dim": "dp_outer",
            "hybrid_fsdp_group": hsdp,
            "hybrid_fsdp_expt_group": hsdp,
            "expt_device_mesh": expert_mesh(),
        },
        "strange experts": {
            "device_mesh": walkthrough_mesh("cp"),
            "dp_shard_dim": "dp_shard",
            "expt_device_mesh": mesh,
        },
        "hybrid group of other ranks": {
            "device_mesh": walkthrough_mesh("cp"),
            "dp_shard_dim": "dp_shard",
            "dp_outer_dim": "dp_outer",
            "hybrid_fsdp_group": walkthrough_mesh("cp")["cp"].get_group(),
        },
        "descending columns": grid(ROWS),
        "descending rows": grid(COLUMNS, tp_dim=True),
        "descending everywhere": grid(CROSSED),
        "descending experts": {
            **grid(INTERLEAVED),
            "expt_device_mesh": mesh_of_ranks("outer", "inner", table=COLUMNS),
            "hybrid_fsdp_expt_group": hsdp,
        },
        "flattened across the grid": {
            "device_mesh": mesh_of_ranks("outer", "inner", "tp", table=FLAT),
            "dp_shard_dim": "both",
            "tp_dim": "tp",
        },
        "expert hybrid group alone": {**plain, "hybrid_fsdp_expt_group": hsdp},
        "expert hybrid group without its mesh": {**grid(INTERLEAVED), "hybrid_fsdp_expt_group": hsdp},
        "same dim twice": {**plain, "dp_outer_dim": "dp_shard", "hybrid_fsdp_group": hsdp},
        "outer behind shard": {
            "device_mesh": mesh,
            "dp_shard_dim": "dp_outer",
            "dp_outer_dim": "dp_shard",
            "hybrid_fsdp_group": hsdp,
        },
    }
    with no_collectives():
        FSDPDistributedIndex(**wrong[what])


MISTAKES = [
    ("no shard dim", "dp_shard_dim is None; name the dimension"),
    ("unknown shard dim", r"dp_shard_dim='fsdp' is not a dimension of device_mesh, which has \('dp_outer', "),
    ("unknown tp dim", "tp_dim='model' is not a dimension of device_mesh"),
    ("outer alone", "dp_outer_dim is given without hybrid_fsdp_group; hybrid sharding needs both"),
    ("group alone", "hybrid_fsdp_group is given without dp_outer_dim"),
    ("unknown outer dim", "dp_outer_dim='dp_inter' is not a dimension"),
    ("wrong hybrid group", r"hybrid_fsdp_group has ranks .*; expected \[0, 1, 2, 3\]: all ranks of 'dp_outer' x 'dp_s"),
    ("wrong gather group", "fsdp_group_ag must hold the same ranks"),
    ("expert gather group alone", "expt_fsdp_group_ag must hold the same ranks"),
    ("expert mesh without the dim", "dp_shard_dim='dp_shard' is not a dimension of expt_device_mesh"),
    ("expert mesh without its hybrid group", "expt_device_mesh and dp_outer_dim need hybrid_fsdp_expt_group"),
    ("wrong expert hybrid group", r"hybrid_fsdp_expt_group has ranks \[0, 1, 2, 3\]; expected \[\d, \d\]: all"),
    ("strange experts", r"experts over ranks \[\d, \d\], of which device_mesh's data-parallel ranks \[\d, \d\] must"),
    ("hybrid group of other ranks", r"hybrid_fsdp_group has ranks \[\d, \d\]; expected \[\d, \d\]: all ranks of"),
    ("outer behind shard", r"has no sub-mesh of \('dp_shard', 'dp_outer'\); the outer dimension must come first"),
    ("descending columns", r"device_mesh has ranks \[3, 2\] along 'outer', in this order; .*must ascend along each"),
    ("descending rows", r"device_mesh has ranks \[3, 2\] along 'inner'.*init_device_mesh\('cpu', \(2, 2\), mesh_dim"),
    ("descending everywhere", r"device_mesh has ranks \[3, 1\] along 'outer'"),
    ("descending experts", r"expt_device_mesh has ranks \[3, 2\] along 'inner'"),
    ("flattened across the grid", r"device_mesh has ranks \[2, 0\] along 'both'"),
    ("expert hybrid group alone", "hybrid_fsdp_expt_group is given without dp_outer_dim and expt_device_mesh"),
    ("expert hybrid group without its mesh", "hybrid_fsdp_expt_group is given without expt_device_mesh; it is all"),
    ("same dim twice", "dp_shard_dim and dp_outer_dim are both 'dp_shard'"),
]


def test_mistakes_in_the_mesh_are_named_on_every_rank(ranks4):
    assert_each_raises(ranks4, [Mistake(make_wrong, (what,), ValueError, message) for what, message in MISTAKES])


def unknown_submesh(has_tp):
    index = FSDPDistributedIndex(walkthrough_mesh("plain"), dp_shard_dim="dp_shard", tp_dim="tp" if has_tp else None)
    index.get_submesh("tp" if not has_tp else ("tp", "dp_shard"))


def test_a_submesh_that_was_not_registered_is_an_error_with_a_hint(ranks2):
    ranks2.run_expecting(ValueError, r"no sub-mesh of dimensions \('tp',\).*pass tp_dim", unknown_submesh, False)
    ranks2.run_expecting(ValueError, r"no sub-mesh of dimensions \('tp', 'dp_shard'\); known", unknown_submesh, True)


def undefined_rank():
    hybrid_index().get_logical_hybrid_fsdp_rank()


def test_there_is_no_global_shard_number_where_the_outer_axis_replicates(ranks4):
    ranks4.run_expecting(RuntimeError, "only when outer_dp_sharding_strategy is 'optim'", undefined_rank)
