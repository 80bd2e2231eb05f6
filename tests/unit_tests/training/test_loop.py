"""Events between the steps: reports, evaluations, skipped steps, reasons to stop; and that no flag is ignored."""

import dataclasses
import os
import re
import shlex
import signal
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megatron.training.config import load_config
from megatron.training.config.flags import sections
from megatron.training.config.rules_support import NOT_YET
from megatron.training.errors import NotFiniteError
from megatron.training.job import prepare
from tests.unit_tests.training.runs import TINY, Outcome, train

LINE = re.compile(
    r" \[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{6}\] iteration +\d+/ +\d+ \| consumed samples: +\d+ \| "
    r"elapsed time per iteration \(ms\): [\d.]+ \| throughput per GPU \(TFLOP/s/GPU\): [\d.]+ \| "
    r"learning rate: \d\.\d{6}E[-+]\d\d \| global batch size: +\d+ \| lm loss: \d\.\d{6}E[-+]\d\d \| "
    r"loss scale: 1\.0 \| grad norm: [\d.]+ \| num zeros: \d+ \| params norm: [\d.]+ \| "
    r"number of skipped iterations:   0 \| number of nan iterations:   0 \|"
)
READ_BY_NO_RUN = {
    "checkpoint.auto_detect_ckpt_format": "documented to change nothing: formats are always recognized",
    "ddp.use_distributed_optimizer": "what is implied may be asked for, and a rule refuses its opposite",
    "dist.use_tp_pp_dp_mapping": "refused",
    "logger.logging_level": "read by launch(), before a run",
}
NOT_READERS = ("rules_run.py", "rules_support.py", "rule_book.py", "sources.py", "flags.py", "dataclasses.py")
"""Files that look at every field without acting on it."""


def record_reads(read: set[str]) -> None:
    """Makes the configuration's classes note which field is read, by those who act on it."""
    for section, cls in sections().items():
        names = {item.name for item in dataclasses.fields(cls)}

        def getattribute(self, name, section=section, names=names):
            if name in names and os.path.basename(sys._getframe(1).f_code.co_filename) not in NOT_READERS:
                read.add(f"{section}.{name}")
            return object.__getattribute__(self, name)

        cls.__getattribute__ = getattribute


def fields_read(folder: Path) -> set[str]:
    """Fields that a few runs read, with everything on that opens a branch."""
    read: set[str] = set()
    record_reads(read)
    model = "--group-query-attention --num-query-groups 2 "
    try:
        for flags in ("--swiglu", "--num-experts 2 --disable-bias-linear"):
            prepare(load_config(shlex.split(f"{TINY} {flags} --train-iters 3")), world_size=2)
        train(
            model + f"--train-samples 16 --lr-warmup-iters 0 --manual-gc --save {folder} --load {folder} "
            f"--tensorboard-dir {folder / 'board'} --eval-iters 1"
        )
        lacks_norms = "--qk-layernorm --no-strict-fsdp-dtensor-load --dist-ckpt-strictness log_all "
        train(model + lacks_norms + f"--train-iters 5 --override-opt-param-scheduler --load {folder}")
    finally:
        for cls in sections().values():
            del cls.__getattribute__
    return read


def test_every_field_is_read(mcore_ranks2, tmp_path):
    read = mcore_ranks2.run(fields_read, tmp_path)[0]
    everything = {f"{name}.{item.name}" for name, cls in sections().items() for item in dataclasses.fields(cls)}
    exist_for_their_messages = {path for path, (allowed, _) in NOT_YET.items() if len(allowed) < 3}
    ignored = everything - read - exist_for_their_messages - READ_BY_NO_RUN.keys()
    assert not ignored, "accepted and ignored: " + ", ".join(sorted(ignored))


@pytest.fixture(scope="module")
def reported(mcore_ranks2, tmp_path_factory):
    """(outcomes by rank, TensorBoard's folder) of a run with every report on."""
    board = tmp_path_factory.mktemp("board")
    flags = (
        "--train-iters 4 --eval-interval 3 --eval-iters 1 --log-throughput --log-num-zeros-in-grad "
        f"--log-params-norm --tensorboard-dir {board} --tensorboard-log-interval 2 --log-memory-to-tensorboard "
        "--log-validation-ppl-to-tensorboard --manual-gc --manual-gc-interval 1"
    )
    return mcore_ranks2.run(train, flags), board


def test_log_lines_are_megatron_lms_and_rank_0s(reported):
    (first, second), _ = reported
    steps = [line for line in first.output.splitlines() if "] iteration" in line]
    assert len(steps) == 4 and all(LINE.fullmatch(line) for line in steps)
    assert second.output == ""


def test_evaluations_come_when_due_and_at_the_end(reported):
    (first, second), _ = reported
    assert list(first.evaluations) == ["validation at 3", "validation at 4", "test at 4"]
    assert first.evaluations == second.evaluations
    lines = [line for line in first.output.splitlines() if line.startswith(" validation loss")]
    assert [line.split(" | ")[0] for line in lines] == [
        " validation loss at iteration 3",
        " validation loss at iteration 4 on validation set",
        " validation loss at iteration 4 on test set",
    ]
    loss = first.evaluations["validation at 3"]
    assert f"lm loss value: {loss:.6E} | lm loss PPL:" in lines[0]


