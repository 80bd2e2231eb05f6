"""Small models with unusual control flow or outputs; linear in every weight, so that integers stay integers.

All take (batch, 6) and give something from which `dot_loss` can be taken. Where ranks are to differ, the input decides.
"""

import dataclasses
import functools
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.unit_tests.harness.models import Batches, MLPBlock, Recompute, TinyMLP, integer_batches

WIDTH = 6


def _block() -> MLPBlock:
    return MLPBlock(WIDTH, WIDTH, is_linear=True)


def _head() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH)


def is_chosen(x: torch.Tensor, number: int) -> bool:
    """A coin that falls differently on each rank."""
    return bool((int(x.detach().abs().sum()) >> (number % 2)) % 2)


def shared_choice(x: torch.Tensor) -> int:
    """0, 1 or 2, the same on all ranks, different between micro-batches."""
    return int(x[0, 0]) + 1


def own_choice(x: torch.Tensor) -> int:
    """0 or 1, different on neighbouring ranks, and between micro-batches."""
    return int(x[0, 1])


def marked_batches(steps: int, microbatches: int, ranks: int) -> Batches:
    """Integer batches that carry what `shared_choice` and `own_choice` read."""
    batches = integer_batches(steps, microbatches, ranks)
    for step, by_microbatch in enumerate(batches):
        for number, by_rank in enumerate(by_microbatch):
            for rank, (inputs, _) in enumerate(by_rank):
                inputs[0, 0] = (step + number) % 3 - 1
                inputs[0, 1] = (step + number + rank) % 2
    return batches


class Casting(TinyMLP):
    """Takes inputs of any dtype."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shape (batch, 6), kept."""
        return super().forward(x.to(self.head.weight.dtype))


class Stack(nn.Module):
    """Units one after the other, and a head."""

    def __init__(self, depth: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_block() for _ in range(depth))
        self.head = _head()

    def forward(self, x: torch.Tensor) -> Any:
        """Shape (batch, 6), kept."""
        return self.head(self.run(x))

    def run(self, x: torch.Tensor) -> torch.Tensor:
        """The part that subclasses change."""
        for block in self.blocks:
            x = block(x)
        return x


class Twice(Stack):
    """Its second unit runs twice, with another one in between."""

    def __init__(self, recompute: Recompute | None = None) -> None:
        super().__init__()
        self.recompute = recompute

    def run(self, x: torch.Tensor) -> torch.Tensor:
        first, shared, between = self.blocks
        for block in (first, shared, between, shared):
            x = _recomputed(block, x, self.recompute)
        return x


