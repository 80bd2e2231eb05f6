"""Support of layers that write their weight's gradient themselves (`gradient_accumulation_fusion`).

In backward such a layer takes `weight.get_main_grad()` and overwrites it with the gradient, sets
`grad_added_to_main_grad`, and gives autograd a dummy, so that hooks still run.
"""

import functools
import importlib.util
import weakref
from collections.abc import Sequence

import torch
from megatron.core.utils import is_te_min_version
from torch import nn

from megatron_fsdp.param_and_grad_buffer import ParamAndGradBuffer
from megatron_fsdp.state.param_group import ParamGroup

_HAS_TE = importlib.util.find_spec("transformer_engine") is not None


def check(root_params: Sequence[nn.Parameter]) -> None:
    """Raises NotImplementedError where an overwritten gradient would lose a part."""
    if root_params:
        raise NotImplementedError(
            "gradient_accumulation_fusion with a weight that two modules read (tied or multi-token prediction): the "
            " second gradient would overwrite the first. Turn the fusion off or untie the weights."
        )
    if _HAS_TE and not is_te_min_version("2.10.0"):
        raise NotImplementedError(
            "gradient_accumulation_fusion needs TransformerEngine 2.10: older ones add to memory that is not zeroed"
        )


def install(buffer: ParamAndGradBuffer) -> None:
    """Gives every unsharded trainable parameter the attributes that such layers read."""
    for group in buffer.parameter_groups:
        if group.main_grad is None:
            continue
        for slot, param in enumerate(group.params):
            lend = functools.partial(_lend, weakref.ref(group), slot)
            vars(param).update(get_main_grad=lend, grad_added_to_main_grad=False, overwrite_main_grad=True)
            # Otherwise the view would keep the whole group's gradients alive.
            param.register_post_accumulate_grad_hook(_forget_main_grad)


def _lend(group: weakref.ref[ParamGroup], slot: int) -> torch.Tensor:
    """The memory for one parameter's gradient of this backward.

    Raises:
        RuntimeError: the parameter has had a gradient in this backward.
    """
    lender = group()
    assert lender is not None and lender.main_grad is not None, "the model runs, and the group is trainable"
    place = lender.main_grad.wgrad_out(slot)
    if place is None:
        raise RuntimeError(
            f"{lender.spec.fqns[slot]} has a second gradient in one backward, which would overwrite the first; turn "
            "gradient_accumulation_fusion off, or use the weight once in each forward and call backward for each."
        )
    return place


def _forget_main_grad(param: torch.Tensor) -> None:
    if hasattr(param, "main_grad"):
        del param.main_grad
