"""A per-tensor float8 (e4m3) weight in plain torch and its codec: what a quantized format asks of the engine's seam."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from megatron_fsdp.state.codec import Shard, WeightCodec, register_codec
from tests.unit_tests.harness.models import TinyMLP

FLOAT8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FLOAT8).max
aten = torch.ops.aten


class Float8Tensor(torch.Tensor):
    """Bytes and one scale. An operator that reads it dequantizes it, so what is saved for backward are the bytes."""

    data_bytes: torch.Tensor
    """uint8, shaped as the tensor."""
    scale: torch.Tensor
    """0-D float32; shared by the tensor and its transposes."""

    @staticmethod
    def __new__(cls, data_bytes: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> "Float8Tensor":
        return torch.Tensor._make_wrapper_subclass(cls, data_bytes.shape, dtype=dtype, device=data_bytes.device)

    def __init__(self, data_bytes: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> None:
        self.data_bytes, self.scale = data_bytes, scale

    @classmethod
    def quantized(cls, values: torch.Tensor) -> "Float8Tensor":
        """`values` rounded to float8 under the scale of their largest magnitude."""
        scale = scale_of(values.detach().abs().max().float())
        return cls(encoded(values.detach(), scale), scale, values.dtype)

    def dequantized(self) -> torch.Tensor:
        """A plain tensor of the values."""
        return (self.data_bytes.view(FLOAT8).float() * self.scale).to(self.dtype)

    def __repr__(self, **_: Any) -> str:
        return f"Float8Tensor(shape={tuple(self.shape)}, dtype={self.dtype})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        first = args[0]
        if func in (aten.detach.default, aten.alias.default):
            return cls(first.data_bytes, first.scale, first.dtype)
        if func is aten.t.default:
            return cls(first.data_bytes.t(), first.scale, first.dtype)
        if func is aten.clone.default:
            return cls(first.data_bytes.clone(), first.scale.clone(), first.dtype)
        if func is aten.copy_.default and isinstance(first, cls):
            values = args[1]
            first.scale.copy_(scale_of(values.abs().max().float()))
            first.data_bytes.copy_(encoded(values, first.scale))
            return first
        plain = [arg.dequantized() if isinstance(arg, cls) else arg for arg in args]
        return func(*plain, **(kwargs or {}))


def scale_of(largest: torch.Tensor) -> torch.Tensor:
    """The value of one step of float8, given the largest magnitude; 1 for zeros."""
    return torch.where(largest > 0, largest / LARGEST, torch.ones_like(largest))


def encoded(values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """`values` as the bytes of float8 under `scale`."""
    return (values.float() / scale).clamp(-LARGEST, LARGEST).to(FLOAT8).view(torch.uint8)


class Float8Codec(WeightCodec):
    """Stores such weights as bytes; ranks agree on the largest magnitude of a whole parameter before they encode."""

    is_cast = False

    def handles(self, param: nn.Parameter) -> bool:
        return isinstance(param.data, Float8Tensor)

    def storage_dtype(self, param: nn.Parameter) -> torch.dtype:
        return torch.uint8

    def initial_main(self, param: nn.Parameter, dtype: torch.dtype) -> torch.Tensor:
        return param.detach().dequantized().to(dtype)

    def bind(self, param: nn.Parameter, view: torch.Tensor) -> None:
        param.data_bytes = view

    def encode(self, shards: Sequence[Shard], groups: Sequence[dist.ProcessGroup]) -> None:
        none = torch.zeros(())
        largest = torch.stack([shard.main.abs().max().float() if shard.main.numel() else none for shard in shards])
        for group in groups:
            dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
        for shard, magnitude in zip(shards, largest, strict=True):
            shard.param.scale.copy_(scale_of(magnitude))
            shard.stored.copy_(encoded(shard.main, shard.param.scale))


@functools.cache
def register() -> None:
    """Makes the engine of this process know the format."""
    register_codec(Float8Codec())


def build_float8(build: Callable[[], nn.Module] = TinyMLP) -> nn.Module:
    """A model whose Linear weights, but not its biases, are float8."""
    register()
    module = build()
    for child in module.modules():
        if isinstance(child, nn.Linear):
            frozen = not child.weight.requires_grad
            child.weight = nn.Parameter(Float8Tensor.quantized(child.weight), requires_grad=not frozen)
    return module
