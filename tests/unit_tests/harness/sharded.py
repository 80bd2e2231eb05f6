"""The engine's side of a parity test: trains on shards what `reference.train_reference` trains whole.

A rank hands back its pieces; the test puts them together. That costs no collective (they are what is slow on gloo), and
pieces that do not tile a parameter exactly are found.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from tests.unit_tests.harness.models import Batches
from tests.unit_tests.harness.reference import DtypePolicy, Recipe, StepRecord, grad_norm


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sharding:
    """Options of sharding a model."""

    strategy: int | str = 3
    units: tuple[type | str, ...] | None = None
    outer: int | str | None = None
    """Strategy of an outer axis of two ranks; None: there is no outer axis."""
    is_poisoned: bool = True
    """Fill storage with NaN when it is taken and when it is given back, in place of freeing it."""
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Further arguments of `fully_shard_model`."""

    @property
    def reduces_each_microbatch(self) -> bool:
        """As the engine's table says."""
        from tests.unit_tests.harness.strategies import reduces_each_microbatch

        return reduces_each_microbatch(self.strategy)


@dataclasses.dataclass(frozen=True)
class Piece:
    """This rank's elements of a flattened parameter, from element `start` on."""

    start: int
    values: torch.Tensor

    def __reduce__(self) -> tuple:
        # As bytes: there are thousands of them, and a tensor takes long to travel.
        return _unpacked, (self.start, self.values.dtype, self.values.view(torch.uint8).numpy().tobytes())


def _unpacked(start: int, dtype: torch.dtype, raw: bytes) -> Piece:
    return Piece(start, torch.frombuffer(bytearray(raw), dtype=dtype) if raw else torch.empty(0, dtype=dtype))


@dataclasses.dataclass(frozen=True)
class RankStep:
    """One optimizer step as one rank sees it."""

    losses: list[float]
    """By micro-batch."""
    grads: dict[str, Piece]
    weights: dict[str, Piece]


# ---- in a rank ----


@functools.cache
def flat_mesh() -> DeviceMesh:
    """All ranks in one dimension; made once per process, because groups cost sockets."""
    return init_device_mesh(_device_type(), (dist.get_world_size(),), mesh_dim_names=("dp",))


