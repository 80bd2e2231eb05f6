"""Refusals: methods of sharded parameters and modules that raise where torch would be silently wrong or unclear."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any, NoReturn

from torch import nn


def refuse_hooks(sharded: nn.Parameter, fqn: str) -> None:
    """Makes `register_hook` and `register_post_accumulate_grad_hook` of this parameter raise."""
    for method in ("register_hook", "register_post_accumulate_grad_hook"):
        setattr(sharded, method, functools.partial(_refuse_hook, method, fqn))


def _refuse_hook(method: str, fqn: str, hook: Any) -> NoReturn:
    raise NotImplementedError(
        f"{method}() of {fqn} would never run its hook: gradients of a sharded parameter are attached by "
        "finish_grad_sync(), past autograd. Work on .grad after it, or register the hook before sharding, where it "
        "sees this rank's own full gradient."
    )


def refuse_moves(module: nn.Module, owner: Callable[[], nn.Module | None]) -> None:
    """Passes moves and casts of the module inside a sharded model, `owner`, on to the model.

    torch would replace the shards one by one, fail at the first with a message about swapping, and do so even where
    nothing would change. References to both are weak.
    """
    module._apply = functools.partial(_apply_as_owner, weakref.ref(module), owner)


def _apply_as_owner(
    inner: weakref.ref[nn.Module], owner: Callable[[], nn.Module | None], fn: Callable[..., Any], recurse: bool = True
) -> nn.Module:
    module, model = inner(), owner()
    assert module is not None, "this is its method"
    if model is None:  # no sharded model is left to answer
        return type(module)._apply(module, fn, recurse)
    model._apply(fn, recurse)
    return module
