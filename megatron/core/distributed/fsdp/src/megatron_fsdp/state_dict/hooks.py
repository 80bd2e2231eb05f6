"""State-dict hooks for torch DCP; they read offsets from layouts and communicate nothing."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from megatron_fsdp.dtensor.shard_spec import ShardSpec, spec_of
from megatron_fsdp.runtime.schedule import Schedule


class StateDictHooks:
    """Makes `state_dict()` show sharded parameters and `load_state_dict()` end with current compute weights.

    Hooks sit on the inner root module, so that `model.state_dict()` and `model.module.state_dict()` agree.
    """

    def __init__(self, schedule: Schedule):
        self._schedule = weakref.ref(schedule)
        self.preprocess = True
        """Prepare `state_dict()` for torch DCP."""
        self.specs: dict[str, ShardSpec] = {
            fqn: spec_of(param.sharded) for unit in schedule.units for param in unit.params for fqn in param.fqns
        }
        """By every name, how the parameter lies."""
        self._showed_unsharded: list = []

    def __deepcopy__(self, memo: dict) -> StateDictHooks:
        raise NotImplementedError(
            "a sharded module cannot be deep-copied; copy it before sharding, or copy its state_dict()."
        )

    def install(self, root: nn.Module) -> None:
        """Registers the hooks on the inner root module."""
        root.register_state_dict_pre_hook(self.before_state_dict)
        # torch marks the hook it is given with an attribute, which a bound method does not take.
        root.register_state_dict_post_hook(functools.partial(self.after_state_dict))
        root.register_load_state_dict_pre_hook(self.before_load)
        root.register_load_state_dict_post_hook(self.after_load)

    def before_state_dict(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:
        """Shows the sharded parameters, also in the middle of a step."""
        self._showed_unsharded = [unit for unit in self._alive().units if unit.shows_unsharded]
        for unit in self._showed_unsharded:
            unit.show_sharded()

    def after_state_dict(
        self, module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: dict
    ) -> None:
        """Makes every `full_tensor` right, tells torch DCP where shards lie, and takes out what it cannot store."""
        for unit in self._showed_unsharded:
            unit.show_unsharded()
        self._showed_unsharded = []
        if self.preprocess:
            for key in [key for key in state_dict if key.endswith("_extra_state")]:
                del state_dict[key]
        for fqn, spec in self.specs.items():
            value = state_dict.get(prefix + fqn)
            if isinstance(value, DTensor):
                spec.mark(value, for_checkpoint=self.preprocess)

    def before_load(
        self, module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: dict, *_: object
    ) -> None:
        """Cuts full tensors to this rank's rows, so that an ordinary checkpoint loads too.

        Raises:
            ValueError: `assign=True`, which would take the parameters away from their buffers; or a tensor that is
                spread over ranks otherwise than the parameter.
            RuntimeError: inside `full_params()`.
        """
        if local_metadata.get("assign_to_params_buffers", False):
            raise ValueError(
                "load_state_dict(assign=True) would detach sharded parameters from their buffers; use assign=False."
            )
        schedule = self._alive()
        schedule.check_unblocked("load_state_dict()")
        schedule.reshard_all()
        for fqn, spec in self.specs.items():
            value = state_dict.get(prefix + fqn)
            if isinstance(value, torch.Tensor) and value.shape == spec.shape and not spec.fits(value):
                state_dict[prefix + fqn] = spec.take(value, fqn)

    def after_load(self, module: nn.Module, incompatible_keys: Any) -> None:
        """Installs the loaded main weights. **Collective** if a weight codec is."""
        if self.preprocess:  # what `after_state_dict` takes out is not missing
            missing = incompatible_keys.missing_keys
            missing[:] = [key for key in missing if not key.endswith("_extra_state")]
        self._alive().install()

    def _alive(self) -> Schedule:
        schedule = self._schedule()
        assert schedule is not None, "the sharded model is gone"
        return schedule


def names_inner_module(names: Iterable[str], module: nn.Module) -> bool:
    """True if more of the names fit the state dict of `module` as they are than without a leading `module.`.

    Models may have a child called `module`. All names of one side fit it, and at most all but one the other.
    """
    names, own = list(names), module.state_dict().keys()
    bare = sum(name in own for name in names)
    return bare > sum(name.startswith("module.") and name.removeprefix("module.") in own for name in names)


def with_extra_state(module: nn.Module, hooks: StateDictHooks) -> dict[str, Any]:
    """The sharded module's state dict with the modules' extra state, which torch DCP cannot store."""
    before, hooks.preprocess = hooks.preprocess, False
    try:
        return nn.Module.state_dict(module)
    finally:
        hooks.preprocess = before