def test_tensorboard_has_megatron_lms_tags(reported):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (first, _), board = reported
    events = EventAccumulator(str(board)).Reload()
    tags = {tag for tag in events.Tags()["scalars"] if "vs samples" not in tag}
    assert tags == {
        "lm loss", "learning-rate", "batch-size", "grad-norm", "num-zeros", "params-norm", "iteration-time",
        "tokens-per-second", "throughput", "loss-scale", "lm loss validation", "lm loss validation ppl", "lm loss test",
        "lm loss test ppl",
    }  # fmt: skip
    points = events.Scalars("lm loss")
    assert [point.step for point in points] == [2, 4]
    assert points[1].value == pytest.approx(sum(first.losses[2:]) / 2)
    assert [point.step for point in events.Scalars("lm loss vs samples")] == [16, 32]
    assert len(list(board.iterdir())) == 1


def overlap_logged() -> tuple[list[str], Outcome]:
    """Log lines of a run about overlap."""
    from megatron.training.callbacks import logger

    with mock.patch.object(logger, "info") as info:
        outcome = train("--train-iters 5 --log-overlap 2")
    return [call.args[0] % call.args[1:] for call in info.call_args_list], outcome


def test_overlap_is_logged_by_rank_0_when_due(mcore_ranks2):
    (first, outcome), (second, _) = mcore_ranks2.run(overlap_logged)
    assert [text.split(":")[0] for text in first] == ["overlap in iteration 2", "overlap in iteration 4"]
    for text in first:
        _, header, *rows = text.splitlines()
        assert header.split() == ["ms", "compute", "gather", "reduce", "outer", "exposed"]
        labels = [row.rsplit(None, 5)[0] for row in rows]
        assert labels[-2:] == ["(outside units)", "total"] and any(".layers.* x2" in label for label in labels)
        assert all(float(value) > 0 for value in rows[-1].split()[1:4])
    assert second == [] and outcome.output.count("\n") == 5, "standard output has Megatron-LM's lines only"


def deterministic_run() -> tuple[list[tuple[bool, bool]], int, list[str]]:
    """Determinism of kernels, and of megatron-core's, in a step; torch's mode and new variables afterwards."""
    from megatron.training.callbacks import Callback
    from megatron.training.config.kernels import DETERMINISTIC

    seen = []

    class Look(Callback):
        def after_step(self, run, result):
            embedding = next(module for module in run.model.modules() if hasattr(module, "deterministic_mode"))
            seen.append((torch.are_deterministic_algorithms_enabled(), embedding.deterministic_mode))

    torch.set_deterministic_debug_mode("warn")
    try:
        train("--train-iters 3 --deterministic-mode", callbacks=[Look()])
        return seen, torch.get_deterministic_debug_mode(), [name for name in DETERMINISTIC if name in os.environ]
    finally:
        torch.set_deterministic_debug_mode("default")


def test_deterministic_mode_lasts_as_long_as_the_run(mcore_ranks1):
    """Another run in the same process has the mode, here only to warn, and the variables that were there before."""
    assert mcore_ranks1.run(deterministic_run) == [([(True, True)] * 3, 1, [])]


def runs_that_overflow() -> list[Outcome]:
    overflowing = "--train-iters 3 --fp16 --hysteresis 1 --initial-loss-scale "
    return [train(overflowing + "4294967296"), train(overflowing + "1024")]


def test_overflowing_steps_are_skipped_and_counted(mcore_ranks2):
    overflows, fits = mcore_ranks2.run(runs_that_overflow)[0]
    assert overflows.state["skipped_iterations"] == 3 and overflows.norms == [None] * 3
    assert overflows.state["consumed_train_samples"] == 24
    *_, last = overflows.output.splitlines()
    assert "| learning rate: 0.000000E+00 |" in last and "| loss scale: 536870912.0 |" in last
    assert "number of skipped iterations:   1 |" in last and "lm loss" not in last and "grad norm" not in last
    assert fits.state["skipped_iterations"] == 0 and fits.losses[-1] < fits.losses[0]


def poisoned(rank: int, call: int):
    """The GPT task, whose loss is NaN on `rank` in its forward number `call`."""
    from megatron.training import gpt

    calls = []

    def forward_step(stream, model):
        output, loss_function = gpt.forward_step(stream, model)
        calls.append(1)
        return (output * float("nan") if (dist.get_rank(), len(calls)) == (rank, call) else output), loss_function

    return dataclasses.replace(gpt.TASK, forward_step=forward_step)


def train_poisoned(flags: str) -> Outcome:
    return train("--train-iters 4 " + flags, task=poisoned(rank=1, call=3))


def test_a_nan_on_one_rank_stops_every_rank(mcore_ranks2):
    message = (
        r"a gradient of iteration 2 is not finite: gradients of .* parameters .* --no-check-for-nan-in-loss-and-grad"
    )
    mcore_ranks2.run_expecting(NotFiniteError, message, train_poisoned, "")


