"""One group's gradient from autograd to the optimizer: accumulate, reduce, finalize, attach."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import weakref
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

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
from megatron_fsdp.state.flat_buffer import FlatBuffer, Span
from megatron_fsdp.state.tensor_parallel import local_part

if TYPE_CHECKING:
    from megatron_fsdp.state.param_group import GroupFacts

AlongOuter = Callable[[], AbstractContextManager]
"""Makes a context in which the outer axis is reduced (its stream), after what was issued before it."""


class GradState(enum.Enum):
    """What the gradient buffer holds."""

    EMPTY = enum.auto()
    """Nothing: the next gradient overwrites it."""
    ACCUMULATING = enum.auto()
    """A sum of micro-batches in its resting placement, some reduction still to come."""
    FINAL = enum.auto()
    """The reduced sum, in the main weight's placement."""


class MainGrad:
    """The main gradient of one trainable group.

    Reducing twice in one optimization cycle is exact under every strategy: the buffer knows when it is final, and a
    new cycle then sets the final part aside and adds it again at the end. (Scaling it by the number of ranks and
    reducing it again would change a third of fp32 values at 3 ranks.)

    Its methods are called without recording, switched off once for all groups: each time costs 2 microseconds.
    """

    def __init__(self, facts: GroupFacts, pool: StoragePool):
        self._facts = facts
        self._pool = pool
        self._plan = facts.plan
        nothing = torch.empty(0, dtype=facts.grad_dtype, device=facts.device)
        self.buffer = FlatBuffer(facts.layout, facts.axes, facts.plan.main_grad, nothing)
        """Has memory from the first backward of a cycle until `reset`."""
        self.state = GradState.EMPTY
        self._aside: torch.Tensor | None = None
        """The reduced part of an earlier cycle, to be added again; afterwards kept for the stream that allocated it."""
        self._staged: FlatBuffer | None = None
        self._lent: dict[int, Callable[[], object]] = {}
        """Parameters whose place in the staged gradients is taken, with who holds it still, if anybody does."""
        # Worked out once: this is needed of every parameter in every backward, and the host must run ahead.
        self._spans = [Span.of(slot.shape, slot.start) for slot in facts.layout.slots]
        first = self.final.bounds[0] - self.buffer.bounds[0]
        final_spans = map(self.final.span, range(len(self._spans)))
        self._final_spans = [span._replace(start=first + span.start) for span in final_spans]
        """This rank's rows of the final gradient, in the data of `buffer`."""
        self._sharded: Sequence[torch.nn.Parameter] = ()
        self._views: list[torch.Tensor | None] = [None] * len(self._spans)
        """Attached to them: DTensors over the buffer's memory."""
        self._empty_views: dict[int, torch.Tensor] = {}  # where this rank has no rows; made once
        self._may_be_held = False  # views of the buffer's memory have been attached
        self.is_current = False
        """Parameters have the final gradient, and nothing has been added to it since."""
        self.dropped: set[int] = set()
        """Slots whose gradient users have dropped, and no backward has brought another; what the rows hold is stale."""

    @property
    def final(self) -> FlatBuffer:
        """The part of the buffer that the optimizer reads once the state is FINAL."""
        return self.buffer.part(self._plan.finalized_grad())

    @property
    def staging_key(self) -> str:
        """The pool's name for the gradients of one backward."""
        return f"{self._facts.name}.grad"

    @property
    def staged_numel(self) -> int:
        """Elements of the gradients of one backward that every backward reduces."""
        return self._facts.layout.size if self._plan.reduces_each_microbatch else 0

    @property
    def staged_nbytes(self) -> int:
        """Bytes of those."""
        return self.staged_numel * self._facts.comm_dtype.itemsize

    @property
    def lends(self) -> bool:
        """Gradients can be computed where they are reduced from."""
        ours, theirs = self._facts.comm_dtype, self._facts.params[0].dtype
        is_possible = ours is theirs or multiplies_into(theirs, ours, self._facts.device.type)
        return self._plan.reduces_each_microbatch and is_possible

    @property
    def is_staged(self) -> bool:
        """Gradients of this backward are being written to where they are reduced from."""
        return self._staged is not None

    @property
    def has_room(self) -> bool:
        """The storage for the gradients of one backward is there."""
        return self.is_staged or self._pool.has_room(self.staging_key)

    def allocate(self) -> None:
        """Gives the buffer memory, if it has none, on the current stream."""
        nbytes = self.buffer.nbytes if self._plan.defers_reduction else 0
        with self._pool.lasting(f"{self._facts.name}.main_grad", nbytes):
            self.buffer.allocate()

    # -- from autograd ------------------------------------------------------------------------------------------

    def lend(self, slot: int) -> torch.Tensor | None:
        """Where parameter `slot`'s gradient of this backward may be computed, full shape; None if that is taken.

        Whoever comes second in a backward needs memory of its own, for autograd to add.
        """
        if slot in self._lent:
            return None
        place = self.place(slot)
        self._lent[slot] = weakref.ref(place)
        return place

    def hold_until_found(self, slot: int) -> None:
        """Counts the place of parameter `slot` as held until its gradient is found there.

        Compiled code that only adds what it was lent to something else puts other tensors into that memory.
        """
        self._lent[slot] = lambda: None if self._is_in_place(slot, self._facts.params[slot].grad) else self

    def _is_in_place(self, slot: int, grad: torch.Tensor | None) -> bool:
        return grad is not None and grad.data_ptr() == self.place(slot).data_ptr()

    def place(self, slot: int) -> torch.Tensor:
        """Where parameter `slot`'s gradient of this backward is reduced from, full shape."""
        return self._spans[slot].view(self._stage().data)

    def _stage(self) -> FlatBuffer:
        """This backward's unreduced gradients, whole, in the dtype in which they travel or else accumulate."""
        if self._staged is None:
            dtype = self._facts.comm_dtype if self._plan.reduces_each_microbatch else self._facts.grad_dtype
            data = self._pool.scratch(self.staging_key, self._facts.layout.size, dtype, self._facts.device)
            self._staged = FlatBuffer(self._facts.layout, self._facts.axes, PARTIAL, data)
        return self._staged

    def _unstage(self) -> FlatBuffer | None:
        staged, self._staged = self._staged, None
        self._lent.clear()
        return staged

    def _leave_what_is_held(self) -> None:
        """Stages elsewhere if somebody still holds a gradient where it was computed.

        Autograd does, until it has the last part of a parameter's gradient. Where a graph task runs inside another, the
        group is reduced before, and would overwrite what is still to be accumulated (and reduced later).
        """
        if any(lent() is not None for lent in self._lent.values()):
            held = self._unstage()
            self._stage().data.copy_(held.data)  # others, of fused kernels, may be nowhere else

    def collect(self) -> FlatBuffer | None:
        """Takes the gradients that autograd left on the parameters, zero where it left none, on the current stream.

        Returns:
            The staged gradients to be reduced, or None if they were added to the accumulation buffer.
        """
        if self._may_be_held or self.dropped:
            self._forget_dropped()
            self.dropped.clear()
        self.is_current = False
        self.allocate()
        if self._plan.reduces_each_microbatch:
            self._leave_what_is_held()
            self._write(self._stage(), accumulate=False)
            return self._unstage()
        self._restart_if_final()
        if self._staged is not None:  # fused kernels overwrite, so their gradients came through a buffer of their own
            self._write(self._staged, accumulate=False)
            self._add(self.buffer.data, self._unstage().data)
        else:
            self._write(self.buffer, accumulate=self.state is not GradState.EMPTY)
        self.state = GradState.ACCUMULATING
        return None

    def _write(self, target: FlatBuffer, *, accumulate: bool) -> None:
        """Moves `param.grad` of every parameter into `target`, which is whole, in one batched copy or addition."""
        views, grads, untouched = [], [], []
        with without_overrides():
            found = [param.grad for param in self._facts.params]
            for param in self._facts.params:
                param.grad = None
        for slot, (span, param, grad) in enumerate(zip(self._spans, self._facts.params, found, strict=True)):
            if getattr(param, "grad_added_to_main_grad", False):
                param.grad_added_to_main_grad = False
            elif grad is not None:
                view, grad = span.view(target.data), local_part(grad)
                if slot in self._lent and grad.data_ptr() == view.data_ptr():
                    continue  # computed in place
                views.append(view)
                grads.append(grad)
            elif not accumulate:
                untouched.append(span.view(target.data))
        if accumulate and views:
            foreach_add_(views, grads)  # of another dtype, they are added without being rounded or copied first
        elif views:
            foreach_copy_(views, grads)
        zero_each(untouched)

    def _restart_if_final(self) -> None:
        """Opens a finalized buffer for accumulation, its reduced part set aside."""
        if self.state is GradState.FINAL and not self._plan.accumulates_final_values:
            self._aside = self.final.data.clone()
            self.state = GradState.EMPTY

    # -- across ranks -------------------------------------------------------------------------------------------

    def reduce(self, staged: FlatBuffer, scale: GradScale) -> None:
        """Reduces staged gradients to the resting placement and adds them there. **Collective**."""
        self._restart_if_final()
        inner_only = AxisPair(staged.placement.outer, self._plan.main_grad.inner)
        shard = staged.reduce_to(inner_only, scale)
        self._add(self.buffer.data, shard.data)
        self.state = GradState.ACCUMULATING

    def _add(self, target: torch.Tensor, source: torch.Tensor) -> None:
        if self.state is GradState.EMPTY:
            # 59 million elements from bf16 to fp32 take `copy_` 0.17 ms and this 0.11 (H200, torch 2.11).
            foreach_copy_([target], [source])
        else:
            target.add_(source)

    def finalize(self, scale: GradScale, along_outer: AlongOuter = contextlib.nullcontext) -> torch.Tensor | None:
        """Ends an accumulation: reduces and scales what has not been. **Collective** if reductions were deferred.

        Args:
            scale: of the whole reduction; not applied again to what `reduce` has scaled already.

        Returns:
            What was allocated outside that context and is read inside it: to be kept until it has been.
        """
        assert self.state is GradState.ACCUMULATING, self.state
        self.state = GradState.FINAL
        if self._plan.accumulates_final_values:
            return None
        if self._plan.defers_reduction:
            return self._reduce_deferred(
                scale.for_the_rest if self._plan.reduces_each_microbatch else scale, along_outer
            )
        if scale.pre != 1.0:
            self.buffer.data.mul_(scale.pre)  # experts without a peer still share their data with all dense ranks
        self._settle(self.final)
        return None

    def _reduce_deferred(self, scale: GradScale, along_outer: AlongOuter) -> torch.Tensor | None:
        target = self._plan.finalized_grad()
        if self._plan.main_grad.inner is target.inner:  # only the outer axis is left
            with along_outer():
                self._settle(self._on_the_wire().reduce_to(target, scale))
            return None
        wire = self._on_the_wire()
        partly = wire.reduce_to(target._replace(outer=wire.placement.outer), scale)
        if partly.placement == target:
            self._settle(partly)
            return None
        with along_outer():
            self._settle(partly.reduce_to(target, scale.for_the_rest))
        return wire.data if wire is not self.buffer else None

    def _on_the_wire(self) -> FlatBuffer:
        """The accumulated gradient in the dtype in which it travels: the buffer itself, or a copy."""
        if self._facts.comm_dtype == self.buffer.dtype:
            return self.buffer
        key = f"{self._facts.name}.wire"
        data = self._pool.scratch(key, self.buffer.data.numel(), self._facts.comm_dtype, self._facts.device)
        data.copy_(self.buffer.data)
        return FlatBuffer(self.buffer.layout, self.buffer.axes, self.buffer.placement, data)

    def _settle(self, reduced: FlatBuffer) -> None:
        """Makes `reduced`, which may be the buffer's own part, the final gradient, with what was set aside."""
        if reduced.data.data_ptr() != self.final.data.data_ptr() or reduced.dtype != self.final.dtype:
            # Copied, never added: the source of this reduction is the buffer itself.
            self.final.data.copy_(reduced.data)
        if self._aside is not None:
            self.final.data.add_(self._aside)

    def discard(self) -> None:
        """Forgets the gradients of a backward that did not come to its end."""
        for param in self._facts.params:
            param.grad = None
            if hasattr(param, "grad_added_to_main_grad"):
                param.grad_added_to_main_grad = False
        self._unstage()

    def reset(self) -> None:
        """Forgets the gradient and frees its memory; the current stream has waited for reductions, if it must."""
        self.state = GradState.EMPTY
        self.buffer.free()
        self._aside = None
        self._views = [None] * len(self._spans)
        self.dropped.clear()
        self.is_current = self._may_be_held = False

    def scale(self, factor: float | torch.Tensor) -> None:
        """Multiplies what has been accumulated by `factor`; the current stream has waited for reductions."""
        self._forget_dropped()
        (self.final if self.state is GradState.FINAL else self.buffer).data.mul_(factor)
        if self.state is GradState.ACCUMULATING and self._aside is not None:
            self._aside.mul_(factor)

    # -- on the sharded parameters ------------------------------------------------------------------------------

    def show_on(
        self, sharded: Sequence[torch.nn.Parameter], attribute: str, wait: Callable[[], Callable[[], None] | None]
    ) -> None:
        """Says what `attach` sets on which parameters, and weakly how the current stream waits for reductions."""
        self._sharded, self._attribute, self._wait = sharded, attribute, wait
        for param in sharded:
            if attribute == "grad" and param.dtype != self.buffer.dtype:
                param.grad_dtype = None  # any: torch's checkpoint helpers attach zeros in the parameter's own dtype

    def attach(self) -> None:
        """Gives every parameter its view of the final gradient; None if it is not final, or was dropped.

        Where there is no gradient of ours, a user's own stays.

        Raises:
            RuntimeError: a parameter has a gradient that is not ours, beside ours.
        """
        is_final = self.state is GradState.FINAL
        for slot, (param, view) in enumerate(zip(self._sharded, self._views, strict=True)):
            if param.grad is not None and param.grad is not view:
                if self.state is GradState.EMPTY:
                    continue
                raise RuntimeError(
                    f"{self._facts.fqns[slot]} has a gradient that did not come through the model's forward, and would "
                    "be lost. A loss term on parameters themselves cannot be taken on sharded ones: use the "
                    "optimizer's weight decay. A gradient that was replaced cannot be added to: change it in place."
                )
            if view is not None and getattr(param, self._attribute, None) is None:
                self.dropped.add(slot)
            if not is_final or slot in self.dropped:
                view = None
            elif view is None:
                view = self._empty_views.get(slot)
                if view is None:
                    view = param.megatron_fsdp_spec.wrap_grad(self.buffer.data, self._final_spans[slot])
                    if 0 in self._final_spans[slot].shape:
                        self._empty_views[slot] = view
            self._views[slot] = view
            setattr(param, self._attribute, view)
        self.is_current = is_final
        self._may_be_held |= is_final
        if len(self.dropped) == len(self._sharded):
            self.reset()

    def detach(self, chosen: Collection[int] | None) -> list[int]:
        """Takes gradients off the parameters of these ids (None: all), and says their slots; the buffer keeps them."""
        self.note_dropped()
        slots = []
        for slot, param in enumerate(self._sharded):
            if chosen is None or id(param) in chosen:
                slots.append(slot)
                param.grad = self._views[slot] = None
                setattr(param, self._attribute, None)
        return slots

    def drop(self, chosen: Collection[int] | None) -> None:
        """Forgets the gradients of these parameters; frees the buffer if it has no others, so see `reset`."""
        self.dropped.update(self.detach(chosen))
        if len(self.dropped) == len(self._sharded):
            self.reset()

    def zero(self, chosen: Collection[int] | None) -> None:
        """Makes the gradients of these parameters zero if they are attached, else drops them."""
        if not self.is_current:
            self.drop(chosen)
            return
        params = [param for param in self._sharded if chosen is None or id(param) in chosen]
        shown = [getattr(param, self._attribute, None) for param in params]  # users' own too, in place of the views
        shown = [grad for grad in shown if grad is not None]
        zero_each(local_tensor(grad) if isinstance(grad, DTensor) else grad for grad in shown)

    def note_dropped(self) -> None:
        """Notices gradients that users have taken off their parameters, as by `p.grad = None`."""
        shown = zip(self._sharded, self._views, strict=True) if self._may_be_held else ()
        for slot, (param, view) in enumerate(shown):
            if view is not None and getattr(param, self._attribute, None) is None:
                self.dropped.add(slot)
                self._views[slot] = None

    def _forget_dropped(self) -> None:
        """Makes dropped gradients zero in the buffer, in new memory if users may hold them; frees it if all are."""
        self.note_dropped()
        if not self.dropped or self.state is GradState.EMPTY:
            return
        if not self.is_current:
            self._wait()()
        if len(self.dropped) == len(self._sharded):
            self.reset()
            return
        if self._may_be_held:
            old = self.buffer.data
            self.buffer.free()
            self.allocate()
            self.buffer.data.copy_(old)
            for view, span in zip(self._views, self._final_spans, strict=True):
                if view is not None:
                    local_tensor(view).set_(span.alone(self.buffer.data))
        held = [self.final if self.state is GradState.FINAL else self.buffer]
        if self._aside is not None:
            held.append(dataclasses.replace(self.final, data=self._aside))
        zero_each(buffer.view(slot) for buffer in held for slot in self.dropped)
