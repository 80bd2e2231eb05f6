"""Optimizer state as shards: made in advance, taken over from full tensors, and placed for torch DCP."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from megatron_fsdp.dtensor.shard_spec import ShardSpec
from megatron_fsdp.machine.device import Device
from megatron_fsdp.machine.torch_compat import local_tensor
from megatron_fsdp.optim.kinds import is_elementwise, owned_kind
from megatron_fsdp.state.param_tags import copy_tags

#: An attribute of DTensors that the engine has made or looked at: they lie like their parameter, and torch DCP knows.
MARK = "full_tensor"
#: State that is one number per parameter: name -> its value after zero steps, from the options of the group.
_SCALAR_STATE: dict[str, Callable[[dict[str, Any]], Any]] = {
    "step": lambda group: 0.0,
    "mu_product": lambda group: 1.0,  # NAdam
    "mu": lambda group: 1.0,  # ASGD
    "eta": lambda group: group["lr"],  # ASGD
}


@torch.no_grad()
def create_state(optimizer: torch.optim.Optimizer) -> None:
    """Gives an optimizer that has not stepped yet the state of zero steps; parameters and options stay as they are.

    The state is what one step with zero gradients leaves on a copy of each parameter, its counters set back.
    What is owned has its kind's, on every rank, empty where it owns nothing. State that is there is left alone.

    Raises:
        ValueError: the state before the first step is not known, or is not that of a step with zero gradients.
    """
    if any(optimizer.state.values()):
        return
    owned, groups, made = owned_kind(optimizer), optimizer.param_groups, {}
    try:
        for group in groups:
            for param in group["params"]:
                if param.requires_grad and owned is None:
                    made[param] = _state_after_zero_steps(optimizer, group, param)
                elif param.requires_grad:
                    made[param] = {name: torch.zeros_like(local_tensor(param)) for name in owned.state or ()}
    finally:
        optimizer.param_groups = groups
        optimizer.state.clear()
    for param, state in made.items():
        if state:
            optimizer.state[param] = {name: as_shard(param, name, value) for name, value in state.items()}
    mark_state(optimizer)


def _state_after_zero_steps(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], param: nn.Parameter
) -> dict[str, Any]:
    if isinstance(optimizer, torch.optim.SGD) and group["momentum"] and group["dampening"]:
        raise ValueError(
            "SGD with dampening starts from its first gradient undamped, which no state before the first step can say; "
            "call step() once before state_dict()."
        )
    stand_in = nn.Parameter((local_tensor(param) if is_elementwise(optimizer) else param).detach().clone())
    copy_tags(param, stand_in)
    stand_in.grad = torch.zeros_like(stand_in)
    options = {key: value for key, value in group.items() if key != "params"}
    options = copy.deepcopy({key: v.to_local() if isinstance(v, DTensor) else v for key, v in options.items()})
    if "weight_decay" in options:  # as part of the gradient it would leave a trace
        options["weight_decay"] = 0.0
    optimizer.param_groups = [{**options, "params": [stand_in]}]
    step = type(optimizer).step
    getattr(step, "__wrapped__", step)(optimizer)  # without hooks
    state = optimizer.state.pop(stand_in, {})
    for key, value in state.items():
        if value is None or _is_shaped_like(stand_in, key, value):
            continue
        # Every rank must come to the same end, so the name decides, not the values.
        if key not in _SCALAR_STATE:
            raise ValueError(
                f"{type(optimizer).__name__} keeps {key!r}, whose value before the first step is unknown; "
                "call step() once before state_dict()."
            )
        zero = _SCALAR_STATE[key](group)
        state[key] = value.fill_(zero) if isinstance(value, torch.Tensor) else type(value)(zero)
    return state


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


def _is_shaped_like(param: torch.Tensor, name: str, value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.shape == param.shape and name not in _SCALAR_STATE


def as_shard(param: nn.Parameter, name: str, value: Any) -> Any:
    """Local state as users see it: as a DTensor where it is shaped like this rank's rows of `param`, else as it is."""
    if isinstance(value, DTensor) or not _is_shaped_like(local_tensor(param), name, value):
        return value
    spec = getattr(param, "megatron_fsdp_spec", None)
    if spec is not None:
        return spec.wrap(value)
    layout = {"shape": param.shape, "stride": param.stride()}
    return DTensor.from_local(value, param.device_mesh, param.placements, run_check=False, **layout)


def mark_state(optimizer: torch.optim.Optimizer) -> None:
    """Gives state that lies like its parameter the right `full_tensor` and torch DCP's chunks."""
    for param, state in optimizer.state.items():
        spec = getattr(param, "megatron_fsdp_spec", None)
        for value in state.values() if spec is not None else ():
            if isinstance(value, DTensor) and MARK not in vars(value) and spec.fits(value):
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


def shard_state(spec: ShardSpec, state: dict[str, Any], dtype: torch.dtype | None = None) -> dict[str, Any]:
    """A parameter's optimizer state with its parameter-shaped tensors cut to this rank's rows, in `dtype` if given.

    Raises:
        ValueError: see `ShardSpec.take`.
    """
    return {
        # Marked again: what was copied, as a loaded state dict may be, has the marks of a tensor without a model.
        key: spec.mark(spec.take(value, f"optimizer state {key!r}", dtype))
        if isinstance(value, torch.Tensor) and value.shape == spec.shape and key not in _SCALAR_STATE
        else value
        for key, value in state.items()
    }
