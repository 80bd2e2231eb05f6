"""Checkpoints: their contents, the meaning of their flags, and their errors."""

import errno
import functools
import logging
import logging.handlers
import re
import shutil
from pathlib import Path
from unittest import mock

import pytest
import torch

from megatron.training.errors import RunError
from tests.unit_tests.training.runs import Outcome, train

RUN = "--train-iters 3 "


def run_all(*flags: str) -> list[Outcome]:
    return [train(RUN + each) for each in flags]


@pytest.fixture(scope="module")
def saved(mcore_ranks1, tmp_path_factory):
    """(outcome, folder) of a run that was saved at 1 and 3."""
    folder = tmp_path_factory.mktemp("saved")
    (outcome,) = mcore_ranks1.run(run_all, f"--save {folder} --save-interval 1 --exit-interval 2")[0]
    return outcome, folder


def stored(folder: Path) -> dict:
    """The names and kinds of everything in a checkpoint."""
    from torch.distributed.checkpoint import FileSystemReader

    return FileSystemReader(str(folder)).read_metadata().state_dict_metadata


def test_the_layout(saved):
    from megatron.training.config import from_yaml

    _, folder = saved
    assert sorted(path.name for path in folder.iterdir()) == [
        "iter_0000001", "iter_0000002", "latest_checkpointed_iteration.txt",
    ]  # fmt: skip
    assert (folder / "latest_checkpointed_iteration.txt").read_text() == "2"
    files = sorted(path.name for path in (folder / "iter_0000002").iterdir())
    assert files == [".metadata", "__0_0.distcp", "manifest.json", "run_config.yaml"]
    config = from_yaml(folder / "iter_0000002" / "run_config.yaml")
    assert config.checkpoint.save == folder and config.train.train_iters == 3


def test_the_names(saved):
    _, folder = saved
    names = stored(folder / "iter_0000002")
    weight = "decoder.layers.0.self_attention.linear_qkv.weight"
    assert {
        f"model.module.{weight}", f"optimizer.state.{weight}.exp_avg", f"optimizer.state.{weight}.step",
        f"optimizer.param_to_group_meta.{weight}.lr", "opt_param_scheduler.num_steps", "iteration", "args",
        "num_floating_point_operations_so_far", "progress.consumed_train_samples",
        "rng_state.rank_00000.random_rng_state", "checkpoint_version",
    } <= names.keys()  # fmt: skip
    assert {name.split(".")[0] for name in names} == {
        "checkpoint_version", "args", "iteration", "num_floating_point_operations_so_far", "model", "progress",
        "optimizer", "opt_param_scheduler", "rng_state",
    }  # fmt: skip


def test_flags_of_loading(mcore_ranks1, saved, tmp_path):
    before, folder = saved
    resumed, finetuned, first, weights_only, same_rng = mcore_ranks1.run(
        run_all,
        f"--load {folder}",
        f"--load {folder} --finetune",
        f"--load {folder} --ckpt-step 1 --exit-interval 2",
        f"--load {folder} --no-load-optim",
        f"--load {folder} --no-load-rng",
    )[0]
    assert len(resumed.losses) == 1 and len(finetuned.losses) == 3 and len(first.losses) == 1
    assert first.losses == before.losses[1:], "iteration 1 is resumed exactly"
    assert finetuned.losses[0] < before.losses[0] and finetuned.state["consumed_train_samples"] == 24
    # Dropout makes the loss depend on the random states, and the update on the moments.
    assert weights_only.losses == resumed.losses != same_rng.losses
    name = next(iter(resumed.weights))
    assert not weights_only.weights[name].equal(resumed.weights[name])


