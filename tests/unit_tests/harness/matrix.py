"""The equivalence matrix: every way of training that is compared with one process, and the list of those that are not.

    python -m tests.unit_tests.harness.matrix --write docs/equivalence.md

runs every cell on gloo and writes what was measured. `gloo/test_equivalence.py` runs some of the same cells in every
pytest, those of 8 ranks only when asked for all, `cuda/test_equivalence.py` on GPUs. Nothing else enumerates cells.
"""

import dataclasses
import itertools
from collections.abc import Sequence

import torch

from tests.unit_tests.harness.models import Recompute
from tests.unit_tests.harness.reference import DtypePolicy

FP32, BF16 = torch.float32, torch.bfloat16
STEPS = 3
ACCUMULATIONS = (1, 3)
RECOMPUTES: tuple[Recompute | None, ...] = (None, "reentrant", "non_reentrant")
COMPUTES, MAIN_PARAMS = (FP32, BF16), (FP32, None)
MAIN_GRADS = GRAD_COMMS = (FP32, BF16, None)
#: Numbers of ranks that every pytest meets. Eight are for GPUs: gloo makes them take turns on a few cores.
DEFAULT_WORLDS = (1, 2, 3, 4)
WORLDS = (*DEFAULT_WORLDS, 8)


@dataclasses.dataclass(frozen=True)
class Topology:
    """A strategy on a number of ranks."""

    world: int
    strategy: int
    outer: str | None = None
    """Strategy of an outer axis of two ranks; None: there is no outer axis."""

    @property
    def name(self) -> str:
        """As in the document."""
        if self.outer is None:
            return (
                f"{self.world} ranks, strategy {self.strategy}"
                if self.world > 1
                else f"1 rank, strategy {self.strategy}"
            )
        return f"2 x {self.world // 2} ranks, strategy {self.strategy} inside `{self.outer}`"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cell:
    """One way of training the odd model."""

    is_exact: bool
    """Integers, of which any order of summation makes the same; otherwise normally distributed numbers."""
    topology: Topology
    microbatches: int
    recompute: Recompute | None
    dtypes: DtypePolicy
    is_poisoned: bool

    @property
    def is_mean(self) -> bool:
        """True if gradients are averaged over ranks; integers are summed at 3 ranks: a third is no binary number."""
        return not (self.is_exact and self.topology.world == 3)

    @property
    def name(self) -> str:
        """Every dimension of it."""
        kind = "integers" if self.is_exact else "floats"
        dtypes = "/".join(map(dtype_name, dataclasses.astuple(self.dtypes)))
        return f"{kind}, {self.topology.name}, {self.microbatches} micro-batches, recompute {self.recompute}, {dtypes}"


def dtype_name(dtype: torch.dtype | None) -> str:
    """Short, as in the document."""
    return {FP32: "fp32", BF16: "bf16", None: "None"}[dtype]


#: Strategies by number. Dtypes are dealt out by the place of a topology, so a new strategy is a tuple of its own at the
#: end: the cells of the others, and what was measured of them, stay what they are.
GENERATIONS: tuple[tuple[int, ...], ...] = ((0, 1, 2, 3),)
#: Strategies inside which the engine lets an outer axis shard.
INSIDE_OPTIM = (3,)


def topologies(generations: Sequence[Sequence[int]]) -> tuple[Topology, ...]:
    """Of the strategies of some generations, one generation after the other."""
    found: list[Topology] = []
    for strategies in generations:
        found += [Topology(world, strategy) for world in DEFAULT_WORLDS for strategy in strategies]
        found += _hybrids(4, strategies)
        found += [Topology(8, strategy) for strategy in strategies]
        found += _hybrids(8, strategies)
    return tuple(found)


def _hybrids(world: int, strategies: Sequence[int]) -> list[Topology]:
    """Two outer ranks."""
    plain = [Topology(world, strategy, "no_shard") for strategy in strategies]
    return plain + [Topology(world, strategy, "optim") for strategy in strategies if strategy in INSIDE_OPTIM]


TOPOLOGIES = topologies(GENERATIONS)


def cells_on(topologies: Sequence[Topology]) -> tuple[Cell, ...]:
    """Integers first; each topology with cells that depend on its place alone."""
    return (*_exact_cells(topologies), *_float_cells(topologies))


