"""What a rank remembers of a unit's forwards until their backward: which turns they took, and whether that is over."""

from __future__ import annotations

import dataclasses

import torch

from megatron_fsdp.machine.torch_compat import next_sequence_number
from megatron_fsdp.runtime.order import Order
from megatron_fsdp.runtime.unit import Unit


@dataclasses.dataclass(eq=False)
class Forward:
    """One forward of the whole model."""

    order: Order | None = None
    """What its turns are numbered in, once it is over."""


@dataclasses.dataclass(eq=False)
class Call:
    """One forward of a unit inside a forward of the whole model; of the root, that forward itself.

    Units refer to calls weakly: the graph of the forward keeps them as long as a backward may come.
    """

    forward: Forward
    turn: int | None = None
    """None: no turn was left, so it was gathered for this call alone."""
    place: int = 0
    """If it has none: the turns that had begun before it."""
    sequence: int = dataclasses.field(default_factory=next_sequence_number)
    """What autograd would have numbered a node when it began; nodes that forward made later have higher numbers."""
    has_graph: bool = dataclasses.field(default_factory=torch.is_grad_enabled)
    """Autograd recorded it. If not, it may be recomputed by a reentrant checkpoint, which did."""
    carries_grad: bool = False
    """Gradients may come to what it returned."""
    recomputed_by: int | None = None
    """Number of the node of that checkpoint."""
    last: int = 0
    """The last call that had begun when it returned, by its number in this forward."""
    inner: list[Call] = dataclasses.field(default_factory=list)
    """Of the root's: every call inside it."""

    def is_over(self, node: int) -> bool:
        """Its backward is, when autograd executes the node of this number: nodes run in the reverse of their order."""
        return self.sequence > node if self.has_graph else self.recomputed_by not in (None, node)


def recomputed_call(unit: Unit, node: int) -> Call | None:
    """The call of `unit` that is repeated while autograd executes the node of this number; None if unknown.

    A reentrant checkpoint is a node made before the calls that it hides and repeats them in their order. Without
    reentrance the node is one of those that the call has made.
    """
    calls = unit.calls
    hidden = [call for call in calls if not call.has_graph and call.sequence > node and not call.is_over(node)]
    if hidden:
        call = next((call for call in hidden if call.recomputed_by is None), hidden[-1])
        call.recomputed_by = node
        return call
    return next((call for call in reversed(calls) if call.has_graph and call.sequence <= node), None)
