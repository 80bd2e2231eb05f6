"""Tensor-parallel parameters: where they lie, their state dicts and checkpoints, and what is refused."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module

from megatron_fsdp import uneven_dtensor
from megatron_fsdp.dtensor.chunk_metadata import attached_chunk
from megatron_fsdp.machine.torch_compat import strided_shard
from tests.unit_tests.harness.communication import no_collectives
from tests.unit_tests.harness.mistakes import Mistake, assert_each_raises
from tests.unit_tests.harness.tensor_parallel import (
    FeedForward,
    SequenceParallelLM,
    TaggedMLP,
    mesh_of,
    parallelize_lm,
    parallelize_tagged,
    shard_over,
    whole,
)

VOCAB = 20
#: Of (data, tensor-parallel) ranks; the third is an outer data-parallel axis in front.
Sizes = tuple[int, int, int | None]


class Mixed(nn.Module):
    """DTensors of all kinds, plain tensors with tags, and plain ones without."""

    def __init__(self) -> None:
        super().__init__()
        self.lm = SequenceParallelLM(VOCAB)
        self.gated = TaggedMLP(VOCAB, 12)
        self.scale = nn.Parameter(torch.rand(VOCAB))
        self.register_buffer("shift", torch.rand(VOCAB))
        for param in self.gated.parameters():
            nn.init.normal_(param, std=0.1)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.gated(self.lm(tokens)) * self.scale + self.shift


def parallelize(model: Mixed, mesh) -> None:
    parallelize_lm(model.lm, mesh)
    parallelize_tagged(model, mesh)


def build(seed: int) -> Mixed:
    torch.manual_seed(seed)
    return Mixed()


def sharded(sizes: Sizes, seed: int = 0, **options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    from megatron_fsdp import fully_shard_optimizer

    options = {"fsdp_unit_modules": [FeedForward, TaggedMLP], "sync_model_each_microbatch": True, **options}
    model = shard_over(mesh_of(*sizes), build(seed), parallelize, **options)
    return model, fully_shard_optimizer(torch.optim.AdamW(model.parameters(), lr=0.01))


def train_a_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    tokens = torch.arange(24).view(2, 12) % VOCAB
    nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
    optimizer.step()


def whole_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Weights, buffers and optimizer state in full. **Collective.**"""
    found = dict(model.module.state_dict())
    for index, state in optimizer.state_dict()["state"].items():
        found.update({f"{index}.{key}": value for key, value in state.items()})
    return {key: v.full_tensor() if isinstance(v, DTensor) else v.clone() for key, v in found.items()}


PLACED = {
    "lm.embedding.weight": (strided_shard(0, 2), Shard(0)),
    "lm.blocks.0.norm.weight": (Shard(0), Replicate()),
    "lm.blocks.0.up.weight": (strided_shard(0, 2), Shard(0)),
    "lm.blocks.0.up.bias": (strided_shard(0, 2), Shard(0)),
    "lm.blocks.0.down.weight": (Shard(0), Shard(1)),
    "lm.blocks.0.down.bias": (Shard(0), Replicate()),
    "gated.fc1": (strided_shard(0, 2), Shard(0)),
    "gated.fc2": (Shard(0), Shard(1)),
    "scale": (Shard(0), Replicate()),
}


def look(sizes: Sizes) -> dict[str, Any]:
    model, _ = sharded(sizes)
    expected = {name: param.detach() for name, param in build(0).named_parameters()}
    state = model.module.state_dict()
    for name, param in model.module.named_parameters():
        assert param.shape == expected[name].shape, name
        assert torch.equal(param.full_tensor(), expected[name]), name
        assert torch.equal(
            state[name].redistribute(placements=[Replicate()] * param.device_mesh.ndim).to_local(), expected[name]
        )
        assert torch.equal(param.megatron_fsdp_spec.cut(expected[name]), param.to_local()), name
        if name == "gated.fc1":  # several boxes on some ranks
            continue
        assert torch.equal(uneven_dtensor.uneven_dtensor_to_full_tensor(state[name]), expected[name]), name
        uneven_dtensor.validate_uneven_dtensor(state[name])
        assert uneven_dtensor.gather_and_compute_chunk_metadata(param) == attached_chunk(state[name]), name
    return {name: model.module.get_parameter(name).placements for name in PLACED}


