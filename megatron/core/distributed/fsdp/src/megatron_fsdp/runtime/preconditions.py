"""Checks that the model is between steps, for what all units take part in, and what they show meanwhile."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

from torch import nn

from megatron_fsdp.runtime.schedule import Schedule
from megatron_fsdp.runtime.unit import Unit


def check_not_taken(schedule: Schedule, action: str) -> None:
    """Raises RuntimeError if something else has put its parameters in the modules."""
    if schedule.taken_by is not None:
        raise RuntimeError(f"{action} inside {schedule.taken_by} would not see its parameters; leave it first.")


def check_idle(schedule: Schedule, action: str) -> None:
    """Raises RuntimeError if the model runs, or something else has put its parameters in the modules."""
    schedule.end_interrupted_backward()
    if schedule.is_running:
        raise RuntimeError(
            f"{action} inside the model's forward or backward would take its weights away; call it before or after."
        )
    check_not_taken(schedule, action)


def note_uninstalled_step(schedule: Schedule, stepped: Iterable[nn.Parameter]) -> None:
    """The main weights of these sharded parameters have changed, and compute weights, where they are kept, have not.

    Where they are not, no forward runs, and no earlier forward has a backward, until `Schedule.install`.
    """
    stepped = set(map(id, stepped))
    groups = (group for unit in schedule.units for group in unit.groups if not group.keeps_installed)
    overwritten = {id(param) for group in groups if group.requires_grad for param in group.params}
    params = (param for unit in schedule.units for param in unit.params if id(param.unsharded) in overwritten)
    lost = [param.fqn for param in params if id(param.sharded) in stepped]
    schedule.generation += bool(lost)
    schedule.lost_weights = [*dict.fromkeys([*(schedule.lost_weights or ()), *lost])]


@contextlib.contextmanager
def showing_sharded(units: Iterable[Unit]) -> Iterator[None]:
    """Inside, modules show sharded parameters, whatever they are doing; nothing is gathered or released."""
    shown = [unit for unit in units if unit.shows_unsharded]
    for unit in shown:
        unit.show_sharded()
    try:
        yield
    finally:
        for unit in shown:
            unit.show_unsharded()
