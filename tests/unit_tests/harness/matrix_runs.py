"""The odd model of the equivalence matrix: its training on a rank, its reference, and how far apart they are."""

import contextlib
import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.unit_tests.harness import matrix
from tests.unit_tests.harness.matrix import Cell
from tests.unit_tests.harness.models import Batches, Recompute, SignSGD, dot_loss, float_batches, square_loss
from tests.unit_tests.harness.reference import DtypePolicy, Recipe, StepRecord, train_reference
from tests.unit_tests.harness.sharded import Piece, RankStep, Sharding, assembled, train_sharded

WIDTH = 5

#: Attributes of a layer, and of the root, with what is odd about each.
PARAMETERS = {
    "matrix": "5 x 5: rows divide by no number of ranks; more ranks than rows at 8",
    "one_row": "1 x 5: more ranks than rows",
    "two_rows": "2 x 5: more ranks than rows from 3 on",
    "vector": "1-D, 5 elements",
    "single": "1-D, 1 element",
    "scalar": "0-D",
    "frozen": "3 x 5, without gradient",
    "unused": "4 x 3, takes no part in forward",
    "whole": "3 x 5, marked by `fsdp_no_shard`",
    "stem": "5 x 5, tied: used twice, in the root unit",
}


class Layer(nn.Module):
    """The unit class: linear in each of its parameters."""

    def __init__(self, is_linear: bool) -> None:
        from megatron_fsdp import fsdp_no_shard

        super().__init__()
        self.is_linear = is_linear
        self.matrix = nn.Parameter(torch.empty(WIDTH, WIDTH))
        self.one_row = nn.Parameter(torch.empty(1, WIDTH))
        self.two_rows = nn.Parameter(torch.empty(2, WIDTH))
        self.vector = nn.Parameter(torch.empty(WIDTH))
        self.single = nn.Parameter(torch.empty(1))
        self.scalar = nn.Parameter(torch.empty(()))
        self.frozen = nn.Parameter(torch.empty(3, WIDTH), requires_grad=False)
        self.unused = nn.Parameter(torch.empty(4, 3))
        self.whole = nn.Parameter(torch.empty(3, WIDTH))
        fsdp_no_shard(self.whole)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shape (batch, 5), kept."""
        h = x if self.is_linear else torch.tanh(x)
        y = h @ self.matrix.T + h @ self.one_row.T + self.vector + self.single + self.scalar * h
        y = y + F.pad(h @ self.two_rows.T, (0, WIDTH - 2))
        return y + F.pad(h @ self.frozen.T + h @ self.whole.T, (0, WIDTH - 3))


class Odd(nn.Module):
    """Two layers behind a stem whose weight the head shares."""

    def __init__(self, is_linear: bool, recompute: Recompute | None) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH, bias=False)
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)
        self.head.weight = self.stem.weight
        self.layers = nn.ModuleList(Layer(is_linear) for _ in range(2))
        self.recompute = recompute
        generator = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for param in self.parameters():
                if is_linear:  # a third of them 1 or -1, the others 0
                    drawn = torch.randint(-2, 4, param.shape, generator=generator)
                    param.copy_(torch.where(drawn.abs() == 1, drawn, 0))
                else:
                    param.copy_(torch.randn(param.shape, generator=generator) * 0.4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shape (batch, 5), kept; takes any dtype."""
        x = x.to(self.stem.weight.dtype)
        y = self.stem(x)
        for layer in self.layers:
            y = checkpoint(layer, y, use_reentrant=self.recompute == "reentrant") if self.recompute else layer(y)
        return y + self.head(x)


def build(is_exact: bool, recompute: Recompute | None, device: str) -> nn.Module:
    """The model with its values."""
    return Odd(is_exact, recompute).to(device)


def unit_batches(steps: int, microbatches: int, ranks: int) -> Batches:
    """One row of a single 1 or -1 each: products of sparse integers stay small enough for bf16.

    Not with every seed, on four ranks or more with three micro-batches; a test trains in bf16 to see that these are.
    """
    generator = torch.Generator().manual_seed(87 if ranks == 8 else 101)

    def row() -> torch.Tensor:
        signs = torch.randint(0, 2, (1, 1), generator=generator) * 2 - 1
        return F.one_hot(torch.randint(WIDTH, (1,), generator=generator), WIDTH).float() * signs

    return [[[(row(), row()) for _ in range(ranks)] for _ in range(microbatches)] for _ in range(steps)]


