"""An optimizer's state keyed by parameter name, not index, so that it can be read back on other ranks."""

from collections.abc import Mapping

import torch
from torch.distributed.tensor import DTensor

from megatron_fsdp.optim.local_step import adopt_state

#: Options that say how a step is computed here, not what it computes.
_IMPLEMENTATION = ("params", "foreach", "fused", "capturable", "differentiable")
#: Options that say how a model is spread here; saved for Megatron-LM, but nothing that another spread could take over.
_SPREAD = ("is_expert_parallel",)


def export(optimizer: torch.optim.Optimizer, fqns: Mapping[torch.nn.Parameter, str]) -> dict:
    """`{"state": {fqn: {name: tensor}}, "param_to_group_meta": {fqn: {option: value}}}`, with the optimizer's tensors.

    Shards of a sharded model's parameters tell torch's distributed checkpoint where they lie.
    """
    adopt_state(optimizer)
    state: dict[str, dict] = {}
    meta: dict[str, dict] = {}
    for group in optimizer.param_groups:
        for param in group["params"]:
            state[fqns[param]] = dict(optimizer.state[param])
            meta[fqns[param]] = _options(group)
    return {"state": state, "param_to_group_meta": meta}


def load(optimizer: torch.optim.Optimizer, fqns: Mapping[torch.nn.Parameter, str], saved: Mapping) -> None:
    """Copies `saved`, as `export` writes it, into `optimizer`, whose state tensors exist.

    Raises:
        ValueError: a parameter or tensor is missing, or parameters of one group were saved with different options.
    """
    for group in optimizer.param_groups:
        names = [fqns[param] for param in group["params"]]
        for param, name in zip(group["params"], names, strict=True):
            _load_tensors(optimizer.state[param], _entry(saved, "state", name), name)
        if names:
            _load_options(group, {name: _entry(saved, "param_to_group_meta", name) for name in names})


def _entry(saved: Mapping, part: str, name: str) -> Mapping:
    try:
        return saved[part][name]
    except KeyError:
        raise ValueError(
            f"the saved optimizer has no {part!r} of parameter {name!r}; it belongs to another model"
        ) from None


def _load_tensors(state: dict, saved: Mapping, name: str) -> None:
    missing = sorted(set(state) - set(saved))
    if missing:
        raise ValueError(
            f"the saved optimizer state of {name!r} has no {missing}; it was written by another kind of optimizer"
        )
    for key, tensor in state.items():
        if saved[key] is tensor:
            continue  # Read in place by the checkpoint's reader.
        _local(tensor).copy_(_local(torch.as_tensor(saved[key])))


def _load_options(group: dict, saved: Mapping[str, Mapping]) -> None:
    (first_name, first), *others = saved.items()
    for name, options in others:
        keys = {*first, *options}.difference(_SPREAD)
        differing = sorted(key for key in keys if not _same(first.get(key), options.get(key)))
        if differing:
            raise ValueError(
                f"parameters {first_name!r} and {name!r} share a group but were saved with different {differing}; "
                "the groups of the saved run were made by other rules"
            )
    for key, value in first.items():
        if key not in _IMPLEMENTATION + _SPREAD:
            group[key] = tuple(value) if isinstance(group.get(key), tuple) else value


def _options(group: dict) -> dict:
    return {key: value for key, value in group.items() if key not in _IMPLEMENTATION}


def _same(one: object, other: object) -> bool:
    one, other = (value.tolist() if isinstance(value, torch.Tensor) else value for value in (one, other))
    # A checkpoint may give a tuple back as a list.
    if isinstance(one, (tuple, list)) and isinstance(other, (tuple, list)):
        return len(one) == len(other) and all(map(_same, one, other))
    return one == other or (one != one and other != other)  # the latter: both are NaN


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
