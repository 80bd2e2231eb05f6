"""Checkpoints that are written in the background: the same as others, and their failures end all ranks."""

import logging
import os
import re
import signal
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megatron.training.errors import RunError
from tests.unit_tests.training.runs import Outcome, train

TRACKER = "latest_checkpointed_iteration.txt"


def runs(folder: Path) -> list[Outcome]:
    flags = "--train-iters 5 --swiglu "
    return [
        train(flags + f"--save {folder / 'sync'} --save-interval 2"),
        train(flags + f"--save {folder / 'async'} --save-interval 2 --async-save"),
        train(flags + f"--load {folder / 'async'} --ckpt-step 2 --save {folder / 'async'} --save-interval 2"),
    ]


def stored(folder: Path) -> dict:
    """Everything in a checkpoint but the run's flags."""
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    dcp_to_torch_save(str(folder), str(folder.parent / "whole.pt"))
    values = torch.load(folder.parent / "whole.pt", weights_only=False)
    assert values.pop("args") is not None
    return values


def assert_equal(one, other) -> None:
    assert type(one) is type(other)
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        for name in one:
            assert_equal(one[name], other[name])
    elif isinstance(one, torch.Tensor):
        assert torch.equal(one, other)
    else:
        assert one == other


def test_a_checkpoint_in_the_background_is_the_same(mcore_ranks2, tmp_path):
    """And training does not notice."""
    for sync, async_writer, resumed in mcore_ranks2.run(runs, tmp_path):
        assert sync.losses == async_writer.losses
        assert resumed.losses == sync.losses[2:]
        for name, value in sync.weights.items():
            assert torch.equal(value, async_writer.weights[name]) and torch.equal(value, resumed.weights[name])
    names = ["iter_0000002", "iter_0000004", "iter_0000005", "latest_checkpointed_iteration.txt"]
    for folder in (tmp_path / "sync", tmp_path / "async"):
        assert sorted(path.name for path in folder.iterdir()) == names
    assert_equal(stored(tmp_path / "sync" / names[1]), stored(tmp_path / "async" / names[1]))


def run_until(fault, flags: str) -> tuple[str, int, list[str]]:
    """The error that ends a run on this rank, its last iteration, and what the run said."""
    outcome, said = [], []
    from megatron.training.callbacks import Callback

    class Watch(Callback):
        def before_step(self, run):
            outcome.append(run.state.iteration)
            fault(run)

    class Collect(logging.Handler):
        def emit(self, record):
            said.append(record.getMessage())

    logger, handler = logging.getLogger("megatron.training.checkpoint.save.saver"), Collect()
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        with pytest.raises(RunError) as raised:
            train(flags, callbacks=[Watch()])
    finally:
        logger.removeHandler(handler)
        logger.setLevel(logging.NOTSET)
    return str(raised.value), outcome[-1], said


def fail_on_rank_1(folder: Path) -> tuple[str, int, list[str]]:
    """The second checkpoint cannot be written by rank 1, whose process is told of a folder that is not there."""
    from megatron.training.checkpoint.save import async_writer

    stage = async_writer.stage

    def stage_badly(folder: Path, *rest):
        staged = stage(folder, *rest)
        is_bad = dist.get_rank() == 1 and ".iter_0000003" in folder.name
        return replace(staged, folder=folder / "gone") if is_bad else staged

    flags = f"--train-iters 400 --save {folder} --save-interval 3 --exit-interval 300 --async-save"
    with mock.patch.object(async_writer, "stage", stage_badly):
        return run_until(lambda run: None, flags)


def test_a_write_that_fails_in_the_background_ends_every_rank(mcore_ranks2, tmp_path):
    for error, iteration, said in mcore_ranks2.run(fail_on_rank_1, tmp_path):
        assert error.startswith(f"iteration 3 cannot be saved to {tmp_path}: rank 1: ")
        assert error.endswith("No such file or directory")
        assert 3 <= iteration < 300, "at the end of a step"
        assert re.match(
            r"saving iteration 3 in the background; training stood still for [\d.]+ s \(0\.0\d+ s of it for", said[0]
        )
    assert list(tmp_path.iterdir()) == [], "nothing looks like a checkpoint"


def lose_the_process(folder: Path) -> tuple[str, int, list[str], int]:
    """The process is killed once the checkpoint of iteration 1 is published; that of iteration 2 is due later."""
    from megatron.training.checkpoint.save import saver

    processes = []

    class Watched(saver.WriterProcess):
        def __init__(self) -> None:
            super().__init__()
            processes.append(self)

    published = []

    def kill(run) -> None:
        if (folder / TRACKER).exists() and not published:
            published.append(run.state.iteration)
            os.kill(processes[0].pid, signal.SIGKILL)

    with mock.patch.object(saver, "WriterProcess", Watched):
        return *run_until(kill, f"--train-iters 400 --save {folder} --save-interval 1 --async-save"), published[0]


def test_a_process_that_is_gone_is_told_and_the_last_checkpoint_stays(mcore_ranks1, tmp_path):
    ((error, last, _, published),) = mcore_ranks1.run(lose_the_process, tmp_path)
    assert f"cannot be saved to {tmp_path}: the process that writes checkpoints (pid " in error
    assert error.endswith("ended by signal 9") and last <= published + 1
    latest = (tmp_path / TRACKER).read_text()
    assert [path.name for path in sorted(tmp_path.glob("iter_*"))][-1] == f"iter_{int(latest):07d}"


def end_at_once(folder: Path) -> list[str]:
    """The checkpoint of a run that ends right after its save, by its own error or as asked."""
    from megatron.training.errors import NotFiniteError

    def fail(run) -> None:
        if run.state.iteration == 1:
            raise NotFiniteError("a loss")

    error, *_ = run_until(fail, f"--train-iters 5 --save {folder / 'failed'} --save-interval 1 --async-save")
    assert error == "a loss"
    return sorted(path.name for path in (folder / "failed").iterdir())


def test_what_is_being_written_is_waited_for_when_all_ranks_fail_alike(mcore_ranks1, tmp_path):
    assert mcore_ranks1.run(end_at_once, tmp_path) == [["iter_0000001", TRACKER]]


def test_memory_is_shared_grows_and_holds_any_dtype():
    from megatron.training.checkpoint.save import shared_memory
    from megatron.training.checkpoint.save.shared_memory import SharedMemory, StagedTensor

    memory = SharedMemory()
    other = SharedMemory(os.dup(memory.descriptor))
    values = [torch.arange(6, dtype=torch.bfloat16).view(2, 3), torch.tensor(7), torch.empty(0, 4)]
    for nbytes, offset in ((128, 0), (8192, 4096)):
        memory.reserve(nbytes, pinned=False)
        other.attach(nbytes)
        for value in values:
            place = StagedTensor(offset=offset, shape=tuple(value.shape), dtype=value.dtype)
            memory.view(place).copy_(value)
            seen = other.view(place)
            assert torch.equal(seen, value) and seen.untyped_storage().nbytes() == value.nbytes
    with (
        mock.patch.object(shared_memory, "available_nbytes", lambda: 1 << 20),
        pytest.raises(OSError, match="--async-save needs 2097152 bytes of host memory, 1048576 are left"),
    ):
        memory.reserve(1 << 21, pinned=False)
    memory.close()
    other.close()
