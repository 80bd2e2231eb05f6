"""Says which sharded parameter a failed forward has read outside the forward of its unit."""

from __future__ import annotations

import itertools
import re
import traceback
from collections.abc import Sequence

from megatron_fsdp.runtime.unit import ManagedParam, Unit

Owned = tuple[Unit, ManagedParam]


def explain_stray_read(error: BaseException, owned: Sequence[Owned]) -> None:
    """Adds a note to an error about DTensors that names the parameters which were sharded where it arose."""
    if "DTensor" not in str(error):
        return
    resting = [(unit, param) for unit, param in owned if not unit.shows_unsharded]
    found = _held(error, resting) or _named(error, resting)
    if not found:
        return
    listed = ", ".join(f"{param.fqn} (unit {unit.label})" for unit, param in found)
    note = (
        f"Parameters are whole only while a forward of their unit runs. Read outside it: {listed}. Pass "
        f"root_params=[model.{found[0][1].fqn}] to fully_shard, so that it stays gathered while the model computes."
    )
    if hasattr(error, "add_note"):
        error.add_note(note)
    else:  # Python 3.10
        error.args = (f"{error}\n{note}", *error.args[1:])


def _held(error: BaseException, resting: Sequence[Owned]) -> list[Owned]:
    """Parameters that are local variables of a frame, or in a tuple that is one."""
    values = [value for frame, _ in traceback.walk_tb(error.__traceback__) for value in frame.f_locals.values()]
    tuples = (value for value in values if isinstance(value, tuple))
    held = set(map(id, itertools.chain(values, *tuples)))
    return [each for each in resting if id(each[1].sharded) in held]


def _named(error: BaseException, resting: Sequence[Owned]) -> list[Owned]:
    """Parameters that the innermost failing line which spells any does: `module.parameter`."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        spelled = set(re.findall(r"(?=\b([A-Za-z_]\w*\.\w+))", frame.line or ""))
        found = [each for each in resting if any(_tail(fqn) in spelled for fqn in each[1].fqns)]
        if found:
            return found
    return []


def _tail(fqn: str) -> str:
    """The last two parts of a name that are attributes: the module's and the parameter's."""
    return ".".join([part for part in fqn.split(".") if not part.isdigit()][-2:])
