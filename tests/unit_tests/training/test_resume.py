"""A run that was stopped and resumed is the run that never stopped."""

import re

import pytest
import torch
import torch.distributed as dist

from megatron.training.errors import RunError
from tests.unit_tests.training.runs import Outcome, logged, train

ITERATIONS = "--train-iters 12 "
NO_DROPOUT = "--attention-dropout 0 --hidden-dropout 0 "
NO_SHARD = "--data-parallel-sharding-strategy no_shard "


def jobs(*flags: str) -> list[Outcome]:
    """Several runs, one after the other."""
    return [train(each) for each in flags]


def assert_same(one: Outcome, other: Outcome) -> None:
    assert one.weights.keys() == other.weights.keys() and one.optimizer.keys() == other.optimizer.keys()
    for name, value in one.weights.items():
        assert torch.equal(value, other.weights[name]), name
    for name, value in one.optimizer.items():
        assert torch.equal(value, other.optimizer[name]), name
    assert one.state == other.state


def test_50_and_50_iterations_are_100_bit_for_bit(mcore_ranks2, tmp_path):
    """Dropout is on, and the loss scale grows and falls: all states must be restored, and counters go on."""
    small = "--num-layers 1 --seq-length 16 --global-batch-size 4 --hidden-size 16 "
    flags = small + "--train-iters 100 --fp16 --loss-scale-window 7 --hysteresis 1 --initial-loss-scale 1048576 "
    everyone = mcore_ranks2.run(
        jobs,
        flags,
        flags + f"--save {tmp_path} --exit-interval 50",
        flags + f"--load {tmp_path} --save {tmp_path}",
    )
    for rank, (whole, first, second) in enumerate(everyone):
        assert len(first.losses) == len(second.losses) == 50
        assert first.losses + second.losses == whole.losses
        assert first.norms + second.norms == whole.norms
        assert_same(second, whole)
        assert whole.state["skipped_iterations"] > 1
        assert logged(first) + logged(second) == logged(whole)
        scales = re.findall("loss scale: ([0-9.]+)", second.output)
        assert (len(logged(whole)), len(set(scales)) > 1) == ((0, False) if rank else (100, True))


def test_an_evaluation_changes_nothing(mcore_ranks2):
    evaluated = "--eval-interval 4 --eval-iters 2 "
    whole, evaluated_too = mcore_ranks2.run(jobs, ITERATIONS, ITERATIONS + evaluated)[1]
    assert evaluated_too.losses == whole.losses
    assert evaluated_too.state.pop("consumed_valid_samples") == 4 * 2 * 8  # at 4, 8, 12 and at the end
    whole.state.pop("consumed_valid_samples")
    assert_same(evaluated_too, whole)


def close(one: list[float], other: list[float]) -> bool:
    return one == pytest.approx(other, rel=1e-5)


def test_resumes_on_fewer_ranks_and_under_other_strategies(mcore_ranks2, mcore_ranks1, tmp_path):
    flags = "--train-iters 6 " + NO_DROPOUT
    zero3, zero1 = tmp_path / "zero3", tmp_path / "zero1"
    whole, _, of_two = mcore_ranks2.run(
        jobs,
        flags,
        flags + f"--exit-interval 3 --save {zero3}",
        flags + f"--load {zero3} --data-parallel-sharding-strategy optim --save {zero1} --exit-interval 4",
    )[0]
    (alone,) = mcore_ranks1.run(jobs, flags + NO_SHARD + f"--load {zero1}")[0]
    assert close(of_two.losses, whole.losses[3:4])
    assert close(alone.losses, whole.losses[4:])
    for part in ("weights", "optimizer"):
        for name, value in getattr(whole, part).items():
            torch.testing.assert_close(getattr(alone, part)[name], value, rtol=1e-4, atol=1e-6)
    assert alone.state == whole.state


def test_resumes_on_more_ranks(mcore_ranks2, mcore_ranks1, tmp_path):
    flags = "--train-iters 4 " + NO_DROPOUT
    whole, _ = mcore_ranks1.run(jobs, flags, flags + NO_SHARD + f"--exit-interval 2 --save {tmp_path}")[0]
    (resumed,) = mcore_ranks2.run(jobs, flags + f"--load {tmp_path}")[0]
    assert close(resumed.losses, whole.losses[2:])


def test_iterations_without_the_file_that_names_the_latest(mcore_ranks2, tmp_path):
    """Starting anew would write over them."""
    (tmp_path / "iter_0000004").mkdir()
    message = "has no latest_checkpointed_iteration.txt, but iter_0000004; pass --ckpt-step"
    mcore_ranks2.run_expecting(RunError, message, jobs, f"--train-iters 3 --load {tmp_path}")


def test_a_folder_that_cannot_be_written_ends_all_ranks_before_the_model_is_built(mcore_ranks2, tmp_path):
    (tmp_path / "file").touch()
    message = "^--save .*/file/x cannot be written: Not a directory$"
    mcore_ranks2.run_expecting(RunError, message, jobs, f"--train-iters 3 --save {tmp_path}/file/x")


def fail_on(bad: int, message: str = "disk") -> None:
    from megatron.training.collective_errors import on_every_rank

    def work() -> int:
        if dist.get_rank() >= bad:
            raise ValueError(message)
        return dist.get_rank()

    on_every_rank(work, torch.device("cpu"))


def test_ranks_agree_on_what_failed(mcore_ranks2):
    mcore_ranks2.run(fail_on, 2)
    mcore_ranks2.run_expecting(RuntimeError, "^rank 1: disk$", fail_on, 1)
    mcore_ranks2.run_expecting(RuntimeError, "^disk$", fail_on, 0)
    mcore_ranks2.run_expecting(RuntimeError, "^rank 1: ValueError$", fail_on, 1, "")
