"""Moves and casts of the module inside a sharded model: answered as the model answers them."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch import nn


class InnerApply:
    """Stands for `_apply` on one module, which it keeps alive no more than its sharded model.

    torch would replace the shards one by one, fail at the first with a message about swapping, and do so even where
    nothing would change.
    """

    def __init__(self, module: nn.Module, owner: Callable[[], Any]):
        self._module = weakref.ref(module)
        self._owner = owner

    def __call__(self, fn: Callable[..., Any], recurse: bool = True) -> nn.Module:
        """As `MegatronFSDP._apply`, but gives the module.

        Raises:
            RuntimeError: the device or a dtype would change.
        """
        module, owner = self._module(), self._owner()
        if owner is None:  # no sharded model is left to answer
            return type(module)._apply(module, fn, recurse)
        owner._apply(fn, recurse)
        return module
