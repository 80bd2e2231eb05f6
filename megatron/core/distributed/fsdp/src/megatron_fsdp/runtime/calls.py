"""What a rank remembers of a unit's forwards until their backward: which turns they took, and whether that is over."""

from __future__ import annotations

import dataclasses

import torch

from megatron_fsdp.machine.torch_compat import hiding_function, next_sequence_number, saving_checkpoint
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
    """Its number in the forward's order; None as long as that has no place for it."""
    sequence: int = dataclasses.field(default_factory=next_sequence_number)
    """What autograd would have numbered a node when it began; nodes that forward made later have higher numbers."""
    has_graph: bool = dataclasses.field(default_factory=torch.is_grad_enabled)
    """Autograd recorded it. If not, it may be recomputed by a reentrant checkpoint, which did."""
    hidden_by: int | None = dataclasses.field(default_factory=hiding_function)
    """Number of the node of that checkpoint."""
    saved_by: int | None = dataclasses.field(default_factory=saving_checkpoint)
    """Names the checkpoint without reentrance that it is in."""
    carries_grad: bool = False
    """Gradients may come to what it returned."""
    has_been_repeated: bool = False
    """By the reentrant checkpoint."""
    last: int = 0
    """The last call that had begun when it returned, by its number in this forward."""
    inner: list[Call] = dataclasses.field(default_factory=list)
    """Of the root's: every call inside it."""

    @property
    def checkpoint(self) -> tuple[str, int] | None:
        """The same for all calls that are recomputed as one; None: it is not recomputed."""
        if self.saved_by is not None:
            return "saved", self.saved_by
        return None if self.hidden_by is None else ("hidden", self.hidden_by)

    def is_over(self, node: int) -> bool:
        """Its backward is, when autograd executes the node of this number: nodes run in the reverse of their order."""
        if self.hidden_by is not None:
            return self.hidden_by > node
        return self.sequence > node or (not self.has_graph and self.saved_by is None)


def recomputed_call(unit: Unit, node: int) -> Call | None:
    """The call of `unit` that is repeated while autograd executes the node of this number; None if unknown.

    A reentrant checkpoint is a node made before the calls that it hides and repeats them in their order. Without
    reentrance the node is one of those that the call has made, or what it repeats with it.
    """
    calls = unit.calls
    hidden = [call for call in calls if call.hidden_by == node]
    if hidden:
        call = next((call for call in hidden if not call.has_been_repeated), hidden[-1])
        call.has_been_repeated = True
        return call
    repeated = [call for call in calls if call.has_graph or call.checkpoint is not None]
    return next((call for call in reversed(repeated) if call.sequence <= node), next(iter(repeated), None))
