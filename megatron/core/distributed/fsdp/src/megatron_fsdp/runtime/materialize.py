"""Meta device to real storage, one unit at a time."""

from __future__ import annotations

import torch
from torch import nn

from megatron_fsdp.runtime.discovery import UnitPlan
from megatron_fsdp.runtime.unit import ManagedParam
from megatron_fsdp.state.param_tags import copy_tags


def check_resettable(plans: list[UnitPlan]) -> None:
    """Checks that every module that holds a meta parameter can initialise it.

    Raises:
        ValueError: some cannot; all of them are named.
    """
    helpless = {
        type(place.module()).__name__ + f" ({fqn})"
        for plan in plans
        for param in plan.params
        if param.raw.is_meta
        for fqn, place in zip(param.fqns, param.places, strict=True)
        if _reset_of(place.module()) is None
    }
    if helpless:
        raise ValueError(
            "init_model_with_meta_device needs a reset_parameters() method on every module that holds a parameter; "
            f"missing on {', '.join(sorted(helpless))}."
        )


def _reset_of(module: nn.Module):
    return getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)


@torch.no_grad()
def materialize(plan: UnitPlan, device: torch.device) -> None:
    """Gives the unit's meta parameters storage on `device` and has their modules initialise them."""
    modules: dict[nn.Module, None] = {}
    for param in plan.params:
        if param.raw.is_meta:
            _replace(param, torch.empty_like(param.raw, device=device))
            modules.update(dict.fromkeys(place.module() for place in param.places))
    for module in modules:
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                module._buffers[name] = torch.empty_like(buffer, device=device)
    for module in modules:
        _reset_of(module)()
    for param in plan.params:
        # reset_parameters may have made new Parameters.
        module, name = param.places[0].module(), param.places[0].name
        if module._parameters[name] is not param.raw:
            _replace(param, module._parameters[name].data)


def _replace(param: ManagedParam, data: torch.Tensor) -> None:
    """Puts a new Parameter of `data`, with the old one's tags, in all its places."""
    fresh = nn.Parameter(data, requires_grad=param.raw.requires_grad)
    copy_tags(param.raw, fresh)
    param.raw = fresh
    for place in param.places:
        place.hold(fresh)
