"""Random models, random shardings: each trains on shards as it does whole. More of them: see `harness/fuzzer.py`."""

import os

import pytest

from tests.unit_tests.harness import fuzz_runs
from tests.unit_tests.harness.fuzz_found import FOUND, REFUSED
from tests.unit_tests.harness.fuzz_programs import random_program
from tests.unit_tests.harness.fuzz_runs import check_program, described
from tests.unit_tests.harness.fuzzer import shrunk
from tests.unit_tests.harness.rank_pool import RankError, RankPool

#: Another number tries other models.
BASE = int(os.environ.get("MEGATRON_FSDP_FUZZ_SEED", "0"))
#: Programs of one test, and tests by number of ranks.
COUNT = 20
TESTS = {2: 3, 3: 2, 4: 1}


@pytest.mark.parametrize(("ranks", "part"), [(ranks, part) for ranks, parts in TESTS.items() for part in range(parts)])
def test_random_programs_train_like_one_process(rank_pools: dict[int, RankPool], ranks: int, part: int) -> None:
    for seed in range(BASE + part * COUNT, BASE + (part + 1) * COUNT):
        check_program(rank_pools[ranks], random_program(seed, ranks))


@pytest.mark.parametrize("name", FOUND)
def test_a_program_that_was_found_to_fail_trains_like_one_process(ranks2: RankPool, name: str) -> None:
    check_program(ranks2, FOUND[name])


@pytest.mark.parametrize("name", REFUSED)
def test_another_order_where_ranks_differ_is_refused(ranks2: RankPool, name: str) -> None:
    with pytest.raises(RankError, match="is not in its program from there on"):
        ranks2.run(fuzz_runs.run_program, REFUSED[name], timeout_s=15)


def test_a_seed_is_always_the_same_program() -> None:
    assert random_program(3, 2) == random_program(3, 2) != random_program(4, 2)
    assert described(random_program(3, 2)).startswith("program 3 on 2 ranks: Program(")


def test_the_first_steps_gradients_get_no_allowance_for_noise() -> None:
    program = random_program(3, 2)
    expected = fuzz_runs.train_reference(program.build, program.batches(), program.recipe)
    first, *later = fuzz_runs._noise(program, expected)
    assert {size for name, size in first.items() if not name.startswith("weights")} == {0.0}
    assert later and all(max(step.values()) > 0 for step in later)


class BrokenPool:
    """Stands for ranks of which no program with an odd parameter, or with accumulation, comes back."""

    def run(self, function, program, timeout_s):
        if "kind='odd'" in described(program) or program.microbatches > 1:
            raise AssertionError("weights['w'] of step 0 differs by 1")
        raise ValueError("works")


def test_what_fails_is_named_with_its_seed_and_made_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fuzz_runs, "train_reference", lambda *_: [])
    seed = next(s for s in range(100) if "kind='odd'" in described(random_program(s, 2)))
    program = random_program(seed, 2)
    with pytest.raises(AssertionError, match=f"fuzzer --seed {seed} --count 1 --ranks 2"):
        check_program(BrokenPool(), program)
    small = shrunk(BrokenPool(), program, "differs by", deadline=float("inf"))
    assert len(described(small).splitlines()) < min(8, len(described(program).splitlines()))
