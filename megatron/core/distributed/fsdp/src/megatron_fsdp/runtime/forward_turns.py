"""The gathers of a forward: each in its turn, in one order on all ranks."""

from __future__ import annotations

import bisect
import dataclasses
import functools
import itertools
from collections.abc import Iterator, Sequence

import torch

from megatron_fsdp.runtime.calls import Call, Forward
from megatron_fsdp.runtime.gatherer import Gatherer, Prefetch
from megatron_fsdp.runtime.inquiry import Forum
from megatron_fsdp.runtime.order import Order, completed, merged, placed, registered
from megatron_fsdp.runtime.unit import Phase, Unit

#: An order that would become longer than this many times what the first forward needed is not kept.
_MOST_GROWTH = 2


@dataclasses.dataclass(frozen=True)
class _Extra:
    """A call that an order has no turn for."""

    call: Call
    unit: Unit
    place: int
    """Turns of the order that had begun before it."""


class ForwardTurns:
    """Gathers for a call of a unit everything whose turn comes before it, and then the unit.

    In the first forward with a graph, and in the first without, the ranks ask each other before every gather which one
    is next (`Forum`). Afterwards they tell each other what they needed, and make of it one sequence in which every rank
    finds that in its order; from then on they follow it without asking.

    If they ran different units, a later forward may need what the sequence lacks, on some ranks only. Then they ask
    each other again once the sequence is through, which costs every forward two questions, and its backward another.
    """

    def __init__(self, forum: Forum, root: Unit, gatherer: Gatherer, prefetch: Prefetch):
        self._forum = forum
        self._root = root
        self._gatherer = gatherer
        self._prefetch = prefetch
        self._registered = registered(forum.units, root)
        self._orders: dict[bool, Order] = {} if forum.units else dict.fromkeys((True, False), self._registered)
        """By whether forward is recorded: an evaluation may call other things than training."""
        self._longest: dict[bool, int] = {}
        """Turns that an order may have."""
        self._is_recorded = False
        """Autograd records the forward that runs, but for what a reentrant checkpoint hides."""
        self._order: Order | None = None
        """Of the forward that runs; None in the first."""
        self._is_asking = True
        """Nothing is known of what comes next."""
        self._has_asked = False
        """Something has been gathered since."""
        self._root_call = Call(Forward())
        self._called: list[int] = []
        """Numbers of the units that this rank has called, unless all ranks are known to call the same."""
        self._gathered = 0
        """Turns of the order whose gather has been started."""
        self._begun = 0
        """Turns of the order that have begun or have been left out."""
        self._extra: list[_Extra] = []
        """Calls of this forward for which an order that all ranks follow alike had no turn left."""
        self._kept: Unit | None = None
        """Once the order is through: the unit that its last turn leaves gathered for backward."""

    @property
    def known(self) -> Order:
        """The order of training; that of registration until the ranks have found it."""
        return self._orders.get(True, self._registered)

    def agreed(self, claims: list[bool]) -> list[bool]:
        """Which of the claims hold on some rank; this one speaks for all if all run the same. **Collective** if not."""
        return claims if self.known.is_alike else self._forum.either(claims)

    @property
    def coming(self) -> Sequence[Unit]:
        """What a forward that begins now would gather, in its order."""
        return self._orders.get(torch.is_grad_enabled(), self._registered).forward

    def begin(self) -> Call:
        """A forward of the whole model begins; gives the root's call."""
        self._is_recorded = torch.is_grad_enabled()
        self._order = self._orders.get(self._is_recorded)
        self._is_asking = self._order is None
        self._has_asked = False
        self._gathered = self._begun = 0
        self._kept = None
        self._root_call, self._called, self._extra = Call(Forward()), [], []
        return self._root_call

    def reach(self, unit: Unit) -> Call:
        """The unit is about to run: takes every turn before its own, and its own. **Collective**."""
        call = self._reach(unit)
        self._root_call.inner.append(call)
        if not self._is_known_alike:  # else nobody asks
            self._called.append(self._forum.units.index(unit))
        return call

    def _reach(self, unit: Unit) -> Call:
        forward = self._root_call.forward
        turn = None if self._is_asking else self._order.next_turn(unit, self._begun)
        if turn is not None:
            self._walk_to(turn)
            self._begun = turn + 1
            return Call(forward, turn=turn)
        if self._is_known_alike:  # all ranks come here, and here
            self._extra.append(_Extra(Call(forward), unit, self._begun))
            return self._extra[-1].call
        self._follow_to_its_end()
        self._ask(unit)
        return Call(forward)

    def leave(self, unit: Unit, turn: int | None) -> None:
        """Releases a unit whose turn is over, but not the last one if its backward is what comes next."""
        if self.keeps(unit, turn):
            self._gatherer.keep(unit)
        else:
            self._gatherer.release(unit)

    def keeps(self, unit: Unit, turn: int | None) -> bool:
        """The unit, whose turn is over, stays gathered for its backward on every rank."""
        is_last = not self._is_asking and turn == len(self._order.forward) - 1
        return is_last and self._is_recorded and unit.joins_backward

    @property
    def latest(self) -> int:
        """The number of the last call that has begun."""
        return len(self._root_call.inner) - 1

    def gather_ahead(self) -> None:
        """Starts the gathers of what may come next. **Collective**."""
        if not self._is_asking:
            self._gather_from(self._begun)

    def end(self) -> None:
        """The forward is over: takes the turns that are left, and notes the order of all of them. **Collective**."""
        self._follow_to_its_end()
        self._root_call.forward.order = self._followed() if self._is_known_alike else self._found()
        if self._kept is None:
            return
        self._kept.is_ahead = not self._has_asked
        if self._has_asked and self._kept.phase is Phase.RESTING:  # backward begins with what they asked for
            self._gatherer.release(self._kept)

    @property
    def _is_known_alike(self) -> bool:
        return self._order is not None and self._order.is_alike

    def _followed(self) -> Order:
        """The order of a forward in which all ranks ran alike, but perhaps again or in another order than at first."""
        before, calls = self._order, self._root_call.inner
        is_usual = not self._extra and all(calls[call.last].turn <= before.ends[call.turn] for call in calls)
        if is_usual or not self._is_recorded:
            return before
        places = [extra.place for extra in self._extra]
        moved = [turn + bisect.bisect_right(places, turn) for turn in range(len(before.forward))]
        for call in calls:
            call.turn = None if call.turn is None else moved[call.turn]
        for number, extra in enumerate(self._extra):
            extra.call.turn = extra.place + number
        units = dict(zip(moved, before.forward, strict=True)) | {extra.call.turn: extra.unit for extra in self._extra}
        ends = {turn: moved[end] for turn, end in zip(moved, before.ends, strict=True)}
        for call in calls:
            ends[call.turn] = max(ends.get(call.turn, 0), calls[call.last].turn)
        turns = range(len(units))
        return Order([units[turn] for turn in turns], self._root, [ends[turn] for turn in turns])

    def _found(self) -> Order:
        """The order of a forward in which ranks may have run different units, which may be that of those to come."""
        self._ask(None)
        calls, before = self._root_call.inner, self._order
        if before is not None and not self._has_asked:
            units, is_alike = before.forward, False
        else:
            everyone = self._forum.every(self._called)
            is_alike = before is None and len(everyone) == 1
            numbers = completed(self._merged(everyone), len(self._forum.units))
            for call, turn in zip(calls, placed(self._called, numbers), strict=True):
                call.turn = turn
            units = [self._forum.units[number] for number in numbers]
        return self._remembered(self._agreed(units, is_alike=is_alike))

    def _merged(self, everyone: list[list[int]]) -> list[int]:
        """Numbers of units in an order in which every rank finds its calls, and what was known before."""
        known = [] if self._order is None else [self._forum.units.index(unit) for unit in self._order.forward]
        return functools.reduce(merged, everyone, known)

    def _remembered(self, order: Order) -> Order:
        """Lets forwards to come follow `order` too, unless that would be too much."""
        longest = self._longest.setdefault(self._is_recorded, _MOST_GROWTH * len(order.forward))
        if len(order.forward) <= longest:
            self._orders[self._is_recorded] = order
        return order

    def _agreed(self, units: list[Unit], *, is_alike: bool) -> Order:
        """The order of these turns, from what ranks called inside each and recompute as one. **Collective**.

        Gives a turn in backward to every unit that needs one on some rank, frozen though it may be: gradients flow
        through it, or if ranks differ, it may be recomputed.
        """
        calls = self._root_call.inner
        ends, firsts = list(range(len(units))), list(range(len(units)))
        together: dict[tuple[str, int], int] = {}
        for call in calls:
            ends[call.turn] = max(ends[call.turn], calls[call.last].turn)
            if call.checkpoint is not None and not is_alike:
                firsts[call.turn] = together.setdefault(call.checkpoint, call.turn)
        joins = [self._joins(unit, is_alike) for unit in self._forum.units]
        highest = self._forum.highest([*ends, *(-first for first in firsts), *joins])
        ends, firsts = highest[: len(units)], [-first for first in highest[len(units) : 2 * len(units)]]
        for unit, joins_backward in zip(self._forum.units, highest[2 * len(units) :], strict=True):
            unit.joins_backward = bool(joins_backward)
        before = self._order
        if before is not None and (before.forward, before.ends, before.firsts) == (units, ends, firsts):
            return before
        return Order(units, self._root, ends, firsts, is_alike=is_alike)

    @staticmethod
    def _joins(unit: Unit, is_alike: bool) -> bool:
        return unit.joins_backward or any(
            call.carries_grad or (call.checkpoint is not None and not is_alike) for call in unit.calls
        )

    def _follow_to_its_end(self) -> None:
        """Takes what is left of the order; from now on the ranks ask each other."""
        if self._is_asking:
            return
        turns = self._order.forward
        self._walk_to(len(turns))
        if turns and self.keeps(turns[-1], len(turns) - 1):
            self._kept = turns[-1]
            self._kept.is_ahead = False  # what they ask for is gathered on all ranks, wherever it is already
        self._is_asking = True

    def _ask(self, wanted: Unit | None) -> None:
        """Gathers what the ranks ask for until it is what this one wants; without a wish, until none has one."""
        while True:
            unit = self._forum.next_unit(wanted)
            if unit is None:
                return
            self._has_asked = True
            self._gatherer.take_turn(unit)
            if unit is wanted:
                return
            if unit.phase is Phase.RESTING:
                self._gatherer.release(unit)

    def _walk_to(self, turn: int) -> None:
        """Takes the turns before number `turn`, releasing what was not used, and gathers for that one."""
        while self._begun < turn:
            self._gather_from(self._begun + 1)
            unit = self._order.forward[self._begun]
            if unit.phase is Phase.RESTING:  # or else it contains the one that is reached, or was called before
                self.leave(unit, self._begun)
            self._begun += 1
        self._gather_first(turn + 1)

    def _gather_from(self, start: int) -> None:
        """Takes the turns before number `start`, and starts what may be gathered when that one comes next."""
        self._gather_first(start)
        self._gather_first(start + len(self._prefetch.pick(self._free(start))))

    def _gather_first(self, count: int) -> None:
        """Takes the first `count` turns, each once in a forward."""
        while self._gathered < min(count, len(self._order.forward)):
            self._gatherer.take_turn(self._order.forward[self._gathered])
            self._gathered += 1

    def _free(self, start: int) -> Iterator[Unit]:
        """The units of the turns from number `start` on, until one that is to be released before its turn."""
        started = itertools.islice(self._order.forward, start, self._gathered)
        rest = itertools.islice(self._order.forward, max(start, self._gathered), None)
        return itertools.chain(started, itertools.takewhile(lambda unit: not unit.is_held, rest))
