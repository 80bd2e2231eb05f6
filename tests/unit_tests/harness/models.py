"""Small models, batches and losses for parity tests; every awkward shape and sharing that an engine must survive."""

from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

Recompute = Literal["reentrant", "non_reentrant"]
#: batches[step][microbatch][rank] -> (inputs, target)
Batches = list[list[list[tuple[torch.Tensor, torch.Tensor]]]]


class MLPBlock(nn.Module):
    """One Linear with an activation, or without one to stay linear in its weights."""

    def __init__(self, width_in: int, width_out: int, *, bias: bool = True, is_linear: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(width_in, width_out, bias=bias)
        self.is_linear = is_linear

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shape (batch, width_in) to (batch, width_out)."""
        y = self.linear(x)
        return y if self.is_linear else F.gelu(y)


class TinyMLP(nn.Module):
    """A stack of MLPBlocks (the unit class) with a head outside them.

    `integers=True` drops the activations and draws weights from {-1, 0, 1}: with `integer_batches`, `dot_loss` and
    `SignSGD` every number stays a small integer (divided by a power of two), so sums are exact in any order.
    """

    def __init__(
        self,
        width: int = 6,
        depth: int = 3,
        *,
        bias: bool = True,
        integers: bool = False,
        recompute: Recompute | None = None,
    ) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(MLPBlock(width, width, bias=bias, is_linear=integers) for _ in range(depth))
        self.head = nn.Linear(width, width, bias=bias)
        self.recompute = recompute
        if integers:
            integer_init_(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shape (batch, width) to (batch, width)."""
        for block in self.blocks:
            x = _call(block, x, recompute=self.recompute)
        return self.head(x)


class TransformerBlock(nn.Module):
    """Pre-norm causal attention and MLP."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width + 1)  # odd on purpose: nothing divides
        self.down = nn.Linear(2 * width + 1, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shape (batch, sequence, width), kept."""
        batch, sequence, width = x.shape
        parts = self.qkv(self.norm1(x)).view(batch, sequence, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.proj(attended.transpose(1, 2).reshape(batch, sequence, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class TinyTransformer(nn.Module):
    """A language model of TransformerBlocks (the unit class); embedding, final norm and head lie outside them.

    `has_unused=True` adds a parameter that never takes part in the forward pass.
    """

    def __init__(
        self,
        vocab: int = 17,
        width: int = 8,
        depth: int = 2,
        heads: int = 2,
        *,
        is_tied: bool = False,
        recompute: Recompute | None = None,
        has_unused: bool = False,
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, width)
        self.blocks = nn.ModuleList(TransformerBlock(width, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)
        if is_tied:
            self.head.weight = self.embedding.weight
        if has_unused:
            self.unused = nn.Linear(3, 5)
        self.recompute = recompute

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Tokens (batch, sequence) to logits (batch, sequence, vocab)."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = _call(block, x, recompute=self.recompute)
        return self.head(self.norm(x))


class OddShapes(nn.Module):
    """A unit with a one-row weight, vectors, a length-1 vector, two rows, a 3-D tensor and coprime widths.

    Takes and returns shape (batch, 7).
    """

    def __init__(self) -> None:
        super().__init__()
        self.one_row = nn.Linear(7, 1, bias=False)
        self.two_rows = nn.Linear(7, 2)
        self.coprime = nn.Linear(7, 5)
        self.back = nn.Linear(5, 7, bias=False)
        self.cube = nn.Parameter(torch.empty(3, 5, 7))
        self.gain = nn.Parameter(torch.empty(7))
        self.temperature = nn.Parameter(torch.empty(1))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws the parameters this module owns directly; its Linears reset themselves."""
        nn.init.normal_(self.cube, std=0.1)
        nn.init.ones_(self.gain)
        nn.init.ones_(self.temperature)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shape (batch, 7), kept."""
        hidden = torch.tanh(self.coprime(x))
        mixed = torch.einsum("bf,kfw->bw", hidden, self.cube)
        gate = self.one_row(x) * self.temperature + self.two_rows(x).sum(-1, keepdim=True)
        return x + self.back(hidden) * gate + mixed * self.gain


class OddModel(nn.Module):
    """A few OddShapes units and an odd head."""

    def __init__(self, depth: int = 2) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(OddShapes() for _ in range(depth))
        self.head = nn.Linear(7, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shape (batch, 7) to (batch, 3)."""
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class SignSGD(torch.optim.Optimizer):
    """Moves each weight by `lr` against its gradient's sign, so integer weights stay integers."""

    def __init__(self, params: Iterable[Any], lr: float = 1.0) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        """One step; elementwise, so it is the same on shards as on whole tensors."""
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.sub_(param.grad.sign().to(param.dtype), alpha=group["lr"])


def integer_init_(module: nn.Module, seed: int = 1) -> None:
    """Fills every parameter with -1, 0 or 1."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for param in module.parameters():
            param.copy_(torch.randint(-1, 2, param.shape, generator=generator))


def freeze(module: nn.Module, *prefixes: str) -> nn.Module:
    """`module`, with every parameter whose name starts with one of `prefixes` frozen."""
    matched = [param for name, param in module.named_parameters() if name.startswith(prefixes)]
    if not matched:
        raise ValueError(
            f"no parameter name starts with {prefixes}; there are {dict(module.named_parameters()).keys()}"
        )
    for param in matched:
        param.requires_grad_(False)
    return module


def integer_batches(steps: int, microbatches: int, ranks: int, *, width: int = 6, rows: int = 2) -> Batches:
    """Inputs and targets in {-1, 0, 1}, different for every step, micro-batch and rank."""
    return _batches(steps, microbatches, ranks, lambda g: tuple(_integers(g, rows, width) for _ in range(2)))


def float_batches(
    steps: int, microbatches: int, ranks: int, *, width: int = 6, width_out: int | None = None, rows: int = 2
) -> Batches:
    """Normally distributed inputs and targets."""
    widths = (width, width_out or width)
    return _batches(steps, microbatches, ranks, lambda g: tuple(torch.randn(rows, w, generator=g) for w in widths))


def token_batches(
    steps: int, microbatches: int, ranks: int, *, vocab: int = 17, sequence: int = 5, rows: int = 2
) -> Batches:
    """Token sequences and the same shifted by one."""

    def draw(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = torch.randint(vocab, (rows, sequence + 1), generator=generator)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    return _batches(steps, microbatches, ranks, draw)


def dot_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Sum of output times target: linear, so integers stay integers."""
    return (output * target.to(output.dtype)).sum()


def square_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Mean squared error in float32."""
    return F.mse_loss(output.float(), target.float())


def token_loss(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy in float32."""
    return F.cross_entropy(logits.float().flatten(0, 1), target.flatten())


def _call(block: nn.Module, x: torch.Tensor, *, recompute: Recompute | None) -> torch.Tensor:
    if recompute is None:
        return block(x)
    if recompute == "reentrant" and not x.requires_grad and torch.is_grad_enabled():
        x = x.detach().requires_grad_()  # reentrant checkpoints give no gradients when no input asks for one
    return checkpoint(block, x, use_reentrant=recompute == "reentrant")


def _integers(generator: torch.Generator, rows: int, width: int) -> torch.Tensor:
    return torch.randint(-1, 2, (rows, width), generator=generator).float()


def _batches(steps: int, microbatches: int, ranks: int, draw: Callable[[torch.Generator], Any]) -> Batches:
    generator = torch.Generator().manual_seed(1234)
    return [[[draw(generator) for _ in range(ranks)] for _ in range(microbatches)] for _ in range(steps)]
