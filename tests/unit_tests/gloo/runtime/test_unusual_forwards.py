"""Forwards that torch.compile has made, and forwards that change weights."""

import torch
from torch import nn

from megatron_fsdp.machine.torch_compat import version_of
from tests.unit_tests.harness.models import MLPBlock, TinyMLP
from tests.unit_tests.harness.rank_pool import RankPool
from tests.unit_tests.harness.sharded import Sharding, shard


class Clamping(nn.Module):
    """Keeps its weight small by hand, in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.linear.weight.clamp_(-0.1, 0.1)
        return self.linear(x)


def change_weights_in_forward(strategy: int, dtype: torch.dtype) -> None:
    model = shard(nn.Sequential(Clamping(), Clamping()).to(dtype), Sharding(strategy=strategy, units=(Clamping,)))
    for _ in range(2):
        model(torch.ones(2, 4, dtype=dtype))


def test_weights_that_forward_changes_are_named_where_the_change_would_be_lost(ranks2: RankPool) -> None:
    message = "forward of unit 0 has changed 0.linear.weight in place, which is lost"
    for strategy, dtype in ((3, torch.float32), (2, torch.bfloat16)):
        ranks2.run_expecting(RuntimeError, message, change_weights_in_forward, strategy, dtype)
    ranks2.run(change_weights_in_forward, 2, torch.float32)


def test_tensors_that_do_not_count_their_changes_have_no_version() -> None:
    counting = torch.zeros(1).add_(1)
    with torch.inference_mode():
        silent = torch.zeros(1).add_(1)
    assert [version_of(counting), version_of(silent)] == [1, None]


def compile_all_ways() -> None:
    """Compiled before or after sharding, whole or in part, the model computes what it does uncompiled."""
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    results = []
    for way in ("not", "units", "before", "after"):
        torch.manual_seed(0)
        module = TinyMLP()
        if way == "units":
            for block in module.blocks:
                block.compile(backend="aot_eager")
        if way == "before":
            module.compile(backend="aot_eager")
        model = shard(module, Sharding(strategy=3, units=(MLPBlock,), is_poisoned=False))
        run = torch.compile(model, backend="aot_eager") if way == "after" else model
        loss = run(x).square().mean()
        loss.backward()
        model.finish_grad_sync()
        results.append([loss.detach(), *(param.grad.full_tensor() for param in model.parameters())])
    for other in results[1:]:
        torch.testing.assert_close(other, results[0])


def test_a_compiled_model_computes_the_same(ranks2: RankPool) -> None:
    ranks2.run(compile_all_ways)
