"""Random models as traces: what hooks report of a forward and of its backward, as autograd was seen to order it."""

import dataclasses
import itertools
import random
from collections.abc import Iterator

from megatron_fsdp.plan.program import AGAIN, ENTER, EXIT, GRAD, KEEP, OVER, Token, Trace, UnitFacts


@dataclasses.dataclass(frozen=True)
class Call:
    """One call of a unit, with calls of others inside."""

    unit: int
    inner: tuple[int, ...] = ()
    span: int = 0
    """Calls of one span are recomputed as one."""


@dataclasses.dataclass(frozen=True)
class Model:
    """Units, and what a forward calls."""

    facts: tuple[UnitFacts, ...]
    calls: tuple[Call, ...]
    kinds: dict[int, str]
    """By span: "", "saved" (checkpoint without reentrance) or "reentrant"."""

    def forward(self, calls: tuple[Call, ...] | None = None) -> Trace:
        """Of a rank that makes these calls."""
        calls = self.calls if calls is None else calls
        tokens = [(ENTER, 0)]
        for call in calls:
            tokens.append((ENTER, call.unit))
            tokens += [token for unit in call.inner for token in ((ENTER, unit), (EXIT, unit))]
            tokens.append((EXIT, call.unit))
        return (*tokens, (KEEP, 0))

    def backward(self, calls: tuple[Call, ...] | None = None) -> Trace:
        """Of the backward of that forward."""
        calls = self.calls if calls is None else calls
        return ((GRAD, 0), *self._backward(calls), (OVER, 0))

    def _backward(self, calls: tuple[Call, ...]) -> Iterator[Token]:
        for span, group in itertools.groupby(reversed(calls), key=lambda call: call.span):
            together, kind = list(group), self.kinds.get(span, "")
            again = [(AGAIN, unit) for call in reversed(together) for unit in (call.unit, *call.inner)]
            if kind == "reentrant":
                yield from again
            for number, call in enumerate(together):
                yield GRAD, call.unit
                if kind == "saved" and not number:
                    yield from again
                yield from ((GRAD, unit) for unit in reversed(call.inner))
                yield from ((OVER, unit) for unit in dict.fromkeys((*call.inner, call.unit)))


def random_model(chance: random.Random) -> Model:
    """Two to six units beside the root, frozen and unsharded ones among them, some called twice, some inside others."""
    count = chance.randint(2, 6)
    facts = [_facts(chance, unit) for unit in range(count + 1)]
    names = list(range(1, count + 1))
    chance.shuffle(names)
    names += [chance.choice(names) for _ in range(chance.randint(0, 2))]
    calls, kinds = [], {}
    while names:
        span = len(kinds) + 1
        kinds[span] = chance.choice(("", "", "saved", "reentrant"))
        for unit in [names.pop() for _ in range(min(len(names), chance.choice((1, 1, 2, 3))))]:
            others = [other for other in range(1, count + 1) if other != unit]
            calls.append(Call(unit, tuple(chance.sample(others, chance.choice((0, 0, 1)))), span))
    return Model(tuple(facts), tuple(calls), kinds)


def _facts(chance: random.Random, unit: int) -> UnitFacts:
    numel = chance.choice((0, 1, 2, 2, 3))
    trains, gathers = chance.random() < 0.85, numel > 0 or chance.random() < 0.5
    return UnitFacts(
        label=f"u{unit}" if unit else "root",
        parent=0 if unit else None,
        gathers=gathers,
        numel=numel,
        nbytes=2 * numel,
        refreshes=chance.random() < 0.2,
        reduces=trains,
        staged_numel=numel if trains else 0,
        staged_nbytes=2 * numel if trains else 0,
    )