def test_parts_that_were_not_saved(mcore_ranks1, saved, tmp_path):
    _, folder = saved
    without = f"--load {tmp_path} "
    mcore_ranks1.run(run_all, f"--save {tmp_path} --no-save-optim --no-save-rng --exit-interval 2")
    assert {name.split(".")[0] for name in stored(tmp_path / "iter_0000002")} == {
        "checkpoint_version", "args", "iteration", "num_floating_point_operations_so_far", "model", "progress",
    }  # fmt: skip
    mcore_ranks1.run_expecting(ValueError, "without optimizer; pass --no-load-optim, or --finetune", run_all, without)
    mcore_ranks1.run_expecting(
        ValueError, "without rng_state; pass --no-load-rng", run_all, without + "--no-load-optim"
    )
    (resumed,) = mcore_ranks1.run(run_all, without + "--no-load-optim --no-load-rng")[0]
    assert resumed.state["iteration"] == 3 and len(resumed.losses) == 1


def test_a_missing_checkpoint(mcore_ranks1, saved, tmp_path):
    _, folder = saved
    (anew,) = mcore_ranks1.run(run_all, f"--load {tmp_path}")[0]
    assert len(anew.losses) == 3
    must = f"--load {tmp_path} --exit-on-missing-checkpoint"
    mcore_ranks1.run_expecting(RunError, "--load .* has no checkpoint", run_all, must)
    message = r"iter_0000007 does not exist; complete there: iter_0000001, iter_0000002"
    mcore_ranks1.run_expecting(RunError, message, run_all, f"--load {folder} --ckpt-step 7")


def test_a_checkpoint_of_another_model(mcore_ranks1, saved):
    _, folder = saved
    load = f"--load {folder} "
    fits_not = functools.partial(mcore_ranks1.run_expecting, ValueError)
    rows = r"word_embeddings.weight: \(128, 32\) in .* \(256, 32\) in .*; .* pass --padded-vocab-size 128"
    fits_not(rows, run_all, load + "--vocab-size 200")
    # Both layers' weights are listed, not only the first that differs.
    shapes = r"(?s)shape.*layers.0.mlp.linear_fc1.weight: \(128, 32\) in the checkpoint, \(64, 32\) in.*layers.1"
    fits_not(shapes, run_all, load + "--ffn-hidden-size 64")
    fits_not(r"(?s)missing \(\d+\):.*decoder.layers.2.mlp.linear_fc1.bias", run_all, load + "--num-layers 3")
    fits_not(r"(?s)unexpected \(\d+\):.*decoder.layers.1.mlp.linear_fc1.bias", run_all, load + "--num-layers 1")
    fits_not("the schedule is not the checkpoint's: .*--override-opt-param-scheduler", run_all, load + "--lr 0.5")
    lenient = load + "--no-strict-fsdp-dtensor-load --num-layers "
    fits_not(r"(?s)missing.*layers.2.*\n--dist-ckpt-strictness log_all would", run_all, lenient + "3")
    fits_not(r"(?s)unexpected.*layers.1", run_all, lenient + "1 --dist-ckpt-strictness raise_all")
    partial, override = mcore_ranks1.run(
        run_all,
        load + "--num-layers 3 --no-strict-fsdp-dtensor-load --dist-ckpt-strictness log_all",
        load + "--lr 0.5 --override-opt-param-scheduler",
    )[0]
    assert partial.state["iteration"] == override.state["iteration"] == 3


def warnings_of(flags: str) -> list[str]:
    """Warnings of `megatron.training` in a run."""
    logger = logging.getLogger("megatron.training")
    told = logging.handlers.BufferingHandler(1000)
    told.setLevel(logging.WARNING)
    logger.addHandler(told)
    try:
        train(RUN + flags)
    finally:
        logger.removeHandler(told)
    return [record.getMessage() for record in told.buffer]


def test_weights_that_fit_another_model_are_refused(mcore_ranks1, saved):
    """Every shape is the same, and the model computes something else."""
    load = f"--load {saved[1]} "
    fits_not = functools.partial(mcore_ranks1.run_expecting, RunError)
    heads = "was trained as another model: --num-attention-heads is 8, the checkpoint's is 4; --kv-channels is 4"
    fits_not(heads, run_all, load + "--num-attention-heads 8")
    several = "--squared-relu is True, .* is False; --norm-epsilon is 0.001, .*; --rotary-base is 500, .* is 10000; "
    fits_not(several, run_all, load + "--squared-relu --norm-epsilon 1e-3 --rotary-base 500")
    for flags in ("--finetune", "--no-strict-fsdp-dtensor-load"):
        told = mcore_ranks1.run(warnings_of, f"{load} --rotary-base 500 {flags}")[0]
        assert any("another model: --rotary-base is 500, the checkpoint's is 10000" in each for each in told)
    assert mcore_ranks1.run(warnings_of, load + "--attention-dropout 0 --seq-length 32")[0] == []


