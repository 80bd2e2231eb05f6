"""Strategies as resting placements, and the transitions they imply."""

from __future__ import annotations

import dataclasses
import enum
import functools
from collections.abc import Callable
from typing import NamedTuple


class Placement(enum.Enum):
    """Placement of one buffer on one data-parallel axis."""

    REPLICATE = "R"
    """Every rank of the axis holds the same values."""
    SHARD = "S"
    """Every rank of the axis holds its contiguous piece."""
    PARTIAL = "P"
    """Every rank of the axis holds a summand; the value is their sum."""

    __hash__ = object.__hash__  # an Enum's own is Python, and every collective looks up what placements need


R, S, P = Placement.REPLICATE, Placement.SHARD, Placement.PARTIAL


@dataclasses.dataclass(frozen=True)
class Resting:
    """Placements of the buffers between steps, on ONE data-parallel axis."""

    weight: Placement
    main_grad: Placement
    main_weight: Placement


#: The only place where a strategy is more than a name. The same rows serve the outer and the inner axis.
RESTING: dict[str, Resting] = {
    #                             weight  main_grad  main_weight
    "no_shard": Resting(R, P, R),
    "optim": Resting(R, P, S),
    "optim_grads": Resting(R, S, S),
    "optim_grads_params": Resting(S, S, S),
}

NO_SHARD = "no_shard"
#: Rows that the public API offers for the outer axis.
OUTER_STRATEGIES = ("no_shard", "optim")


class AxisPair(NamedTuple):
    """A placement on each of the two data-parallel axes, outer first."""

    outer: Placement
    inner: Placement


REPLICATED = AxisPair(R, R)
PARTIAL = AxisPair(P, P)


def shards_are_contiguous(pair: AxisPair) -> bool:
    """True if a rank's piece is one contiguous range: along (outer, inner), SHARD is a suffix."""
    return not (pair.outer is S and pair.inner is not S)


@dataclasses.dataclass(frozen=True)
class StrategyPlan:
    """Resting placements of one group's buffers on both axes, and the questions that call sites ask."""

    weight: AxisPair
    main_grad: AxisPair
    main_weight: AxisPair

    @functools.cached_property
    def gathers_weights(self) -> bool:
        """The compute weights are gathered before use and released after it."""
        return self.weight != REPLICATED

    @functools.cached_property
    def gathers_after_install(self) -> bool:
        """After an optimizer step the resting weights are rebuilt by a gather."""
        return self.weight != self.main_weight

    @functools.cached_property
    def refreshes_along_outer(self) -> bool:
        """That gather runs over the outer axis (and then over it alone)."""
        return self.weight.outer is not self.main_weight.outer

    @functools.cached_property
    def gathers_along_inner(self) -> bool:
        """Gathers, before use or after an install, run over the inner axis."""
        return S in (self.weight.inner, self.main_weight.inner)

    @functools.cached_property
    def reduces_each_microbatch(self) -> bool:
        """Every backward reduces on the inner axis; otherwise gradients accumulate unreduced."""
        return self.main_grad.inner is S

    @functools.cached_property
    def defers_reduction(self) -> bool:
        """A reduction waits for the last micro-batch of an optimization cycle."""
        return P in self.main_grad

    @functools.cached_property
    def accumulates_final_values(self) -> bool:
        """Accumulated gradients are reduced and scaled already; otherwise the end of a cycle completes them."""
        return self.reduces_each_microbatch and not self.defers_reduction

    @functools.cached_property
    def shards_anything(self) -> bool:
        """A buffer is split over ranks."""
        return self.shards_along(0) or self.shards_along(1)

    def shards_along(self, axis: int) -> bool:
        """A buffer is split over the ranks of this axis; 0 is the outer one."""
        return S in (self.weight[axis], self.main_grad[axis], self.main_weight[axis])

    def without_optimizer(self) -> StrategyPlan:
        """The plan of weights that are never updated: the main weight is the weight, and nothing is gathered anew."""
        return dataclasses.replace(self, main_weight=self.weight)

    def finalized_grad(self) -> AxisPair:
        """The placement of the gradient when the optimizer reads it."""
        return self.main_weight


def plan_for(inner: str, outer: str = NO_SHARD, *, inner_size: int = 2, outer_size: int = 1) -> StrategyPlan:
    """The plan of strategy `inner` on the inner axis and `outer` on the outer axis.

    Args:
        inner: row of `RESTING` for the inner axis.
        outer: row of `RESTING` for the outer axis.
        inner_size: ranks on the inner axis. An axis of one rank has nothing to shard.
        outer_size: ranks on the outer axis.

    Raises:
        ValueError: unknown strategy, or SHARD would not be a suffix along (outer, inner).
    """
    for name, axis in ((inner, "inner"), (outer, "outer")):
        if name not in RESTING:
            raise ValueError(f"unknown {axis} sharding strategy {name!r}; expected one of {list(RESTING)}")
    pairs = {}
    for field in dataclasses.fields(Resting):
        pair = AxisPair(*(getattr(RESTING[name], field.name) for name in (outer, inner)))
        if not shards_are_contiguous(pair):
            raise ValueError(
                f"outer_dp_sharding_strategy={outer!r} shards {field.name} outside an unsharded inner axis "
                f"(zero_dp_strategy={inner!r}); use zero_dp_strategy='optim_grads_params'."
            )
        # Values on an axis of one rank are whole and final as they are: every transition along it is empty.
        pairs[field.name] = AxisPair(pair.outer if outer_size > 1 else R, pair.inner if inner_size > 1 else R)
    return StrategyPlan(**pairs)


def strategies_that(is_fit: Callable[[StrategyPlan], bool]) -> str:
    """The rows of `RESTING` whose plan fits, for messages: "'optim' (1) or 'optim_grads' (2)"."""
    *others, last = (f"{name!r} ({number})" for number, name in enumerate(RESTING) if is_fit(plan_for(name)))
    return f"{', '.join(others)} or {last}" if others else last


#: The collective behind each legal single-axis step.
COLLECTIVE: dict[tuple[Placement, Placement], str] = {
    (S, R): "all_gather",
    (P, R): "all_reduce",
    (P, S): "reduce_scatter",
    (R, S): "slice",
}


class CollectiveStep(NamedTuple):
    """One collective over one axis."""

    axis: int
    """0: the outer one."""
    collective: str
    placement: AxisPair
    """Of the buffer after it."""


@functools.cache
def collective_steps(source: AxisPair, target: AxisPair) -> tuple[CollectiveStep, ...]:
    """The collectives that take a buffer from `source` to `target`.

    Towards SHARD the inner axis is cut first, towards REPLICATE the outer axis is gathered first: the global order of
    shards is inner-major, so any other order would leave a rank with a piece that is not contiguous.

    Raises:
        KeyError: no collective does that on one of the axes.
    """
    gathers = any(a is S and b is R for a, b in zip(source, target, strict=True))
    steps, placement = [], source
    for axis in (0, 1) if gathers else (1, 0):
        if source[axis] is not target[axis]:
            placement = placement._replace(**{placement._fields[axis]: target[axis]})
            steps.append(CollectiveStep(axis, COLLECTIVE[source[axis], target[axis]], placement))
    return tuple(steps)
