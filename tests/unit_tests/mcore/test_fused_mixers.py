"""Fused weights of gated delta-net and Mamba layers, stored in parts that fit any number of tensor-parallel ranks."""

import itertools
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

from tests.unit_tests.harness.rank_pool import RankPool
from tests.unit_tests.mcore.mixers import Mixers
from tests.unit_tests.mcore.models import BATCH, HIDDEN, SEQUENCE, initialize_groups
from tests.unit_tests.mcore.training import Case, build_optimizer

DELTA_NET, MAMBA = "decoder.layers.0.self_attention.", "decoder.layers.1.mixer."
_QKV, _XBC = {"query": 8, "key": 8, "value": 24}, {"x": 64, "B": 6, "C": 6}
FUSED = {
    DELTA_NET + "in_proj.weight": {**_QKV, "z": 24, "beta": 4, "alpha": 4},
    DELTA_NET + "conv1d.weight": _QKV,
    DELTA_NET + "conv1d.bias": _QKV,
    MAMBA + "in_proj.weight": {"z": 64, **_XBC, "dt": 8},
    MAMBA + "conv1d.weight": _XBC,
    MAMBA + "conv1d.bias": _XBC,
}
#: Weights with the same rows for each head, and weights that ranks cut along another dim or not at all.
HEADS = {
    **{DELTA_NET + name: 4 for name in ("dt_bias", "A_log")},
    **{MAMBA + name: 8 for name in ("dt_bias", "A_log", "D")},
    MAMBA + "norm.weight": 64,
}
COLUMNS = {DELTA_NET + "out_proj.weight": (HIDDEN, 24), MAMBA + "out_proj.weight": (HIDDEN, 64)}
KINDS = ("weight", "exp_avg", "exp_avg_sq")


