"""Specification of a parameter group: its parameters, layout, strategy and dtypes."""

from __future__ import annotations

import dataclasses

import torch

from megatron_fsdp.machine.copy_engine import PeerGather
from megatron_fsdp.plan.layout import Layout
from megatron_fsdp.plan.strategy import AxisPair, StrategyPlan
from megatron_fsdp.state.codec import WeightCodec
from megatron_fsdp.state.flat_buffer import Axes, FlatBuffer


@dataclasses.dataclass(frozen=True)
class GroupSpec:
    """Everything that a `ParamGroup` and its `MainGrad` are made from."""

    name: str
    """Unique in the model; prefix of the group's keys in the storage pool."""
    params: tuple[torch.nn.Parameter, ...]
    """The original parameters, which modules compute with while they are gathered: one slot of the layout each."""
    fqns: tuple[str, ...]
    layout: Layout
    plan: StrategyPlan
    axes: Axes
    codec: WeightCodec
    main_dtype: torch.dtype
    grad_dtype: torch.dtype
    """Dtype in which gradients accumulate."""
    comm_dtype: torch.dtype
    """Dtype in which gradients are reduced."""
    requires_grad: bool
    is_expert: bool
    is_replicated: bool
    device: torch.device
    atom_rows: tuple[int, ...]
    """By parameter, the number of rows that no shard boundary cuts."""
    peers: PeerGather | None = None
    """All-gathers over the inner axis by copies between devices; None: by collectives."""

    def new_buffer(self, placement: AxisPair, dtype: torch.dtype) -> FlatBuffer:
        """A buffer of this rank's size under `placement`, without memory until `allocate`."""
        return FlatBuffer(self.layout, self.axes, placement, torch.empty(0, dtype=dtype, device=self.device))
