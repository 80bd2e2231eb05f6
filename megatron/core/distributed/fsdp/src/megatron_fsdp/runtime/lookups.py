"""Finds out whose weights a backward does not read: a table that was looked up needs only the places and its shape."""

from __future__ import annotations

from collections.abc import Iterable

import torch

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