class Span(Stack):
    """Recomputation around two units at a time."""

    def __init__(self, recompute: Recompute) -> None:
        super().__init__(depth=5)
        self.recompute = recompute

    def run(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks[0](x)
        for pair in (self.blocks[1:3], self.blocks[3:5]):
            x = _recomputed(lambda y, pair=pair: pair[1](pair[0](y)), x, self.recompute)
        return x


class Whole(Stack):
    """Recomputation around everything but the head."""

    def __init__(self, recompute: Recompute) -> None:
        super().__init__()
        self.recompute = recompute

    def run(self, x: torch.Tensor) -> torch.Tensor:
        return _recomputed(super().run, x, self.recompute)


class Reversed(Stack):
    """Runs its units in the reverse of the order in which they are registered."""

    def run(self, x: torch.Tensor) -> torch.Tensor:
        for block in reversed(self.blocks):
            x = block(x)
        return x


class Shuffled(Stack):
    """Runs its units in another order in every forward, in the same one on every rank."""

    def run(self, x: torch.Tensor) -> torch.Tensor:
        first = shared_choice(x)
        for number in ((0, 1, 2), (2, 0, 1), (1, 0, 2))[first]:
            x = self.blocks[number](x)
        return x


class Skipping(Stack):
    """Every rank leaves out another set of units."""

    def __init__(self, recompute: Recompute | None = None) -> None:
        super().__init__(depth=5)
        self.recompute = recompute

    def run(self, x: torch.Tensor) -> torch.Tensor:
        y = x
        for number, block in enumerate(self.blocks):
            if number == 2 or is_chosen(x, number):
                y = _recomputed(block, y, self.recompute)
        return y


class Wandering(Stack):
    """Every rank runs other units, some of them twice, in an order that changes from forward to forward."""

    def __init__(self) -> None:
        super().__init__(depth=4)

    def run(self, x: torch.Tensor) -> torch.Tensor:
        start = shared_choice(x)
        for number in ((0, 1, 0), (3, 1, 1))[own_choice(x)]:
            x = self.blocks[(start + number) % 4](x)
        return x


class Alternating(Stack):
    """All ranks leave out the same unit, another one in every forward."""

    def run(self, x: torch.Tensor) -> torch.Tensor:
        skipped = shared_choice(x)
        for number, block in enumerate(self.blocks):
            if number != skipped:
                x = block(x)
        return x


class ChoosyBlock(nn.Module):
    """A unit with a side path that some ranks do not take, or that hands its input through untouched."""

    def __init__(self, number: int, *, hands_through: bool) -> None:
        super().__init__()
        self.main, self.side = _head(), _head()
        self.number, self.hands_through = number, hands_through

    def forward(self, x: torch.Tensor, choice: torch.Tensor) -> torch.Tensor:
        """Shape (batch, 6), kept."""
        is_on = is_chosen(choice, self.number)
        if self.hands_through:
            return self.side(self.main(x)) if is_on else x
        return self.main(x) + self.side(x) if is_on else self.main(x)


class Choosy(nn.Module):
    """Units that all ranks call, but whose parameters not all of them use."""

    def __init__(self, *, hands_through: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(ChoosyBlock(number, hands_through=hands_through) for number in range(4))
        self.head = _head()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shape (batch, 6), kept."""
        y = x
        for block in self.blocks:
            y = block(y, x)
        return self.head(y)


class SandwichBlock(nn.Module):
    """A unit with parameters of its own before, between and after two units inside it."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.inner, self.after = _head(), nn.ModuleList([_block(), _block()]), _head()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shape (batch, 6), kept."""
        first, second = self.inner
        return self.after(second(first(self.before(x))) + self.before(x))


class Sandwich(nn.Module):
    """Nested units."""

    def __init__(self, recompute: Recompute | None = None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([SandwichBlock(), SandwichBlock()])
        self.recompute = recompute

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shape (batch, 6), kept."""
        return sum(_recomputed(block, x, self.recompute) for block in self.blocks)


class Branches(Stack):
    """Units side by side, all of whose outputs come back."""

    def run(self, x: torch.Tensor) -> torch.Tensor:
        first, second, third = self.blocks
        stem = first(x)
        left, right = second(stem), third(stem)
        return stem + left + right


@dataclasses.dataclass
class Result:
    """An output as models return them."""

    hidden: list[torch.Tensor]
    parts: dict[str, Any]
    name: str = "result"

    def __mul__(self, target: torch.Tensor) -> torch.Tensor:
        return sum(tensor * target for tensor in [*self.hidden, self.parts["out"]])


class Opaque:
    """An output of a class that nobody knows."""

    def __init__(self, value: torch.Tensor) -> None:
        self.value = value
        self.myself = self


class StructuredBlock(nn.Module):
    """A unit whose input and output are nested."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = _head()

    def forward(self, *, state: dict[str, Any]) -> dict[str, Any]:
        """Adds one hidden state."""
        out = self.linear(state["out"].value)
        return {"out": Opaque(out), "hidden": [*state["hidden"], out], "count": (len(state["hidden"]), None)}


class Structured(nn.Module):
    """Dataclass, dict, list, tuple and unknown objects as outputs of units and of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(StructuredBlock() for _ in range(3))
        self.head = _head()

    def forward(self, x: torch.Tensor) -> "StructuredOutput":
        """Shape (batch, 6)."""
        state: dict[str, Any] = {"out": Opaque(x), "hidden": []}
        for block in self.blocks:
            state = block(state=state)
        return StructuredOutput(Result(state["hidden"], {"out": self.head(state["out"].value), "none": None}))


class StructuredOutput:
    """Part of an output that `dot_loss` needs, around a Result."""

    dtype = torch.float32

    def __init__(self, result: Result) -> None:
        self.result = result

    def __mul__(self, target: torch.Tensor) -> torch.Tensor:
        return self.result * target


class Table(nn.Module):
    """A unit that returns its own weight, or a part of it, or both."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(WIDTH, WIDTH))
        self.kind = kind

    def forward(self, rows: int) -> Any:
        """`rows` rows, all of them, or the two one after the other."""
        return {"rows": self.weight[:rows], "whole": self.weight, "both": (self.weight, self.weight[:rows])}[self.kind]


class Lending(nn.Module):
    """Weights leave the units that own them and are read later, in forward and in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(Table(kind) for kind in ("rows", "whole", "both"))
        self.blocks = nn.ModuleList(_block() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shape (batch, 6), kept."""
        rows, whole, (both, part) = (table(len(x)) for table in self.tables)
        for block in self.blocks:
            x = block(x)
        return (x + rows) @ whole + x @ both + part


class LendingSkipped(Stack):
    """Some ranks leave out a unit that lends its weights to whoever runs it."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(Table("rows") for _ in range(2))

    def run(self, x: torch.Tensor) -> torch.Tensor:
        y = x
        for number, table in enumerate(self.tables):
            y = self.blocks[number](y)
            if is_chosen(x, number):
                y = y + table(len(x))
        return self.blocks[2](y)


def _recomputed(function: Any, x: torch.Tensor, recompute: Recompute | None) -> torch.Tensor:
    if recompute is None:
        return function(x)
    if recompute == "reentrant" and not x.requires_grad and torch.is_grad_enabled():
        x = x.detach().requires_grad_()
    return checkpoint(function, x, use_reentrant=recompute == "reentrant")


#: name -> (constructor, unit class)
BUILDERS: dict[str, tuple[Any, type]] = {
    "twice": (Twice, MLPBlock),
    "reversed": (Reversed, MLPBlock),
    "shuffled": (Shuffled, MLPBlock),
    "skipping": (Skipping, MLPBlock),
    "wandering": (Wandering, MLPBlock),
    "alternating": (Alternating, MLPBlock),
    "choosy": (lambda: Choosy(hands_through=False), ChoosyBlock),
    "handing_through": (lambda: Choosy(hands_through=True), ChoosyBlock),
    "sandwich": (Sandwich, SandwichBlock),
    "branches": (Branches, MLPBlock),
    "structured": (Structured, StructuredBlock),
    "lending": (Lending, Table),
    "lending_skipped": (LendingSkipped, Table),
}
for _kind in ("reentrant", "non_reentrant"):
    BUILDERS |= {
        f"integers_{_kind}": (functools.partial(TinyMLP, integers=True, recompute=_kind), MLPBlock),
        f"twice_{_kind}": (functools.partial(Twice, _kind), MLPBlock),
        f"span_{_kind}": (functools.partial(Span, _kind), MLPBlock),
        f"whole_{_kind}": (functools.partial(Whole, _kind), MLPBlock),
        f"skipping_{_kind}": (functools.partial(Skipping, _kind), MLPBlock),
        f"sandwich_{_kind}": (functools.partial(Sandwich, _kind), SandwichBlock),
    }
