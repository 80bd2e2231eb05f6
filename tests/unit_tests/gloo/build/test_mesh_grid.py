"""Facts of a mesh beside its names: the order of its ranks, dimensions that nothing names, and experts' meshes."""

import logging

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from megatron_fsdp import FSDPDistributedIndex, fully_shard_model, fully_shard_optimizer
from tests.unit_tests.gloo.build.test_mesh import INTERLEAVED, ROWS, expert_mesh, mesh_of_ranks, walkthrough_mesh
from tests.unit_tests.harness.communication import no_collectives
from tests.unit_tests.harness.models import TinyMLP


def untagged_experts():
    mesh = walkthrough_mesh("hybrid")
    experts = {"expt_device_mesh": expert_mesh(), "hybrid_fsdp_expt_group": expert_mesh()["hsdp"].get_group()}
    group = mesh["hsdp"].get_group()
    with no_collectives():
        fully_shard_model(TinyMLP(), mesh, "dp_shard_cp", "dp_outer", hybrid_fsdp_group=group, **experts)


def test_a_mesh_for_experts_without_any_is_a_mistake(ranks4):
    message = (
        "over 2 data-parallel ranks and device_mesh everything else over 4, but no parameter is .*allreduce = False"
    )
    ranks4.run_expecting(ValueError, message, untagged_experts)


def whole_weights(table, shard_dim):
    """From a mesh of which one dimension is used, whatever its order; the first of its ranks gets them."""
    if isinstance(table[0], int):
        mesh = DeviceMesh("cpu", list(table), mesh_dim_names=("inner",))
    else:
        mesh = mesh_of_ranks("outer", "inner", table=table)
    torch.manual_seed(dist.get_rank())
    module = TinyMLP()
    own = {name: value.clone() for name, value in module.state_dict().items()}
    model = fully_shard_model(module, mesh, shard_dim)
    optimizer = fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.0))
    model(torch.ones(2, 6)).sum().backward()
    optimizer.step()
    return own, {name: param.full_tensor() for name, param in model.named_parameters()}, model.full_state_dict()


@pytest.mark.parametrize(("table", "shard_dim"), [((3, 1, 0, 2), "inner"), (INTERLEAVED, "both"), (ROWS, "outer")])
def test_the_ranks_of_a_dimension_alone_may_have_any_order(ranks4, table, shard_dim):
    results = ranks4.run(whole_weights, table, shard_dim)
    groups = [[0, 1], [2, 3]] if shard_dim == "outer" else [[0, 1, 2, 3]]
    for group in groups:
        expected = results[group[0]][0]
        for rank in group:
            _, gathered, whole = results[rank]
            assert all(torch.equal(value, expected[name.removeprefix("module.")]) for name, value in gathered.items())
            assert whole.keys() == (expected.keys() if rank == group[0] else set())
            assert all(torch.equal(value, expected[name]) for name, value in whole.items())


def warnings_of(cases):
    """Log lines while each index is made."""
    told = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: told[-1].append(record.getMessage())
    logger = logging.getLogger("megatron_fsdp")
    logger.addHandler(handler)
    try:
        for kind, submesh, options in cases:
            told.append([])
            mesh = walkthrough_mesh(kind)
            if "dp_outer_dim" in options:
                options = {**options, "hybrid_fsdp_group": mesh["hsdp"].get_group()}
            FSDPDistributedIndex(mesh[submesh] if submesh else mesh, **options)
    finally:
        logger.removeHandler(handler)
    return told


def test_a_dimension_that_no_argument_names_is_warned_about_once(ranks4):
    shard, cp, tp = {"dp_shard_dim": "dp_shard"}, {"dp_shard_dim": "dp_shard_cp"}, {"tp_dim": "tp"}
    forgotten = [("hybrid", None, shard, "dp_outer"), ("cp", None, shard, "cp"), ("tp", None, cp, "tp")]
    named = [
        ("hybrid", None, {**shard, "dp_outer_dim": "dp_outer"}),
        ("hybrid", "dp_shard", shard),
        ("cp", None, cp),
        ("cp", None, {"dp_shard_dim": "hsdp"}),
        ("tp", None, {**cp, **tp}),
        ("tp", ("dp_shard", "tp"), {**shard, **tp}),
    ]
    for rank, told in enumerate(ranks4.run(warnings_of, [case[:3] for case in forgotten] + named)):
        assert not any(told[len(forgotten) :]), told
        for (*_, dim), messages in zip(forgotten, told, strict=False):
            assert len(messages) == (rank == 0), messages
            for message in messages:
                assert message.startswith(f"dimension '{dim}' of device_mesh has 2 ranks")
                assert "start from and train 2 different models" in message and "hybrid_fsdp_group" in message
