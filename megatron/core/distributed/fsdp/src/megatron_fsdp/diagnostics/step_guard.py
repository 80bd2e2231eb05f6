"""Step guard: in the first cycles, finds main weights that an unknown optimizer has stepped and nobody installed."""

from __future__ import annotations

import torch

from megatron_fsdp.runtime.schedule import Schedule
from megatron_fsdp.runtime.unit import Unit
from megatron_fsdp.state.param_group import ParamGroup

#: Optimization cycles after which nothing is looked at any more.
FIRST_CYCLES = 5
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class StepGuard:
    """Compares main weights with those of the cycle before, where nothing was installed since.

    By values, because fused and foreach steps of an optimizer that was built from `parameters()` are counted nowhere,
    and because a step may rightly be left out. It reads only, and communicates nothing. A model whose optimizer is
    known costs nothing: `is_active` is set to False then.
    """

    def __init__(self, schedule: Schedule):
        self.is_active = True
        self._schedule = schedule
        self._left = FIRST_CYCLES
        self._generation = -1
        self._sums: dict[int, torch.Tensor] = {}
        """By id of the group."""

    @torch.no_grad()
    def check(self) -> None:
        """Looks at main weights if gradients are about to be attached and no earlier ones are: a cycle is over.

        Raises:
            RuntimeError: they have changed since the cycle before, and forwards compute with other values.
        """
        if _shows_grads(self._schedule):
            return
        self._left -= 1
        self.is_active = self._left > 0
        before, generation = self._sums, self._generation
        owned = [
            (unit, group) for unit in self._schedule.units for group in unit.groups if self._needs_install(unit, group)
        ]
        self._sums = {id(group): _sum_of_bits(group.main_weight_buffer.data) for _, group in owned}
        self._generation = self._schedule.generation
        if generation != self._generation:
            return
        for unit, group in owned:
            if id(group) in before and bool(before[id(group)] != self._sums[id(group)]):
                raise RuntimeError(
                    f"{', '.join(group.spec.fqns)} of unit {unit.label} have other values than the model computes "
                    "with: they were changed without its knowledge. Step with the optimizer that "
                    "fully_shard_optimizer() or fully_shard() gives back; after other changes call "
                    "install_optimized_model_weights()."
                )

    def _needs_install(self, unit: Unit, group: ParamGroup) -> bool:
        """Forwards do not see a change of the main weight: they neither gather it nor compute with it."""
        if not group.requires_grad:
            return False
        is_resident = unit.number in self._schedule.programs.resident
        return group.keeps_installed or group.plan.gathers_after_install or is_resident


def _shows_grads(schedule: Schedule) -> bool:
    params = (param.sharded for unit in schedule.units for param in unit.params)
    return any(param.grad is not None or getattr(param, "decoupled_grad", None) is not None for param in params)


def _sum_of_bits(data: torch.Tensor) -> torch.Tensor:
    return data.view(_INTEGERS[data.itemsize]).sum(dtype=torch.int64)
