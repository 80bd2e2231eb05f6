"""Autograd hooks on sharded parameters, which would never run: refused where they are registered."""

from __future__ import annotations

import dataclasses
from typing import Any, NoReturn

from torch import nn


def refuse_hooks(sharded: nn.Parameter, fqn: str) -> None:
    """Makes `register_hook` and `register_post_accumulate_grad_hook` of this parameter raise."""
    # On the instance: the class is torch's own. Gradients are attached from a buffer, past autograd.
    for method in ("register_hook", "register_post_accumulate_grad_hook"):
        setattr(sharded, method, _Refused(method, fqn))


@dataclasses.dataclass(frozen=True)
class _Refused:
    """A method that says why it is none."""

    method: str
    fqn: str

    def __call__(self, hook: Any) -> NoReturn:
        """Raises NotImplementedError."""
        raise NotImplementedError(
            f"{self.method}() of {self.fqn} would never run its hook: gradients of a sharded parameter are attached by "
            "finish_grad_sync(), past autograd. Work on .grad after it, or register the hook before sharding, where it "
            "sees this rank's own full gradient."
        )
