"""A run that was stopped and resumed is the run that never stopped."""

import dataclasses
import logging
import shutil

import pytest
import torch

from tests.unit_tests.harness.rank_pool import RankPool, setup_mcore
from tests.unit_tests.training.runs import Outcome, train

ITERATIONS = "--train-iters 12 "
NO_DROPOUT = "--attention-dropout 0 --hidden-dropout 0 "


@pytest.fixture(scope="module")
def one_rank():
    pool = RankPool(1, setup=setup_mcore)
    yield pool
    pool.close()


def jobs(*flags: str) -> list[Outcome]:
    """Several runs, one after the other."""
    logging.getLogger().addHandler(logging.NullHandler())
    return [train(each) for each in flags]


def assert_same(one: Outcome, other: Outcome) -> None:
    assert one.weights.keys() == other.weights.keys() and one.optimizer.keys() == other.optimizer.keys()
    for name, value in one.weights.items():
        assert torch.equal(value, other.weights[name]), name
    for name, value in one.optimizer.items():
        assert torch.equal(value, other.optimizer[name]), name
    assert one.state == other.state


def test_resumed_equals_uninterrupted_bit_for_bit(mcore_ranks2, tmp_path):
    """Dropout is on: the random states must be restored too. An evaluation must change nothing."""
    evaluated = "--eval-interval 4 --eval-iters 2 "
    whole, evaluated_too, first, second = mcore_ranks2.run(
        jobs,
        ITERATIONS,
        ITERATIONS + evaluated,
        ITERATIONS + f"--save {tmp_path} --exit-interval 5",
        ITERATIONS + f"--load {tmp_path} --save {tmp_path}",
    )[1]
    assert len(first.losses) == 5 and len(second.losses) == 7
    assert first.losses + second.losses == whole.losses
    assert first.norms + second.norms == whole.norms
    assert_same(second, whole)
    assert evaluated_too.losses == whole.losses
    assert evaluated_too.state.pop("consumed_valid_samples") == 4 * 2 * 8  # at 4, 8, 12 and at the end
    whole.state.pop("consumed_valid_samples")
    assert_same(evaluated_too, whole)
