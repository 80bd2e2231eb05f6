"""Guards of the first steps: they raise for changes to a sharded model that training would silently ignore."""

from __future__ import annotations

import itertools
import linecache
import logging
import math
import re
import traceback
import weakref
from collections.abc import Sequence

import torch
from torch import nn

from megatron_fsdp.machine.torch_compat import local_tensor, storage_id, version_of
from megatron_fsdp.runtime.schedule import Schedule
from megatron_fsdp.runtime.unit import ManagedParam, Unit

logger = logging.getLogger(__name__)

#: Forwards of the whole model that are checked; in strict mode all are.
FIRST_FORWARDS = 3
#: Optimization cycles whose main weights are checked.
FIRST_CYCLES = 5
_WHAT_TO_DO = "change values in place or inside full_params(), and structure before sharding."
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

Owned = tuple[Unit, ManagedParam]


class ForwardGuard:
    """Compares a sharded model with its state at sharding. Reads only, and communicates nothing."""

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
    def _owned(self) -> list[Owned]:
        return [(unit, param) for unit in self._alive().units for param in unit.params]

    def _alive(self) -> Schedule:
        schedule = self._schedule()
        assert schedule is not None, "the model runs"
        return schedule

    def check(self) -> None:
        """Looks at the model before a forward communicates.

        Raises:
            RuntimeError: a parameter was replaced, removed or added, its `data` or `requires_grad` was set, or a
                forward has written into weights that are copies of the main weights. All ranks make the same mistake.
        """
        schedule = self._alive()
        root = schedule.root.module()
        assert root is not None, "its forward begins"
        self._check_names(root)
        for (_, param), storage in zip(self._owned, self._storages, strict=True):
            if storage_id(param.sharded) != storage:
                raise RuntimeError(f"{param.fqn}.data was set after sharding, which changes nothing; {_WHAT_TO_DO}")
            if torch.is_grad_enabled() and param.sharded.requires_grad != param.unsharded.requires_grad:
                raise RuntimeError(
                    f"{param.fqn}.requires_grad has become {param.sharded.requires_grad} after sharding, which decides "
                    "once whether there is a gradient; freeze parameters before sharding."
                )
        self._check_writes(schedule)
        self._left -= 1
        self.is_active = self._left > 0

    def explain(self, error: BaseException) -> None:
        """Adds a note to an error about DTensors that names the sharded parameters which the forward has read."""
        found = []
        if "DTensor" in str(error):
            found = _stray_reads(error, [(unit, param) for unit, param in self._owned if not unit.shows_unsharded])
        if not found:
            return
        listed = ", ".join(f"{_spelled(param.fqn)} (unit {unit.label})" for unit, param in found)
        note = "Parameters are whole only while a forward of their unit runs. Read outside it: "
        if len(found) == 1:
            note += (
                f"{listed}. Pass root_params=[{_spelled(found[0][1].fqn)}] to fully_shard, so that it stays gathered "
                "while the model computes."
            )
        else:
            note += f"one of {listed}."
        if hasattr(error, "add_note"):
            error.add_note(note)
        else:  # Python 3.10
            error.args = (f"{error}\n{note}", *error.args[1:])

    def _check_names(self, root: nn.Module) -> None:
        expected = {
            fqn: param.unsharded if unit.shows_unsharded else param.sharded
            for unit, param in self._owned
            for fqn in param.fqns
        }
        held = {
            f"{path}.{name}".removeprefix("."): param
            for path, module in root.named_modules()
            for name, param in module._parameters.items()
            if param is not None
        }
        for fqn in expected | held:
            if held.get(fqn) is not expected.get(fqn):
                how = "replaced" if fqn in held else "removed"
                raise RuntimeError(
                    f"parameter {fqn} was {how if fqn in expected else 'added'} after sharding, and would not be "
                    f"trained; {_WHAT_TO_DO}"
                )

    def _check_writes(self, schedule: Schedule) -> None:
        """Raises for writes of a forward, warns of writes between forwards: equal values are no mistake."""
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


def _stray_reads(error: BaseException, resting: Sequence[Owned]) -> list[Owned]:
    """Of the `resting` parameters those that the innermost frame with any holds in a variable or names in its line."""
    for frame, line in reversed(list(traceback.walk_tb(error.__traceback__))):
        values = list(frame.f_locals.values())
        held = set(map(id, itertools.chain(values, *(value for value in values if isinstance(value, tuple)))))
        source = linecache.getline(frame.f_code.co_filename, line)
        spelled = set(re.findall(r"(?=\b([A-Za-z_]\w*\.\w+))", source))
        found = [
            each for each in resting if id(each[1].sharded) in held or spelled.intersection(map(_tail, each[1].fqns))
        ]
        if found:
            return found
    return []


def _spelled(fqn: str) -> str:
    """The parameter as Python reads it: `layers.0.weight` is `model.layers[0].weight`."""
    return re.sub(r"\.(\d+)(?=\.|$)", r"[\1]", f"model.{fqn}")


def _tail(fqn: str) -> str:
    """`module.parameter`: the last two parts of a name that are attributes."""
    return ".".join([part for part in fqn.split(".") if not part.isdigit()][-2:])


class StepGuard:
    """Raises if an unknown optimizer has stepped main weights which nobody installed, in the first cycles.

    Main weights are compared by value with those of the cycle before, because fused and foreach steps of an optimizer
    that was built from `parameters()` are counted nowhere, and because a step may rightly be left out. Reads only, and
    communicates nothing. A model whose optimizer is known costs nothing: `is_active` is set to False then.
    """

    def __init__(self, schedule: Schedule):
        self.is_active = True
        self._schedule = schedule
        self._left = FIRST_CYCLES
        self._generation = -1
        self._sums: dict[int, torch.Tensor] = {}
        """Sums of the main weights' bits, by id of the group."""

    @torch.no_grad()
    def check(self) -> None:
        """Looks at main weights if gradients are about to be attached and no earlier ones are: a cycle is over.

        Raises:
            RuntimeError: they have changed since the cycle before, and forwards compute with other values.
        """
        schedule = self._schedule
        params = [param.sharded for unit in schedule.units for param in unit.params]
        if any(param.grad is not None or getattr(param, "decoupled_grad", None) is not None for param in params):
            return
        self._left -= 1
        self.is_active = self._left > 0
        before, self._sums = self._sums if schedule.generation == self._generation else {}, {}
        self._generation = schedule.generation
        trained = [(unit, group) for unit in schedule.units for group in unit.groups if group.requires_grad]
        for unit, group in trained:
            is_resident = unit.number in schedule.programs.resident
            if not (group.keeps_installed or group.plan.gathers_after_install or is_resident):
                continue  # the next forward sees the main weight
            data = group.main_weight_buffer.data
            found = self._sums[id(group)] = data.view(_INTEGERS[data.itemsize]).sum(dtype=torch.int64)
            if bool(before.get(id(group), found) != found):
                raise RuntimeError(
                    f"{', '.join(group.spec.fqns)} of unit {unit.label} have other values than the model computes "
                    "with: they were changed without its knowledge. Step with the optimizer that "
                    "fully_shard_optimizer() or fully_shard() gives back; after other changes call "
                    "install_optimized_model_weights()."
                )