def train_with_an_infinite_norm(flags: str) -> tuple[str, bool]:
    """The error, and whether the weights have stayed what they were."""
    from megatron.training import step
    from megatron_fsdp.optim import grad_norm

    kept = []
    train_step = step.train_step

    def noted(run):
        params = [param.to_local() for group in run.optimizer.param_groups for param in group["params"]]
        kept.extend((param, param.clone()) for param in params)
        return train_step(run)

    with (
        mock.patch.object(grad_norm, "total_norm", lambda rows, groups, device: torch.tensor(float("inf"))),
        mock.patch("megatron.training.loop.train_step", noted),
        pytest.raises(NotFiniteError) as caught,
    ):
        train("--train-iters 4 --lr-warmup-iters 0 " + flags)
    return str(caught.value), all(torch.equal(param, before) for param, before in kept)


@pytest.mark.parametrize("clips", [1.0, 0.0])
def test_an_infinite_norm_is_noticed_before_anything_is_updated(mcore_ranks2, clips):
    for message, is_kept in mcore_ranks2.run(train_with_an_infinite_norm, f"--clip-grad {clips}"):
        assert message.startswith("the gradient norm of iteration 1 is inf, with learning rate")
        assert is_kept


def test_unchecked_nans_are_counted(mcore_ranks2):
    flags = "--no-check-for-nan-in-loss-and-grad --log-interval 4"
    (line,) = mcore_ranks2.run(train_poisoned, flags)[0].output.splitlines()
    assert "number of nan iterations:   3 |" in line, "the NaN of iteration 2 reaches the weights"


def terminated(folder: Path) -> Outcome:
    """A run in which rank 1 gets SIGTERM during its second step."""
    from megatron.training.callbacks import Callback

    class Terminate(Callback):
        def before_step(self, run):
            if run.state.iteration == 1 and dist.get_rank() == 1:
                os.kill(os.getpid(), signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    outcome = train(f"--train-iters 5 --exit-signal-handler --save {folder} --eval-iters 1", callbacks=[Terminate()])
    assert signal.getsignal(signal.SIGTERM) is before
    return outcome


def test_sigterm_on_one_rank_saves_and_ends_all(mcore_ranks2, tmp_path):
    for outcome in mcore_ranks2.run(terminated, tmp_path):
        assert len(outcome.losses) == 2 and not outcome.evaluations
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "2"


def signalled_in_evaluation(folder: Path) -> list[Outcome]:
    """Rank 1 gets SIGUSR1 in an evaluation: during training, after it, and with nothing but it."""
    from megatron.training import evaluate

    forward_backward = evaluate.forward_backward

    def signal_at(iteration: int, flags: str) -> Outcome:
        batches = []

        def forward(run, stream, *, forward_only):
            batches.append(run.state.iteration)
            if dist.get_rank() == 1 and batches.count(iteration) == 2:
                os.kill(os.getpid(), signal.SIGUSR1)
            return forward_backward(run, stream, forward_only=forward_only)

        with mock.patch.object(evaluate, "forward_backward", forward):
            outcome = train(f"--exit-signal-handler --eval-iters 4 {flags}")
        outcome.output = batches
        return outcome

    flags = f"--train-iters 3 --eval-interval 2 --save {folder}"
    return [signal_at(2, flags), signal_at(3, flags), signal_at(2, f"--skip-train --load {folder} --ckpt-step 2")]


def test_a_signal_ends_an_evaluation_too(mcore_ranks2, tmp_path):
    before = signal.getsignal(signal.SIGUSR1)
    for during, after, only in mcore_ranks2.run(signalled_in_evaluation, tmp_path):
        assert len(during.losses) == 2 and not during.evaluations and during.output == [2, 2]
        assert during.state["consumed_valid_samples"] == 4 * 8, "as if it had been read"
        assert len(after.losses) == 3 and list(after.evaluations) == ["validation at 2"]
        assert after.output == [2] * 4 + [3] * 2, "the test set is not read"
        assert not only.evaluations and only.output == [2, 2]
    assert signal.getsignal(signal.SIGUSR1) is before
    assert sorted(path.name for path in tmp_path.glob("iter*")) == ["iter_0000002", "iter_0000003"]


def runs_that_stop(folder: Path) -> list[Outcome]:
    return [
        train(f"--train-iters 4 --save {folder} --save-interval 3 --exit-duration-in-mins 1000"),
        train(f"--skip-train --load {folder} --eval-iters 2"),
    ]


def test_saves_at_the_end_and_evaluates_without_training(mcore_ranks2, tmp_path):
    trained, evaluated = mcore_ranks2.run(runs_that_stop, tmp_path)[0]
    assert sorted(path.name for path in tmp_path.glob("iter*")) == ["iter_0000003", "iter_0000004"]
    assert evaluated.losses == [] and evaluated.state["iteration"] == 4
    assert evaluated.evaluations["validation at 4"] < trained.losses[0]
    assert all(value.equal(trained.weights[name]) for name, value in evaluated.weights.items())
