"""Modules that are built from a description: trees of odd parts, called in odd ways.

Every part takes and gives (batch, width), whatever it does inside; `ctx` says which parts are left out this time.
Values depend on the seed of the part alone, so a model on the meta device, or on another rank, starts from the same.
"""

import dataclasses
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.unit_tests.harness.fuzz_tree import Call, Leaf, Node, leaves_of

VOCABULARY = 5


@dataclasses.dataclass(frozen=True)
class Context:
    """Decisions of a micro-batch on one rank, apart from numbers."""

    tokens: torch.Tensor
    step_coins: tuple[bool, ...]
    rank_coins: tuple[bool, ...]
    turn: int

    def leaves_out(self, call: Call) -> bool:
        """The call does not take place."""
        return bool(call.skip) and (self.step_coins if call.skip == "step" else self.rank_coins)[call.site]


# ---- values ----

_PERTURBATION = 0.0


def perturb(amount: float) -> None:
    """Models built from now on have other values, as on a rank with another seed; 0 undoes it."""
    global _PERTURBATION
    _PERTURBATION = amount


def _fill(module: nn.Module) -> None:
    """Draws the parameters and buffers that `module` owns; of a few elements each, so that two models never agree."""
    with torch.no_grad():
        for number, tensor in enumerate([*module._parameters.values(), *module._buffers.values()]):
            if tensor is not None:
                generator = torch.Generator().manual_seed(1000 * getattr(module, "seed", 0) + number)
                drawn = torch.randn(tensor.shape, generator=generator, device="cpu") * 0.4 + 0.1
                tensor.copy_(drawn + _PERTURBATION)


class _Linear(nn.Linear):
    reset_parameters = _fill


class _Norm(nn.LayerNorm):
    reset_parameters = _fill


class _Embedding(nn.Embedding):
    reset_parameters = _fill


class _Conv(nn.Conv1d):
    reset_parameters = _fill


# ---- leaves ----


class Part(nn.Module):
    """A leaf: adds something to its input."""

    dtype = torch.float32
    """Of its parameters; noted when it is built, for a part whose parameters are another unit's sees its shards."""

    def forward(self, x: torch.Tensor, ctx: Context) -> torch.Tensor:
        """Shape (batch, width), kept."""
        return x + torch.tanh(self.change(x.to(self.dtype), ctx)).to(x.dtype)

    def change(self, x: torch.Tensor, ctx: Context) -> torch.Tensor:
        """The summand, broadcast to the input's shape."""
        raise NotImplementedError

    reset_parameters = _fill


class LinearPart(Part):
    """One square Linear."""

    def __init__(self, width: int, size: int) -> None:
        super().__init__()
        self.inner = _Linear(width, width, bias=size % 2 == 0)

    def change(self, x: torch.Tensor, ctx: Context) -> torch.Tensor:
        return self.inner(x)


class BottleneckPart(Part):
    """Two Linears with `size` features between them: one row, or as many as nothing divides."""

    def __init__(self, width: int, size: int) -> None:
        super().__init__()
        self.down, self.up = _Linear(width, size), _Linear(size, width, bias=False)

    def change(self, x: torch.Tensor, ctx: Context) -> torch.Tensor:
        return self.up(F.gelu(self.down(x)))


class NormPart(Part):
    """A LayerNorm, and a buffer."""

    def __init__(self, width: int, size: int) -> None:
        super().__init__()
        self.inner = _Norm(width)
        self.register_buffer("shift", torch.empty(width))
        _fill(self)

    def change(self, x: torch.Tensor, ctx: Context) -> torch.Tensor:
        return self.inner(x).to(x.dtype) + self.shift.to(x.dtype)


class EmbeddingPart(Part):
    """A table that is read with integers; it does not look at its input."""

    def __init__(self, width: int, size: int) -> None:
        super().__init__()
        self.inner = _Embedding(VOCABULARY, width)

    def change(self, x: torch.Tensor, ctx: Context) -> torch.Tensor:
        return self.inner(ctx.tokens)


