"""The gradients that users and optimizers hold: made once, pointed at memory that comes and goes."""

from __future__ import annotations

import sys
from collections.abc import Iterable

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from megatron_fsdp.dtensor import ShardSpec, own_storage
from megatron_fsdp.machine.torch_compat import local_tensor, viewed_tensor
from megatron_fsdp.state.flat_buffer import Span


def _references(made: dict[int, object], keys: Iterable[int]) -> dict[int, int]:
    """How often each of these values is referred to, by key."""
    return {key: sys.getrefcount(made[key]) for key in keys if key in made}


#: What that says of a value that nobody else holds; interpreters differ in what a loop and a call hold.
_NOBODY_ELSE = _references({0: object()}, [0])[0]


class GradHandles:
    """One DTensor per parameter over its part of a gradient buffer.

    A DTensor costs some 100 microseconds to make (torch 2.13), and a step would have to make hundreds of them. Methods
    are called for every parameter in every step, without recording.
    """

    def __init__(self) -> None:
        self._made: dict[int, DTensor] = {}
        """By id of the sharded parameter."""
        self._pointing: set[int] = set()
        """Those that show what the buffers hold now."""

    def of(self, sharded: nn.Parameter, data: torch.Tensor, span: Span) -> DTensor:
        """The gradient of `sharded`, on every rank, perhaps of zero rows: `span` of `data`, whose memory it shares."""
        key = id(sharded)
        if key not in self._pointing:
            if key not in self._made:
                self._made[key] = _made_for(sharded.megatron_fsdp_spec, span.view(data))
            elif 0 not in span.shape:  # else it still shows the nothing that it was made of
                storage = own_storage(data, span)
                local_tensor(self._made[key]).set_(storage, 0, span.shape, span.stride)
            self._pointing.add(key)
        return self._made[key]

    def let_go(self, params: Iterable[nn.Parameter], *, copies: bool = False) -> None:
        """Points at nothing, so that buffers can be freed. What somebody else holds keeps its memory and values.

        That may be the local tensor alone: without gradients being recorded `to_local()` gives it, and no alias.

        Args:
            params: sharded.
            copies: the memory is about to be overwritten, so what is held gets memory of its own.
        """
        if not self._pointing:
            return
        keys = {id(sharded) for sharded in params} & self._pointing
        locals_made = {key: local_tensor(self._made[key]) for key in keys}
        held = {key for key, references in _references(self._made, keys).items() if references > _NOBODY_ELSE}
        in_dtensors = _NOBODY_ELSE + 1
        held |= {key for key, references in _references(locals_made, keys).items() if references > in_dtensors}
        for key, local in locals_made.items():
            if key in held:
                del self._made[key]
                if copies:
                    local.set_(local.clone())
            elif local.numel():
                local.set_()
        self._pointing -= keys

    def is_one(self, grad: torch.Tensor, sharded: nn.Parameter) -> bool:
        """`grad` is what `of(sharded)` has given, not a copy in another dtype."""
        return self._made.get(id(sharded)) is grad


def _made_for(spec: ShardSpec, view: torch.Tensor) -> DTensor:
    """`view` as a DTensor that keeps no other tensor, and so no memory, alive."""
    alias = torch.empty(0, dtype=view.dtype, device=view.device)
    made = spec.wrap(alias.set_(view.untyped_storage(), view.storage_offset(), view.shape, view.stride()))
    # DTensor.from_local makes a view of what it is given; pointed elsewhere later, it would still hold that.
    base = viewed_tensor(local_tensor(made))
    if base is not None:
        base.set_()
    return made
