"""Tensor-parallel models made of whole ones: DTensors by `parallelize_module`, and tensors with Megatron's tags."""

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from tests.unit_tests.harness.models import integer_init_
from tests.unit_tests.harness.sharded import poisoned_storage

#: Changes a whole model, the same on every rank, to one that is spread over the ranks of a 1-D mesh.
Parallelize = Callable[[nn.Module, DeviceMesh], Any]


@functools.cache
def mesh_of(dp: int, tp: int, outer: int | None = None) -> DeviceMesh:
    """Made once per process, because groups cost sockets."""
    if outer is not None:
        return init_device_mesh("cpu", (outer, dp, tp), mesh_dim_names=("outer", "dp", "tp"))
    return init_device_mesh("cpu", (dp, tp), mesh_dim_names=("dp", "tp"))


def shard_over(mesh: DeviceMesh, module: nn.Module, parallelize: Parallelize, **options: Any) -> Any:
    """The model over data- and tensor-parallel ranks. **Collective.**"""
    from megatron_fsdp import fully_shard_model

    if mesh["tp"].size() > 1:
        parallelize(module, mesh["tp"])
    if "outer" in mesh.mesh_dim_names:
        options = {"dp_outer_dim": "outer", "hybrid_fsdp_group": dp_group(mesh), **options}
    with poisoned_storage():
        return fully_shard_model(
            module,
            device_mesh=mesh,
            dp_shard_dim="dp",
            tp_dim="tp",
            **{"sync_model_each_microbatch": False, **options},
        )


@functools.cache
def dp_group(mesh: DeviceMesh) -> dist.ProcessGroup:
    """All ranks of (outer, dp)."""
    mine = mesh["outer", "dp"].mesh.flatten().tolist()
    return dist.new_group(mine, use_local_synchronization=True)


def dp_rank(mesh: DeviceMesh) -> int:
    """Number of this rank's batch."""
    inner = mesh.get_local_rank("dp")
    return mesh.get_local_rank("outer") * mesh["dp"].size() + inner if "outer" in mesh.mesh_dim_names else inner


def whole(model: Any, kind: str) -> dict[str, torch.Tensor]:
    """Full weights (`data`), or full gradients (`grad`) of the trainable parameters. **Collective.**"""
    params = {name: p for name, p in model.module.named_parameters() if kind == "data" or p.requires_grad}
    return {name: (p if kind == "data" else p.grad).full_tensor() for name, p in params.items()}


def parallelize_mlp(model: nn.Module, mesh: DeviceMesh) -> None:
    """TinyMLP: columns, rows and columns in turn; the head stays a plain tensor, whole on every rank."""
    styles = (ColwiseParallel(output_layouts=Replicate()), RowwiseParallel(input_layouts=Replicate()))
    plan = {f"blocks.{number}.linear": styles[number % 2] for number in range(len(model.blocks))}
    parallelize_module(model, mesh, plan)


class SequenceParallelLM(nn.Module):
    """Embedding, blocks (the unit class) whose norms see a part of the sequence, a norm and a head."""

    def __init__(self, vocab: int = 18, width: int = 8, depth: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, width)
        self.blocks = nn.ModuleList(FeedForward(width) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Tokens (batch, sequence) to logits."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class FeedForward(nn.Module):
    """A residual MLP after a norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Keeps the shape."""
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def parallelize_lm(model: SequenceParallelLM, mesh: DeviceMesh) -> None:
    """As torch's tutorial does: rows of the vocabulary, and sequence parallelism between the blocks' two linears."""
    parallelize_module(
        model,
        mesh,
        {
            "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "norm": SequenceParallel(),
            "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
        },
    )
    for block in model.blocks:
        gather = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
        plan = {
            "norm": SequenceParallel(),
            "up": gather,
            "down": RowwiseParallel(output_layouts=Shard(1)),
        }
        parallelize_module(block, mesh, plan)
        parallelize_module(block, mesh, {"up": ColwiseParallel(input_layouts=Replicate())})


class TaggedMLP(nn.Module):
    """A gated MLP as megatron-core lays it out: plain tensors, of which tags say how ranks share them.

    The first weight is [gate; up], of which rank r has [gate_r; up_r] (`partition_stride` 2). Integers stay integers.
    """

    def __init__(self, width: int = 6, hidden: int = 4) -> None:
        super().__init__()
        self.fc1 = nn.Parameter(torch.empty(2 * hidden, width))
        self.fc2 = nn.Parameter(torch.empty(width, hidden))
        self.bias = nn.Parameter(torch.empty(width))
        self.group: dist.ProcessGroup | None = None
        integer_init_(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shape (batch, width), kept."""
        gate, up = nn.functional.linear(_CopyToRanks.apply(x, self.group), self.fc1).chunk(2, dim=-1)
        return _SumOverRanks.apply(nn.functional.linear(gate * up, self.fc2), self.group) + self.bias


def parallelize_tagged(model: nn.Module, mesh: DeviceMesh) -> None:
    """Leaves each rank its part, tagged."""
    rank, size = mesh.get_local_rank(), mesh.size()
    for module in model.modules():
        if isinstance(module, TaggedMLP):
            module.group = mesh.get_group()
            gate, up = (half.chunk(size)[rank] for half in module.fc1.data.chunk(2))
            module.fc1 = _tagged(torch.cat([gate, up]), dim=0, stride=2)
            module.fc2 = _tagged(module.fc2.data.chunk(size, dim=1)[rank].contiguous(), dim=1, stride=1)


def _tagged(data: torch.Tensor, dim: int, stride: int) -> nn.Parameter:
    param = nn.Parameter(data)
    param.tensor_model_parallel, param.partition_dim, param.partition_stride = True, dim, stride
    return param


class _CopyToRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _summed(grad, ctx.group), None


class _SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
        return _summed(x, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None


def _summed(tensor: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    total = tensor.clone()
    if group is not None:
        dist.all_reduce(total, group=group)
    return total
