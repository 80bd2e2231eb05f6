"""The gathers of a backward: each in its turn, in one order on all ranks."""

from __future__ import annotations

import itertools
from collections.abc import Container

from megatron_fsdp.machine.torch_compat import graph_task, node_number
from megatron_fsdp.runtime.calls import Forward
from megatron_fsdp.runtime.gatherer import Gatherer, Prefetch
from megatron_fsdp.runtime.order import Order, Step
from megatron_fsdp.runtime.unit import Unit


class BackwardTurns:
    """Gathers for every step of a backward, each once, and a few ahead."""

    def __init__(self, gatherer: Gatherer, prefetch: Prefetch, lenders: Container[Unit], order: Order):
        self._gatherer = gatherer
        self._prefetch = prefetch
        self._lenders = lenders
        self.order = order
        self._gathered = 0
        """Steps up to which everything has been gathered."""

    def restart(self, order: Order) -> None:
        """The backward of a forward of this order begins."""
        self.order = order
        self._gathered = 0

    def gather_before(self, stop: int) -> None:
        """Gathers for every turn whose backward begins before step number `stop`. **Collective**."""
        while self._gathered < stop:
            step = self.order.backward[self._gathered]
            self._gathered += 1
            if not step.is_entry or not step.unit.joins_backward:
                continue
            is_shown_everywhere = step.turn is None or (self.order.is_alike and step.unit not in self._lenders)
            if is_shown_everywhere:
                self._gatherer.gather(step.unit)
            elif step.opens:  # it may be readable here, but not on a rank that left it out
                self._gatherer.take_turn(step.unit)

    def gather_ahead(self, start: int) -> None:
        """Starts the gathers of what may come next, from step number `start` on. **Collective**."""
        count = len(self._prefetch.pick(unit for _, unit in self.order.entries_from(start)))
        for number, _ in itertools.islice(self.order.entries_from(start), count):
            self.gather_before(number + 1)


class Progress:
    """How far autograd has come in the backward that runs."""

    def __init__(self) -> None:
        self._task = self._node = 0
        self._forward: Forward | None = None

    def begin(self) -> None:
        """A backward begins; called inside its graph task."""
        self._task = graph_task()
        self._forward = None

    def follow(self, forward: Forward) -> bool:
        """The backward of `forward` goes on, or begins, and then it is True."""
        begins = forward is not self._forward
        self._forward = forward
        return begins

    @property
    def node(self) -> int:
        """The node that the outermost graph task executes; another inside it has nodes of another thread."""
        if graph_task() == self._task:
            self._node = node_number()
        return self._node

    def is_to_come(self, step: Step) -> bool:
        """The backward of the step's turn is not over on this rank."""
        if not step.unit.joins_backward:
            return False
        node = self.node
        calls = (call for call in step.unit.calls if call.turn == step.turn and call.forward is self._forward)
        return any(not call.is_over(node) for call in calls)