@functools.cache
def hybrid_mesh() -> DeviceMesh:
    """Two outer ranks times the rest."""
    return init_device_mesh(_device_type(), (2, dist.get_world_size() // 2), mesh_dim_names=("outer", "dp"))


def _device_type() -> str:
    return "cuda" if dist.get_backend() == "nccl" else "cpu"


@contextlib.contextmanager
def poisoned_storage(is_on: bool = True) -> Iterator[None]:
    """Models built inside read NaN wherever they read what they should not."""
    from megatron_fsdp import MegatronFSDP
    from tests.unit_tests.harness.poison_pool import PoisonPool

    before = MegatronFSDP.pool_class
    MegatronFSDP.pool_class = PoisonPool if is_on else before
    try:
        yield
    finally:
        MegatronFSDP.pool_class = before


#: The engine's default: fp32 main weights, gradients in the parameters' dtype.
MAIN_FP32 = DtypePolicy(main_grads=None)


def shard(module: nn.Module, sharding: Sharding, dtypes: DtypePolicy = MAIN_FP32) -> Any:
    """The sharded model. **Collective.**"""
    from megatron_fsdp import MixedPrecisionPolicy, fully_shard_model

    mesh: dict[str, Any] = {"device_mesh": flat_mesh()}
    if sharding.outer is not None:
        mesh = {
            "device_mesh": hybrid_mesh(),
            "dp_outer_dim": "outer",
            "hybrid_fsdp_group": dist.group.WORLD,
            "outer_dp_sharding_strategy": sharding.outer,
        }
    with poisoned_storage(sharding.is_poisoned):
        return fully_shard_model(
            module,
            fsdp_unit_modules=sharding.units,
            zero_dp_strategy=sharding.strategy,
            mixed_precision_policy=MixedPrecisionPolicy(dtypes.main_params, dtypes.main_grads, dtypes.grad_comm),
            **{"dp_shard_dim": "dp", "sync_model_each_microbatch": False, **mesh, **sharding.options},
        )


def build_sharded(build_model: Callable[[], nn.Module], recipe: Recipe, sharding: Sharding) -> tuple[Any, Any]:
    """The sharded model and its optimizer. **Collective.**"""
    from megatron_fsdp import fully_shard_optimizer

    torch.manual_seed(0)
    module = build_model()
    if recipe.dtypes.compute is not None:
        module.to(recipe.dtypes.compute)
    options = {"calculate_per_token_loss": not recipe.is_mean_over_ranks, **sharding.options}
    if options["calculate_per_token_loss"]:  # sums, which no collective may average
        options.pop("average_in_collective", None)
    model = shard(module, dataclasses.replace(sharding, options=options), recipe.dtypes)
    return model, fully_shard_optimizer(recipe.build_optimizer(model))


def train_sharded(
    build_model: Callable[[], nn.Module], batches: Batches, recipe: Recipe, sharding: Sharding
) -> list[RankStep]:
    """This rank's part of what `train_reference` gives. **Collective.**"""
    model, optimizer = build_sharded(build_model, recipe, sharding)
    return [train_step(model, optimizer, recipe, microbatches) for microbatches in batches]


def train_step(model: Any, optimizer: torch.optim.Optimizer, recipe: Recipe, microbatches: Sequence[Any]) -> RankStep:
    """One optimizer step over `microbatches[microbatch][rank]`. **Collective.**"""
    optimizer.zero_grad()
    losses = []
    for number, ranks in enumerate(microbatches):
        model.is_last_microbatch = number == len(microbatches) - 1
        losses.append(backward(model, recipe, ranks[dist.get_rank()]))
    return finish_step(model, optimizer, recipe, losses)


def backward(model: Any, recipe: Recipe, batch: tuple[Any, Any]) -> float:
    """The loss of one micro-batch, differentiated. **Collective.**"""
    inputs, target = batch
    loss = recipe.loss_fn(model(inputs), target)
    loss.backward()
    return loss.item()


def finish_step(model: Any, optimizer: torch.optim.Optimizer, recipe: Recipe, losses: list[float]) -> RankStep:
    """Synchronizes, records the gradients, steps and records the weights. **Collective.**"""
    model.finish_grad_sync()
    assert_resting(model)
    grads = pieces(model, "grad")
    if recipe.max_norm is not None:
        true_norm = grad_norm(full_grads(model))
        torch.testing.assert_close(float(model.clip_grad_norm_(recipe.max_norm)), true_norm, rtol=1e-4, atol=1e-6)
    optimizer.step(sync_grad_before_optimizer_step=False)
    assert_resting(model)
    return RankStep(losses, grads, pieces(model, "data"))


def pieces(model: Any, kind: str) -> dict[str, Piece]:
    """Copies of this rank's pieces of all weights (`data`), or of the gradients (`grad`) of trainable ones."""
    found = {}
    for name, param in model.module.named_parameters():
        if kind == "data" or param.requires_grad:
            tensor = getattr(param, kind)
            assert isinstance(tensor, DTensor), f"{name} has no {kind}"
            place = param.megatron_fsdp_slice
            values = tensor.to_local().detach().flatten().clone()
            assert len(values) == place.stop - place.start, (name, place, len(values))
            found[name] = Piece(place.start, values)
    return found


def full_grads(model: Any) -> dict[str, torch.Tensor]:
    """Whole gradients of the trainable parameters; every rank has its part of each. **Collective.**"""
    return {name: p.grad.full_tensor() for name, p in model.module.named_parameters() if p.requires_grad}


def full_weights(model: Any) -> dict[str, torch.Tensor]:
    """Whole main weights. **Collective.**"""
    return {name: param.full_tensor() for name, param in model.module.named_parameters()}


def assert_resting(model: Any) -> None:
    """Every module shows its shards, gradients lie like their parameters, and nothing is left gathered."""
    for name, param in model.module.named_parameters():
        assert isinstance(param, DTensor), f"{name} is still gathered"
        if param.grad is not None:
            assert param.grad.placements == param.placements, name
            assert param.grad.to_local().shape == param.to_local().shape, name
    for group, param in model.param_and_grad_buffer.trained():
        assert param.sharded.grad is None or param.sharded.grad.dtype == group.spec.grad_dtype, param.fqn
    for group in model.param_and_grad_buffer.parameter_groups:
        if group.plan.gathers_weights:
            assert not group.is_unsharded, f"{group.spec.fqns} are still gathered"
            sizes = [param.untyped_storage().size() for param in group.params if type(param.data) is torch.Tensor]
            assert is_poisoned(model) or not any(sizes), f"{group.spec.fqns} keep their full storage: {sizes} bytes"


def is_poisoned(model: Any) -> bool:
    """Storage is poisoned, not freed."""
    from tests.unit_tests.harness.poison_pool import PoisonPool

    pool = model.param_and_grad_buffer.parameter_groups[0]._pool
    return isinstance(getattr(pool, "base", pool), PoisonPool)


# ---- in the test ----


def assembled(runs: Sequence[Sequence[RankStep]], expected: Sequence[StepRecord]) -> list[StepRecord]:
    """All ranks' pieces as whole records, shaped like the expected ones."""
    records = []
    for ranks, reference in zip(zip(*runs, strict=True), expected, strict=True):
        losses = [list(by_rank) for by_rank in zip(*(rank.losses for rank in ranks), strict=True)]
        grads = _whole([rank.grads for rank in ranks], reference.grads)
        weights = _whole([rank.weights for rank in ranks], reference.weights)
        records.append(StepRecord(losses, grads, grad_norm(grads), weights))
    return records


def _whole(ranks: Sequence[Mapping[str, Piece]], like: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    names = ranks[0].keys()
    assert all(rank.keys() == names for rank in ranks), "ranks hold different parameters"
    assert names == like.keys(), f"names differ by {names ^ like.keys()}"
    return {name: _joined(name, [rank[name] for rank in ranks]).view(like[name].shape) for name in names}


def _joined(name: str, found: Sequence[Piece]) -> torch.Tensor:
    """One tensor from pieces of which several may be copies of each other."""
    by_start: dict[int, torch.Tensor] = {}
    for piece in found:
        if len(piece.values):
            first = by_start.setdefault(piece.start, piece.values)
            assert torch.equal(first, piece.values), f"copies of {name} from element {piece.start} on differ"
    parts, end = [], 0
    for start, values in sorted(by_start.items(), key=lambda item: item[0]):
        assert start == end, f"{name}: a piece starts at {start}, the one before it ends at {end}"
        parts.append(values)
        end += len(values)
    return torch.cat(parts) if parts else found[0].values
