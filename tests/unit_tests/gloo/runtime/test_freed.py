"""A deleted model frees its memory at once, without the garbage collector, whatever has been done with it."""

import gc
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

from megatron_fsdp import fully_shard_optimizer
from tests.unit_tests.harness.models import MLPBlock, TinyMLP
from tests.unit_tests.harness.rank_pool import RankPool
from tests.unit_tests.harness.sharded import Sharding, shard


class Failing(TinyMLP):
    """Raises in its head or, if asked to, reads a block's weight where it is sharded."""

    how = ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shape (batch, 6), kept."""
        for block in self.blocks:
            x = block(x)
        if self.how == "raise":
            raise ZeroDivisionError("in forward")
        return x @ self.blocks[0].linear.weight if self.how == "stray" else self.head(x)


def forward(model: Any, optimizer: Any) -> None:
    model(torch.ones(2, 6))


def backward(model: Any, optimizer: Any) -> None:
    model(torch.ones(2, 6)).sum().backward()


def step(model: Any, optimizer: Any) -> None:
    backward(model, optimizer)
    optimizer.step()
    optimizer.zero_grad()


def raise_in_forward(model: Any, optimizer: Any) -> None:
    model.module.how = "raise"
    with pytest.raises(ZeroDivisionError):
        model(torch.ones(2, 6))


def read_astray(model: Any, optimizer: Any) -> None:
    model.module.how = "stray"
    with pytest.raises(RuntimeError, match="DTensor"):
        model(torch.ones(2, 6))


def raise_in_backward(model: Any, optimizer: Any) -> None:
    output = model(torch.ones(2, 6))
    output.register_hook(lambda grad: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        output.sum().backward()


def lose_finiteness(model: Any, optimizer: Any) -> None:
    with pytest.raises(ValueError, match="not finite"):
        (model(torch.ones(2, 6)).sum() * float("nan")).backward()


def state_dicts(model: Any, optimizer: Any) -> None:
    step(model, optimizer)
    model.load_state_dict(model.state_dict())
    optimizer.load_state_dict(optimizer.state_dict())
    model.full_state_dict()


def whole(model: Any, optimizer: Any) -> None:
    with model.full_params(), torch.no_grad():
        model.module.head.weight.zero_()
    with pytest.raises(ZeroDivisionError), model.full_params():
        raise ZeroDivisionError


USES: list[Callable[[Any, Any], None]] = [
    forward, backward, step, raise_in_forward, read_astray, raise_in_backward, lose_finiteness, state_dicts, whole,
]  # fmt: skip


def alive_after(use: Callable[[Any, Any], None], strategy: int) -> list[str]:
    """Remains of a model when its last reference goes after a use."""
    options = {"report_nan_in_param_grad": True, "sync_model_each_microbatch": True}
    model: Any = shard(Failing(), Sharding(strategy=strategy, units=(MLPBlock,), is_poisoned=False, options=options))
    optimizer = fully_shard_optimizer(torch.optim.Adam(model.parameters()))
    use(model, optimizer)
    groups = model.param_and_grad_buffer.parameter_groups
    refs: dict[str, weakref.ref] = {
        "model": weakref.ref(model),
        "module": weakref.ref(model.module),
        "schedule": weakref.ref(model._schedule),
    }
    for group in groups:
        tensors = {
            "weight": group.model_weight_buffer,
            "main": group.main_weight_buffer,
            "grad": group.main_grad_buffer,
        }
        refs |= {f"{group.spec.name} {name}": weakref.ref(buffer.data) for name, buffer in tensors.items()}
        refs |= {
            f"unsharded {name}": weakref.ref(param) for name, param in zip(group.spec.fqns, group.params, strict=True)
        }
    refs |= {f"sharded {name}": weakref.ref(param) for name, param in model.named_parameters()}
    del model, optimizer, groups, group, tensors
    deadline = time.monotonic() + 2.0  # gloo's own thread lets go of the last collective's tensors a moment later
    while (left := [name for name, ref in refs.items() if ref() is not None]) and time.monotonic() < deadline:
        time.sleep(0.001)
    return left


def job() -> dict[str, list[str]]:
    """By use, what is left, with the collector off."""
    gc.collect()
    gc.disable()
    try:
        return {f"{use.__name__} {strategy}": alive_after(use, strategy) for use in USES for strategy in (3, 1)}
    finally:
        gc.enable()


def test_a_deleted_model_is_freed_at_once_after_anything(ranks2: RankPool) -> None:
    for left in ranks2.run(job):
        assert {use: names for use, names in left.items() if names} == {}


def keep_module() -> list[str]:
    """Remains of the engine when the sharded model goes and the user's own module stays."""
    module = TinyMLP()
    model = shard(module, Sharding(units=(MLPBlock,)))
    model(torch.ones(2, 6)).sum().backward()
    parts = {"schedule": model._schedule, "unit": model._schedule.units[0], "group": model._schedule.units[0].groups[0]}
    refs = {name: weakref.ref(part) for name, part in parts.items()}
    del model, parts
    gc.collect()
    return [name for name, ref in refs.items() if ref() is not None]


def test_the_users_module_does_not_own_the_engine(ranks2: RankPool) -> None:
    assert ranks2.run(keep_module) == [[], []]
