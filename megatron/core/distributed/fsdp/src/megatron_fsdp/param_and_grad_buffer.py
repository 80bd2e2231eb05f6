"""The groups of a model under the names that megatron-core reads."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import torch
from torch import nn

from megatron_fsdp.build.storage import register_late
from megatron_fsdp.machine.allocator import StoragePool
from megatron_fsdp.machine.torch_compat import uncompiled
from megatron_fsdp.runtime.schedule import Schedule
from megatron_fsdp.runtime.unit import ManagedParam
from megatron_fsdp.state.main_grad import GradState
from megatron_fsdp.state.param_group import ParamGroup


class ParamAndGradBuffer:
    """Every group's buffers, with the operations on all of them at once.

    A parameter's gradient is a view of its group's buffer. So torch's own rules hold for it: the next backward adds to
    values that were changed in place, and a gradient that is taken off its parameter is gone. See `MainGrad`.
    """

    def __init__(self, schedule: Schedule, pool: StoragePool):
        self._schedule = schedule
        self._pool = pool
        self.parameter_groups: list[ParamGroup] = [group for unit in schedule.units for group in unit.groups]
        self.managed_params: list[ManagedParam] = [param for unit in schedule.units for param in unit.params]
        """Every parameter, once."""
        managed = {id(param.unsharded): param for param in self.managed_params}
        trained = [(group, group.main_grad) for group in self.parameter_groups if group.main_grad is not None]
        self._trained = [(group, managed[id(param)]) for group, _ in trained for param in group.params]
        self._main_grads = [main_grad for _, main_grad in trained]
        self.are_grads_decoupled = schedule.config.megatron_fsdp_use_decoupled_grad
        """Gradients are attached as `.decoupled_grad`."""
        attribute = "decoupled_grad" if self.are_grads_decoupled else "grad"
        for group, main_grad in trained:
            main_grad.show_on([managed[id(param)].sharded for param in group.params], attribute)

    @property
    def optimizer_named_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """(name, sharded parameter) of every parameter, tied ones once."""
        return [(param.fqn, param.sharded) for param in self.managed_params]

    def trained(self) -> list[tuple[ParamGroup, ManagedParam]]:
        """Every trainable parameter with its group."""
        return self._trained

    def copy_main_weights_to_model_weights(self) -> None:
        """Makes compute weights follow main weights. **Collective** if a weight codec is."""
        self._schedule.install()

    @uncompiled
    @torch.no_grad()
    def update_main_grads(self) -> None:
        """Attaches every finalized gradient to its sharded parameter, on every rank; others get None.

        Raises:
            RuntimeError: a parameter has a gradient of its own.
        """
        self._schedule.wait_for_reductions()
        for main_grad in self._main_grads:
            main_grad.attach()

    @torch.no_grad()
    def attach_grads(self) -> None:
        """Attaches the gradients that came since the last call; the current stream has waited for reductions.

        Gradients of other groups may have been replaced, or dropped, and stay so.
        """
        for main_grad in self._main_grads:
            (main_grad.note_dropped if main_grad.is_current else main_grad.attach)()

    @property
    def has_open_grads(self) -> bool:
        """Some gradient has been computed and is not attached yet."""
        return bool(self._schedule.strays()) or any(
            main_grad.state is not GradState.EMPTY and not main_grad.is_current for main_grad in self._main_grads
        )

    @property
    def has_foreign_grads_only(self) -> bool:
        """Gradients are on parameters, and none has come through the model."""
        is_empty = all(main_grad.state is GradState.EMPTY for main_grad in self._main_grads)
        return is_empty and not self._schedule.strays() and any(p.sharded.grad is not None for _, p in self._trained)

    def zero_grad(self, params: Iterable[nn.Parameter] | None = None) -> None:
        """Forgets and detaches the gradients of `params` (None: of all); frees buffers that hold no others."""
        self.forget_grads(params, set_to_none=True)

    @uncompiled
    @torch.no_grad()
    def forget_grads(self, params: Iterable[nn.Parameter] | None, *, set_to_none: bool) -> None:
        """As `zero_grad`; without `set_to_none` attached gradients stay, as zeros."""
        self._schedule.end_interrupted_backward()
        if not all(main_grad.is_current for main_grad in self._main_grads):
            self._schedule.wait_for_reductions()  # they may still read the dropped gradients
        chosen = _ids(params)
        for main_grad in self._main_grads:
            (main_grad.drop if set_to_none else main_grad.zero)(chosen)

    def detach_grads(self, params: Iterable[nn.Parameter] | None = None) -> None:
        """Takes the gradients off `params` (None: all); the buffers keep them."""
        chosen = _ids(params)
        for main_grad in self._main_grads:
            main_grad.detach(chosen)
            main_grad.is_current = False

    @uncompiled
    @torch.no_grad()
    def scale_gradients(self, factor: float | torch.Tensor) -> None:
        """Multiplies every gradient, attached or still accumulating, by `factor`, and attaches the final ones."""
        self._schedule.wait_for_reductions()
        if isinstance(factor, torch.Tensor):  # without a dim it would be rounded to the gradients' dtype, on CUDA
            factor = factor.to(self.parameter_groups[0].spec.device).reshape(1)
        for main_grad in self._main_grads:
            main_grad.scale(factor)
        self.update_main_grads()

    def manual_buffer_registration(self) -> None:
        """Registers communication buffers with NCCL; call it once, between steps. **Collective**.

        Raises:
            RuntimeError: `nccl_ub` with `fsdp_manual_registration` is off, so there is nothing to register; or the
                buffers are registered already.
        """
        register_late(self._pool, self._schedule.config)


def _ids(params: Iterable[nn.Parameter] | None) -> Collection[int] | None:
    return None if params is None else set(map(id, params))
