"""`fsdp_no_shard`: what is marked stays whole on every rank, is never gathered, and trains all the same."""

import logging
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

from megatron_fsdp import fsdp_no_shard
from megatron_fsdp.plan.strategy import plan_for
from tests.unit_tests.harness.communication import collectives_heard
from tests.unit_tests.harness.models import float_batches, square_loss
from tests.unit_tests.harness.sharded import Sharding, shard

WIDTH = 6


class Layer(nn.Linear):
    """The unit class."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(super().forward(x))


class Towers(nn.Module):
    """A tower of units before a body of units, and a head outside them."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = nn.Sequential(Layer(), Layer())
        self.body = nn.Sequential(Layer(), Layer())
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.tower(x)))


def build(marks: str, is_frozen: bool = False) -> Towers:
    torch.manual_seed(0)
    model = Towers()
    if is_frozen:
        model.tower.requires_grad_(False)
    for name in filter(None, marks.split(",")):
        owner, _, last = name.rpartition(".")
        fsdp_no_shard(getattr(model.get_submodule(owner), last))
    return model


def build_sharded(marks: str, strategy: int, is_frozen: bool = False, is_poisoned: bool = True) -> Any:
    options = {"sync_model_each_microbatch": True}
    return shard(
        build(marks, is_frozen), Sharding(strategy=strategy, units=(Layer,), is_poisoned=is_poisoned, options=options)
    )


def batches(world: int) -> list:
    return [step[0] for step in float_batches(3, 1, world, width=WIDTH)]


def train(marks: str, strategy: int, is_frozen: bool) -> dict[str, torch.Tensor]:
    from megatron_fsdp import fully_shard_optimizer

    model = build_sharded(marks, strategy, is_frozen)
    optimizer = fully_shard_optimizer(torch.optim.AdamW(model.parameters(), lr=0.01))
    for batch in batches(dist.get_world_size()):
        optimizer.zero_grad()
        inputs, target = batch[dist.get_rank()]
        square_loss(model(inputs), target).backward()
        model.clip_grad_norm_(0.1)
        optimizer.step()
    return {name: param.full_tensor() for name, param in model.module.named_parameters()}


def train_plain(world: int, is_frozen: bool) -> dict[str, torch.Tensor]:
    model = build("", is_frozen)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for batch in batches(world):
        optimizer.zero_grad()
        for inputs, target in batch:
            (square_loss(model(inputs), target) / world).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
    return {name: param.detach() for name, param in model.named_parameters()}


MARKS = ["tower", "tower.0,head.bias", "body.1.weight,tower.1"]


