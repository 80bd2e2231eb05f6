"""One group's gradient from autograd to the optimizer: collect, reduce, finalize, attach."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import weakref
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager

import torch
from torch.distributed.tensor import DTensor

from megatron_fsdp.machine.allocator import StoragePool
from megatron_fsdp.machine.collectives import GradScale
from megatron_fsdp.machine.torch_compat import (
    foreach_add_,
    foreach_copy_,
    local_tensor,
    multiplies_into,
    without_overrides,
    zero_each,
)
from megatron_fsdp.plan.strategy import PARTIAL, AxisPair
from megatron_fsdp.state.flat_buffer import FlatBuffer, FlatSpan
from megatron_fsdp.state.group_spec import GroupSpec
from megatron_fsdp.state.tensor_parallel import local_part

AlongOuter = Callable[[], AbstractContextManager]
"""Makes a context in which the outer axis is reduced (its stream), after the work issued before it."""


class GradState(enum.Enum):
    """Contents of the gradient buffer."""

    EMPTY = enum.auto()
    """Nothing: the next gradient overwrites it."""
    ACCUMULATING = enum.auto()
    """A sum of micro-batches in its resting placement, some reduction still to come."""
    FINAL = enum.auto()
    """The reduced sum, in the main weight's placement."""


class MainGrad:
    """The main gradient of one trainable group.

    A backward is `collect` and, if that returns staged gradients, `reduce`; a cycle ends with `finalize` and `attach`.
    Reducing twice in one optimization cycle is exact under every strategy: a final buffer that receives more gradients
    sets its reduced part aside and adds it again at the end. (Scaling it by the number of ranks and reducing it again
    would change a third of fp32 values at 3 ranks.)

    Callers switch off autograd's recording, once for all groups: each time costs 2 microseconds. Before `collect` and
    `scale` move or change what reductions have written (`dropped`), the caller's stream has waited for them.
    """

    def __init__(self, spec: GroupSpec, pool: StoragePool):
        self._spec, self._plan, self._pool = spec, spec.plan, pool
        self.staging_key = f"{spec.name}.grad"
        """The pool's name for the staged gradients."""
        self.staged_numel = spec.layout.size if spec.plan.reduces_each_microbatch else 0
        """Elements of the staged gradients that every backward reduces."""
        self.staged_nbytes = self.staged_numel * spec.comm_dtype.itemsize
        self.staged: FlatBuffer | None = None
        """Unreduced gradients of this backward, whole, once somebody has written some."""
        self._wgrads: dict[int, Callable[[], object]] = {}
        """By slot of weight gradients that kernels write into the staged ones: gives their holder, None if released."""
        self.buffer = spec.new_buffer(spec.plan.main_grad, spec.grad_dtype)
        """Has memory from the first backward of a cycle until `reset`."""
        self.state = GradState.EMPTY
        self._aside: torch.Tensor | None = None
        """The reduced part of an earlier cycle, to be added again; afterwards kept for the stream that allocated it."""
        # Every backward and every attachment needs the span of every parameter, and the host must run ahead.
        self._spans = [FlatSpan.of(slot.shape, slot.start) for slot in spec.layout.slots]
        self._final_spans = list(map(self.final.span, range(len(self._spans))))
        """This rank's rows, in the data of `final`."""
        self._sharded: Sequence[torch.nn.Parameter] = ()
        self._attribute = "grad"
        self._attached: dict[int, DTensor] = {}
        """By slot, the gradient on the sharded parameter: a DTensor over the buffer's memory."""
        self._without_rows: dict[int, DTensor] = {}
        """By slot, the gradient where this rank has no rows; made once, since a DTensor takes the host 4 us."""
        self.is_current = False
        """Parameters have the final gradient, and nothing has been added to it since."""
        self.dropped: set[int] = set()
        """Slots whose gradient users dropped since the last backward; their rows in the buffer are stale."""

    @property
    def final(self) -> FlatBuffer:
        """The part of the buffer that the optimizer reads once the state is FINAL."""
        return self.buffer.part(self._plan.finalized_grad())

    def allocate(self) -> None:
        """Gives the buffer memory, if it has none, on the current stream."""
        nbytes = self.buffer.nbytes if self._plan.defers_reduction else 0
        with self._pool.lasting(f"{self._spec.name}.main_grad", nbytes):
            self.buffer.allocate()

    # -- backward: from autograd into the staged gradients, or straight into the buffer --------------------------

    @property
    def has_wgrad_out(self) -> bool:
        """Kernels can write weight gradients into the staged ones."""
        ours, theirs = self._spec.comm_dtype, self._spec.params[0].dtype
        is_possible = ours is theirs or multiplies_into(theirs, ours, self._spec.device.type)
        return self._plan.reduces_each_microbatch and is_possible

    @property
    def has_room(self) -> bool:
        """The storage for the gradients of one backward is free, or theirs already."""
        return self.staged is not None or self._pool.has_room(self.staging_key)

    def wgrad_out(self, slot: int) -> torch.Tensor | None:
        """Memory to compute parameter `slot`'s gradient of this backward in, full shape; None from the second call on.

        Who computes a second gradient in one backward needs other memory, for autograd to add.
        """
        if slot in self._wgrads:
            return None
        out = self.staged_grad(slot)
        self._wgrads[slot] = weakref.ref(out)
        return out

    def hold_until_found(self, slot: int) -> None:
        """Counts the memory of `wgrad_out` as held until the parameter's gradient is found there.

        Compiled code that only adds that gradient to another one reuses the memory for other tensors.
        """
        param, address = self._spec.params[slot], self.staged_grad(slot).data_ptr()
        self._wgrads[slot] = lambda: None if param.grad is not None and param.grad.data_ptr() == address else self

    def staged_grad(self, slot: int) -> torch.Tensor:
        """Parameter `slot`'s part of the staged gradients, full shape; allocates them if need be."""
        return self._spans[slot].view(self._stage().data)

    def _stage(self) -> FlatBuffer:
        """This backward's unreduced gradients, whole, in the dtype in which they are reduced or else accumulate."""
        if self.staged is None:
            dtype = self._spec.comm_dtype if self._plan.reduces_each_microbatch else self._spec.grad_dtype
            data = self._pool.scratch(self.staging_key, self._spec.layout.size, dtype, self._spec.device)
            self.staged = FlatBuffer(self._spec.layout, self._spec.axes, PARTIAL, data)
        return self.staged

    def _unstage(self) -> FlatBuffer | None:
        staged, self.staged = self.staged, None
        self._wgrads.clear()
        return staged

    def collect(self) -> FlatBuffer | None:
        """Takes the gradients that autograd left on the parameters, zero where it left none, on the current stream.

        Those that `note_dropped`, which the caller has called, found dropped begin at zero.

        Returns:
            The staged gradients to be reduced, or None if they were added to the accumulation buffer.
        """
        self._zero_dropped()
        self.dropped.clear()
        self.is_current = False
        self.allocate()
        if self._plan.reduces_each_microbatch:
            self._leave_held_memory()
            self._write(self._stage(), accumulate=False)
            return self._unstage()
        self._restart_if_final()
        if self.staged is not None:  # fused kernels overwrite, so their gradients came through a buffer of their own
            self._write(self.staged, accumulate=False)
            self._add(self.staged)
            self._unstage()
        else:
            self._write(self.buffer, accumulate=self.state is not GradState.EMPTY)
        self.state = GradState.ACCUMULATING
        return None

    def _leave_held_memory(self) -> None:
        """Copies the staged gradients if somebody still holds one, so that the reduction cannot overwrite it.

        Autograd holds one until it has the last part of a parameter's gradient. Where a graph task runs inside another,
        the group is reduced before that, and again when the rest has been accumulated.
        """
        if any(holder() is not None for holder in self._wgrads.values()):
            held = self._stage()
            self._unstage()
            self._stage().data.copy_(held.data)  # gradients of fused kernels may be nowhere else

    def _take_grads(self) -> list[torch.Tensor | None]:
        """Takes the gradients off the parameters; those of fused kernels lie in the staged gradients already."""
        with without_overrides():
            grads = [param.grad for param in self._spec.params]
            for slot, param in enumerate(self._spec.params):
                param.grad = None
                if getattr(param, "grad_added_to_main_grad", False):
                    param.grad_added_to_main_grad = False  # type: ignore[attr-defined]  # a tag of megatron-core's
                    grads[slot] = self.staged_grad(slot)
        return grads

    def _write(self, target: FlatBuffer, *, accumulate: bool) -> None:
        """Moves the gradient of every parameter into `target`, which is whole, in one batched copy or addition."""
        views, grads, untouched = [], [], []
        for span, grad in zip(self._spans, self._take_grads(), strict=True):
            if grad is not None:
                view, grad = span.view(target.data), local_part(grad)
                if grad.data_ptr() != view.data_ptr():  # not computed in place
                    views.append(view)
                    grads.append(grad)
            elif not accumulate:
                untouched.append(span.view(target.data))
        if views:
            # `foreach_add_` adds gradients of another dtype without rounding or copying them first.
            (foreach_add_ if accumulate else foreach_copy_)(views, grads)
        zero_each(untouched)

    # -- across ranks -------------------------------------------------------------------------------------------

    def reduce(self, staged: FlatBuffer, scale: GradScale) -> None:
        """Reduces staged gradients to the resting placement and adds them there. **Collective**."""
        self._restart_if_final()
        inner_only = AxisPair(staged.placement.outer, self._plan.main_grad.inner)
        self._add(staged.reduce_to(inner_only, scale))
        self.state = GradState.ACCUMULATING

    def _restart_if_final(self) -> None:
        """Opens a finalized buffer for accumulation, its reduced part set aside."""
        if self.state is GradState.FINAL and not self._plan.accumulates_final_values:
            self._aside = self.final.data.clone()
            self.state = GradState.EMPTY

    def _add(self, grads: FlatBuffer) -> None:
        if self.state is GradState.EMPTY:
            # 59 million elements from bf16 to fp32 take `copy_` 0.17 ms and this 0.11 (H200, torch 2.11).
            foreach_copy_([self.buffer.data], [grads.data])
        else:
            self.buffer.data.add_(grads.data)

    def finalize(self, scale: GradScale, along_outer: AlongOuter = contextlib.nullcontext) -> torch.Tensor | None:
        """Ends an accumulation: reduces and scales what has not been. **Collective** if reductions were deferred.

        Args:
            scale: of the whole reduction; not applied again to gradients that `reduce` has scaled.

        Returns:
            Memory allocated outside the context `along_outer` and read inside it: to be kept until it has been.
        """
        assert self.state is GradState.ACCUMULATING, self.state
        self.state = GradState.FINAL
        if self._plan.accumulates_final_values:
            return None
        target, resting = self._plan.finalized_grad(), self._plan.main_grad
        if self._plan.reduces_each_microbatch:
            scale = scale.for_the_rest
        if resting == target:
            if scale.pre != 1.0:
                self.buffer.data.mul_(scale.pre)  # experts without a peer still share their data with all dense ranks
            self._settle(self.buffer)
            return None
        if resting.inner is target.inner:
            with along_outer():
                self._settle(self._wire().reduce_to(target, scale))
            return None
        wire = self._wire()
        partly = wire.reduce_to(target._replace(outer=resting.outer), scale)
        if partly.placement == target:
            self._settle(partly)
            return None
        with along_outer():
            self._settle(partly.reduce_to(target, scale.for_the_rest))
        return wire.data if wire is not self.buffer else None

    def _wire(self) -> FlatBuffer:
        """The accumulated gradient in the dtype in which it is reduced: the buffer itself, or a copy."""
        if self._spec.comm_dtype == self.buffer.dtype:
            return self.buffer
        key = f"{self._spec.name}.wire"
        data = self._pool.scratch(key, self.buffer.data.numel(), self._spec.comm_dtype, self._spec.device)
        return dataclasses.replace(self.buffer, data=data.copy_(self.buffer.data))

    def _settle(self, reduced: FlatBuffer) -> None:
        """Makes `reduced`, which may be the buffer's own part, the final gradient, with the part that was set aside."""
        final = self.final.data
        if reduced.data.data_ptr() != final.data_ptr() or reduced.dtype != final.dtype:
            final.copy_(reduced.data)  # never added: the source of this reduction is the buffer itself
        if self._aside is not None:
            final.add_(self._aside)

    # -- on the sharded parameters ------------------------------------------------------------------------------

    def show_on(self, sharded: Sequence[torch.nn.Parameter], attribute: str) -> None:
        """Sets the parameters, one for each slot, and the name of their attribute that `attach` sets."""
        self._sharded, self._attribute = sharded, attribute
        for param in sharded:
            if attribute == "grad" and param.dtype != self.buffer.dtype:
                param.grad_dtype = None  # any: torch's checkpoint helpers attach zeros in the parameter's own dtype

    def attach(self) -> None:
        """Gives every parameter its view of the final gradient; None if it is not final, or was dropped.

        A user's own gradient stays where the buffer has none.

        Raises:
            RuntimeError: a parameter has a gradient of the user's and one in the buffer.
        """
        self.note_dropped()
        is_final, data = self.state is GradState.FINAL, self.final.data
        for slot, param in enumerate(self._sharded):
            view = self._attached.get(slot)
            if param.grad is not None and param.grad is not view:
                if self.state is GradState.EMPTY:
                    continue
                raise RuntimeError(
                    f"{self._spec.fqns[slot]} has a gradient that did not come through the model's forward, and would "
                    "be lost. A loss term on parameters themselves cannot be taken on sharded ones: use the "
                    "optimizer's weight decay. A gradient that was replaced cannot be added to: change it in place."
                )
            if not is_final or slot in self.dropped:
                view = None
                self._attached.pop(slot, None)
            elif view is None:
                view = self._attached[slot] = self._wrap(slot, data)
            setattr(param, self._attribute, view)
        self.is_current = is_final
        if len(self.dropped) == len(self._sharded):
            self.reset()

    def _wrap(self, slot: int, data: torch.Tensor) -> DTensor:
        """This rank's rows of a parameter's final gradient, in `data`, as a DTensor."""
        view = self._without_rows.get(slot)
        if view is None:
            spec = self._sharded[slot].megatron_fsdp_spec  # type: ignore[attr-defined]  # a tag, see param_tags.py
            view = spec.wrap(data, self._final_spans[slot])
            if 0 in self._final_spans[slot].shape:
                self._without_rows[slot] = view
        return view

    def note_dropped(self) -> None:
        """Notices gradients that users have taken off their parameters, as by `p.grad = None`."""
        for slot in list(self._attached):
            if getattr(self._sharded[slot], self._attribute, None) is None:
                self.dropped.add(slot)
                del self._attached[slot]

    def _zero_dropped(self) -> None:
        """Zeroes dropped gradients in the buffer, and frees it if all are dropped.

        It gets new memory, to which attached gradients move, because users may hold dropped ones.
        """
        if not self.dropped or self.state is GradState.EMPTY:
            return
        if len(self.dropped) == len(self._sharded):
            self.reset()
            return
        old = self.buffer.data
        self.buffer.free()
        self.allocate()
        self.buffer.data.copy_(old)
        final = self.final
        for slot, view in self._attached.items():
            local_tensor(view).set_(self._final_spans[slot].alone(final.data))
        parts = [final if self.state is GradState.FINAL else self.buffer]
        if self._aside is not None:
            parts.append(dataclasses.replace(final, data=self._aside))
        zero_each(part.view(slot) for part in parts for slot in self.dropped)

    def detach(self, chosen: Collection[int] | None) -> list[int]:
        """Takes gradients off the parameters with these ids (None: all) and returns their slots; the buffer stays."""
        self.note_dropped()
        slots = [slot for slot, param in enumerate(self._sharded) if chosen is None or id(param) in chosen]
        for slot in slots:
            self._attached.pop(slot, None)
            self._sharded[slot].grad = None
            setattr(self._sharded[slot], self._attribute, None)
        return slots

    def drop(self, chosen: Collection[int] | None) -> None:
        """Drops the gradients of the parameters with these ids; frees the buffer if it has no others (see `reset`)."""
        self.dropped.update(self.detach(chosen))
        if len(self.dropped) == len(self._sharded):
            self.reset()

    def zero(self, chosen: Collection[int] | None) -> None:
        """Zeroes the gradients of the parameters with these ids if they are attached, else drops them."""
        if not self.is_current:
            self.drop(chosen)
            return
        params = [param for param in self._sharded if chosen is None or id(param) in chosen]
        grads = [getattr(param, self._attribute, None) for param in params]  # users' own, too
        zero_each(local_part(grad) for grad in grads if grad is not None)

    def scale(self, factor: float | torch.Tensor) -> None:
        """Multiplies the accumulated gradients by `factor`."""
        self.note_dropped()
        self._zero_dropped()
        (self.final if self.state is GradState.FINAL else self.buffer).data.mul_(factor)
        if self.state is GradState.ACCUMULATING and self._aside is not None:
            self._aside.mul_(factor)

    def discard(self) -> None:
        """Forgets the gradients of a backward that was interrupted."""
        self._take_grads()
        self._unstage()

    def reset(self) -> None:
        """Forgets the gradient and frees its memory; the current stream has waited for reductions, if it must."""
        self.state = GradState.EMPTY
        self.buffer.free()
        self._aside = None
        self._attached.clear()
        self.dropped.clear()
        self.is_current = False