def test_parameters_name_both_axes(ranks4):
    assert ranks4.run(look, (2, 2, None)) == [PLACED] * 4
    outer = [rank["lm.embedding.weight"] for rank in ranks4.run(look, (1, 2, 2))]
    assert outer == [(Replicate(), Replicate(), Shard(0))] * 4


SAVERS_AND_LOADERS: list[tuple[Sizes, list[Sizes]]] = [
    ((2, 2, None), [(4, 1, None), (1, 4, None), (1, 2, 2)]),
    ((4, 1, None), [(2, 2, None), (1, 4, None)]),
    ((1, 4, None), [(2, 2, None)]),
]


def save_and_load(saver: Sizes, loaders: list[Sizes], folder: str) -> None:
    model, optimizer = sharded(saver)
    train_a_step(model, optimizer)
    with no_collectives():
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    dcp.save(state, checkpoint_id=folder)
    saved = whole_state(model, optimizer)
    for loader in loaders:
        model, optimizer = sharded(loader, seed=7)
        with no_collectives():
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        dcp.load(state, checkpoint_id=folder)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        came = whole_state(model, optimizer)
        assert came.keys() == saved.keys()
        wrong = [key for key, value in saved.items() if not torch.equal(came[key], value)]
        assert not wrong, (saver, loader, wrong)
        train_a_step(model, optimizer)


@pytest.mark.parametrize(("saver", "loaders"), SAVERS_AND_LOADERS)
def test_a_checkpoint_loads_at_other_sizes_of_both_axes(ranks4, tmp_path, saver, loaders):
    ranks4.run(save_and_load, saver, loaders, str(tmp_path))


def load_full() -> None:
    """A whole model's state dict and optimizer state, as one process writes them."""
    plain = build(3)
    adam = torch.optim.AdamW(plain.parameters(), lr=0.01)
    tokens = torch.arange(24).view(2, 12) % VOCAB
    nn.functional.cross_entropy(plain(tokens).flatten(0, 1), tokens.flatten()).backward()
    adam.step()
    model, optimizer = sharded((2, 2, None))
    with no_collectives():
        model.module.load_state_dict(plain.state_dict())
        optimizer.load_state_dict(copy.deepcopy(adam.state_dict()))
    came = whole_state(model, optimizer)
    assert all(torch.equal(came[name], value) for name, value in plain.state_dict().items())
    for index, state in adam.state_dict()["state"].items():
        assert all(torch.equal(came[f"{index}.{key}"], value) for key, value in state.items())


def test_full_tensors_are_cut_both_ways(ranks4):
    ranks4.run(load_full)


def edit_in_full() -> None:
    model, _ = sharded((2, 2, None))
    before = {name: param.full_tensor() for name, param in model.module.named_parameters()}
    with model.full_params():
        for name, param in model.module.named_parameters():
            assert isinstance(param, DTensor) == (name.startswith("lm.")), name
            with torch.no_grad():
                param.mul_(2.0)
    for name, param in model.module.named_parameters():
        assert torch.equal(param.full_tensor(), 2.0 * before[name]), name
    model.full_state_dict()


def test_parts_may_be_edited_in_full_and_are_not_taken_for_whole_models(ranks4):
    ranks4.run_expecting(NotImplementedError, "tensor-parallel or expert-parallel ranks hold other parts", edit_in_full)


def save_a_copy(folder: str) -> None:
    model, _ = sharded((1, 2, None), zero_dp_strategy=0)
    dcp.save(copy.deepcopy(model.state_dict()), checkpoint_id=folder)


def test_a_copy_of_a_shard_in_pieces_is_not_saved(ranks2, tmp_path):
    """It would have to find its pieces in memory that it does not know."""
    ranks2.run_expecting(CheckpointException, "this shard was copied away from its model", save_a_copy, str(tmp_path))


