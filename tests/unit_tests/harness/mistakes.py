"""Many mistakes in one job: each must raise on every rank before it communicates, so the ranks stay in step."""

import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from tests.unit_tests.harness.communication import Communicated
from tests.unit_tests.harness.rank_pool import RankPool


class Mistake(NamedTuple):
    """A module-level function, its arguments, and the error that calling it must raise."""

    function: Callable[..., Any]
    arguments: tuple
    error: type[Exception]
    message: str
    """A regular expression."""


class Raised(NamedTuple):
    """The error that a call raised on one rank."""

    type_names: tuple[str, ...]
    message: str


def assert_each_raises(pool: RankPool, mistakes: Sequence[Mistake]) -> None:
    """Asserts that every mistake raises its error on every rank of `pool`."""
    by_rank = pool.run(_attempt_all, [(mistake.function, mistake.arguments) for mistake in mistakes])
    wrong = [
        f"[rank {rank}] {mistake.function.__name__}{mistake.arguments}: expected {mistake.error.__name__} "
        f"matching {mistake.message!r}, came {came}"
        for rank, raised in enumerate(by_rank)
        for mistake, came in zip(mistakes, raised, strict=True)
        if not _is_expected(mistake, came)
    ]
    assert not wrong, "\n".join(wrong)


def _is_expected(mistake: Mistake, came: Raised | None) -> bool:
    return (
        came is not None
        and mistake.error.__name__ in came.type_names
        and bool(re.search(mistake.message, came.message))
    )


def _attempt_all(calls: Sequence[tuple[Callable[..., Any], tuple]]) -> list[Raised | None]:
    return [_attempt(function, arguments) for function, arguments in calls]


def _attempt(function: Callable[..., Any], arguments: tuple) -> Raised | None:
    try:
        function(*arguments)
    except Communicated:
        raise  # the ranks are out of step now
    except Exception as error:  # noqa: BLE001  (whatever it is, it is compared)
        return Raised(tuple(cls.__name__ for cls in type(error).__mro__), str(error))
    return None