def _exact_cells(topologies: Sequence[Topology]) -> list[Cell]:
    """The product topology x accumulation x recompute x dtype of communication, each with one of twelve other dtypes.

    On two ranks with two of them, dealt out so that every strategy also meets all 36 combinations of dtypes there;
    elsewhere a topology meets half of them and its neighbour the other half.
    """
    others = list(itertools.product(COMPUTES, MAIN_PARAMS, MAIN_GRADS))
    cells = []
    for shift, topology in enumerate(topologies):
        for number, (microbatches, recompute) in enumerate(itertools.product(ACCUMULATIONS, RECOMPUTES)):
            for offset, comm in enumerate(GRAD_COMMS):
                for half in (0, 1) if topology.world == 2 else (shift % 2,):
                    compute, params, grads = others[(number + shift // 2 + 2 * offset + 6 * half) % 12]
                    cells.append(
                        Cell(
                            is_exact=True,
                            topology=topology,
                            microbatches=microbatches,
                            recompute=recompute,
                            dtypes=DtypePolicy(compute=compute, main_params=params, main_grads=grads, grad_comm=comm),
                            is_poisoned=(number + shift + offset) % 2 == 0,
                        )
                    )
    return cells


#: A float cell is run for one combination of dtypes in this many, another one on each topology.
FLOAT_STRIDE = 6


def _float_cells(topologies: Sequence[Topology]) -> list[Cell]:
    """Every topology with a sixth of all combinations of dtypes; accumulation and recomputation take turns."""
    ways = list(itertools.product(ACCUMULATIONS, RECOMPUTES))
    cells = []
    for shift, topology in enumerate(topologies):
        combinations = list(itertools.product(COMPUTES, MAIN_PARAMS, MAIN_GRADS, GRAD_COMMS))
        for number, (compute, params, grads, comm) in enumerate(combinations):
            if (number + shift) % FLOAT_STRIDE == 0:
                microbatches, recompute = ways[(number // FLOAT_STRIDE + shift) % len(ways)]
                cells.append(
                    Cell(
                        is_exact=False,
                        topology=topology,
                        microbatches=microbatches,
                        recompute=recompute,
                        dtypes=DtypePolicy(compute=compute, main_params=params, main_grads=grads, grad_comm=comm),
                        is_poisoned=number % 2 == 0,
                    )
                )
    return cells


CELLS: tuple[Cell, ...] = cells_on(TOPOLOGIES)


@dataclasses.dataclass(frozen=True)
class Bound:
    """By how much a cell may differ from one process, relative to the largest loss, gradient or weight, and why."""

    relative: float
    reason: str


BITWISE = Bound(0.0, "every number is an integer (over a power of two) that all dtypes involved hold exactly")
ALONE = Bound(0.0, "one rank sends nothing, and runs the kernels that the reference runs")
PAIR = Bound(0.0, "a sum of two is the same in either order; the reference rounds where the engine does")
ORDER = Bound(2e-5, "fp32 sums of three or more in another order; a few units in the last place, carried through steps")
STORED = Bound(
    4e-2, "as D, but a bf16 weight or gradient may round to its other neighbour (2^-8), carried through steps"
)
WIRE = Bound(6e-2, "bf16 on the wire: each partial sum is rounded (2^-9), in another order, carried through steps")


def bound_of(cell: Cell) -> Bound:
    """The class of a cell."""
    world = cell.topology.world
    if cell.is_exact:
        return BITWISE
    if world <= 2:
        return ALONE if world == 1 else PAIR
    dtypes = cell.dtypes
    main_grads = dtypes.main_grads or dtypes.compute
    if BF16 in (dtypes.grad_comm or main_grads,):
        return WIRE
    return STORED if BF16 in (dtypes.compute, main_grads) else ORDER


BOUNDS = (BITWISE, ALONE, PAIR, ORDER, STORED, WIRE)

HOLES: tuple[str, ...] = (
    "Integers: of the 12 combinations of compute, main-parameter and main-gradient dtypes, one (two of them on 2 "
    "ranks) is run for each choice of topology, accumulation, recomputation and communication dtype: half of the 36 "
    "combinations of dtypes on each topology and the other half on its neighbour.",
    "Floats: a sixth of the 36 combinations of dtypes is run on each topology (another sixth on the next), each with "
    "one pair of accumulation and recomputation. All of one topology's share have one communication dtype.",
    "Integers at 3 ranks are summed, not averaged: a third is no binary number. The floats are averaged there.",
    "Strategies 0, 1 and 2 inside an outer axis that shards: the engine refuses them.",
    "Outer axes other than 2 x 2 and 2 x 4 (2 x 1 is in gloo/test_parity.py), 5 to 7 ranks, and more than 8.",
    "Unit lists other than the model's layers (five of them are in gloo/test_parity.py).",
    "fp16, fp64 and float8 (gloo/test_dtypes.py and gloo/test_codec.py have some of fp64 and float8).",
    "Tensor, pipeline and context parallelism, and expert meshes, which have tests of their own.",
    "Optimizers other than SGD with momentum and its sign; gradient clipping (gloo/test_grad_norm.py).",
)


#: Of the cells of a world one in this many is run by default. It divides no number of choices, so that each is met.
DEFAULT_STRIDE = 5


def cells_of(world: int, *, is_exact: bool, stride: int = 1) -> Sequence[Cell]:
    """The cells of so many ranks, or one in `stride` of them."""
    return [cell for cell in CELLS if cell.topology.world == world and cell.is_exact is is_exact][::stride]


if __name__ == "__main__":
    from tests.unit_tests.harness import matrix_document

    matrix_document.main()
