"""Says which sharded parameter a failed forward has read outside the forward of its unit."""

from __future__ import annotations

import dis
import itertools
import traceback
from collections.abc import Iterator, Sequence
from types import CodeType, FrameType
from typing import Any

from megatron_fsdp.runtime.unit import ManagedParam, Unit


def explain(error: BaseException, units: Sequence[Unit]) -> None:
    """Adds a note to an error about DTensors that names the parameters which were sharded where it arose."""
    if "DTensor" not in str(error):
        return
    resting = [(unit, param) for unit in units if not unit.shows_raw for param in unit.params]
    frames = list(traceback.walk_tb(error.__traceback__))
    found = _held(frames, resting) or _named(frames, resting)
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


Owned = tuple[Unit, ManagedParam]
Frames = Sequence[tuple[FrameType, int]]


def _held(frames: Frames, resting: Sequence[Owned]) -> list[Owned]:
    """Parameters that are local variables of a frame, or in a tuple that is one."""
    held = {id(value) for frame, _ in frames for value in _locals(frame)}
    return [owned for owned in resting if id(owned[1].sharded) in held]


def _locals(frame: FrameType) -> Iterator[Any]:
    for value in frame.f_locals.values():
        yield value
        if isinstance(value, tuple):
            yield from value


def _named(frames: Frames, resting: Sequence[Owned]) -> list[Owned]:
    """Parameters that the failing line of the innermost frame spells which spells any: `.module.parameter`."""
    for frame, line in reversed(frames):
        pairs = set(itertools.pairwise(_names(frame.f_code, line)))
        found = [owned for owned in resting if any(_tail(fqn) in pairs for fqn in owned[1].fqns)]
        if found:
            return found
    return []


def _names(code: CodeType, line: int) -> list[Any]:
    """What the instructions of a line refer to, in order."""
    spans = [(start, end) for start, end, number in code.co_lines() if number == line]
    return [
        instruction.argval
        for instruction in dis.get_instructions(code)
        if instruction.argval is not None and any(start <= instruction.offset < end for start, end in spans)
    ]


def _tail(fqn: str) -> tuple[str, ...]:
    """The last two parts of a name that are attributes: the module's and the parameter's."""
    return tuple(part for part in fqn.split(".") if not part.isdigit())[-2:]
