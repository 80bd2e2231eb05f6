"""Agreement between all ranks of a model, over its own data-parallel axes: for passes that no program covers yet."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence

import torch

from megatron_fsdp.machine.collectives import all_gather, largest
from megatron_fsdp.plan.program import EVENTS, Trace
from megatron_fsdp.runtime.unit import Unit
from megatron_fsdp.state.flat_buffer import Axes


@dataclasses.dataclass(frozen=True)
class Consensus:
    """All ranks of a model. Steady steps ask nothing."""

    axes: Axes
    """Axes that reach all ranks, as those of experts need not; none where there is nothing to agree on."""
    device: torch.device

    @classmethod
    def of(cls, units: Sequence[Unit], device: torch.device) -> Consensus:
        """The ranks over which these units are spread. A single unit has one order by itself."""
        specs = [group.spec for unit in units for group in unit.groups] if len(units) > 1 else []
        return cls(min(specs, key=lambda spec: spec.is_expert).axes if specs else (), device)

    def largest(self, numbers: Sequence[int | bool]) -> list[int]:
        """The largest of each of the numbers over all ranks. **Collective**."""
        return largest(numbers, [axis.gather_group for axis in self.axes if axis.size > 1], self.device)

    def smallest(self, numbers: Sequence[int | bool]) -> list[int]:
        """The smallest of each of the numbers over all ranks. **Collective**."""
        return [-number for number in self.largest([-number for number in numbers])]

    def traces(self, own: Trace) -> list[Trace]:
        """The different traces that ranks have: one if all are alike, which 16 bytes tell. **Collective**."""
        codes = [EVENTS.index(event) + len(EVENTS) * unit for event, unit in own]
        digest = int.from_bytes(hashlib.blake2b(repr(codes).encode(), digest_size=7).digest(), "big")
        most, least, length = self.largest([digest, -digest, len(codes)])
        if most == -least:
            return [own]
        table = torch.tensor([[*codes, *[-1] * (length - len(codes))]], dtype=torch.int64, device=self.device)
        for axis in self.axes:
            rows = table.repeat(axis.size, 1)
            all_gather(rows.view(-1), table.view(-1), axis)
            table = rows
        rows = sorted({tuple(code for code in row if code >= 0) for row in table.tolist()})
        return [tuple((EVENTS[code % len(EVENTS)], code // len(EVENTS)) for code in row) for row in rows]
