"""Models of linear layers, and what their gradients cost and are."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from tests.unit_tests.harness.sharded import Sharding, full_grads, shard

WIDTH = 4


class Layer(nn.Module):
    """A unit with a weight of its own, which `use` reads."""

    def __init__(self, use: Callable[[nn.Linear, torch.Tensor], torch.Tensor], *, bias: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, bias=bias)
        self.use = use

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.use(self.linear, x)


def plainly(linear: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    return linear(x)


def build(use: Callable, *, bias: bool = False) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Layer(use, bias=bias), Layer(use, bias=bias))


@contextlib.contextmanager
def counted_copies() -> Iterator[list[int]]:
    """Elements of gradients that are copied inside the context, in a list of one."""
    from megatron_fsdp.state import main_grad

    group = main_grad.MainGrad
    copied, write, copy_all, leave = [0], group._write, main_grad.foreach_copy_, group._leave_held_memory

    def count(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
        copied[0] += sum(source.numel() for source in sources)
        copy_all(targets, sources)

    def counting(*args, **kwargs) -> None:
        main_grad.foreach_copy_ = count
        try:
            write(*args, **kwargs)
        finally:
            main_grad.foreach_copy_ = copy_all

    def leaving(self: Any) -> None:
        before = self.staged
        leave(self)
        copied[0] += 0 if self.staged is before else self.staged.data.numel()

    group._write, group._leave_held_memory = counting, leaving
    try:
        yield copied
    finally:
        group._write, group._leave_held_memory = write, leave


@contextlib.contextmanager
def wider_products() -> Iterator[None]:
    """Products of bf16 are written in fp32, as CUDA can."""
    from megatron_fsdp.machine import torch_compat
    from megatron_fsdp.state import main_grad

    before = main_grad.multiplies_into, torch_compat.multiply_into
    main_grad.multiplies_into = lambda dtype, wider, device_type: wider is torch.float32
    torch_compat.multiply_into = lambda left, right, out: torch.mm(left.float(), right.float(), out=out)
    try:
        yield
    finally:
        main_grad.multiplies_into, torch_compat.multiply_into = before


def trained(build_model: Callable[[], nn.Module], strategy: int = 3, **options) -> tuple[int, dict[str, torch.Tensor]]:
    """Elements copied, and gradients of two micro-batches, of a sharded model."""
    model = shard(build_model(), Sharding(strategy=strategy, units=(Layer,), options=options))
    with counted_copies() as copied:
        for seed in range(2):
            model.is_last_microbatch = seed == 1
            x = torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(seed))
            model(x).square().sum().backward()
        model.finish_grad_sync()
    return copied[0], full_grads(model)


def whole(build_model: Callable[[], nn.Module]) -> dict[str, torch.Tensor]:
    module = build_model()
    for seed in range(2):
        x = torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(seed))
        module(x).square().sum().backward()
    return {name: param.grad for name, param in module.named_parameters()}
