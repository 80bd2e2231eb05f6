"""Runs on tensor-parallel ranks are the runs without them, and their checkpoints are interchangeable."""

from tests.unit_tests.training.runs import Outcome, train
from tests.unit_tests.training.test_hybrid import assert_close

# One padded vocabulary, of 128, for any number of ranks. The gated weight is cut in two halves.
FLAGS = (
    "--train-iters 4 --attention-dropout 0 --hidden-dropout 0 --clip-grad 0.5 --swiglu --disable-bias-linear "
    "--make-vocab-size-divisible-by 32 "
)
SPLIT = "--tensor-model-parallel-size 2 "


def jobs(*flags: str) -> list[Outcome]:
    """Several runs, one after the other."""
    return [train(FLAGS + each) for each in flags]


def test_split_models_train_like_whole_ones_and_resume_as_such(mcore_ranks4, mcore_ranks2, tmp_path):
    split, whole = tmp_path / "split", tmp_path / "whole"
    first = mcore_ranks4.run(
        jobs,
        f"--save-interval 2 --save {whole}",
        SPLIT + f"--save-interval 2 --save {split}",
        timeout_s=180.0,
    )
    second = mcore_ranks4.run(
        jobs, SPLIT + f"--load {whole} --ckpt-step 2", f"--load {split} --ckpt-step 2", timeout_s=180.0
    )
    (on_half,) = mcore_ranks2.run(jobs, SPLIT + f"--load {split} --ckpt-step 2")[0]
    for (flat, on_tp), resumed in zip(first, second, strict=True):
        for came in (on_tp, *resumed, on_half):
            assert_close(came, flat)
    for outcomes in (first, second):
        for run in range(2):  # the norm is one number
            assert len({tuple(rank[run].norms) for rank in outcomes}) == 1
