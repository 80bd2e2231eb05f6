"""Whole, writable parameters in place of shards, for a while."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import nn

from megatron_fsdp.plan.strategy import REPLICATED
from megatron_fsdp.runtime.schedule import Schedule
from megatron_fsdp.runtime.unit import ManagedParam
from megatron_fsdp.state.flat_buffer import FlatBuffer
from megatron_fsdp.state.param_group import ParamGroup
from megatron_fsdp.state.param_tags import copy_tags
from megatron_fsdp.state.tensor_parallel import in_form_of, local_part


class _Shown(NamedTuple):
    """A parameter that is whole at the moment."""

    param: ManagedParam
    whole: nn.Parameter
    rows: torch.Tensor
    """This rank's rows of the main weight."""
    first_row: int


@contextlib.contextmanager
def full_params(schedule: Schedule, *, writeback: bool) -> Iterator[None]:
    """See `MegatronFSDP.full_params`. **Collective**."""
    schedule.check_idle("full_params()")
    schedule.reshard_all()
    shown: list[_Shown] = []
    schedule.blocked_by = "full_params()"
    try:
        for unit in schedule.units:
            by_unsharded = {id(param.unsharded): param for param in unit.params}
            for group in unit.groups:
                shown += _show(group, by_unsharded)
        yield
        if writeback:
            _write_back(shown)
    finally:
        for param in (param for unit in schedule.units for param in unit.params):
            for place in param.places:
                place.hold(param.sharded)
        schedule.blocked_by = None
    if writeback:
        schedule.install()


@torch.no_grad()
def _show(group: ParamGroup, by_unsharded: dict[int, ManagedParam]) -> list[_Shown]:
    """Lets modules hold the whole main weights of a group. **Collective**."""
    main = group.main_weight_buffer
    data = torch.empty(group.layout.size, dtype=main.dtype, device=main.data.device)
    full = FlatBuffer(group.layout, main.axes, REPLICATED, data)
    if main.is_data_distributed:
        full.gather_from(main)
    else:
        data.copy_(main.data)
    shown = []
    for slot, unsharded in enumerate(group.params):
        param = by_unsharded[id(unsharded)]
        whole = nn.Parameter(in_form_of(unsharded, full.view(slot)), requires_grad=unsharded.requires_grad)
        copy_tags(unsharded, whole)
        whole._megatron_fsdp_owner = param.sharded._megatron_fsdp_owner
        for place in param.places:
            place.hold(whole)
        shown.append(_Shown(param, whole, main.view(slot), main.rows(slot).first))
    return shown


@torch.no_grad()
def _write_back(shown: list[_Shown]) -> None:
    """Copies this rank's rows of every whole parameter into its main weight; all of them or none.

    Raises:
        ValueError: a parameter has been replaced or has another shape or dtype.
    """
    for param, whole, rows, _ in shown:
        if not all(place.holds(whole) for place in param.places):
            raise ValueError(
                f"{param.fqn} was replaced inside full_params(); write into it instead, e.g. with copy_(). Nothing "
                "has been written back."
            )
        if whole.shape != param.unsharded.shape or whole.dtype != rows.dtype:
            raise ValueError(
                f"{param.fqn} has become {tuple(whole.shape)} of {whole.dtype} inside full_params(), expected "
                f"{tuple(param.unsharded.shape)} of {rows.dtype}; keep its shape and dtype. Nothing has been "
                "written back."
            )
    for _, whole, rows, first in shown:
        part = local_part(whole)
        rows.copy_(part[first : first + len(rows)] if part.dim() else part)