def test_another_optimizers_state_names_the_flag(mcore_ranks1, saved):
    message = r"(?s)missing \(\d+\):\n  optimizer.state.*\npass --no-load-optim to go on with the weights alone"
    mcore_ranks1.run_expecting(RunError, message, run_all, f"--load {saved[1]} --optimizer sgd")


def test_a_run_is_warned_before_it_replaces_newer_checkpoints(mcore_ranks1, damageable):
    told = mcore_ranks1.run(warnings_of, f"--save {damageable} --exit-interval 1 --no-save-optim --no-save-rng")[0]
    assert any(f"--save {damageable} already has iter_0000002 and 1 before it, and this run" in each for each in told)
    assert mcore_ranks1.run(warnings_of, f"--load {damageable} --ckpt-step 2 --save {damageable}")[0] == []


def save_beside(folder: Path) -> list[str]:
    """The warnings of a run that saves at 1, 2 and 3, when another one has saved after 1."""
    from megatron.training.checkpoint.save import saver

    def publish(disk, partial, *rest):
        published = whole(disk, partial, *rest)
        if partial.iteration == 1:
            (folder / "latest_checkpointed_iteration.txt").write_text("7")
        return published

    whole = saver.publish
    with mock.patch.object(saver, "publish", publish):
        return warnings_of(f"--save {folder} --save-interval 1 --no-save-optim --no-save-rng")


def test_another_run_that_saves_to_the_same_folder_is_told(mcore_ranks1, tmp_path):
    (told,) = mcore_ranks1.run(save_beside, tmp_path)
    assert len(told) == 1 and "iteration.txt names 7, which this run has not saved: does another run" in told[0]


def test_a_folder_under_another_iterations_name_is_refused(mcore_ranks1, damageable):
    shutil.rmtree(damageable / "iter_0000002")
    shutil.copytree(damageable / "iter_0000001", damageable / "iter_0000002")
    message = "iter_0000002 is no .*: what it holds is of iteration 1, not 2, as if it were renamed; complete besides"
    mcore_ranks1.run_expecting(RunError, message, run_all, f"--load {damageable}")


def test_a_difference_names_each_parameter_once():
    from megatron.training.checkpoint.load.match_keys import Difference

    missing = ("model.module.a", "optimizer.state.a.exp_avg", "optimizer.state.b.exp_avg", "optimizer.state.b.step")
    difference = Difference(missing=missing, unexpected=(), shapes=())
    assert str(difference) == "missing (2):\n  model.module.a\n  optimizer.state.b.*"
    assert not Difference(missing=(), unexpected=(), shapes=())


def test_a_longer_run_needs_no_flag_where_the_schedule_is_the_same(mcore_ranks1, saved):
    _, folder = saved
    (longer,) = mcore_ranks1.run(run_all, f"--load {folder} --train-iters 5 --lr-decay-iters 3")[0]
    assert len(longer.losses) == 3


def test_the_loss_scale_is_resumed(mcore_ranks1, tmp_path):
    flags = "--fp16 --hysteresis 1 --loss-scale-window 2 --initial-loss-scale 1024 "
    whole, _, resumed = mcore_ranks1.run(
        run_all, flags, flags + f"--save {tmp_path} --exit-interval 1", flags + f"--load {tmp_path}"
    )[0]
    assert "loss scale: 2048.0" in whole.output.splitlines()[-1]
    assert resumed.losses == whole.losses[1:]
    scales = [re.findall("loss scale: ([0-9.]+)", run.output) for run in (whole, resumed)]
    assert scales[1] == scales[0][1:]