class ConvPart(Part):
    """3-D weights."""

    def __init__(self, width: int, size: int) -> None:
        super().__init__()
        self.inner = _Conv(1, size, 3, padding=1)

    def change(self, x: torch.Tensor, ctx: Context) -> torch.Tensor:
        return self.inner(x.unsqueeze(1)).sum(1)


class OddPart(Part):
    """Parameters of 0, 1 and 3 dims, of one element, of no rows, and one that is never used."""

    def __init__(self, width: int, size: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.empty(width))
        self.scalar = nn.Parameter(torch.empty(()))
        self.single = nn.Parameter(torch.empty(1))
        self.cube = nn.Parameter(torch.empty(size, 2, width))
        self.nothing = nn.Parameter(torch.empty(0, width))
        self.unused = nn.Parameter(torch.empty(size, 3))
        _fill(self)

    def change(self, x: torch.Tensor, ctx: Context) -> torch.Tensor:
        mixed = torch.einsum("bw,kjw->bw", x, self.cube)
        return self.gain * x * self.scalar + self.single * mixed + self.nothing.sum(0)


class ChoosyPart(Part):
    """Two Linears, one of which each rank leaves out by a coin of its own; or hands its input through."""

    def __init__(self, width: int, size: int) -> None:
        super().__init__()
        self.main, self.side = _Linear(width, width), _Linear(width, width, bias=False)
        self.site, self.hands_through = size, size % 2 == 0

    def forward(self, x: torch.Tensor, ctx: Context) -> torch.Tensor:
        if self.hands_through and ctx.rank_coins[self.site]:
            return x
        return super().forward(x, ctx)

    def change(self, x: torch.Tensor, ctx: Context) -> torch.Tensor:
        y = self.main(x)
        return y if ctx.rank_coins[self.site] else y + self.side(x)


class TablePart(Part):
    """Reads the weight of a module that returns views of it."""

    def __init__(self, width: int, size: int) -> None:
        super().__init__()
        self.table = Table(width, size)

    def change(self, x: torch.Tensor, ctx: Context) -> torch.Tensor:
        return self.table(ctx.tokens.shape[0]).mean(0) * x


class Table(nn.Module):
    """Returns rows of its weight."""

    def __init__(self, width: int, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, width))
        _fill(self)

    def forward(self, rows: int) -> torch.Tensor:
        """The first `rows` rows."""
        return self.weight[:rows]

    reset_parameters = _fill


LEAVES: dict[str, type[Part]] = {
    "linear": LinearPart,
    "bottleneck": BottleneckPart,
    "norm": NormPart,
    "embedding": EmbeddingPart,
    "conv": ConvPart,
    "odd": OddPart,
    "choosy": ChoosyPart,
    "table": TablePart,
}


# ---- nodes ----


@dataclasses.dataclass
class Result:
    """An output as models return them."""

    count: int
    tensors: list[torch.Tensor]


class Thing:
    """An output of a class that nobody knows."""

    def __init__(self, value: torch.Tensor) -> None:
        self.value, self.itself = value, self


def wrapped(x: torch.Tensor, kind: str) -> Any:
    """`x` as an output of this kind."""
    if kind == "dataclass":
        return Result(1, [x])
    return {"tensor": x, "tuple": (None, x), "dict": {"n": 1, "x": [x]}, "object": Thing(x)}[kind]


def unwrapped(output: Any) -> torch.Tensor:
    """The tensor inside."""
    if isinstance(output, torch.Tensor):
        return output
    if isinstance(output, tuple):
        return output[1]
    if isinstance(output, dict):
        return output["x"][0]
    return output.tensors[0] if isinstance(output, Result) else output.value


