"""In which order units gather and reduce: one order for all ranks, whatever each of them happens to run."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence

import torch

from megatron_fsdp.machine.collectives import all_gather
from megatron_fsdp.runtime.unit import Unit
from megatron_fsdp.state.flat_buffer import Axes


@dataclasses.dataclass(frozen=True)
class Step:
    """The beginning (its gather) or the end (its reduction and release) of one unit's backward."""

    unit: Unit
    is_entry: bool


class Order:
    """Positions of all units in a forward and in the backward that mirrors it.

    Autograd executes nodes in the reverse of the order in which forward made them. So when the gradient of a unit's
    output arrives, the backward of everything that forward ran after that unit is over: whatever comes before a step
    of `backward` can be done before it, on a rank that ran it and on a rank that did not.
    """

    def __init__(self, forward: Sequence[Unit], root: Unit):
        self.forward = list(forward)
        """Every unit but the root, as their first calls begin."""
        self.forward_index = {unit: index for index, unit in enumerate(self.forward)}
        self.backward = list(_steps(root, _children(self.forward, root)))
        """Entry and exit of every unit; those of units inside another one lie between its own."""
        self.entry = {step.unit: index for index, step in enumerate(self.backward) if step.is_entry}
        self.entries = [step.unit for step in self.backward if step.is_entry]
        self.exits = [step.unit for step in self.backward if not step.is_entry]
        self.exit_number = {unit: number for number, unit in enumerate(self.exits)}
        self._entry_number = {unit: number for number, unit in enumerate(self.entries)}

    def entries_after(self, unit: Unit) -> Iterator[Unit]:
        """The units that join backward whose entries follow that of `unit`."""
        following = itertools.islice(self.entries, self._entry_number[unit] + 1, None)
        return (other for other in following if other.joins_backward)


def agree(order: Order, ran: Sequence[Unit], axes: Axes, device: torch.device) -> Order:
    """The order in which the rank that ran most units ran them, the first one among equals. **Collective**.

    Any order that all ranks share is correct; this one is also fast. Units that no rank ran keep their place in `order`
    behind the one before them.
    """
    count = len(order.forward)
    numbers = [order.forward_index[unit] for unit in ran]
    longest = torch.tensor([len(ran), *numbers, *[0] * (count - len(ran))], dtype=torch.int64, device=device)
    for axis in axes:
        table = longest.repeat(axis.size)
        all_gather(table, longest, axis)
        rows = table.view(axis.size, count + 1)
        longest = rows[int(rows[:, 0].argmax())].clone()
    length, *agreed = longest.tolist()
    agreed = agreed[:length]
    for number in range(count):
        if number not in agreed:
            agreed.insert(agreed.index(number - 1) + 1 if number else 0, number)
    return Order([order.forward[number] for number in agreed], order.backward[0].unit)


def _children(forward: Sequence[Unit], root: Unit) -> dict[Unit, list[Unit]]:
    """Units by the innermost unit whose module contains them, in forward order."""
    by_fqn = {unit.fqn: unit for unit in forward}
    children: dict[Unit, list[Unit]] = {}
    for unit in forward:
        name, parent = unit.fqn, root
        while "." in name:
            name = name.rpartition(".")[0]
            if name in by_fqn:
                parent = by_fqn[name]
                break
        children.setdefault(parent, []).append(unit)
    return children


def _steps(unit: Unit, children: dict[Unit, list[Unit]]) -> Iterator[Step]:
    yield Step(unit, is_entry=True)
    for child in reversed(children.get(unit, [])):
        yield from _steps(child, children)
    yield Step(unit, is_entry=False)