def test_a_schedule_that_differs_is_told_in_the_runs_own_units(mcore_ranks1, saved):
    _, folder = saved
    load = f"--load {folder} "
    message = (
        "the schedule is not the checkpoint's: --lr is 0.02, the checkpoint's is 0.01; "
        "--lr-decay-iters is 5, the checkpoint's is 3; pass the checkpoint's values, or"
    )
    mcore_ranks1.run_expecting(RunError, message, run_all, load + "--lr 0.02 --train-iters 5")
    mcore_ranks1.run_expecting(
        RunError,
        "schedule is not .*: --weight-decay is 0.5, the checkpoint's is 0.01; pass",
        run_all,
        load + "--weight-decay 0.5",
    )


def test_an_overridden_schedule_holds_and_a_taken_one_too(mcore_ranks1, saved):
    _, folder = saved
    flags = f"--load {folder} --lr 0.5 --min-lr 0.25 --train-iters 4 "
    ours, theirs = mcore_ranks1.run(
        run_all, flags + "--override-opt-param-scheduler", flags + "--use-checkpoint-opt-param-scheduler"
    )[0]
    rates = [re.findall("learning rate: ([0-9.E+-]+)", each.output) for each in (ours, theirs)]
    assert float(rates[0][-1]) == 0.25 and float(rates[1][-1]) == 1e-3


CONSTANT = "--lr-decay-style constant --min-lr 0 "


def test_a_constant_rate_needs_no_flag_for_a_longer_run(mcore_ranks1, tmp_path):
    flags = CONSTANT + "--train-iters 6 "
    whole, _, resumed = mcore_ranks1.run(
        run_all, flags, CONSTANT + f"--save {tmp_path}", flags + f"--load {tmp_path} --lr-warmup-iters 1"
    )[0]
    assert resumed.losses == whole.losses[3:]
    warming = CONSTANT + f"--load {tmp_path} --train-iters 6 --lr-warmup-iters 4"
    mcore_ranks1.run_expecting(RunError, "--lr-warmup-iters is 4, the checkpoint's is 2", run_all, warming)


@pytest.fixture
def damageable(saved, tmp_path):
    """A copy of a folder with checkpoints of iterations 1 and 2."""
    return Path(shutil.copytree(saved[1], tmp_path / "damaged"))


OTHERS = "; complete besides: iter_0000001, which --ckpt-step chooses"


def test_a_damaged_checkpoint_is_one_sentence(mcore_ranks1, damageable):
    from megatron.training.checkpoint.format.paths import folder_to_load

    data = damageable / "iter_0000002" / "__0_0.distcp"
    whole = data.read_bytes()
    data.write_bytes(whole[:-100])
    message = rf"iter_0000002 is no complete fsdp_dtensor .*: __0_0.distcp has \d+ of {len(whole)} bytes{OTHERS}"
    mcore_ranks1.run_expecting(RunError, message, run_all, f"--load {damageable}")
    data.write_bytes(b"\xff" * len(whole))
    message = rf"iter_0000002 is no .*: __0_0.distcp is not what was written \(its checksum differs\){OTHERS}"
    mcore_ranks1.run_expecting(RunError, message, run_all, f"--load {damageable}")
    message = f"iter_0000002 is no complete fsdp_dtensor checkpoint: args cannot be read [(][^\n]*[)]{OTHERS}"
    mcore_ranks1.run_expecting(RunError, message, run_all, f"--load {damageable} --no-verify-checksums")
    data.unlink()
    with pytest.raises(ValueError, match="__0_0.distcp is missing" + OTHERS):
        folder_to_load(damageable, None)
    (damageable / "iter_0000002" / "manifest.json").unlink()  # as in checkpoints from before there were any
    with pytest.raises(ValueError, match="__0_0.distcp is missing" + OTHERS):
        folder_to_load(damageable, None)
    (damageable / "iter_0000002" / ".metadata").write_bytes(b"half")
    with pytest.raises(ValueError, match=".metadata cannot be read .*" + OTHERS):
        folder_to_load(damageable, None)