class Block(nn.Module):
    """Calls its children as its description says."""

    def __init__(self, node: Node, width: int) -> None:
        super().__init__()
        self.node = node
        self.parts = nn.ModuleList(built(child, width) for child in node.children)

    def forward(self, x: torch.Tensor, ctx: Context) -> Any:
        """Shape (batch, width), kept, inside whatever the description asks for."""
        calls = list(self.node.calls)
        if self.node.is_rotating and calls:
            first = ctx.turn % len(calls)
            calls = calls[first:] + calls[:first]
        dtype = x.dtype
        is_lossy = self.node.has_autocast or torch.is_autocast_enabled("cpu")
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=is_lossy):
            for call in calls:
                if not ctx.leaves_out(call):
                    x = _called(self.parts[call.child], call, x, ctx)
        return wrapped(x.to(dtype), self.node.output)


class BlockA(Block):
    """So that several classes of units can be inside each other."""


class BlockB(Block):
    """As BlockA."""


class BlockC(Block):
    """As BlockA."""


BLOCKS: dict[str, type[Block]] = {"A": BlockA, "B": BlockB, "C": BlockC}


def _called(part: nn.Module, call: Call, x: torch.Tensor, ctx: Context) -> torch.Tensor:
    def run(value: torch.Tensor) -> torch.Tensor:
        return unwrapped(part(x=value, ctx=ctx) if call.mode == "keyword" else part(value, ctx))

    if call.mode == "no_grad":
        with torch.no_grad():
            added = run(x)
        return 0.5 * x + 0.5 * added
    if not call.recompute:
        return run(x)
    if call.recompute == "reentrant" and not x.requires_grad and torch.is_grad_enabled():
        x = x.detach().requires_grad_()  # without a gradient to pass on it gives none to its weights
    return checkpoint(run, x, use_reentrant=call.recompute == "reentrant")


class FuzzModel(nn.Module):
    """Perhaps a stem, the tree, and a head, which always runs."""

    dtype = torch.float32

    def __init__(self, tree: Node, width: int, has_stem: bool) -> None:
        super().__init__()
        self.stem = _Linear(width, width) if has_stem else None
        self.tree = built(tree, width)
        self.head = _Linear(width, width)
        self.head.seed = 7
        self.head.reset_parameters()

    def forward(self, inputs: tuple[torch.Tensor, Context]) -> torch.Tensor:
        """(batch, width) of float32 to the same."""
        x, ctx = inputs
        if self.stem is not None:
            x = self.stem(x.to(self.dtype)).float()
        return self.head(unwrapped(self.tree(x, ctx)).to(self.dtype)).float()


def built(part: Node | Leaf, width: int) -> nn.Module:
    """The module of a description, with its values; on the meta device if that is the default."""
    if isinstance(part, Node):
        return BLOCKS[part.cls](part, width)
    module = LEAVES[part.kind](width, part.size)
    for number, inner in enumerate(module.modules()):
        # Parts that share a parameter must agree on its values, whichever of them draws it.
        inner.seed = (500 + part.tie if part.tie else part.seed) * 10 + number
        if inner._parameters or inner._buffers:
            inner.reset_parameters()
    params = list(module.parameters())
    for param in params if part.frozen == "all" else params[:1] if part.frozen else []:
        param.requires_grad_(False)
    return module.to(torch.bfloat16) if part.is_half else module


def build_model(tree: Node, width: int, *, has_stem: bool, dtype: torch.dtype | None) -> FuzzModel:
    """The model, ties and marks included; `dtype` of its parameters, None: as the leaves say."""
    from megatron_fsdp import fsdp_no_shard

    model = FuzzModel(tree, width, has_stem)
    parts = [module for module in model.modules() if isinstance(module, Part)]
    first: dict[int, nn.Parameter] = {}
    for module, leaf in zip(parts, leaves_of(tree), strict=True):
        holder = next(inner for inner in module.modules() if inner._parameters)
        if leaf.tie:
            name = next(iter(holder._parameters))
            holder._parameters[name] = first.setdefault(leaf.tie, holder._parameters[name])
        if leaf.is_whole:
            fsdp_no_shard(module)
    model.to(dtype)
    model.dtype = model.head.weight.dtype
    for module in parts:
        module.dtype = next(module.parameters()).dtype
    return model
