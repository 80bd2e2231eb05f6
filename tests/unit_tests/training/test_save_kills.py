"""Ranks that are killed while a checkpoint is written: the run goes on from the one before, or from the new one."""

import os
import signal
from contextlib import ExitStack
from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist

from tests.unit_tests.harness.rank_pool import RankError
from tests.unit_tests.training.runs import train
from tests.unit_tests.training.test_save_crashes import EVERY_POINT

RUN = "--train-iters 6 "


def run_killed(folder: Path, flags: str, victim: int, method: str, count: int) -> None:
    """A run that saves at 2 and 4, in whose second save rank `victim` gets SIGKILL at call `count` of `method`."""
    from megatron.training.checkpoint.format.filesystem import Disk
    from megatron.training.checkpoint.save.async_writer import WriterProcess

    owner = WriterProcess if method == "start" else Disk
    whole, calls = getattr(owner, method), []

    def call(self, *args):
        is_second = bool(list(folder.glob("*iter_0000004*")))
        calls.extend([method] * is_second)
        if len(calls) == count and method != "start":
            os.kill(os.getpid(), signal.SIGKILL)
        whole(self, *args)
        if len(calls) == count:  # It has been handed over, and is being written.
            os.kill(os.getpid(), signal.SIGKILL)

    with ExitStack() as stack:
        if dist.get_rank() == victim:
            stack.enter_context(mock.patch.object(owner, method, call))
        train(RUN + f"--save {folder} --save-interval 2 --save-retain-interval 4 {flags}")


# Before that call, except for `start`. Of rank 0: its own file, .metadata, run_config.yaml, manifest; then the folder,
# the tracker, and what is not retained.
CASES = [
    ("", 1, "write", 40, {2}),
    ("--async-save", 1, "start", 1, {2}),
]
MORE = [
    ("", 1, "sync", 1, {2}),
    ("", 0, "write", 40, {2}),
    *(("", 0, "sync", count, {2}) for count in (1, 2, 4)),
    ("", 0, "rename", 1, {2}),
    ("", 0, "rename", 2, {2}),
    ("", 0, "rename", 3, {4}),
    ("", 0, "delete_file", 2, {4}),
    ("--async-save", 0, "start", 1, {2}),
    ("--async-save", 0, "rename", 1, {2}),
    ("--async-save", 0, "sync_folder", 2, {2}),
]


@pytest.mark.slow
@pytest.mark.parametrize("flags, victim, method, count, expected", CASES + (MORE if EVERY_POINT else []))
def test_a_run_goes_on_after_a_rank_was_killed(mcore_ranks2, tmp_path, flags, victim, method, count, expected):
    with pytest.raises(RankError, match="died with exit code -9"):
        mcore_ranks2.run(run_killed, tmp_path, flags, victim, method, count)
    tracked = int((tmp_path / "latest_checkpointed_iteration.txt").read_text())
    whole, resumed = mcore_ranks2.run(runs_after, tmp_path)[0]
    at = 6 - len(resumed.losses)
    assert at == tracked and at in expected
    assert resumed.losses == whole.losses[at:]
    for name, value in whole.weights.items():
        assert value.equal(resumed.weights[name])
    assert not list(tmp_path.glob(".*")), "the next save clears up"


def runs_after(folder: Path) -> list:
    return [train(RUN), train(RUN + f"--load {folder} --save {folder}")]
