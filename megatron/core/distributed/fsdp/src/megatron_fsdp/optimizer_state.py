"""Optimizer state as shards: taken over from full tensors, made in advance, and placed for torch DCP."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from megatron_fsdp.dtensor import ShardSpec
from megatron_fsdp.machine.device import Device
from megatron_fsdp.state.param_tags import copy_tags

#: State that is one number per parameter: name -> its value after zero steps, from the options of the group.
_SCALAR_STATE: dict[str, Callable[[dict[str, Any]], Any]] = {
    "step": lambda group: 0.0,
    "mu_product": lambda group: 1.0,  # NAdam
    "mu": lambda group: 1.0,  # ASGD
    "eta": lambda group: group["lr"],  # ASGD
}


@torch.no_grad()
def create_state(optimizer: torch.optim.Optimizer, bare_step: Callable[[torch.optim.Optimizer], Any]) -> None:
    """Gives an optimizer that has not stepped yet the state of zero steps; parameters and options stay as they are.

    The state is what one step with zero gradients leaves on a copy of each parameter, its counters set back.

    Args:
        optimizer: its state is left alone if there is any.
        bare_step: the class's own `step`, without hooks.

    Raises:
        ValueError: the state before the first step is not known, or is not that of a step with zero gradients.
    """
    if any(optimizer.state.values()):
        return
    groups = optimizer.param_groups
    made = {}
    try:
        for group in groups:
            _check_starts_from_zero(optimizer, group)
            for param in group["params"]:
                if param.requires_grad:
                    made[param] = _state_after_zero_steps(optimizer, bare_step, group, param)
    finally:
        optimizer.param_groups = groups
        optimizer.state.clear()
    optimizer.state.update({param: state for param, state in made.items() if state})
    mark_state(optimizer)


def compact_before_state(optimizer: torch.optim.Optimizer) -> None:
    """Gives free memory back to the device when a first step is about to make state.

    Otherwise what stays for ever is put into holes that the first backward has left, and later steps, which find these
    holes taken, take new memory: of an 8B model on 8 GPUs 4 GiB each (docs/performance.md).
    """
    is_first = True

    def compact(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        nonlocal is_first
        if is_first and not any(optimizer.state.values()):
            Device.current().empty_cache()
        is_first = False

    optimizer.register_step_pre_hook(compact)


def _check_starts_from_zero(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> None:
    if isinstance(optimizer, torch.optim.SGD) and group["momentum"] and group["dampening"]:
        raise ValueError(
            "SGD with dampening starts from its first gradient undamped, which no state before the first step can say; "
            "call step() once before state_dict()."
        )


def _state_after_zero_steps(
    optimizer: torch.optim.Optimizer, bare_step: Callable, group: dict[str, Any], param: nn.Parameter
) -> dict[str, Any]:
    stand_in = nn.Parameter(param.detach().clone())
    copy_tags(param, stand_in)
    stand_in.grad = torch.zeros_like(stand_in)
    options = copy.deepcopy({key: value for key, value in group.items() if key != "params"})
    if "weight_decay" in options:  # as part of the gradient it would leave a trace
        options["weight_decay"] = 0.0
    optimizer.param_groups = [{**options, "params": [stand_in]}]
    bare_step(optimizer)
    state = optimizer.state.pop(stand_in, {})
    for key, value in state.items():
        # Every rank must come to the same end, so the name decides, not the values.
        if isinstance(value, torch.Tensor) and value.shape == param.shape and key not in _SCALAR_STATE:
            continue
        if key not in _SCALAR_STATE and value is not None:
            raise ValueError(
                f"{type(optimizer).__name__} keeps {key!r}, whose value before the first step is unknown; "
                "call step() once before state_dict()."
            )
        if isinstance(value, torch.Tensor):
            value.fill_(_SCALAR_STATE[key](group))
        elif value is not None:
            state[key] = type(value)(_SCALAR_STATE[key](group))
    return state


def mark_state(optimizer: torch.optim.Optimizer) -> None:
    """Gives the state of sharded parameters the right `full_tensor` and torch DCP's chunks."""
    for param, state in optimizer.state.items():
        spec = getattr(param, "megatron_fsdp_spec", None)
        if spec is not None:
            mark_param_state(spec, state)


def count_unmarked(optimizer: torch.optim.Optimizer) -> int:
    """How many DTensors of the state have torch's own `full_tensor`, which is wrong on uneven shards."""
    values = (value for state in optimizer.state.values() for value in state.values())
    return sum(isinstance(value, DTensor) and "full_tensor" not in vars(value) for value in values)


def mark_param_state(spec: ShardSpec, state: dict[str, Any]) -> None:
    """Marks every tensor of one parameter's optimizer state that lies like the parameter."""
    for value in state.values():
        if spec.fits(value):
            spec.mark(value)


def adopt_state(optimizer: torch.optim.Optimizer) -> None:
    """Cuts state in full tensors to the parameters' shards, and marks all of it.

    Raises:
        ValueError: state lies otherwise than its parameter.
    """
    for param, state in optimizer.state.items():
        spec = getattr(param, "megatron_fsdp_spec", None)
        if spec is not None:  # loading keeps what belongs to no parameter
            optimizer.state[param] = shard_state(spec, state)
    mark_state(optimizer)


def shard_state(spec: ShardSpec, state: dict[str, Any], dtype: torch.dtype | None = None) -> dict[str, Any]:
    """A parameter's optimizer state with its parameter-shaped tensors cut to this rank's rows, in `dtype` if given.

    Raises:
        ValueError: see `ShardSpec.take`.
    """
    return {
        key: spec.take(value, f"optimizer state {key!r}", dtype)
        if isinstance(value, torch.Tensor) and value.shape == spec.shape and key not in _SCALAR_STATE
        else value
        for key, value in state.items()
    }
