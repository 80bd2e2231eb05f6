"""Finds out whose weights a backward does not read: a table that was looked up needs only the places and its shape."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from megatron_fsdp.runtime.calls import Call
from megatron_fsdp.runtime.unit import Unit

#: Nodes that save no values of what was looked up, as autograd names them (torch 2.11 to 2.13); the last two are
#: megatron-core's, of its vocabulary-parallel embedding.
_LOOKUPS = frozenset(
    {
        "EmbeddingBackward0",
        "IndexBackward0",
        "IndexPutBackward0",
        "CloneBackward0",
        "TransposeBackward0",
        "ViewBackward0",
        "_ReduceFromModelParallelRegionBackward",
        "_ReduceScatterToSequenceParallelRegionBackward",
    }
)
#: A graph of more nodes than this is no lookup.
_MOST_NODES = 8


def note_reads(unit: Unit, call: Call | None, outputs: Sequence[torch.Tensor]) -> None:
    """Notes if the backward of a unit's forward that ends reads its weights.

    What is recomputed does. A unit that, all ranks have agreed, backward does not gather stays gathered here: the other
    ranks cannot know.
    """
    if unit.is_root:
        return
    are_held, is_recomputed = unit.has_new_holders(), call is not None and call.checkpoint is not None
    if not torch.is_grad_enabled() and not is_recomputed:
        return
    reads = unit.has_read_back or is_recomputed or are_held or backward_reads_weights(outputs)
    if reads or outputs:
        unit.has_read_back = reads
    if call is not None:
        call.reads_weights = reads
        unit.is_retained |= reads and not unit.reads_weights_back


def backward_reads_weights(outputs: Iterable[torch.Tensor]) -> bool:
    """The backward of `outputs` may read values of parameters, as far as the names of its nodes tell."""
    nodes = [output.grad_fn for output in outputs]
    for _ in range(_MOST_NODES):
        if not nodes:
            return False
        node = nodes.pop()
        if node.name() not in _LOOKUPS:
            return True
        nodes += [
            following
            for following, _ in node.next_functions
            if following is not None and following.name() != "torch::autograd::AccumulateGrad"
        ]
    return bool(nodes)