def _on(device: str, batches: Batches) -> Batches:
    return [[[tuple(t.to(device) for t in pair) for pair in ranks] for ranks in step] for step in batches]


def batches_of(is_exact: bool, microbatches: int, ranks: int, device: str) -> Batches:
    """The data, the same for all cells of so many micro-batches and ranks."""
    draw = unit_batches if is_exact else functools.partial(float_batches, width=WIDTH)
    return _on(device, draw(matrix.STEPS, microbatches, ranks))


def _sgd(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=2.0**-5, momentum=0.5)


def _sign_sgd(module: nn.Module) -> torch.optim.Optimizer:
    return SignSGD(module.parameters())


def recipe_of(is_exact: bool, is_mean: bool, dtypes: DtypePolicy, reduces_each: bool) -> Recipe:
    """Options of training."""
    return Recipe(
        build_optimizer=_sign_sgd if is_exact else _sgd,
        loss_fn=dot_loss if is_exact else square_loss,
        dtypes=dtypes,
        reduces_each_microbatch=reduces_each,
        reduced_once=("scalar", "whole"),
        is_mean_over_ranks=is_mean,
    )


# ---- in a rank ----


def run_cells(cells: Sequence[Cell], device: str = "cpu", sabotage: str | None = None) -> list[list[RankStep]]:
    """A pool job: this rank's part of every cell, its pieces on the CPU. **Collective.**"""
    with SABOTAGES[sabotage]() if sabotage else contextlib.nullcontext():
        return [_run(cell, device) for cell in cells]


def _run(cell: Cell, device: str) -> list[RankStep]:
    sharding = Sharding(
        strategy=cell.topology.strategy, outer=cell.topology.outer, units=(Layer,), is_poisoned=cell.is_poisoned
    )
    recipe = recipe_of(cell.is_exact, cell.is_mean, cell.dtypes, sharding.reduces_each_microbatch)
    batches = batches_of(cell.is_exact, cell.microbatches, cell.topology.world, device)
    model = functools.partial(build, cell.is_exact, cell.recompute, device)
    return [_on_cpu(step) for step in train_sharded(model, batches, recipe, sharding)]


def _on_cpu(step: RankStep) -> RankStep:
    kinds = {
        kind: {name: Piece(piece.start, piece.values.cpu()) for name, piece in getattr(step, kind).items()}
        for kind in ("grads", "weights")
    }
    return dataclasses.replace(step, **kinds)


# ---- deliberate faults ----


@contextlib.contextmanager
def _patched(owner: Any, name: str, wrapper: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, wrapper(before))
    try:
        yield
    finally:
        setattr(owner, name, before)


def _own_gradients(factor: float, rank: int) -> Any:
    """One rank's gradients times `factor` before they are collected."""
    from megatron_fsdp.state.main_grad import MainGrad

    def wrapper(collect: Any) -> Any:
        def collect_scaled(self: Any) -> Any:
            for param in self._spec.params:
                if param.grad is not None and dist.get_rank() == rank:
                    param.grad.mul_(factor)
            return collect(self)

        return collect_scaled

    return _patched(MainGrad, "collect", wrapper)


def _scaled_twice() -> Any:
    """Every reduction over ranks scales once more by a half."""
    from megatron_fsdp.machine import collectives

    def wrapper(prepare: Any) -> Any:
        def prepare_halved(full: Any, axis: Any, scale: Any) -> Any:
            if axis.size > 1:
                full.mul_(0.5)
            return prepare(full, axis, scale)

        return prepare_halved

    return _patched(collectives, "_prepare", wrapper)


def _first_microbatch_lost() -> Any:
    """Overwrites gradients instead of accumulating them."""
    from megatron_fsdp.state.main_grad import GradState, MainGrad

    def wrapper(collect: Any) -> Any:
        def collect_afresh(self: Any) -> Any:
            if self.state is GradState.ACCUMULATING:
                self.state = GradState.EMPTY
            return collect(self)

        return collect_afresh

    return _patched(MainGrad, "collect", wrapper)


