"""A mixture of experts spread over expert-parallel ranks, whose experts one process can also hold together."""

import dataclasses
import functools
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tests.unit_tests.harness.models import integer_init_
from tests.unit_tests.harness.sharded import Piece, RankStep

EXPERTS, WIDTH = 4, 4


@dataclasses.dataclass(frozen=True)
class Place:
    """Place of a rank's experts: one of `size` groups of ranks holds its share of them."""

    rank: int = 0
    size: int = 1
    group: Any = None
    """The ranks that together hold all experts; None if one rank does."""

    @property
    def held(self) -> range:
        """Numbers of the experts held here."""
        share = EXPERTS // self.size
        return range(self.rank * share, (self.rank + 1) * share)

    def global_name(self, name: str) -> str:
        """The parameter's name in a process that holds all experts."""
        parts = name.split(".")
        if "experts" in parts:
            at = parts.index("experts") + 1
            parts[at] = str(self.held[int(parts[at])])
        return ".".join(parts)


class _Gathered(torch.autograd.Function):
    """All ranks' rows; the gradient is the sum of what all ranks say about this rank's rows."""

    @staticmethod
    def forward(ctx, x, place):
        ctx.place = place
        return _all_gather(x, place)

    @staticmethod
    def backward(ctx, grad):
        return _reduce_scatter(grad, ctx.place), None


class _Returned(torch.autograd.Function):
    """The sum of all ranks' results for this rank's rows."""

    @staticmethod
    def forward(ctx, x, place):
        ctx.place = place
        return _reduce_scatter(x, place)

    @staticmethod
    def backward(ctx, grad):
        return _all_gather(grad, ctx.place), None


def _all_gather(x, place):
    parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(place.size)]
    dist.all_gather(parts, x.contiguous(), group=place.group)
    return torch.cat(parts)


def _reduce_scatter(x, place):
    total = x.contiguous().clone()
    dist.all_reduce(total, group=place.group)
    return total.chunk(place.size)[place.rank].contiguous()


class Expert(nn.Module):
    """One expert, linear in its weight; `served` counts nothing but is each expert's own buffer."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Module()
        self.scale.register_buffer("served", torch.tensor([float(number + 1)]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shape (rows, WIDTH), kept."""
        return self.linear(x) * self.scale.served


class MixtureBlock(nn.Module):
    """A dense layer, then for each row the expert that the row's first two numbers name."""

    def __init__(self, place: Place, *, skips: bool) -> None:
        super().__init__()
        self.place, self.skips = place, skips
        self.dense = nn.Linear(WIDTH, WIDTH)
        self.experts = nn.ModuleList(Expert(number) for number in place.held)
        if place.size > 1:
            for param in self.experts.parameters():
                param.allreduce = False

    def forward(self, x: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        """Shape (rows, WIDTH), kept; `chosen` (rows,) numbers experts."""
        y = self.dense(x)
        rows, numbers = y, chosen
        if self.place.size > 1:
            rows, numbers = _Gathered.apply(y, self.place), _all_gather(chosen, self.place)
        out = torch.zeros_like(rows)
        for number, expert in zip(self.place.held, self.experts, strict=True):
            mask = (numbers == number).unsqueeze(-1)
            if not self.skips or mask.any():
                out = out + expert(rows) * mask
        return y + (_Returned.apply(out, self.place) if self.place.size > 1 else out)


class Mixture(nn.Module):
    """MixtureBlocks (the unit class) and a dense head. Every number is a small integer."""

    def __init__(self, place: Place = Place(), *, skips: bool = False, depth: int = 2) -> None:
        super().__init__()
        whole = [MixtureBlock(Place(), skips=skips) for _ in range(depth)]
        self.blocks = nn.ModuleList(MixtureBlock(place, skips=skips) for _ in range(depth))
        self.head = nn.Linear(WIDTH, WIDTH)
        for number, block in enumerate(whole):
            integer_init_(block, seed=number + 1)
        integer_init_(self.head)
        values = {
            f"blocks.{n}.{name}": param for n, block in enumerate(whole) for name, param in block.named_parameters()
        }
        with torch.no_grad():
            for name, param in self.blocks.named_parameters(prefix="blocks"):
                param.copy_(values[place.global_name(name)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shape (rows, WIDTH) of integers, kept."""
        chosen = (x[:, 0] * 3 + x[:, 1]).long() % EXPERTS
        for block in self.blocks:
            x = block(x, chosen)
        return self.head(x)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Topology:
    """Layout of ranks. Ranks of one expert-parallel group are neighbours unless `spans_outer`."""

    ep: int = 2
    outer: int = 1
    """Ranks on the outer axis; 1: there is none."""
    spans_outer: bool = False
    """Expert-parallel groups are made of outer ranks, so that the two meshes have different outer groups."""

    def place(self) -> Place:
        """This rank's."""
        mesh = expert_mesh(self)
        return Place(mesh["ep"].get_local_rank(), self.ep, mesh["ep"].get_group())

    def options(self) -> dict[str, Any]:
        """Arguments of `fully_shard_model`. **Collective**, the first time."""
        experts = {"expt_device_mesh": expert_mesh(self)}
        if self.outer == 1:
            return experts
        return {
            **experts,
            "device_mesh": dense_mesh(self.outer),
            "dp_outer_dim": "outer",
            "hybrid_fsdp_group": dense_mesh(self.outer)["all"].get_group(),
            "hybrid_fsdp_expt_group": expert_mesh(self)["all"].get_group(),
        }


@functools.cache
def dense_mesh(outer: int) -> DeviceMesh:
    """All ranks."""
    mesh = init_device_mesh("cpu", (outer, dist.get_world_size() // outer), mesh_dim_names=("outer", "dp"))
    mesh[("outer", "dp")]._flatten("all")
    return mesh


@functools.cache
def expert_mesh(topology: Topology) -> DeviceMesh:
    """The data-parallel ranks of each expert, and the experts' ranks beside them."""
    inner = dist.get_world_size() // (topology.ep * topology.outer)
    if topology.spans_outer:
        ranks = torch.arange(dist.get_world_size()).view(topology.ep, topology.outer, inner).permute(1, 2, 0)
    else:
        ranks = torch.arange(dist.get_world_size()).view(topology.outer, inner, topology.ep)
    mesh = DeviceMesh("cpu", ranks.contiguous(), mesh_dim_names=("outer", "dp", "ep"))
    mesh[("outer", "dp")]._flatten("all")
    return mesh


def renamed(steps: list[RankStep], place: Place) -> list[RankStep]:
    """This rank's part with the names that a process with all experts has; empty pieces for what is not here."""

    def rename(pieces: dict[str, Piece]) -> dict[str, Piece]:
        found = {place.global_name(name): piece for name, piece in pieces.items()}
        dtype = next(iter(found.values())).values.dtype
        names = [name for name, _ in Mixture(depth=2).named_parameters()]
        return {name: found.get(name, Piece(0, torch.empty(0, dtype=dtype))) for name in names}

    return [dataclasses.replace(step, grads=rename(step.grads), weights=rename(step.weights)) for step in steps]
