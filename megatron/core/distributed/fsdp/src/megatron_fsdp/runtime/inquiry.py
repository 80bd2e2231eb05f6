"""How ranks find one order for the gathers of a forward that none of them knows in advance."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from megatron_fsdp.machine.collectives import all_gather
from megatron_fsdp.runtime.unit import Unit
from megatron_fsdp.state.flat_buffer import Axes


def widest_axes(units: Sequence[Unit]) -> Axes:
    """Axes that reach all ranks; those of experts need not."""
    facts = [group.facts for unit in units for group in unit.groups]
    return min(facts, key=lambda fact: fact.is_expert).axes if facts else ()


@dataclasses.dataclass(frozen=True)
class Forum:
    """All ranks of a model."""

    units: Sequence[Unit]
    """In the order in which they are registered, without the root."""
    axes: Axes
    device: torch.device

    def next_unit(self, wanted: Unit | None) -> Unit | None:
        """The first one registered of the units that ranks want next. **Collective**.

        Args:
            wanted: what this rank wants; None once its forward is over, and as an answer if all are.
        """
        number = len(self.units) if wanted is None else self.units.index(wanted)
        first = -self.highest([-number])[0]
        return self.units[first] if first < len(self.units) else None

    def either(self, claims: Sequence[bool]) -> list[bool]:
        """Which of the claims hold on some rank. **Collective**."""
        return [bool(claim) for claim in self.highest([int(claim) for claim in claims])]

    def every(self, own: Sequence[int]) -> list[list[int]]:
        """The lists of numbers that ranks have, the longest first and each once. **Collective**."""
        (length,) = self.highest([len(own)])
        table = torch.tensor([[*own, *[-1] * (length - len(own))]], dtype=torch.int64, device=self.device)
        for axis in self.axes:
            rows = table.repeat(axis.size, 1)
            all_gather(rows.view(-1), table.view(-1), axis)
            table = rows
        lists = {tuple(number for number in row if number >= 0) for row in table.tolist()}
        return [list(numbers) for numbers in sorted(lists, key=lambda numbers: (-len(numbers), numbers))]

    def highest(self, numbers: Sequence[int]) -> list[int]:
        """The highest of each of the numbers over all ranks. **Collective**."""
        own = torch.tensor(numbers, dtype=torch.int64, device=self.device)
        for axis in self.axes:
            table = own.repeat(axis.size)
            all_gather(table, own, axis)
            own = table.view(axis.size, len(numbers)).amax(dim=0)
        return own.tolist()
