"""A step without install: forwards go on with the weights from before, or raise where there are none."""

import pytest
import torch
from torch import nn

from megatron_fsdp import fully_shard_optimizer
from tests.unit_tests.harness.communication import no_collectives
from tests.unit_tests.harness.models import MLPBlock, TinyMLP
from tests.unit_tests.harness.rank_pool import RankPool
from tests.unit_tests.harness.reference import DtypePolicy
from tests.unit_tests.harness.sharded import Sharding, full_weights, shard
from tests.unit_tests.harness.strategies import STRATEGIES

FP32, BF16 = torch.float32, torch.bfloat16
INPUTS = torch.arange(12.0).view(2, 6) / 6
OVERWRITTEN = "overwritten what this forward would compute with: of .*head.bias.* no values are kept"

#: (strategy, outer strategy, dtype of the model, of the main weights; None: the model's).
KEPT = [(strategy, None, BF16, FP32) for strategy in (0, 1, 2)] + [(3, "optim", BF16, FP32)]
NOT_KEPT = [
    *((strategy, None, dtype, None) for strategy in STRATEGIES for dtype in (FP32, BF16)),
    (3, None, BF16, FP32),
    (3, "no_shard", BF16, FP32),
    (3, "optim", FP32, FP32),
]


def build(strategy: int, outer: str | None, dtype: torch.dtype, main: torch.dtype | None) -> tuple:
    """A model, its optimizer, and an input."""
    torch.manual_seed(0)
    sharding = Sharding(strategy=strategy, outer=outer, units=(MLPBlock,))
    model = shard(TinyMLP().to(dtype), sharding, DtypePolicy(main_params=main, main_grads=None))
    return model, fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1)), INPUTS.to(dtype)


def train(case: tuple, installs: tuple[bool, ...]) -> dict[str, torch.Tensor]:
    """The whole main weights after a step for each of `installs`, with an install after those that have none."""
    model, optimizer, inputs = build(*case)
    for install in installs:
        model(inputs).square().sum().backward()
        optimizer.step(install_optimized_model_weights=install)
        optimizer.zero_grad()
        if not install:
            model.install_optimized_model_weights()
    return full_weights(model)


def go_on_with_old_weights(case: tuple) -> None:
    """Outputs stay what they were until the install, twice; a backward through them is that of the old weights."""
    model, optimizer, inputs = build(*case)
    for _ in range(2):
        old = model(inputs)
        old.square().sum().backward()
        model.finish_grad_sync()
        expected = [param.grad.to_local().clone() for param in model.parameters()]
        before = full_weights(model)
        again = model(inputs)
        optimizer.step(install_optimized_model_weights=False)
        assert not torch.equal(full_weights(model)["head.bias"], before["head.bias"])
        optimizer.zero_grad()
        again.square().sum().backward()
        model.finish_grad_sync()
        assert all(map(torch.equal, [param.grad.to_local() for param in model.parameters()], expected))
        optimizer.zero_grad()
        with torch.no_grad():
            assert torch.equal(model(inputs), old)
        model.install_optimized_model_weights()
        assert not torch.equal(model(inputs), old)


def stop_without_weights(case: tuple) -> None:
    """No forward until an install or a load, and no backward of a forward before the step."""
    model, optimizer, inputs = build(*case)
    installs = [
        model.install_optimized_model_weights,
        lambda: model.load_state_dict(model.state_dict()),
    ]
    for install in installs:
        model(inputs).square().sum().backward()
        loss = model(inputs).square().sum()
        optimizer.step(install_optimized_model_weights=False)
        with pytest.raises(RuntimeError, match="have changed since its forward"):
            loss.backward()
        optimizer.zero_grad()
        with no_collectives(), pytest.raises(RuntimeError, match=OVERWRITTEN):
            model(inputs)
        install()
        model(inputs)


def test_forwards_use_the_weights_from_before_the_step_where_they_are_kept(ranks4: RankPool) -> None:
    for case in KEPT:
        ranks4.run(go_on_with_old_weights, case)


def test_forwards_raise_where_no_weights_from_before_the_step_are_kept(ranks4: RankPool) -> None:
    for case in NOT_KEPT:
        ranks4.run(stop_without_weights, case)


def test_a_step_and_an_install_are_what_a_step_with_install_is(ranks4: RankPool) -> None:
    for case in (KEPT[1], KEPT[3], NOT_KEPT[0], NOT_KEPT[6]):
        together, apart = ranks4.run(train, case, (True, True))[0], ranks4.run(train, case, (False, False))[0]
        assert all(torch.equal(together[name], apart[name]) for name in together)


class Mixed(nn.Sequential):
    """A bf16 layer, whose compute weights are kept beside fp32 ones, and an fp32 layer, whose are not."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(6, 6, dtype=BF16), nn.Linear(6, 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shape (batch, 6), kept."""
        return self[1](self[0](x.bfloat16()).float())


def step_parts() -> None:
    """Weights that a step has not touched need not be kept."""
    model = shard(Mixed(), Sharding(strategy=1, units=(nn.Linear,)))
    kept, overwritten = (fully_shard_optimizer(torch.optim.SGD(layer.parameters(), lr=0.1)) for layer in model.module)
    old = model(INPUTS)
    old.square().sum().backward()
    kept.step(install_optimized_model_weights=False)
    with torch.no_grad():
        assert torch.equal(model(INPUTS), old)
    overwritten.step(install_optimized_model_weights=False)
    with pytest.raises(RuntimeError, match="of 1.weight, 1.bias no values are kept"):
        model(INPUTS)
    kept.step()  # installs the model's weights, whoever has stepped
    assert not torch.equal(model(INPUTS), old)


def test_only_what_the_optimizer_holds_counts(ranks2: RankPool) -> None:
    ranks2.run(step_parts)
