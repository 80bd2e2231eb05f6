"""Meta device to real storage, one unit at a time."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator

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
        if _reset_of(module) is None and (_meta_buffers(module) or any(p.is_meta for p in _own_params(module).values()))
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
    for module in _children_first(plan.module):
        if module in holders:
            _reset(module, {param.places[0].name for param in replaced if param.places[0].module() is module}, device)
    for param in replaced:
        # reset_parameters may have made new Parameters.
        module, name = param.places[0].module(), param.places[0].name
        if module._parameters[name] is not param.unsharded:
            _replace(param, module._parameters[name].data)


@torch.no_grad()
def materialize_buffers(root: nn.Module, device: torch.device) -> None:
    """Has modules that own meta buffers but none of the materialized parameters initialise them."""
    for module in _children_first(root):
        if _meta_buffers(module):
            _reset(module, (), device)


def _reset(module: nn.Module, names: Collection[str], device: torch.device) -> None:
    """Calls the module's reset, which may change its buffers and the parameters `names`, and no others.

    The others belong to another unit, whose storage may be gone, or to the module that holds a tied one first.
    """
    others = {name: param for name, param in _own_params(module).items() if name not in names}
    for name, param in others.items():
        module._parameters[name] = nn.Parameter(torch.empty_like(param, device="meta"), param.requires_grad)
    for name in _meta_buffers(module):
        module._buffers[name] = torch.empty_like(module._buffers[name], device=device)
    _reset_of(module)()
    module._parameters.update(others)


def _children_first(module: nn.Module) -> Iterator[nn.Module]:
    """Every module once, in the order in which constructors finish: a parent's reset may adjust its children."""
    seen: set[nn.Module] = set()

    def visit(node: nn.Module) -> Iterator[nn.Module]:
        if node in seen:
            return
        seen.add(node)
        for child in node.children():
            yield from visit(child)
        yield node

    yield from visit(module)


def _reset_of(module: nn.Module) -> Callable[[], None] | None:
    return getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)


def _own_params(module: nn.Module) -> dict[str, nn.Parameter]:
    return {name: param for name, param in module._parameters.items() if param is not None}


def _meta_buffers(module: nn.Module) -> list[str]:
    return [name for name, buffer in module._buffers.items() if buffer is not None and buffer.is_meta]


def _replace(param: ManagedParam, data: torch.Tensor) -> None:
    """Puts a new Parameter of `data`, with the old one's tags, in all its places."""
    fresh = nn.Parameter(data, requires_grad=param.unsharded.requires_grad)
    copy_tags(param.unsharded, fresh)
    param.unsharded = fresh
    for place in param.places:
        place.hold(fresh)
