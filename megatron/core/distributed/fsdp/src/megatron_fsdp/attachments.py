"""Everything that sharding attaches to the user's own modules and to their parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from megatron_fsdp.diagnostics.guards import ForwardGuard
from megatron_fsdp.diagnostics.hang_report import report_hangs
from megatron_fsdp.diagnostics.refusals import refuse_hooks, refuse_moves
from megatron_fsdp.runtime.hooks import install_hooks
from megatron_fsdp.runtime.schedule import Schedule
from megatron_fsdp.state_dict.hooks import StateDictHooks


def attach(root: nn.Module, schedule: Schedule, owner: Callable[[], Any]) -> StateDictHooks:
    """Gives a model's own objects what makes them a sharded model's; returns the hooks of its state dicts.

    Hooks, attributes and replaced methods are all put here; only what `make_sharded_param` makes has its layout from
    there. They refer to the sharded model weakly.

    Args:
        root: the user's module.
        owner: a weak reference to the sharded model.
    """
    for param in (param for unit in schedule.units for param in unit.params):
        param.sharded._megatron_fsdp_owner = owner  # how an optimizer finds the model
        param.unsharded.__fsdp_param__ = True  # read by megatron-core
        refuse_hooks(param.sharded, param.fqn)
    refuse_moves(root, owner)
    if schedule.config.hang_report_s:
        report_hangs(schedule, schedule.config.hang_report_s)
    install_hooks(schedule, ForwardGuard(schedule, is_strict=schedule.config.is_strict))
    state_dict_hooks = StateDictHooks(schedule)
    state_dict_hooks.install(root)
    return state_dict_hooks
