"""Trains random programs on shards and whole, and says which one differs.

    python -m tests.unit_tests.harness.fuzzer --minutes 60 --seed 7 --ranks 3

A failing program is printed with its seed, and again as small as it could be made. To see it once more:

    python -m tests.unit_tests.harness.fuzzer --seed 1234 --count 1 --ranks 3
"""

import argparse
import dataclasses
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

from tests.unit_tests.harness import fuzz_models
from tests.unit_tests.harness.fuzz_programs import Program, random_program, unit_choices
from tests.unit_tests.harness.fuzz_runs import check_program, described
from tests.unit_tests.harness.rank_pool import RankPool

# ---- smaller ----


#: Kinds of failure, by what their messages say; a smaller program must fail in the same way.
_KINDS = ("differs by", "no answer", "Connection reset", "Error")


def shrunk(pool: RankPool, program: Program, failure: str, deadline: float) -> Program:
    """A program that fails like `failure` and from which nothing can be left out, as far as time allows."""
    progress = True
    while progress:
        progress = False
        for smaller in _smaller_programs(program):
            if time.monotonic() > deadline:
                return program
            if _fails(pool, smaller, failure):
                program, progress = smaller, True
                break
    return program


def _kind(failure: str) -> str:
    found = next((kind for kind in _KINDS if kind in failure), "")
    return "no answer" if found == "Connection reset" else found


def _fails(pool: RankPool, program: Program, failure: str) -> bool:
    if not program.plan.units or not set(program.plan.units) <= {"FuzzModel", *unit_choices(program.tree)}:
        return False
    try:
        check_program(pool, program, timeout_s=8.0)
    except AssertionError as error:
        return _kind(str(error)) == _kind(failure)
    except Exception:  # noqa: BLE001  (what was left out was needed: not a program)
        return False
    return False


def _smaller_programs(program: Program) -> Iterator[Program]:
    for tree in _smaller_trees(program.tree):
        yield dataclasses.replace(program, tree=tree)
    for value in (program, program.plan):
        for field in dataclasses.fields(value):
            is_simple = field.default is dataclasses.MISSING or getattr(value, field.name) == field.default
            if is_simple or field.name in ("steps", "units"):
                continue
            simple = dataclasses.replace(value, **{field.name: field.default})
            yield simple if value is program else dataclasses.replace(program, plan=simple)
    for number in range(len(program.plan.units)):
        units = program.plan.units[:number] + program.plan.units[number + 1 :]
        yield dataclasses.replace(program, plan=dataclasses.replace(program.plan, units=units))
    if program.steps > 1:
        yield dataclasses.replace(program, steps=program.steps - 1, reload_at=min(program.reload_at, program.steps - 2))


def _smaller_trees(tree: fuzz_models.Node) -> Iterator[fuzz_models.Node]:
    for number, child in enumerate(tree.children):
        if isinstance(child, fuzz_models.Node):
            yield child
        calls = [dataclasses.replace(c, child=c.child - (c.child > number)) for c in tree.calls if c.child != number]
        children = tree.children[:number] + tree.children[number + 1 :]
        yield dataclasses.replace(tree, children=children, calls=tuple(calls))
        replacements: list[Any] = []
        if isinstance(child, fuzz_models.Node):
            replacements = [*_smaller_trees(child), fuzz_models.Leaf(kind="linear", seed=child.cls.encode()[0])]
        else:
            replacements = list(_simpler(child, ("kind", "seed")))
        for smaller in replacements:
            yield dataclasses.replace(tree, children=(*tree.children[:number], smaller, *tree.children[number + 1 :]))
    for number, call in enumerate(tree.calls):
        yield dataclasses.replace(tree, calls=tree.calls[:number] + tree.calls[number + 1 :])
        for smaller in _simpler(call, ("child", "site")):
            yield dataclasses.replace(tree, calls=(*tree.calls[:number], smaller, *tree.calls[number + 1 :]))
    yield from _simpler(tree, ("cls", "children", "calls"))


def _simpler(value: Any, keep: tuple[str, ...]) -> Iterator[Any]:
    for field in dataclasses.fields(value):
        if field.name not in keep and getattr(value, field.name) != field.default:
            yield dataclasses.replace(value, **{field.name: field.default})


# ---- command line ----


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs seeds one after the other; the number of failures is the exit code, at most 100."""
    parser = argparse.ArgumentParser(description="Trains random models on shards and whole, and compares.")
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--count", type=int, default=None, help="how many seeds; default: as many as there is time for")
    parser.add_argument("--shrink-minutes", type=float, default=2.0, help="time to make a failing program smaller")
    given = parser.parse_args(arguments)
    pool, start, seed, failures = RankPool(given.ranks), time.monotonic(), given.seed, 0
    try:
        while seed - given.seed != given.count and time.monotonic() - start < 60 * given.minutes:
            failures += _try_seed(pool, seed, given)
            seed += 1
    finally:
        pool.close()
    sys.stdout.write(f"{seed - given.seed} programs on {given.ranks} ranks, {failures} failed\n")
    return min(failures, 100)


def _try_seed(pool: RankPool, seed: int, given: argparse.Namespace) -> int:
    program = random_program(seed, given.ranks)
    try:
        check_program(pool, program)
    except AssertionError as error:
        sys.stdout.write(f"FAILED\n{error}\n")
        sys.stdout.flush()
        small = shrunk(pool, program, str(error), time.monotonic() + 60 * given.shrink_minutes)
        sys.stdout.write(f"as small as it got:\n{described(small)}\n{small!r}\n\n")
        sys.stdout.flush()
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