def numbers(name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """A tensor that is a pure function of its name."""
    return torch.rand(shape, generator=torch.Generator().manual_seed(zlib.crc32(name.encode()))) + 0.5


def of_rank(name: str, kind: str, shape: torch.Size, tp: int, rank: int) -> torch.Tensor:
    """The part of the global tensors of one of `tp` ranks; `shape` is that of its part."""
    label = f"{kind} {name}"
    if name in COLUMNS:
        return numbers(label, COLUMNS[name]).chunk(tp, 1)[rank]
    if name in HEADS:
        return numbers(label, (HEADS[name],)).chunk(tp)[rank]
    if name in FUSED:
        parts = (numbers(f"{label}.{part}", (rows, *shape[1:])) for part, rows in FUSED[name].items())
        return torch.cat([part.chunk(tp)[rank] for part in parts])
    return numbers(label, shape)


def build(tp: int) -> tuple[nn.Module, Any]:
    from megatron_fsdp.mcore import DistributedDataParallelConfig, FullyShardedDataParallel

    initialize_groups(**({} if tp == 1 else {"tensor_model_parallel_size": tp}))
    model = Mixers(tp)
    ddp_config = DistributedDataParallelConfig(data_parallel_sharding_strategy="optim_grads_params")
    units = [type(module) for module in model.modules() if hasattr(module, "in_proj")]
    sharded = FullyShardedDataParallel(model.config, ddp_config, model, units)
    return sharded, build_optimizer(Case(), sharded)


def shards(model: nn.Module, optimizer: Any, tp: int) -> list[tuple[str, torch.Tensor, torch.Tensor]]:
    """(what, this rank's rows, what they should be) of weights and moments."""
    from megatron_fsdp.mcore import unwrap_model

    state = optimizer.fqn_state_dict()["state"]
    found = []
    for name, param in unwrap_model(model).named_parameters():
        spec = param.megatron_fsdp_spec
        for kind in KINDS:
            local = (param if kind == "weight" else state[name][kind]).to_local()
            expected = of_rank(name, kind, spec._part_shape, tp, dist.get_rank() % tp)
            assert expected.shape == spec._part_shape, (name, expected.shape)
            found.append((f"{kind} {name}", local, expected[spec.first_row :][: spec.row_count]))
    return found


def stored_dict(stored: Any, model: nn.Module, optimizer: Any) -> dict[str, Any]:
    return {"model": stored.model(model.state_dict()), "optimizer": stored.optimizer(optimizer.fqn_state_dict())}


def output(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(numbers("input", (SEQUENCE, BATCH, HIDDEN)))


def assert_cuts_inside_parts(model: nn.Module) -> None:
    """The two ranks share each input projection, and not where one part ends and another begins."""
    for name, param in model.named_parameters():
        spec, parts = param.megatron_fsdp_spec, FUSED.get(name.removeprefix("module."), {})
        if "in_proj" in name:
            ends = [*itertools.accumulate(parts.values()), 0]
            assert 0 < spec.row_count < ends[-2] and {spec.first_row, spec.first_row + spec.row_count} - set(ends), name


def save(tp: int, folder: str, in_one_piece: bool = False) -> torch.Tensor:
    from megatron_fsdp.mcore import StoredState

    model, optimizer = build(tp)
    with torch.no_grad():
        for _, local, expected in shards(model, optimizer, tp):
            local.copy_(expected)
    model.load_state_dict(model.state_dict())
    if tp == 1:
        assert_cuts_inside_parts(model)
    stored = StoredState(model, (lambda name: name in FUSED) if in_one_piece else None)
    dcp.save(stored_dict(stored, model, optimizer), checkpoint_id=folder)
    return output(model)


def load(tp: int, folder: str) -> tuple[list[str], list[str], torch.Tensor]:
    """Mistakes after a load, names read in one piece, and the output of the layer that can compute."""
    from megatron_fsdp.mcore import StoredState

    model, optimizer = build(tp)
    with torch.no_grad():
        for _, local, _ in shards(model, optimizer, tp):
            local.zero_()
    there = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    stored = StoredState(model, lambda name: f"model.module.{name}" in there)
    state = stored_dict(stored, model, optimizer)
    dcp.load(state, checkpoint_id=folder)
    optimizer.load_fqn_state_dict(stored.optimizer_from(state["optimizer"], optimizer.fqn_state_dict()))
    model.load_state_dict(model.state_dict())
    wrong = [what for what, local, expected in shards(model, optimizer, tp) if not local.equal(expected)]
    return wrong, stored.tied_to_ranks, output(model)


@pytest.mark.parametrize("tp", [1, 2])
def test_layers_go_on_at_any_tensor_parallel_size(mcore_ranks2: RankPool, tmp_path: Path, tp: int) -> None:
    expected, *_ = mcore_ranks2.run(save, tp, str(tmp_path))
    assert_parts(tmp_path)
    for own in (1, 2):
        for wrong, tied, came in mcore_ranks2.run(load, own, str(tmp_path)):
            assert (wrong, tied) == ([], [])
            torch.testing.assert_close(came, expected)


def assert_parts(folder: Path) -> None:
    """Parts have megatron-core's names and are what they are on one rank; options are of the whole parameter."""
    there = dcp.FileSystemReader(str(folder)).read_metadata().state_dict_metadata
    starts = {"weight": "model.module.", "exp_avg": "optimizer.state.", "exp_avg_sq": "optimizer.state."}
    read = {
        f"{starts[kind]}{name}.{part}" + ("" if kind == "weight" else f".{kind}"): f"{kind} {name}.{part}"
        for name, parts in FUSED.items()
        for part in parts
        for kind in KINDS
    }
    values = {name: torch.empty(there[name].size) for name in read}
    dcp.load(values, checkpoint_id=str(folder), no_dist=True)
    for name, label in read.items():
        assert values[name].equal(numbers(label, values[name].shape)), name
    for name, parts in FUSED.items():
        assert f"model.module.{name}" not in there and f"optimizer.param_to_group_meta.{name}.lr" in there
        assert [there[f"model.module.{name}.{part}"].size[0] for part in parts] == list(parts.values())
        assert all(f"optimizer.state.{name}.{part}.step" in there for part in parts)


@pytest.mark.parametrize("tp", [1, 2])
def test_what_was_saved_in_one_piece_is_read_at_the_same_size(mcore_ranks2: RankPool, tmp_path, tp: int) -> None:
    expected, *_ = mcore_ranks2.run(save, tp, str(tmp_path), True)
    for wrong, tied, came in mcore_ranks2.run(load, tp, str(tmp_path)):
        assert wrong == [] and sorted(tied) == sorted(FUSED)
        assert came.equal(expected)


def names_of_megatron_core() -> dict[str, tuple[int, ...]]:
    from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory

    initialize_groups(tensor_model_parallel_size=2)
    found = {}
    for name, module in Mixers(2).named_modules():
        if name in (DELTA_NET[:-1], MAMBA[:-1]):
            for value in module.sharded_state_dict(prefix=f"{name}.").values():
                pieces = value.build() if isinstance(value, ShardedTensorFactory) else [value]
                found |= {piece.key: piece.global_shape for piece in pieces if hasattr(piece, "global_shape")}
    return found


def test_parts_are_those_that_megatron_core_names(mcore_ranks2: RankPool) -> None:
    theirs = mcore_ranks2.run(names_of_megatron_core)[0]
    rows = {name: shape[0] for name, shape in theirs.items() if name in HEADS or ".weight." in name or ".bias." in name}
    parts = {f"{name}.{part}": count for name, parts in FUSED.items() for part, count in parts.items()}
    assert rows == {**parts, **HEADS}


def check_other_rows() -> None:
    from megatron_fsdp.mcore import StoredState

    model, _ = build(1)
    next(each for each in model.modules() if type(each).__name__ == "MambaMixer").d_state = 4
    StoredState(model)


def test_a_layer_that_fuses_something_else_is_told(mcore_ranks2: RankPool) -> None:
    message = r"mixer.in_proj.weight has 148 rows .* but its layer fuses 152: 64 of z, 64 of x, 8 of B, 8 of C, 8 of dt"
    mcore_ranks2.run_expecting(ValueError, message, check_other_rows)
