"""A model with everything that a checkpoint can meet, trained a little, and how its states are compared."""

import copy
import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.tensor import DTensor

from tests.unit_tests.harness.communication import no_collectives
from tests.unit_tests.harness.models import OddShapes
from tests.unit_tests.harness.reference import DtypePolicy
from tests.unit_tests.harness.sharded import Sharding, shard

SAMPLES, WIDTH = 12, 7


class Assortment(nn.Module):
    """Tied, frozen, replicated, empty, zero-dimensional and odd parameters, buffers, and extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, WIDTH)
        self.block = OddShapes()
        self.frozen = nn.Linear(WIDTH, WIDTH)
        self.frozen.requires_grad_(False)
        self.whole = nn.Linear(WIDTH, WIDTH)
        self.empty = nn.Parameter(torch.empty(0, 4))
        self.gate = nn.Parameter(torch.tensor(0.5))
        self.head = nn.Linear(WIDTH, 5, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("shift", torch.randn(WIDTH))
        self.register_buffer("seen", torch.tensor(0))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens) + self.shift.to(self.gate.dtype)
        x = self.block(x) + self.gate * self.whole(self.frozen(x))
        return self.head(x).float()


@dataclasses.dataclass(frozen=True)
class Setup:
    """A world, and how the model is sharded in it."""

    world: int
    strategy: int
    outer: int | None = None
    dtype: torch.dtype = torch.float32


def build(seed: int, dtype: torch.dtype = torch.float32) -> nn.Module:
    from megatron_fsdp import fsdp_no_shard

    torch.manual_seed(seed)
    module = Assortment().to(dtype)
    fsdp_no_shard(module.whole)
    return module


def sharded(setup: Setup, seed: int = 0, **options: Any) -> nn.Module:
    sharding = Sharding(
        strategy=setup.strategy,
        outer=setup.outer,
        units=(OddShapes,),
        options={"sync_model_each_microbatch": True, **options},
    )
    return shard(build(seed, setup.dtype), sharding, DtypePolicy())


def optimizer_of(model: nn.Module, lr: float = 0.02) -> torch.optim.Optimizer:
    from megatron_fsdp import fully_shard_optimizer

    trained = [param for param in model.parameters() if param.requires_grad]
    groups = [{"params": trained[:3], "lr": 3 * lr}, {"params": trained[3:]}]
    return fully_shard_optimizer(torch.optim.AdamW(groups, lr=lr))


def batches(steps: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """This rank's samples of global batches that do not depend on the number of ranks."""
    generator = torch.Generator().manual_seed(5)
    mine = slice(dist.get_rank(), None, dist.get_world_size())
    for _ in range(steps):
        tokens, targets = (torch.randint(5, (SAMPLES,), generator=generator) for _ in range(2))
        yield tokens[mine], targets[mine]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, data: Any) -> list[float]:
    losses = []
    for tokens, targets in data:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(tokens), targets)
        loss.backward()
        optimizer.step()
        dist.all_reduce(loss := loss.detach())
        losses.append(loss.item() / dist.get_world_size())
    return losses


def full(values: dict[Any, Any]) -> dict[Any, Any]:
    """Whole plain tensors. **Collective.**"""
    return {
        key: value.full_tensor() if isinstance(value, DTensor) else copy.deepcopy(value)
        for key, value in values.items()
    }


def everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    state = optimizer.state_dict()
    flat = {(index, key): value for index, entry in state["state"].items() for key, value in entry.items()}
    return {"model": full(model.state_dict()), "optimizer": full(flat), "groups": copy.deepcopy(state["param_groups"])}


def both(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """As the README's example writes it."""
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


def save(setup: Setup, folder: str) -> tuple[dict[str, Any], list[float], dict[str, Any]]:
    """The state saved after two steps, and the results of two more steps without stopping."""
    model = sharded(setup)
    optimizer = optimizer_of(model)
    data = list(batches(4))
    train(model, optimizer, data[:2])
    model.module.seen.fill_(2)
    with no_collectives():
        state = both(model, optimizer)
    dcp.save(state, checkpoint_id=folder)
    saved = everything(model, optimizer)
    losses = train(model, optimizer, data[2:])
    return saved, losses, everything(model, optimizer)


def load(setup: Setup, folder: str) -> tuple[dict[str, Any], list[float], dict[str, Any]]:
    """The state loaded into another model, and the results of the next two steps."""
    model = sharded(setup, seed=77)
    optimizer = optimizer_of(model, lr=0.5)
    with no_collectives():
        state = both(model, optimizer)
    dcp.load(state_dict=state, checkpoint_id=folder)
    with no_collectives():
        model.load_state_dict(state["model"], strict=False)
        optimizer.load_state_dict(state["optimizer"])
    loaded = everything(model, optimizer)
    losses = train(model, optimizer, list(batches(4))[2:])
    return loaded, losses, everything(model, optimizer)


def assert_same(came: Any, expected: Any, *, tolerance: float = 0.0, where: str = "") -> None:
    """Equal structures; tensors within `tolerance`, exactly by default."""
    if isinstance(expected, torch.Tensor):
        torch.testing.assert_close(came, expected, rtol=tolerance, atol=tolerance, msg=lambda text: f"{where}: {text}")
    elif isinstance(expected, dict):
        assert came.keys() == expected.keys(), where
        for key, value in expected.items():
            assert_same(came[key], value, tolerance=tolerance, where=f"{where}.{key}")
    elif isinstance(expected, (list, tuple)):
        assert len(came) == len(expected), where
        for index, value in enumerate(expected):
            assert_same(came[index], value, tolerance=tolerance, where=f"{where}[{index}]")
    else:
        assert came == pytest.approx(expected, rel=tolerance) if isinstance(expected, float) else came == expected, (
            where
        )


BF16 = torch.bfloat16
