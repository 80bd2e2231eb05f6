"""The groups of a model under the names that megatron-core reads."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator

import torch
from torch import nn

from megatron_fsdp.grad_handles import GradHandles
from megatron_fsdp.machine.allocator import StoragePool
from megatron_fsdp.machine.torch_compat import foreach_copy_, in_backward, local_tensor
from megatron_fsdp.runtime.schedule import Schedule
from megatron_fsdp.runtime.storage import register_late
from megatron_fsdp.runtime.unit import ManagedParam
from megatron_fsdp.state.flat_buffer import Span
from megatron_fsdp.state.main_grad import GradState
from megatron_fsdp.state.param_group import ParamGroup


class ParamAndGradBuffer:
    """Every group's buffers, and what is done to all of them at once."""

    def __init__(self, schedule: Schedule, pool: StoragePool, *, use_decoupled_grad: bool):
        self._schedule = schedule
        self._pool = pool
        self._use_decoupled_grad = use_decoupled_grad
        self.parameter_groups: list[ParamGroup] = [group for unit in schedule.units for group in unit.groups]
        managed = {id(param.raw): param for unit in schedule.units for param in unit.params}
        self._members = {id(group): [managed[id(raw)] for raw in group.params] for group in self.parameter_groups}
        self._handles = GradHandles()
        """Over the buffers themselves."""
        self._copies = GradHandles()
        """Over copies in the dtype of parameters that have another one than gradients accumulate in."""
        schedule.before_gradients = weakref.WeakMethod(self.follow_grads)
        self._attached: dict[int, tuple[torch.Tensor | None, int]] = {}
        """What was attached last, and the generation it holds, by id of the sharded parameter."""
        self._backwards = 0
        """That have begun."""
        self._left_out: dict[int, int] = {}
        """Parameters, by id, whose gradient was dropped before it was final, and how many backwards there had been."""
        self._showing: set[int] = set()
        """Groups, by id, of which gradients may be attached or left out; the host passes over the others."""

    @property
    def managed_params(self) -> list[ManagedParam]:
        """Every parameter, once."""
        return [param for unit in self._schedule.units for param in unit.params]

    @property
    def optimizer_named_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """(name, sharded parameter) of every parameter, tied ones once."""
        return [(param.fqn, param.sharded) for param in self.managed_params]

    def trained(self) -> Iterator[tuple[ParamGroup, ManagedParam]]:
        """Every trainable parameter with its group."""
        for group in self.parameter_groups:
            if group.main_grad is not None:
                for param in self._members[id(group)]:
                    yield group, param

    def copy_main_weights_to_model_weights(self) -> None:
        """Makes compute weights follow main weights. **Collective** if a weight codec is."""
        self._schedule.install()

    @torch.no_grad()
    def update_main_grads(self) -> None:
        """Attaches every finalized gradient to its sharded parameter, on every rank; others get None."""
        self._schedule.wait_for_reductions()
        self.forget_dropped()
        for group, members in self._trained_groups():
            shown: tuple[torch.Tensor, GradHandles] | None = None
            is_final = group.main_grad.state is GradState.FINAL
            is_first = id(group) not in self._showing
            for param, span in zip(members, group.main_grad.final_spans, strict=True):
                self._check_grad(param)
                if is_final and not is_first and self._has_had_final(group, param.sharded):
                    continue
                if is_final and self._left_out.get(id(param.sharded)) == self._backwards:
                    self._attach(group, param.sharded, None, span)
                    continue
                if is_final and shown is None:
                    shown = self._shown(group, members)
                self._attach(group, param.sharded, shown, span)
            if is_final:
                self._showing.add(id(group))

    def _shown(self, group: ParamGroup, members: list[ManagedParam]) -> tuple[torch.Tensor, GradHandles]:
        """A finalized gradient as parameters have it: the buffer's own, or a copy in their dtype."""
        final = group.main_grad.final.data
        if not self._has_copies(group):
            return final, self._handles
        self._copies.let_go(param.sharded for param in members)  # they show an earlier gradient, if any
        return final.to(members[0].sharded.dtype), self._copies

    def _attach(
        self, group: ParamGroup, sharded: nn.Parameter, shown: tuple[torch.Tensor, GradHandles] | None, span: Span
    ) -> None:
        """Gives the parameter its `span` of what is `shown` of the group's final gradient; None if it is not final."""
        if shown is None:
            sharded.grad = None
            grad = self._grad(sharded)
        else:
            data, handles = shown
            grad = handles.of(sharded, data, span)
            setattr(sharded, "decoupled_grad" if self._use_decoupled_grad else "grad", grad)
        self._attached[id(sharded)] = (grad, group.main_grad.generation)

    def _has_had_final(self, group: ParamGroup, sharded: nn.Parameter) -> bool:
        """This gradient is on the parameter, perhaps as a copy that has been clipped since, or was taken off again."""
        grad, generation = self._attached.get(id(sharded), (None, -1))
        return generation == group.main_grad.generation and (grad is None or grad is self._grad(sharded))

    def _is_left_out(self, group: ParamGroup, sharded: nn.Parameter) -> bool:
        """The gradient of this cycle was taken off the parameter again, and no backward has brought another."""
        grad, generation = self._attached.get(id(sharded), (None, -1))
        if grad is not None or generation != group.main_grad.generation:
            return False
        is_last = self._left_out.get(id(sharded)) == self._backwards
        return group.main_grad.state is GradState.FINAL or is_last

    def _is_attached(self, group: ParamGroup, sharded: nn.Parameter) -> bool:
        grad, generation = self._attached.get(id(sharded), (None, -1))
        return grad is not None and grad is self._grad(sharded) and generation == group.main_grad.generation

    def _shows_final(self, group: ParamGroup, sharded: nn.Parameter) -> bool:
        """The parameter has this gradient, or what somebody has put in its place; not an earlier one, or none."""
        held, (grad, generation) = self._grad(sharded), self._attached.get(id(sharded), (None, -1))
        return held is not None and (held is not grad or generation == group.main_grad.generation)

    @property
    def has_open_grads(self) -> bool:
        """Some gradient has been computed and is not attached yet."""
        self.forget_dropped()
        return any(unit.has_stray_grads() for unit in self._schedule.units) or any(
            group.main_grad.state is not GradState.EMPTY
            and (group.main_grad.state is not GradState.FINAL or not self._shows_final(group, param.sharded))
            and not self._is_left_out(group, param.sharded)
            for group, param in self.trained()
        )

    @property
    def has_foreign_grads_only(self) -> bool:
        """Gradients are on parameters, and none has come through the model."""
        trained = list(self.trained())
        is_empty = all(group.main_grad.state is GradState.EMPTY for group, _ in trained)
        has_any = any(param.sharded.grad is not None for _, param in trained)
        return is_empty and has_any and not any(unit.has_stray_grads() for unit in self._schedule.units)

    def _grad(self, sharded: nn.Parameter) -> torch.Tensor | None:
        return getattr(sharded, "decoupled_grad", None) if self._use_decoupled_grad else sharded.grad

    def _check_grad(self, param: ManagedParam) -> None:
        """Raises RuntimeError if autograd, not the engine, has put a gradient on the sharded parameter."""
        grad = param.sharded.grad
        if grad is not None and self._attached.get(id(param.sharded), (None, 0))[0] is not grad:
            raise RuntimeError(
                f"{param.fqn} has a gradient that did not come through the model's forward, and would be lost. A loss "
                "term on parameters themselves cannot be taken on sharded ones: use the optimizer's weight decay. A "
                "gradient that was replaced cannot be added to: change it in place."
            )

    @torch.no_grad()
    def zero_grad(self, params: Iterable[nn.Parameter] | None = None) -> None:
        """Forgets and detaches the gradients of `params` (None: of all); frees buffers that hold no others."""
        self._schedule.end_interrupted_backward()
        self._schedule.wait_for_reductions()  # what is dropped here may still be read there
        chosen = None if params is None else {id(param) for param in params}
        for group, members in self._trained_groups():
            slots = [slot for slot, param in enumerate(members) if chosen is None or id(param.sharded) in chosen]
            self._forget(group, members, slots)

    @torch.no_grad()
    def follow_grads(self) -> None:
        """Makes the buffers hold what has become of attached gradients, before others are added to them."""
        self._backwards += in_backward()
        self.forget_dropped()
        for group, members in self._trained_groups():
            if id(group) in self._showing and group.main_grad.state is GradState.FINAL and self._has_copies(group):
                self._take_back(
                    group, [i for i, param in enumerate(members) if self._is_attached(group, param.sharded)]
                )

    def _has_copies(self, group: ParamGroup) -> bool:
        """Gradients are shown in another dtype than that in which they accumulate."""
        sharded = self._members[id(group)][0].sharded
        return not self._use_decoupled_grad and group.main_grad.buffer.dtype != sharded.dtype

    def _take_back(self, group: ParamGroup, slots: list[int]) -> None:
        """Copies gradients that may have been changed in place, as by clipping, back to the buffer.

        Nothing tells for sure whether they were: operations on many DTensors are counted nowhere (torch 2.13).
        """
        members, spans, final = self._members[id(group)], group.main_grad.final_spans, group.main_grad.final.data
        views = [spans[slot].view(final) for slot in slots]
        if not views:
            return
        copies = [local_tensor(members[slot].sharded.grad) for slot in slots]
        if self._copies_are_wider(group):
            foreach_copy_(views, copies)  # what was not changed comes back as it was
        else:
            for view, copy in zip(views, copies, strict=True):  # it would come back rounded
                view.copy_(torch.where(copy != view.to(copy.dtype), copy.to(view.dtype), view))

    def _copies_are_wider(self, group: ParamGroup) -> bool:
        """They hold every value that the buffer can."""
        buffer, sharded = group.main_grad.buffer.dtype, self._members[id(group)][0].sharded.dtype
        return torch.promote_types(buffer, sharded) is sharded

    @torch.no_grad()
    def forget_dropped(self) -> None:
        """Forgets gradients that have been taken off their parameters since they were attached, as by `p.grad = None`.

        Otherwise the next backward would add to what the user has thrown away.
        """
        for group, members in self._trained_groups():
            if id(group) not in self._showing:
                continue
            dropped = [slot for slot, param in enumerate(members) if self._is_dropped(param.sharded)]
            if dropped:
                self._schedule.wait_for_reductions()
                self._forget(group, members, dropped)

    def _is_dropped(self, sharded: nn.Parameter) -> bool:
        grad, _ = self._attached.get(id(sharded), (None, -1))
        return grad is not None and self._grad(sharded) is None

    def _trained_groups(self) -> Iterator[tuple[ParamGroup, list[ManagedParam]]]:
        groups = (group for group in self.parameter_groups if group.main_grad is not None)
        return ((group, self._members[id(group)]) for group in groups)

    def _forget(self, group: ParamGroup, members: list[ManagedParam], slots: list[int]) -> None:
        """Drops the gradients of some of a group's parameters; its buffer too if that leaves none."""
        if len(slots) < len(members):
            chosen = set(slots)
            slots = [i for i, param in enumerate(members) if i in chosen or self._is_dropped(param.sharded)]
        for param in (members[slot] for slot in slots):
            self._detach(param)
            self._attached[id(param.sharded)] = (None, group.main_grad.generation)
            if group.main_grad.state is GradState.ACCUMULATING:
                self._left_out[id(param.sharded)] = self._backwards
            if hasattr(param.raw, "grad_added_to_main_grad"):
                param.raw.grad_added_to_main_grad = False
        if len(slots) == len(members) or all(self._is_left_out(group, param.sharded) for param in members):
            for handles in (self._handles, self._copies):
                handles.let_go(param.sharded for param in members)
            group.main_grad.reset()
            self._showing.discard(id(group))
        else:
            self._handles.let_go((members[slot].sharded for slot in slots), copies=True)
            group.main_grad.forget(slots)
            self._showing.add(id(group))

    def detach_grads(self, params: Iterable[nn.Parameter] | None = None) -> None:
        """Takes the gradients off `params` (None: all); the buffers keep them, and copies are freed."""
        chosen = None if params is None else {id(param) for param in params}
        detached = [param for _, param in self.trained() if chosen is None or id(param.sharded) in chosen]
        for param in detached:
            self._detach(param)
        self._copies.let_go(param.sharded for param in detached)

    def _detach(self, param: ManagedParam) -> None:
        param.sharded.grad = None
        if self._attached.get(id(param.sharded), (None, 0))[0] is not None:  # else it stays left out
            del self._attached[id(param.sharded)]
        if self._use_decoupled_grad:
            param.sharded.decoupled_grad = None

    @torch.no_grad()
    def scale_gradients(self, factor: float | torch.Tensor) -> None:
        """Multiplies every gradient, attached or still accumulating, by `factor`, with what was done to it since."""
        self._schedule.wait_for_reductions()
        self.follow_grads()
        trained = list(self.trained())
        attached = [self._is_attached(group, param.sharded) for group, param in trained]
        left_out = [(group, param) for group, param in trained if self._is_left_out(group, param.sharded)]
        spans = {}
        for group, members in self._trained_groups():
            group.main_grad.scale(factor)
            spans |= {id(param): span for param, span in zip(members, group.main_grad.final_spans, strict=True)}
        for group, param in left_out:  # zeros in the buffer, with which an optimizer would decay weights
            self._attached[id(param.sharded)] = (None, group.main_grad.generation)
        for is_attached, (group, param) in zip(attached, trained, strict=True):
            grad = self._grad(param.sharded)
            if is_attached and not self._handles.is_one(grad, param.sharded):
                # A copy in another dtype, which megatron-core may have summed over tensor-parallel ranks.
                if self._copies_are_wider(group):
                    grad.to_local().mul_(factor)
                else:  # as it will be told whether it was changed
                    grad.to_local().copy_(spans[id(param)].view(group.main_grad.final.data))
                self._attached[id(param.sharded)] = (grad, group.main_grad.generation)
        self.update_main_grads()

    def manual_buffer_registration(self) -> None:
        """Registers communication buffers with NCCL; call it once, between steps. **Collective**.

        Raises:
            RuntimeError: `nccl_ub` with `fsdp_manual_registration` is off, so there is nothing to register; or it has
                been done.
        """
        register_late(self._pool, self._schedule.config.buffers)
