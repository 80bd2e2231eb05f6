"""Runs on tensor-parallel ranks are the runs without them, and their checkpoints are interchangeable."""

import shlex
from unittest import mock

import torch.distributed as dist

from tests.unit_tests.training.runs import TINY, Outcome, kept_groups, train
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


def said_of_models(*flags: str) -> list[list[str]]:
    """Log lines from building the models of several runs."""
    from megatron.training import gpt, model
    from megatron.training.config import load_config
    from megatron.training.initialize import initialized
    from megatron.training.job import prepare
    from megatron.training.ranks import Ranks

    ranks = Ranks(rank=dist.get_rank(), local_rank=dist.get_rank(), world_size=dist.get_world_size())
    said = []
    for each in flags:
        job = prepare(load_config(shlex.split(TINY + "--train-iters 4 " + each)), ranks.world_size)
        with (
            kept_groups(),
            initialized(job.config, job.plan, ranks) as world,
            mock.patch.object(model, "logger") as log,
        ):
            model.build_model(job, gpt.model_provider, world)
        said.append([call.args[0] % call.args[1:] for call in log.info.call_args_list])
    return said


def test_the_log_counts_the_whole_model_s_parameters_and_tells_of_padding(mcore_ranks2):
    kinds = [
        "--swiglu --disable-bias-linear ",
        "--untie-embeddings-and-output-weights --group-query-attention --num-query-groups 2 ",
    ]
    padded = "--padded-vocab-size 192 "
    flags = [kind + split + padded for kind in kinds for split in ("", SPLIT)]
    unpadded = "--make-vocab-size-divisible-by 128"
    for *said, quiet in mcore_ranks2.run(said_of_models, *flags, unpadded):
        note = "vocabulary of 128 padded to 192 rows (--padded-vocab-size, --make-vocab-size-divisible-by)"
        assert all(line[1:] == [note] for line in said) and len(quiet) == 1
        counts = [line[0] for line in said]
        assert counts[0] == counts[1] and counts[2] == counts[3] and counts[0] != counts[2]
