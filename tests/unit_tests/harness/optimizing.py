"""The same small steps of torch's optimizers, sharded and whole."""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from tests.unit_tests.harness.communication import no_collectives
from tests.unit_tests.harness.models import OddModel, OddShapes, float_batches, square_loss
from tests.unit_tests.harness.sharded import Sharding, shard

STEPS = 3
AUTO = {"sync_model_each_microbatch": True}


class Kind(NamedTuple):
    """A class of torch.optim and its options."""

    name: str
    options: dict[str, Any]

    def over(self, params: Any) -> torch.optim.Optimizer:
        """One of this kind."""
        return getattr(torch.optim, self.name)(params, **self.options)


KINDS = [
    Kind("SGD", {"lr": 0.1}),
    Kind("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    Kind("SGD", {"lr": 0.1, "momentum": 0.9, "dampening": 0.1, "foreach": True}),
    Kind("AdamW", {"lr": 0.01, "weight_decay": 0.1, "foreach": True}),
    Kind("AdamW", {"lr": 0.01, "weight_decay": 0.1, "fused": True}),
    Kind("Adam", {"lr": 0.01, "amsgrad": True}),
    Kind("Adam", {"lr": torch.tensor(0.01), "weight_decay": 0.1, "foreach": False}),
    Kind("RAdam", {"lr": 0.01}),
    Kind("NAdam", {"lr": 0.01}),
    Kind("SGD", {"lr": 0.1, "momentum": 0.9, "fused": True}),
]
RARE_KINDS = [
    Kind("Adagrad", {"lr": 0.01, "initial_accumulator_value": 0.1}),
    Kind("Adadelta", {"lr": 1.0}),
    Kind("Adamax", {"lr": 0.01}),
    Kind("ASGD", {"lr": 0.01}),
    Kind("RMSprop", {"lr": 0.01, "momentum": 0.9}),
    Kind("Adagrad", {"lr": 0.01, "fused": True}),
]


def build() -> nn.Module:
    """The model, the same every time."""
    torch.manual_seed(0)
    return OddModel(depth=1)


def build_sharded(strategy: int, **options: Any) -> Any:
    """The model, sharded. **Collective.**"""
    return shard(build(), Sharding(strategy=strategy, units=(OddShapes,), options=options))


def batches(world: int, steps: int = STEPS) -> list[list[tuple[torch.Tensor, torch.Tensor]]]:
    """`[step][rank]` -> (inputs, target)."""
    return [step[0] for step in float_batches(steps, 1, world, width=7, width_out=3)]


def plain_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: list) -> None:
    """One step of a whole model on all ranks' samples."""
    optimizer.zero_grad()
    for inputs, target in batch:
        (square_loss(model(inputs), target) / len(batch)).backward()
    optimizer.step()


def sharded_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: list) -> None:
    """One step of a sharded model on this rank's samples. **Collective.**"""
    optimizer.zero_grad()
    inputs, target = batch[dist.get_rank()]
    square_loss(model(inputs), target).backward()
    optimizer.step()


def full(model: nn.Module) -> list[torch.Tensor]:
    """Whole weights. **Collective.**"""
    return [param.full_tensor() for param in model.parameters()]


def plain_weights(kind: Kind, world: int) -> list[torch.Tensor]:
    """Weights after all steps of a whole model."""
    model = build()
    optimizer = kind.over(model.parameters())
    for batch in batches(world):
        plain_step(model, optimizer, batch)
    return [param.detach() for param in model.parameters()]


def train_each(kinds: list[Kind], strategy: int, saves_early: bool = False) -> list[list[torch.Tensor]]:
    """Full weights after all steps, by kind. **Collective.**"""
    from megatron_fsdp import fully_shard_optimizer

    results = []
    for kind in kinds:
        model = build_sharded(strategy, **AUTO)
        optimizer = fully_shard_optimizer(kind.over(model.parameters()))
        if saves_early:
            with no_collectives():
                optimizer.state_dict()
        for batch in batches(dist.get_world_size()):
            sharded_step(model, optimizer, batch)
        results.append(full(model))
    return results


def assert_close(ours: list[torch.Tensor], theirs: list[torch.Tensor], **tolerance: float) -> None:
    """Pairwise, to a few roundings unless told otherwise."""
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, **(tolerance or {"rtol": 1e-5, "atol": 1e-5}))
