"""Meta device to real storage, one unit at a time."""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch
from torch import nn

from megatron_fsdp.build.find_units import UnitPlan
from megatron_fsdp.runtime.unit import ManagedParam
from megatron_fsdp.state.param_tags import copy_tags


def check_resettable(root: nn.Module) -> None:
    """Checks that every module that owns a meta parameter or buffer can initialise it.

    Raises:
        ValueError: some cannot; all of them are named.
    """
    helpless = sorted(
        f"{type(module).__name__} ({fqn or 'the root'})"
        for fqn, module in root.named_modules()
        if _reset_of(module) is None
        and (_meta_buffers(module) or any(param.is_meta for param in module.parameters(recurse=False)))
    )
    if helpless:
        raise ValueError(
            "init_model_with_meta_device needs a reset_parameters() method on every module that owns a parameter or "
            f"buffer; missing on {', '.join(helpless)}."
        )


@torch.no_grad()
def materialize(plan: UnitPlan, device: torch.device) -> None:
    """Gives the unit's meta parameters storage on `device` and has their modules initialise them."""
    replaced = [param for param in plan.params if param.unsharded.is_meta]
    for param in replaced:
        _replace(param, torch.empty_like(param.unsharded, device=device))
    holders = {place.module() for param in replaced for place in param.places}
    firsts = [(param, param.places[0].module(), param.places[0].name) for param in replaced]
    for module in _children_first(plan.module):
        if module in holders:
            _reset(module, {name for _, holder, name in firsts if holder is module}, device)
    for param, holder, name in firsts:
        # reset_parameters may have made new Parameters.
        if getattr(holder, name) is not param.unsharded:
            _replace(param, getattr(holder, name).data)


@torch.no_grad()
def materialize_buffers(root: nn.Module, device: torch.device) -> None:
    """Initialises meta buffers by the modules that own them, where those own no parameters that were materialized."""
    for module in _children_first(root):
        if _meta_buffers(module):
            _reset(module, (), device)


def _reset(module: nn.Module, names: Collection[str], device: torch.device) -> None:
    """Calls the module's reset, which may change its buffers and the parameters `names`, and no others.

    The others belong to another unit, whose storage may be gone, or to the module that holds a tied one first.
    """
    own = list(module.named_parameters(recurse=False, remove_duplicate=False))
    others = [(name, param) for name, param in own if name not in names]
    for name, param in others:
        setattr(module, name, nn.Parameter(torch.empty_like(param, device="meta"), param.requires_grad))
    for name, buffer in _meta_buffers(module):
        setattr(module, name, torch.empty_like(buffer, device=device))
    reset = _reset_of(module)
    assert reset is not None, "checked before sharding"
    reset()
    for name, param in others:
        setattr(module, name, param)


def _children_first(module: nn.Module) -> list[nn.Module]:
    """Every module once, in the order in which constructors finish: a parent's reset may adjust its children."""
    below = [part for child in module.children() for part in _children_first(child)]
    return list(dict.fromkeys([*below, module]))


def _reset_of(module: nn.Module) -> Callable[[], None] | None:
    return getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)


def _meta_buffers(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    buffers = module.named_buffers(recurse=False, remove_duplicate=False)
    return [(name, buffer) for name, buffer in buffers if buffer.is_meta]


def _replace(param: ManagedParam, data: torch.Tensor) -> None:
    """Puts a new Parameter of `data`, with the old one's tags, in all its places."""
    fresh = nn.Parameter(data, requires_grad=param.unsharded.requires_grad)
    copy_tags(param.unsharded, fresh)
    param.unsharded = fresh
    for place in param.places:
        place.hold(fresh)
