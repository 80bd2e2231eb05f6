"""Forward guard: before the first forwards, looks for parameters that were replaced, frozen or written to."""

from __future__ import annotations

import logging
import math
import weakref

import torch
from torch import nn

from megatron_fsdp.diagnostics.error_hints import explain_stray_read
from megatron_fsdp.machine.torch_compat import local_tensor, storage_id, version_of
from megatron_fsdp.runtime.schedule import Schedule
from megatron_fsdp.runtime.unit import ManagedParam, Unit

logger = logging.getLogger(__name__)

#: Forwards of the whole model that are looked at; in strict mode all are.
FIRST_FORWARDS = 3
_WHAT_TO_DO = "change values in place or inside full_params(), and structure before sharding."


class ForwardGuard:
    """Compares a sharded model with what it was when it was sharded. Reads only, and communicates nothing."""

    def __init__(self, schedule: Schedule, *, is_strict: bool):
        self.is_active = True
        """The next forward is to be checked."""
        self._left = math.inf if is_strict else FIRST_FORWARDS
        self._schedule = weakref.ref(schedule)  # modules' hooks hold the guard, and must not own the model
        self._storages = [storage_id(param.sharded) for _, param in self._owned]
        groups = [group for unit in schedule.units for group in unit.groups]
        self._copies = {id(param) for group in groups if group.loses_writes for param in group.params}
        """Whole weights that are copies of the main weights, by id."""
        self._versions = self._count_writes()
        self._generation = schedule.generation

    @property
    def _owned(self) -> list[tuple[Unit, ManagedParam]]:
        return [(unit, param) for unit in self._schedule().units for param in unit.params]

    def check(self) -> None:
        """Looks at the model before a forward communicates.

        Raises:
            RuntimeError: a parameter was replaced, removed or added, its `data` or `requires_grad` was set, or a
                forward has written into weights that are copies of the main weights. All ranks make the same mistake.
        """
        schedule = self._schedule()
        self._check_names(schedule.root.module())
        self._check_params()
        self._check_writes(schedule)
        self._left -= 1
        self.is_active = self._left > 0

    def explain(self, error: BaseException) -> None:
        """Adds what is known about the cause to an error that a forward has raised."""
        explain_stray_read(error, self._owned)

    def _check_names(self, root: nn.Module) -> None:
        held = {
            f"{path}.{name}".removeprefix("."): param
            for path, module in root.named_modules()
            for name, param in module._parameters.items()
            if param is not None
        }
        for unit, param in self._owned:
            for fqn in param.fqns:
                found = held.pop(fqn, None)
                if found is not (param.unsharded if unit.shows_unsharded else param.sharded):
                    how = "removed" if found is None else "replaced"
                    raise RuntimeError(f"{fqn} was {how} after sharding, and would not be trained; {_WHAT_TO_DO}")
        for fqn in held:
            raise RuntimeError(f"parameter {fqn} was added after sharding, and would not be trained; {_WHAT_TO_DO}")

    def _check_params(self) -> None:
        for (_, param), storage in zip(self._owned, self._storages, strict=True):
            if storage_id(param.sharded) != storage:
                raise RuntimeError(f"{param.fqn}.data was set after sharding, which changes nothing; {_WHAT_TO_DO}")
            if torch.is_grad_enabled() and param.sharded.requires_grad != param.unsharded.requires_grad:
                raise RuntimeError(
                    f"{param.fqn}.requires_grad has become {param.sharded.requires_grad} after sharding, which decides "
                    "once whether there is a gradient; freeze parameters before sharding."
                )

    def _check_writes(self, schedule: Schedule) -> None:
        """Raises for what a forward has written, warns of what was written between: equal values are no mistake."""
        before, self._versions = self._versions, self._count_writes()
        generation, self._generation = self._generation, schedule.generation
        written = []
        for (unit, param), was, now in zip(self._owned, before, self._versions, strict=True):
            if now[0] != was[0]:
                raise RuntimeError(
                    f"a forward of unit {unit.label} has changed {param.fqn} in place, which is lost: the weights that "
                    "modules see are copies of the main weights. Change parameters between steps, through to_local() "
                    "or full_params()."
                )
            if now != was:
                written.append(param.fqn)
        is_by_contract = schedule.generation != generation or schedule.lost_weights is not None
        if written and not is_by_contract:
            logger.warning(
                "%s were written to, perhaps with equal values, and nothing was installed since: forwards may compute "
                "with older values. Call install_optimized_model_weights() after changing parameters by hand, and step "
                "with the optimizer that fully_shard_optimizer() or fully_shard() gives back.",
                ", ".join(written),
            )

    def _count_writes(self) -> list[tuple[int | None, ...]]:
        """Version counters of every parameter: whole if it is a copy, as DTensor, and as local tensor."""
        return [
            (
                version_of(param.unsharded) if id(param.unsharded) in self._copies else None,
                version_of(param.sharded),
                version_of(local_tensor(param.sharded)),
            )
            for _, param in self._owned
        ]