def shard_linear(what: str) -> None:
    from megatron_fsdp import fully_shard_model

    dp, tp = (1, 2) if what != "whole" else (2, 1)
    mesh = mesh_of(dp, tp)
    torch.manual_seed(dist.get_rank() if what == "seeds" else 0)
    model = nn.Linear(5 if what == "uneven" else 4, 4)
    options = {"tp_dim": "tp"}
    if what == "no tp_dim":
        options = {}
    if what in ("no tp_dim", "two axes", "partial"):
        over, placed = (mesh["tp"], [Shard(0)]) if what == "no tp_dim" else (mesh, [Replicate(), Shard(0)])
        model.weight = nn.Parameter(distribute_tensor(model.weight.data, over, placed))
    if what == "partial":
        model.weight = nn.Parameter(DTensor.from_local(torch.ones(4, 4), mesh["tp"], [Partial()]))
    if what == "uneven":
        parallelize_module(model, mesh["tp"], RowwiseParallel())
    if what in ("no such dim", "stride"):
        model.bias.tensor_model_parallel, model.bias.partition_dim = True, int(what == "no such dim")
        model.bias.partition_stride = 3
    fully_shard_model(model, device_mesh=mesh, dp_shard_dim="dp", **options)


def shard_over_an_axis_that_holds_the_other() -> None:
    from megatron_fsdp import fully_shard_model

    mesh = dist.init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    mesh._flatten("all")
    fully_shard_model(nn.Linear(4, 4), device_mesh=mesh, dp_shard_dim="all", tp_dim="tp")


MISTAKES = [
    ("no tp_dim", "weight is a DTensor; pass tp_dim"),
    ("two axes", "weight is a DTensor on .*expected one on the tensor-parallel dimension alone.*device_mesh.tp_dim"),
    ("partial", "weight is a DTensor placed as .*expected Replicate or Shard"),
    ("uneven", "weight of shape .4, 5. is cut in dim 1 over 2 tensor-parallel ranks, which does not give them equal"),
    ("no such dim", "bias of shape .4,. has no dim 1, over which its tags say it is split"),
    ("stride", "bias has partition_stride=3, which does not divide dim 0"),
    ("seeds", "weight, bias should be whole on every tensor-parallel rank, but their values differ"),
]


def test_what_cannot_be_described_is_refused_on_every_rank(ranks2):
    assert_each_raises(
        ranks2,
        [Mistake(shard_linear, (what,), ValueError, message) for what, message in MISTAKES]
        + [
            Mistake(shard_over_an_axis_that_holds_the_other, (), ValueError, "no sub-mesh of .'all', 'tp'"),
        ],
    )


def load_parts() -> None:
    """Tensor-parallel parts are not whole tensors, whatever their shape suggests."""
    model, _ = sharded((1, 2, None))
    state = dict(model.module.state_dict())
    mesh = mesh_of(1, 2)["tp"]
    state["lm.head.weight"] = distribute_tensor(state["lm.head.weight"].full_tensor(), mesh, [Shard(1)])
    model.module.load_state_dict(state)


def test_tensors_that_lie_otherwise_are_refused(ranks2):
    ranks2.run_expecting(ValueError, "lm.head.weight of shape .20, 8. has .20, 4. here", load_parts)


def infinite_norms() -> list[float]:
    model, optimizer = sharded((2, 2, None))
    tokens = torch.arange(24).view(2, 12) % VOCAB
    nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
    grads = whole(model, "grad").values()
    expected = [max(float(grad.abs().max()) for grad in grads), float(sum(grad.abs().sum() for grad in grads))]
    came = [float(model.clip_grad_norm_(1e9, norm_type)) for norm_type in (float("inf"), 1.0)]
    by_torch = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9).full_tensor()
    came.append(float(by_torch))
    expected.append(float(torch.stack([grad.norm() for grad in grads]).norm()))
    torch.testing.assert_close(came, expected)
    return came


def test_norms_count_shards_once_and_copies_once(ranks4):
    first, *others = ranks4.run(infinite_norms)
    assert all(other == first for other in others)