class FullDisk:
    """Replaces `Disk.write`: little fits on the disk once it is on, so that torch breaks off in the middle."""

    def __init__(self) -> None:
        from megatron.training.checkpoint.format.filesystem import Disk

        self.is_on, self._left, self._write = False, 3000, Disk.write

    def write(self, disk, stream, data) -> None:
        self._left -= len(data) if self.is_on else 0
        if self._left < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        self._write(disk, stream, data)


def save_to_a_full_disk(folder: Path, *flags: str) -> list[str]:
    """Saves once well; then the disk is full, and what is there is told; then saves again, and over that."""
    from megatron.training.checkpoint.format.filesystem import Disk

    full = FullDisk()
    with mock.patch.object(Disk, "write", lambda *args: full.write(*args)):
        train(RUN + f"--save {folder} --exit-interval 1")
        full.is_on = True
        message = f"iteration 3 cannot be saved to {folder}: rank 0: .*No space left on device"
        with pytest.raises(RunError, match=message):
            train(RUN + f"--load {folder} --save {folder}")
    seen = sorted(path.name for path in folder.iterdir())
    seen.append((folder / "latest_checkpointed_iteration.txt").read_text())
    train(RUN + f"--load {folder} --save {folder}")
    train(RUN + f"--save {folder}")  # over the one that is there
    return [*seen, *sorted(path.name for path in folder.iterdir())]


def test_a_full_disk_ends_the_run_and_leaves_the_last_checkpoint(mcore_ranks1, tmp_path):
    (seen,) = mcore_ranks1.run(save_to_a_full_disk, tmp_path)
    tracker = "latest_checkpointed_iteration.txt"
    assert seen == ["iter_0000001", tracker, "1", "iter_0000001", "iter_0000003", tracker]


def test_only_some_checkpoints_are_retained(mcore_ranks1, tmp_path):
    flags = f"--train-iters 5 --save {tmp_path} --save-interval 1 --save-retain-interval 2"
    mcore_ranks1.run(train, flags)
    assert [path.name for path in sorted(tmp_path.glob("iter*"))] == ["iter_0000002", "iter_0000004", "iter_0000005"]
    assert not list(tmp_path.glob(".*"))


class Payload:
    """Something that only code can restore."""


def load_code(folder: Path) -> None:
    import torch.distributed.checkpoint as dcp

    from megatron.training.checkpoint.load.storage_reader import DataOnlyPlanner

    dcp.save({"weight": torch.ones(2), "payload": Payload()}, checkpoint_id=str(folder))
    dcp.load({"weight": torch.zeros(2), "payload": 0}, checkpoint_id=str(folder), planner=DataOnlyPlanner())


def test_code_is_not_run(mcore_ranks1, tmp_path):
    from torch.distributed.checkpoint import CheckpointException

    mcore_ranks1.run_expecting(CheckpointException, "(?s)Weights only load failed", load_code, tmp_path)


def test_a_tracker_that_is_not_one(tmp_path):
    from megatron.training.checkpoint.format.paths import folder_to_load

    assert folder_to_load(tmp_path, None) is None
    tracker = tmp_path / "latest_checkpointed_iteration.txt"
    for content in (b"soon", b"", b"\xff\xfe4", "\u00b2".encode(), b"9" * 5000):
        tracker.write_bytes(content)
        with pytest.raises(ValueError, match="should hold an iteration or 'release', not '.{0,40}'; pass --ckpt-step"):
            folder_to_load(tmp_path, None)


def test_a_path_that_is_no_folder_of_checkpoints(tmp_path):
    """Starting anew, as where there is nothing yet, would be what nobody wants."""
    from megatron.training.checkpoint.format.paths import folder_to_load

    (tmp_path / "iter_0000004").mkdir()
    moved = tmp_path / "best"
    moved.mkdir()
    (moved / ".metadata").touch()
    for path in (tmp_path / "iter_0000004", tmp_path / "iter_0000009", moved):
        with pytest.raises(ValueError, match=f"{path} is the folder of one iteration; pass the one above, {tmp_path}"):
            folder_to_load(path, None)
    with pytest.raises(ValueError, match="is no folder; pass the one that --save has named"):
        folder_to_load(moved / ".metadata", None)
