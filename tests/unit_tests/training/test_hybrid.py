"""Runs with an outer data-parallel axis are the runs without one, and their checkpoints are interchangeable."""

import pytest
import torch

from tests.unit_tests.training.runs import Outcome, train

FLAGS = "--train-iters 4 --attention-dropout 0 --hidden-dropout 0 --clip-grad 0.5 "
INSTANCES = "--num-distributed-optimizer-instances 2 "
OUTER_SHARDS = INSTANCES + "--outer-dp-sharding-strategy optim "


def jobs(*flags: str) -> list[Outcome]:
    """Several runs, one after the other."""
    return [train(FLAGS + each) for each in flags]


def assert_close(came: Outcome, whole: Outcome) -> None:
    """Of a run that ends with `whole`, perhaps resumed."""
    first = len(whole.losses) - len(came.losses)
    assert came.losses == pytest.approx(whole.losses[first:], rel=1e-5)
    assert came.norms == pytest.approx(whole.norms[first:], rel=1e-4)
    for part in ("weights", "optimizer"):
        assert getattr(came, part).keys() == getattr(whole, part).keys()
        for name, value in getattr(whole, part).items():
            torch.testing.assert_close(getattr(came, part)[name], value, rtol=1e-4, atol=1e-6)
    assert came.state == whole.state


def test_hybrid_sharding_trains_like_flat_and_resumes_as_anything(mcore_ranks4, mcore_ranks2, tmp_path):
    hsdp, hfsdp = tmp_path / "hsdp", tmp_path / "hfsdp"
    by_rank = mcore_ranks4.run(
        jobs,
        "",
        INSTANCES + f"--save-interval 2 --save {hsdp}",
        OUTER_SHARDS + f"--save-interval 2 --save {hfsdp}",
        INSTANCES + f"--load {hfsdp} --ckpt-step 2",
        timeout_s=180.0,
    )
    (on_half,) = mcore_ranks2.run(jobs, f"--load {hsdp} --ckpt-step 2")[0]
    for flat, as_hsdp, as_hfsdp, to_hsdp in by_rank:
        assert [len(run.losses) for run in (flat, as_hsdp, as_hfsdp, to_hsdp, on_half)] == [4, 4, 4, 2, 2]
        for came in (as_hsdp, as_hfsdp, to_hsdp, on_half):
            assert_close(came, flat)
    for run in range(4):  # the norm is one number
        assert len({tuple(outcomes[run].norms) for outcomes in by_rank}) == 1
