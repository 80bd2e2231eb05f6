"""Flat buffers: this rank's part of all parameters of a group, with per-parameter views and collectives."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import NamedTuple

import torch

from megatron_fsdp.machine import collectives
from megatron_fsdp.machine.collectives import NO_SCALE, Axis, GradScale
from megatron_fsdp.machine.copy_engine import PeerGather
from megatron_fsdp.plan.layout import Layout, RowRange
from megatron_fsdp.plan.strategy import AxisPair, Placement, collective_steps

Axes = tuple[Axis, Axis]
"""The (outer, inner) data-parallel axes."""
#: Position of the inner axis.
INNER = 1


def local_bounds(layout: Layout, axes: Axes, placement: AxisPair) -> tuple[int, int]:
    """Elements [lo, hi) of the global buffer that this rank holds under `placement`; shards are inner-major."""
    lo, hi = 0, layout.size
    for axis, place in ((axes[1], placement.inner), (axes[0], placement.outer)):
        if place is Placement.SHARD:
            step = (hi - lo) // axis.size
            lo, hi = lo + axis.rank * step, lo + (axis.rank + 1) * step
    return lo, hi


class FlatSpan(NamedTuple):
    """Shape, stride and first element of one parameter's rows in the data of a buffer."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    start: int

    @classmethod
    def of(cls, shape: tuple[int, ...], start: int) -> FlatSpan:
        """Contiguous rows of this shape, from element `start` on."""
        stride = [math.prod(max(size, 1) for size in shape[dim + 1 :]) for dim in range(len(shape))]
        return cls(shape, tuple(stride), start)

    def view(self, data: torch.Tensor) -> torch.Tensor:
        """These rows of `data`. Shares storage."""
        # Backward needs every parameter's: a slice and a view of that would take 2.5 times as long (torch 2.13).
        return data.as_strided(self.shape, self.stride, data.storage_offset() + self.start)

    def alone(self, data: torch.Tensor) -> torch.Tensor:
        """These rows of the contiguous `data`, as a tensor whose storage is just their memory.

        torch (2.11 to 2.13) neither deep-copies nor stages a DTensor whose local tensor begins inside its storage, and
        copies the whole storage of one that does not fill it.
        """
        if 0 in self.shape:
            return data.new_empty(self.shape)
        storage, itemsize = data.untyped_storage(), data.itemsize
        nbytes = math.prod(self.shape) * itemsize
        if storage.nbytes() != nbytes:
            first = (data.storage_offset() + self.start) * itemsize
            storage = storage[first : first + nbytes]
        return data.new_empty(0).set_(storage, 0, self.shape, self.stride)


@dataclasses.dataclass
class FlatBuffer:
    """This rank's part of one flat buffer."""

    layout: Layout
    axes: Axes
    placement: AxisPair
    data: torch.Tensor
    """1-D; elements [lo, hi) of the global buffer, or none while the buffer has no memory."""

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the elements."""
        return self.data.dtype

    @functools.cached_property
    def bounds(self) -> tuple[int, int]:
        """Elements [lo, hi) of the global buffer held here."""
        return local_bounds(self.layout, self.axes, self.placement)

    @property
    def numel(self) -> int:
        """Elements that this rank holds, with or without memory for them."""
        return self.bounds[1] - self.bounds[0]

    @property
    def nbytes(self) -> int:
        """Bytes that this rank holds, allocated or not."""
        return self.numel * self.data.itemsize

    @property
    def is_data_distributed(self) -> bool:
        """True if this rank holds less than the whole buffer."""
        return self.numel < self.layout.size

    def allocate(self) -> None:
        """Gives a buffer without memory some, on the current stream, contents undefined."""
        if self.data.numel() != self.numel:
            self.data = self.data.new_empty(self.numel)

    def free(self) -> None:
        """Drops the memory, which stays as long as somebody else refers to it."""
        self.data = self.data.new_empty(0)

    def rows(self, slot: int) -> RowRange:
        """Rows of parameter `slot` held here."""
        return self.layout.rows_on(slot, *self.bounds)

    def span(self, slot: int) -> FlatSpan:
        """Position in `data` of this rank's rows of parameter `slot`."""
        rows, shape = self.rows(slot), self.layout.slots[slot].shape
        return FlatSpan.of((rows.count, *shape[1:]) if shape else (), rows.start - self.bounds[0] if rows.count else 0)

    def view(self, slot: int) -> torch.Tensor:
        """This rank's rows of parameter `slot`, shape (rows, *shape[1:]); zero rows if it owns none. Shares storage."""
        return self.span(slot).view(self.data)

    def part(self, placement: AxisPair) -> FlatBuffer:
        """This rank's part of the buffer under a finer `placement`; the buffer itself if it lies so. Shares storage."""
        if placement == self.placement:
            return self
        lo, hi = local_bounds(self.layout, self.axes, placement)
        base = self.bounds[0]
        return FlatBuffer(self.layout, self.axes, placement, self.data[lo - base : hi - base])

    def gather_from(self, source: FlatBuffer, peers: PeerGather | None = None) -> None:
        """All-gathers this buffer from `source`, which holds less, perhaps a part of this buffer. **Collective**.

        Args:
            peers: gathers over the inner axis, casting where `source` has another dtype; None: collectives do.
        """
        held = source.data
        for step in collective_steps(source.placement, self.placement):
            assert step.collective == "all_gather", (source.placement, self.placement)
            # Every step but the last lands in its own slice of this buffer, so none needs memory of its own.
            target = self.part(step.placement).data
            if step.axis == INNER and peers is not None:
                peers.gather(target, held)
            else:
                _all_gather(target, held, self.axes[step.axis])
            held = target

    def reduce_to(self, placement: AxisPair, scale: GradScale = NO_SCALE) -> FlatBuffer:
        """Reduces in place to `placement` and returns that part of this buffer. **Collective**; overwrites the rest."""
        current = self
        for step in collective_steps(self.placement, placement):
            target = current.part(step.placement)
            if step.collective == "all_reduce":
                collectives.all_reduce(target.data, self.axes[step.axis], scale)
            else:
                assert step.collective == "reduce_scatter", (self.placement, placement)
                collectives.reduce_scatter(target.data, current.data, self.axes[step.axis], scale)
            current, scale = target, scale.for_the_rest
        return current


def _all_gather(out: torch.Tensor, shard: torch.Tensor, axis: Axis) -> None:
    if out.dtype.itemsize == 1:
        # Gloo knows no float8; bytes are bytes on every backend.
        out, shard = out.view(torch.uint8), shard.view(torch.uint8)
    collectives.all_gather(out, shard, axis)
