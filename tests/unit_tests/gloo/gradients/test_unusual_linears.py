"""Linear layers that are not used as usual: changed ones, odd inputs, outputs and hooks."""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import prune

from tests.unit_tests.harness.linears import WIDTH, Layer, build, plainly, trained, whole
from tests.unit_tests.harness.rank_pool import RankPool
from tests.unit_tests.harness.sharded import Sharding, shard


def sparse(linear: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    return linear(x.detach().to_sparse()) + linear(x.detach().to_sparse_csr()) + x


def nested(linear: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    return torch.cat(linear(torch.nested.as_nested_tensor([x[:1], x[1:]])).unbind())


def changed_in_place(linear: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    by_batch, by_row = linear(x.view(2, -1, WIDTH)), [linear(row) for row in x]
    by_batch[..., :2] = 0
    return F.relu(by_batch, inplace=True).view(-1, WIDTH) + torch.stack([row.mul_(2) for row in by_row])


def keep_gradients(watch: str) -> list[torch.Tensor]:
    """This rank's own gradients as hooks keep them that were registered before sharding."""
    kept: list[torch.Tensor] = []
    module = build(plainly)
    for param in module.parameters():
        if watch == "gradients":
            param.register_hook(kept.append)
        else:
            param.register_post_accumulate_grad_hook(lambda param: kept.append(param.grad))
    model = shard(module, Sharding(strategy=3, units=(Layer,)))
    for seed in range(2):
        model.is_last_microbatch = seed == 1
        x = torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(seed))
        model(x * (1 + dist.get_rank())).square().sum().backward()
    model.finish_grad_sync()
    return kept


def keep_gradients_of_either_kind(watch: str) -> None:
    from megatron_fsdp.runtime import linear_grads

    before, linear_grads.LEAST_NUMEL = linear_grads.LEAST_NUMEL, 2**62
    try:
        expected = keep_gradients(watch)
    finally:
        linear_grads.LEAST_NUMEL = before
    found = keep_gradients(watch)
    assert len(found) == len(expected) == 4
    for grad, other in zip(found, expected, strict=True):
        torch.testing.assert_close(grad, other)


@pytest.mark.parametrize("watch", ["gradients", "parameters"])
def test_a_gradient_that_a_hook_keeps_is_not_overwritten(ranks2: RankPool, watch: str) -> None:
    ranks2.run(keep_gradients_of_either_kind, watch)


def give_other_layouts() -> None:
    for use in (sparse, nested):
        _, found = trained(lambda use=use: build(use, bias=True))
        for name, expected in whole(lambda use=use: build(use, bias=True)).items():
            torch.testing.assert_close(found[name], expected)


@pytest.mark.filterwarnings("ignore:Sparse CSR", "ignore:The PyTorch API of nested")
def test_inputs_may_be_sparse_or_nested(ranks2: RankPool) -> None:
    ranks2.run(give_other_layouts)


def change_outputs() -> None:
    for bias in (False, True):
        _, found = trained(lambda bias=bias: build(changed_in_place, bias=bias))
        for name, expected in whole(lambda bias=bias: build(changed_in_place, bias=bias)).items():
            torch.testing.assert_close(found[name], expected)


def test_outputs_can_be_changed_in_place(ranks2: RankPool) -> None:
    ranks2.run(change_outputs)


def prune_bias(linear: nn.Linear) -> None:
    prune.l1_unstructured(linear, "bias", 2)


def fix_bias(linear: nn.Linear) -> None:
    fixed = linear.bias.detach()
    del linear.bias
    linear.register_buffer("bias", fixed)


def shadow_weight(linear: nn.Linear) -> None:
    def hook(module: nn.Linear, args: tuple) -> None:
        vars(module)["weight"] = 2 * module._parameters["weight"]

    def unhook(module: nn.Linear, args: tuple, output: torch.Tensor) -> None:
        del vars(module)["weight"]

    linear.register_forward_pre_hook(hook)
    linear.register_forward_hook(unhook)


def replaced_forward(module: nn.Linear, input: torch.Tensor) -> torch.Tensor:
    return 2 * F.linear(input, module.weight, module.bias)


def change_layers() -> None:
    def changed(change: Callable[[nn.Linear], None]) -> nn.Module:
        module = build(plainly, bias=True)
        for layer in module:
            change(layer.linear)
        return module

    def check(change: Callable[[nn.Linear], None]) -> None:
        _, found = trained(lambda: changed(change))
        for name, expected in whole(lambda: changed(change)).items():
            torch.testing.assert_close(found[name], expected)

    for change in (prune_bias, fix_bias, shadow_weight):
        check(change)
    before, nn.Linear.forward = nn.Linear.forward, replaced_forward
    try:
        check(lambda linear: None)
    finally:
        nn.Linear.forward = before


def test_layers_that_were_changed_compute_what_they_did(ranks2: RankPool) -> None:
    ranks2.run(change_layers)