SABOTAGES = {
    "a rank is dropped": functools.partial(_own_gradients, 0.0, 1),
    "a rank counts twice": functools.partial(_own_gradients, 2.0, 0),
    "scaled twice": _scaled_twice,
    "micro-batches before the last are lost": _first_microbatch_lost,
}


# ---- where they are compared ----

#: Integers are computed in fp64: nothing is rounded there, whatever the order.
_EXACT = DtypePolicy(compute=torch.float64, main_params=None, main_grads=None)


def reference(cell: Cell, device: str = "cpu") -> list[StepRecord]:
    """One process without recomputation; the same for many cells, so computed once."""
    if cell.is_exact:
        return _reference(True, cell.is_mean, _EXACT, False, cell.microbatches, cell.topology.world, device)
    reduces_each = Sharding(strategy=cell.topology.strategy).reduces_each_microbatch
    return _reference(False, True, cell.dtypes, reduces_each, cell.microbatches, cell.topology.world, device)


@functools.cache
def _reference(
    is_exact: bool, is_mean: bool, dtypes: DtypePolicy, reduces_each: bool, microbatches: int, ranks: int, device: str
) -> list[StepRecord]:
    recipe = recipe_of(is_exact, is_mean, dtypes, reduces_each)
    model = functools.partial(build, is_exact, None, device)
    return [
        _record_on_cpu(step)
        for step in train_reference(model, batches_of(is_exact, microbatches, ranks, device), recipe)
    ]


def _record_on_cpu(step: StepRecord) -> StepRecord:
    """On the CPU."""
    weights = {name: weight.cpu() for name, weight in step.weights.items()}
    grads = {name: grad.cpu() for name, grad in step.grads.items()}
    return dataclasses.replace(step, grads=grads, weights=weights)


@dataclasses.dataclass(frozen=True)
class Measure:
    """The largest difference of a cell from its reference over all steps, losses, gradients and weights."""

    is_bitwise: bool
    absolute: float
    relative: float
    """To the largest loss, gradient or weight of the step, whichever it is."""
    where: str

    def meets(self, bound: matrix.Bound) -> bool:
        """True if the cell is as equal as it must be."""
        return self.is_bitwise if bound.relative == 0 else self.relative <= bound.relative


def measure(cell: Cell, by_rank: Sequence[Sequence[RankStep]], device: str = "cpu") -> Measure:
    """Compares all ranks' steps together with one process."""
    expected = reference(cell, device)
    worst = Measure(True, 0.0, 0.0, "nowhere")
    for number, (ours, theirs) in enumerate(zip(assembled(by_rank, expected), expected, strict=True)):
        losses = torch.tensor(ours.losses), torch.tensor(theirs.losses)
        kinds = {"losses": {"all": losses}}
        for kind in ("grads", "weights"):
            mine = getattr(ours, kind)
            kinds[kind] = {name: (mine[name], tensor) for name, tensor in getattr(theirs, kind).items()}
        for kind, pairs in kinds.items():
            scale = max(wanted.abs().max().item() for _, wanted in pairs.values())
            for name, (came, wanted) in pairs.items():
                worst = _worse(worst, came.double(), wanted.double(), scale, f"{kind}[{name}] of step {number}")
    return worst


def _worse(worst: Measure, came: torch.Tensor, wanted: torch.Tensor, scale: float, where: str) -> Measure:
    if torch.equal(came, wanted):
        return worst
    difference = (came - wanted).abs().nan_to_num(nan=float("inf")).max().item()
    relative = difference / scale if scale else float("inf")
    where = where if relative > worst.relative else worst.where
    return Measure(False, max(difference, worst.absolute), max(relative, worst.relative), where)


def failures(cells: Sequence[Cell], measures: Sequence[Measure]) -> list[str]:
    """One line for each cell that is not as equal as it must be."""
    return [
        f"{cell.name}: {found.relative:.3g} at {found.where}, at most {matrix.bound_of(cell).relative:.3g} is right"
        for cell, found in zip(cells, measures, strict=True)
        if not found.meets(matrix.bound_of(cell))
    ]


def measured(cells: Sequence[Cell], runs: Sequence[Sequence[Any]], device: str = "cpu") -> list[Measure]:
    """Of what each rank's `run_cells` gave."""
    return [measure(cell, by_rank, device) for cell, *by_rank in zip(cells, *runs, strict=True)]
