"""Refusals: methods of sharded parameters and modules that raise where torch would be silently wrong or unclear."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import torch
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


def refuse_moves(root: nn.Module, owner: Callable[[], object | None], device: torch.device) -> None:
    """Makes moves and casts raise, of `root` and its modules that have parameters, as long as `owner` gives a model.

    torch would replace the shards one by one, fail at the first with a message about swapping or at a later forward,
    and do so even where nothing would change. References are weak.
    """
    for module in root.modules():
        if next(module.parameters(), None) is not None:
            module._apply = _Apply(module, owner, device)


class _Apply:
    """`_apply` of one module of a sharded model: does nothing, and raises if something would change."""

    def __init__(self, module: nn.Module, owner: Callable[[], object | None], device: torch.device):
        self._module, self._owner, self._device = weakref.ref(module), owner, device

    def __call__(self, fn: Callable[..., Any], recurse: bool = True) -> nn.Module:
        module = self._module()
        assert module is not None, "this is its method"
        if self._owner() is None:  # no sharded model is left to protect
            return type(module)._apply(module, fn, recurse)
        check_stays(fn, module.parameters(), self._device)
        return module

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., nn.Module]:
        module = self._module()
        assert module is not None, "it is being copied"
        return _Apply(memo.get(id(module), module), self._owner, self._device)  # of the copy that is being made


def check_stays(fn: Callable[..., Any], params: Iterable[nn.Parameter], device: torch.device) -> None:
    """Compares dtypes and device: `fn`, as `nn.Module._apply` takes it, has to leave `params` as they are.

    Raises:
        RuntimeError: it does not.
    """
    for dtype in {param.dtype for param in params}:
        probe = torch.empty(0, dtype=dtype, device=device)
        moved = fn(probe)
        if moved.dtype != dtype or moved.device != probe.device:
            raise RuntimeError(
                f"a sharded model, or a part of it, cannot be moved or cast (from {dtype} on {device} to {moved.dtype} "
                f"on {moved.device}); do it before sharding."
            )
