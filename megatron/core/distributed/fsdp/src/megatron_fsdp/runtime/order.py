"""In which order units gather and reduce: one order for all ranks, whatever each of them happens to run."""

from __future__ import annotations

import bisect
import collections
import dataclasses
import itertools
from collections.abc import Iterator, Sequence

from megatron_fsdp.runtime.unit import Unit


@dataclasses.dataclass(frozen=True)
class Step:
    """The beginning (its gather) or the end (its release) of the backward of one turn."""

    unit: Unit
    turn: int | None
    """Its number in the forward; None for the root."""
    is_entry: bool
    opens: bool = False
    """The beginning of a turn while no other one of the unit is between its entry and its end."""
    releases: bool = False
    """The end of a turn while no other one of the unit is between its entry and its end."""
    reduces: bool = False
    """The end of a unit's first turn: no more gradients will come."""


class Order:
    """The turns of a forward and the backward that mirrors it.

    A turn is one gather of one unit; a unit that forward calls several times has several. Autograd executes nodes in
    the reverse of the order in which forward made them. So when the gradient of a call's output arrives, the backward
    of everything that forward ran after that call is over: whatever comes before a step of `backward` can be done
    before it, on a rank that made the call and on a rank that did not.
    """

    def __init__(
        self,
        forward: Sequence[Unit],
        root: Unit,
        ends: Sequence[int] | None = None,
        firsts: Sequence[int] | None = None,
        *,
        is_alike: bool = True,
    ):
        self.forward = list(forward)
        """The unit of every turn. The root has none: it stays gathered."""
        self.ends = list(range(len(self.forward)) if ends is None else ends)
        """The last turn that began, on any rank, before the call of each turn had returned."""
        self.firsts = list(range(len(self.forward)) if firsts is None else firsts)
        """The first turn that any rank recomputes as one with each turn."""
        self.is_alike = is_alike
        """All ranks took all turns when the order was found."""
        self._turns: dict[Unit, list[int]] = {}
        for turn, unit in enumerate(self.forward):
            self._turns.setdefault(unit, []).append(turn)
        self.backward = [Step(root, None, is_entry=True), *self._steps()]
        self.backward.append(Step(root, None, is_entry=False, releases=True, reduces=True))
        """Entry and exit of every turn, as forward left and entered them, in reverse."""
        self.entry = {step.turn: index for index, step in enumerate(self.backward) if step.is_entry}
        """Step at which the backward of a turn begins."""
        self.exits = [step.unit for step in self.backward if step.reduces]
        """Every unit, in the order of reductions."""
        self.exit_number = {unit: number for number, unit in enumerate(self.exits)}

    def next_turn(self, unit: Unit, start: int) -> int | None:
        """The first turn of `unit` that is not before `start`; None if there is none."""
        turns = self._turns[unit]
        index = bisect.bisect_left(turns, start)
        return turns[index] if index < len(turns) else None

    def entries_from(self, start: int) -> Iterator[tuple[int, Unit]]:
        """Number and unit of the steps from number `start` on at which something is gathered in backward.

        Up to the first that must wait for an earlier release of the same unit.
        """
        released: set[Unit] = set()
        for number, step in enumerate(itertools.islice(self.backward, start, None), start):
            if step.releases:
                released.add(step.unit)
            elif step.is_entry and step.unit in released:
                return
            elif step.is_entry and step.unit.joins_backward:
                yield number, step.unit

    def _steps(self) -> Iterator[Step]:
        entries = sorted(range(len(self.forward)), key=lambda turn: (-self.ends[turn], turn))
        number = {turn: index for index, turn in enumerate(entries)}
        begun = 0
        entered: collections.Counter[Unit] = collections.Counter()
        for turn in reversed(range(len(self.forward))):
            # What is recomputed as one is entered as one.
            last = max(number[other] for other in range(self.firsts[turn], turn + 1))
            while begun < len(entries) and (begun <= last or self.ends[entries[begun]] == turn):
                unit = self.forward[entries[begun]]
                yield Step(unit, entries[begun], is_entry=True, opens=not entered[unit])
                entered[unit] += 1
                begun += 1
            unit = self.forward[turn]
            entered[unit] -= 1
            is_first = turn == self._turns[unit][0]
            yield Step(unit, turn, is_entry=False, releases=not entered[unit], reduces=is_first)


def placed(part: Sequence[int], whole: Sequence[int]) -> list[int] | None:
    """Where the items of `part` lie in `whole`, each as early as can be; None if it is no subsequence."""
    places: list[int] = []
    start = 0
    for item in part:
        place = next((index for index in range(start, len(whole)) if whole[index] == item), None)
        if place is None:
            return None
        places.append(place)
        start = place + 1
    return places


def merged(one: Sequence[int], other: Sequence[int]) -> list[int]:
    """A shortest sequence of which both are subsequences, by their longest common one."""
    if placed(other, one) is not None:
        return list(one)
    # lengths[i][j]: of the longest common subsequence of one[i:] and other[j:]
    lengths = [[0] * (len(other) + 1) for _ in range(len(one) + 1)]
    for i, j in itertools.product(reversed(range(len(one))), reversed(range(len(other)))):
        longer = max(lengths[i + 1][j], lengths[i][j + 1])
        lengths[i][j] = lengths[i + 1][j + 1] + 1 if one[i] == other[j] else longer
    result: list[int] = []
    i = j = 0
    while i < len(one) and j < len(other):
        if one[i] == other[j]:
            result.append(one[i])
            i, j = i + 1, j + 1
        elif lengths[i + 1][j] >= lengths[i][j + 1]:
            result.append(one[i])
            i += 1
        else:
            result.append(other[j])
            j += 1
    return [*result, *one[i:], *other[j:]]


def completed(sequence: Sequence[int], count: int) -> list[int]:
    """`sequence` with each of `count` numbers that it lacks, behind the first place of the number before."""
    result = list(sequence)
    for number in range(count):
        if number not in result:
            result.insert(result.index(number - 1) + 1 if number else 0, number)
    return result


def registered(units: Sequence[Unit], root: Unit) -> Order:
    """One turn for each unit, as they are registered; those inside another one run inside it."""
    ends = list(range(len(units)))
    open_turns: list[int] = []
    for turn, unit in enumerate(units):
        while open_turns and not unit.fqn.startswith(units[open_turns[-1]].fqn + "."):
            open_turns.pop()
        open_turns.append(turn)
        for outer in open_turns:
            ends[outer] = turn
    return Order(units, root, ends)