@pytest.mark.parametrize("strategy", range(4))
def test_a_marked_part_trains_like_everything_else(ranks3, strategy):
    for marks in MARKS:
        expected = train_plain(3, is_frozen=False)
        for weights in ranks3.run(train, marks, strategy, False):
            torch.testing.assert_close(weights, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("strategy", [1, 3])
def test_a_marked_frozen_part_stays_what_it_was(ranks2, strategy):
    before, expected = build("").state_dict(), train_plain(2, is_frozen=True)
    for weights in ranks2.run(train, "tower", strategy, True):
        torch.testing.assert_close(weights, expected, rtol=1e-5, atol=1e-6)
        assert all(torch.equal(weights[name], before[name]) for name in weights if name.startswith("tower"))


def look_inside(marks: str, is_frozen: bool) -> dict[str, Any]:
    model = build_sharded(marks, 3, is_frozen, is_poisoned=False)
    inputs, target = batches(dist.get_world_size())[0][dist.get_rank()]
    square_loss(model(inputs), target).backward()  # ranks agree on the order of units in the first step
    model.zero_grad_buffer()
    with collectives_heard() as forward:
        loss = square_loss(model(inputs), target)
    with collectives_heard() as backward:
        loss.backward()
    groups = model.param_and_grad_buffer.parameter_groups
    marked = [group for group in groups if group.spec.is_replicated]
    return {
        "forward": forward,
        "backward": backward,
        "hooks": {
            name: len(module._forward_pre_hooks) + len(module._forward_hooks)
            for name, module in model.module.named_modules()
        },
        "numel": sum(group.model_weight_buffer.data.numel() for group in marked),
        "gathered": sum(group.gathered_nbytes for group in marked),
        "grads": [group.main_grad_buffer is not None for group in marked],
        "placements": {
            name: isinstance(param, DTensor) and param.placements == (Replicate(),)
            for name, param in model.module.named_parameters()
        },
        "rows": {name: param.to_local().shape[0] for name, param in model.module.named_parameters()},
        "plans": {group.plan for group in marked},
        "tags": {name: hasattr(param, "_fsdp_no_shard") for name, param in model.module.named_parameters()},
    }


def is_in_tower(name: str) -> bool:
    return name.startswith("tower")


def test_a_frozen_marked_tower_costs_no_communication_and_no_hooks(ranks2):
    tower, others = "tower", 3  # two layers of the body, and the root's head
    for seen in ranks2.run(look_inside, tower, True):
        gathers = [name for name in seen["forward"] if "allgather" in name]
        assert len(gathers) == len(seen["forward"]) == others
        assert not any("allreduce" in name for name in seen["backward"])
        assert sum(seen["hooks"][name] for name in seen["hooks"] if is_in_tower(name)) == 0
        assert seen["hooks"]["body.0"] > 0
        assert seen["gathered"] == 0 and seen["grads"] == [False]
        assert seen["numel"] >= 2 * (WIDTH * WIDTH + WIDTH)


def test_marked_parameters_are_replicas_beside_shards(ranks2):
    for seen in ranks2.run(look_inside, "tower", False):
        assert seen["placements"] == {name: is_in_tower(name) for name in seen["placements"]}
        assert all(rows == WIDTH for name, rows in seen["rows"].items() if is_in_tower(name))
        assert seen["plans"] == {plan_for("no_shard")} and seen["grads"] == [True]
        assert seen["tags"] == {name: is_in_tower(name) for name in seen["tags"]}
        assert sum("allreduce" in name for name in seen["backward"]) == 1


def log_of_building(marks: str, is_frozen: bool) -> str:
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    logger = logging.getLogger("megatron_fsdp")
    logger.addHandler(handler)
    level = logger.level
    logger.setLevel(logging.INFO)
    try:
        build_sharded(marks, 3, is_frozen)
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    return "\n".join(records)


def test_the_summary_says_what_is_not_sharded(ranks2):
    table, nothing = ranks2.run(log_of_building, "tower", True)
    (root,) = [line for line in table.splitlines() if "(root)" in line]
    assert root.split()[-1] == "float32,frozen,no_shard"
    assert "no_shard" not in ranks2.run(log_of_building, "", False)[0]
    assert nothing == ""


def mark_everything() -> tuple[int, list[str]]:
    model = build("tower,body,head")
    model = shard(model, Sharding(units=(Layer,)))
    with collectives_heard() as heard:
        model(torch.ones(1, WIDTH))
    return len(heard), [type(unit.module()).__name__ for unit in model._schedule.units]


def test_everything_may_be_marked(ranks2):
    assert ranks2.run(mark_everything) == [(0, ["Towers"])] * 2


def test_a_module_and_a_parameter_can_be_marked():
    layer = Layer()
    fsdp_no_shard(layer.bias)
    assert layer.bias._fsdp_no_shard and not hasattr(layer.weight, "_fsdp_no_shard")
    fsdp_no_shard(nn.Sequential(layer))
    assert layer.weight._fsdp_no_shard


@pytest.mark.parametrize("wrong", [torch.ones(2), [Layer()], "tower"])
def test_nothing_else_can_be_marked(wrong):
    with pytest.raises(TypeError, match="fsdp_no_shard expects a Module or a Parameter, got"):
        fsdp_no_shard(wrong)
