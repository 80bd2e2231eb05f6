"""Tables that are only looked up are not gathered for backward; whatever else is done with them, they are."""

import contextlib
from collections.abc import Iterator
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.unit_tests.harness.rank_pool import RankPool
from tests.unit_tests.harness.sharded import poisoned_storage

STEPS = 3
WIDTH, ROWS = 8, 13


class Table(nn.Embedding):
    """A unit class of its own, so that no other embedding becomes one."""


class Scaled(Table):
    """Reads its weights in backward."""

    def forward(self, places: torch.Tensor) -> torch.Tensor:
        return super().forward(places) * self.weight.square().mean()


class Indexed(Table):
    """Looks up another way, as megatron-core's deterministic mode does."""

    def forward(self, places: torch.Tensor) -> torch.Tensor:
        return self.weight[places]


class Padded(Table):
    """Reads its weights in the backward of some batches."""

    is_padded = False

    def forward(self, places: torch.Tensor) -> torch.Tensor:
        found = super().forward(places)
        return found * self.weight.square().mean() if self.is_padded else found


class Penalized(Table):
    """Keeps, beside what it returns, a term of the loss whose backward reads the weights."""

    def forward(self, places: torch.Tensor) -> torch.Tensor:
        self.penalty = self.weight.square().mean()
        return super().forward(places)


class Body(nn.Module):
    """What follows the table."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x))


class Model(nn.Module):
    """A table, a body behind it, and what is done around them."""

    def __init__(self, kind: type, how: str = "") -> None:
        super().__init__()
        self.table, self.body = kind(ROWS, WIDTH), Body()
        self.how = how
        self.skips = self.is_odd = self.is_late = False
        if how == "hooked":
            self.table.register_forward_hook(lambda module, places, found: found * module.weight.square().mean())

    def forward(self, places: torch.Tensor) -> torch.Tensor:
        self.table.is_padded = self.is_late and not self.is_odd
        return self._loss(places) + getattr(self.table, "penalty", 0.0)

    def _loss(self, places: torch.Tensor) -> torch.Tensor:
        if self.skips:
            return self.body(torch.ones(*places.shape, WIDTH)).square().sum()
        if self.how == "unrecorded" and self.is_odd:
            with torch.no_grad():
                x = self.table(places)
            return self.body(x).square().sum()
        kind = self.how.removeprefix("late ") if self.is_late else self.how
        if kind in ("reentrant", "non_reentrant"):
            needed = torch.zeros((), requires_grad=True)  # reentrant checkpoints know no other reason for a graph
            x = checkpoint(self._both, places, needed, use_reentrant=kind == "reentrant")
        elif self.how == "twice" or (self.how == "late twice" and self.is_late):
            x = self.body(self.table(places))
            self.table.is_padded = False
            x = x + self.table(places.flip(0))
        else:
            x = self._both(places)
        return x.square().sum()

    def _both(self, places: torch.Tensor, added: torch.Tensor | float = 0.0) -> torch.Tensor:
        return self.body(self.table(places)) + added


def batch(step: int, rank: int) -> torch.Tensor:
    """Places in the table."""
    return torch.randint(ROWS, (5,), generator=torch.Generator().manual_seed(10 * step + rank))


def loss(model: nn.Module, inner: Model, step: int, rank: int) -> torch.Tensor:
    """Of one forward, or of as many as share a backward, the last of which reads no table."""
    total = model(batch(step, rank))
    if inner.how == "two forwards":
        with torch.no_grad():
            model(batch(step, rank))
        inner.is_late = False
        total = total + model(batch(step + 1, rank))
    return total


def made(kind: type, how: str) -> Model:
    torch.manual_seed(0)
    return Model(kind, how)


def train_whole(kind: type, how: str, world: int, skipping: int | None = None) -> list[torch.Tensor]:
    """Weights after all steps on one process."""
    model = made(kind, how)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in range(STEPS):
        optimizer.zero_grad()
        for rank in range(world):
            model.skips, model.is_odd, model.is_late = rank == skipping and step > 0, rank == 1, step > 0
            (loss(model, model, step, rank) / world).backward()
        optimizer.step()
    return [param.detach() for param in model.parameters()]


def train_sharded(kind: type, how: str, skipping: int | None = None) -> tuple[list[torch.Tensor], list[list[str]]]:
    """Weights after all steps, and by step what has been gathered in backward, in order. **Collective.**"""
    from megatron_fsdp import fully_shard

    model = made(kind, how)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    with poisoned_storage():
        model, optimizer = fully_shard(model, optimizer, fsdp_unit_modules=[Table, Body])
    rank, steps = dist.get_rank(), []
    for step in range(STEPS):
        optimizer.zero_grad()
        inner = model.module
        inner.skips, inner.is_odd, inner.is_late = rank == skipping and step > 0, rank == 1, step > 0
        total = loss(model, inner, step, rank)
        with gathers() as found:
            total.backward()
        optimizer.step()
        steps.append(found)
    return [param.full_tensor() for param in model.parameters()], steps


@contextlib.contextmanager
def gathers() -> Iterator[list[str]]:
    """The units that are gathered inside, by the first part of their names."""
    from megatron_fsdp.state.param_group import ParamGroup

    found: list[str] = []
    unshard = ParamGroup.unshard

    def noted(group: ParamGroup, *, again: bool = False) -> None:
        if group.needs_gather or again:
            found.append(group.facts.fqns[0].partition(".")[0])
        unshard(group, again=again)

    with mock.patch.object(ParamGroup, "unshard", noted):
        yield found


def check(ranks: RankPool, kind: type, how: str, skipping: int | None = None) -> list[list[list[str]]]:
    """Trains, compares with one process, and gives what each rank has gathered in backward."""
    expected = train_whole(kind, how, ranks.world_size, skipping)
    found = ranks.run(train_sharded, kind, how, skipping)
    for weights, _ in found:
        torch.testing.assert_close(weights, expected)
    return [steps for _, steps in found]


@pytest.mark.parametrize("kind", [Table, Indexed])
@pytest.mark.parametrize("how", ["", "twice"])
def test_a_table_that_is_only_looked_up_is_not_gathered_for_backward(ranks2: RankPool, kind: type, how: str) -> None:
    for steps in check(ranks2, kind, how):
        assert all("table" not in gathered for gathered in steps)


@pytest.mark.parametrize(
    ("kind", "how"),
    [
        (Scaled, ""),
        (Penalized, ""),
        (Table, "hooked"),
        (Table, "reentrant"),
        (Table, "non_reentrant"),
        (Table, "unrecorded"),
    ],
)
def test_a_table_that_backward_reads_is_gathered(ranks2: RankPool, kind: type, how: str) -> None:
    for steps in check(ranks2, kind, how):
        assert all("table" in gathered for gathered in steps)


def test_a_rank_that_skips_the_table_changes_nothing(ranks2: RankPool) -> None:
    check(ranks2, Table, "", skipping=1)


@pytest.mark.parametrize(
    ("kind", "how", "skipping"),
    [
        (Padded, "", None),
        (Padded, "late twice", None),
        (Padded, "two forwards", None),
        (Table, "non_reentrant", 1),
        (Table, "late reentrant", 1),
        (Table, "late non_reentrant", 1),
    ],
)
def test_ranks_need_not_agree_on_what_backward_reads(
    ranks2: RankPool, kind: type, how: str, skipping: int | None
) -> None:
    """One that reads the table, or recomputes its lookup, keeps it for its backward; the other gathers nothing."""
    check(ranks2, kind, how, skipping)
