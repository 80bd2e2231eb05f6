"""Ranks of an (outer, inner) mesh as entries of a dict, so that a strategy is checked without any process.

A placement is "R" (replicated), "P" (partial: the value is the mean over the axis) or "S" (sharded), or an enum member
whose name starts with that letter; a placement of a buffer is the pair (outer, inner).
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

Buffers = dict[tuple[int, int], torch.Tensor]
OUTER, INNER = 0, 1
MOVES = {"SR": "all_gather", "PR": "all_reduce", "PS": "reduce_scatter", "RS": "slice"}


@dataclass(frozen=True)
class Moved:
    """Buffers after a redistribution and the collectives it took, such as "reduce_scatter_outer"."""

    buffers: Buffers
    log: tuple[str, ...]


@dataclass(frozen=True)
class SimulatedMesh:
    """`outer` x `inner` ranks; sharded over both axes, rank (o, i) holds outer piece o of inner piece i."""

    outer: int
    inner: int

    @property
    def ranks(self) -> list[tuple[int, int]]:
        """Coordinates in rank order."""
        return list(itertools.product(range(self.outer), range(self.inner)))

    def replicate(self, value: torch.Tensor) -> Buffers:
        """The same value on every rank."""
        return {rank: value.clone() for rank in self.ranks}

    def move(self, buffers: Buffers, source: Sequence[Any], target: Sequence[Any]) -> Moved:
        """Buffers redistributed from one pair of placements to another.

        Towards SHARD the inner axis is cut first, towards REPLICATE the outer axis is gathered first, because a
        shard of both axes is the outer piece of an inner piece.
        """
        start, goal = [_letter(p) for p in source], [_letter(p) for p in target]
        gathers = any(a == "S" and b == "R" for a, b in zip(start, goal, strict=True))
        log = []
        for axis in (OUTER, INNER) if gathers else (INNER, OUTER):
            if start[axis] == goal[axis]:
                continue
            kind = start[axis] + goal[axis]
            if kind not in MOVES:
                raise ValueError(f"no collective goes from {start[axis]} to {goal[axis]} (axis {axis})")
            buffers = {rank: self._move_one(buffers, rank, axis, kind) for rank in self.ranks}
            log.append(MOVES[kind] + ("_outer" if axis == OUTER else ""))
        return Moved(buffers, tuple(log))

    def _move_one(self, buffers: Buffers, rank: tuple[int, int], axis: int, kind: str) -> torch.Tensor:
        size = (self.outer, self.inner)[axis]
        peers = [buffers[(k, rank[INNER]) if axis == OUTER else (rank[OUTER], k)] for k in range(size)]
        if kind == "SR":
            return torch.cat(peers)
        whole = buffers[rank] if kind == "RS" else torch.stack(peers).mean(0)
        return whole.clone() if kind == "PR" else whole.chunk(size)[rank[axis]].clone()


@dataclass(frozen=True)
class Resting:
    """Placements of one group's buffers between steps, as (outer, inner) pairs."""

    weight: tuple[Any, Any]
    main_grad: tuple[Any, Any]
    main_weight: tuple[Any, Any]

    @property
    def is_contiguous(self) -> bool:
        """True if SHARD is a suffix of every pair, without which a rank's piece is not one slice."""
        pairs = (self.weight, self.main_grad, self.main_weight)
        return all(not (_letter(outer) == "S" and _letter(inner) != "S") for outer, inner in pairs)


def train_simulated(
    mesh: SimulatedMesh,
    resting: Resting,
    *,
    numel: int = 36,
    steps: int = 2,
    microbatches: int = 3,
    on_check: Callable[[torch.Tensor, torch.Tensor], None] = torch.testing.assert_close,
) -> dict[str, tuple[str, ...]]:
    """Trains random weights against a plain mean and gives the collectives of install, unshard, reduce and finalize.

    An outer axis of size 1 counts as absent. Weights are compared with the plain ones wherever they are gathered.
    """
    generator = torch.Generator().manual_seed(0)
    full = ("R", "R")
    partial = ("P" if mesh.outer > 1 else "R", "P")
    grad_rest = tuple(resting.main_grad) if mesh.outer > 1 else ("R", resting.main_grad[INNER])
    plain = torch.randn(numel, generator=generator, dtype=torch.float64)
    main = mesh.move(mesh.replicate(plain), full, resting.main_weight).buffers
    logs: dict[str, tuple[str, ...]] = {}
    for _ in range(steps):
        installed = mesh.move(main, resting.main_weight, resting.weight)
        total, mean = None, torch.zeros_like(plain)
        for _ in range(microbatches):
            unsharded = mesh.move(installed.buffers, resting.weight, full)
            for weight in unsharded.buffers.values():
                on_check(weight, plain)
            fresh = {rank: torch.randn(numel, generator=generator, dtype=torch.float64) for rank in mesh.ranks}
            mean = mean + torch.stack(list(fresh.values())).mean(0)
            reduced = mesh.move(fresh, partial, grad_rest)
            total = reduced.buffers if total is None else {r: total[r] + reduced.buffers[r] for r in mesh.ranks}
        finalized = mesh.move(total, grad_rest, resting.main_weight)
        main = {rank: main[rank] - 0.1 * finalized.buffers[rank] for rank in mesh.ranks}
        plain = plain - 0.1 * mean
        logs = {
            "install": installed.log,
            "unshard": unsharded.log,
            "reduce": reduced.log,
            "finalize": finalized.log,
        }
    last = mesh.move(mesh.move(main, resting.main_weight, resting.weight).buffers, resting.weight, full)
    for weight in last.buffers.values():
        on_check(weight, plain)
    return logs


def _letter(placement: Any) -> str:
    return (placement if isinstance(placement, str) else placement.name)[0]
