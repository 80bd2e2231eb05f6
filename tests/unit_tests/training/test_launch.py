"""Answers to a command line before anything is started; both packages are of one version."""

import logging
import shlex
import subprocess
import sys
import time
import warnings

import pytest
import torch

import megatron.training
import megatron_fsdp
from megatron.training.config import load_config
from megatron.training.errors import RunError
from megatron.training.files import make_output_folders, missing_files
from megatron.training.launch import configure_logging, ignore_expected_warnings, launch
from megatron.training.pretrain import check_versions
from megatron.training.ranks import ON_EVERY_RANK, Ranks
from tests.unit_tests.harness.rank_pool import REPO_ROOT, import_paths
from tests.unit_tests.training.runs import TINY

WRONG = [
    "--train-iters",
    "2",
    "--lr",
    "-1",
    "--use-megatron-fsdp",
    "--micro-batch-size",
    "3",
    "--global-batch-size",
    "7",
]


@pytest.fixture
def as_rank(monkeypatch):
    def set_rank(rank: int, world_size: int) -> None:
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("LOCAL_RANK", str(rank))
        monkeypatch.setenv("WORLD_SIZE", str(world_size))

    return set_rank


def test_every_mistake_is_told_at_once_by_rank_0_alone(as_rank, capsys):
    as_rank(0, 2)
    assert launch("megatron.training.gpt", WRONG) == 2
    told = capsys.readouterr().err
    for words in (
        "--num-layers is missing",
        "--lr is -1.0",
        "there is no data",
        "7 is not divisible by",
        "x 2 data-par",
    ):
        assert words in told
    as_rank(1, 2)
    assert launch("megatron.training.gpt", WRONG) == 2
    assert capsys.readouterr().err == ""


def test_each_machine_tells_its_mistakes(as_rank, capsys, monkeypatch):
    """A file may be missing on one of them only, whose ranks would end in silence."""
    as_rank(8, 16)
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert launch("megatron.training.gpt", WRONG) == 2
    told = capsys.readouterr().err
    assert told.startswith("[rank 8] ") and "--num-layers is missing" in told


def test_unknown_flags_and_unreadable_tokenizers_are_mistakes_too(as_rank, capsys, tmp_path):
    as_rank(0, 1)
    assert launch("megatron.training.gpt", ["--num-layer", "2"]) == 2
    assert "did you mean --num-layers?" in capsys.readouterr().err
    flags = (
        "--use-megatron-fsdp --num-layers 1 --hidden-size 8 --num-attention-heads 2 --seq-length 4 --lr 1 --mock-data"
    )
    flags += (
        f" --micro-batch-size 1 --train-iters 2 --tokenizer-type HuggingFaceTokenizer --tokenizer-model {tmp_path}/no"
    )
    assert launch("megatron.training.gpt", flags.split()) == 2
    assert "--tokenizer-model" in capsys.readouterr().err


def test_mistyped_flags_and_rules_are_told_together_but_not_what_follows(as_rank, capsys, tmp_path):
    as_rank(0, 2)
    more = f"--lerning-rate 1 --hidden-size wide --seed x --tokenizer-type NullTokenizer --data-path {tmp_path}/none"
    assert launch("megatron.training.gpt", [*WRONG, *more.split()]) == 2
    told = capsys.readouterr().err
    for words in (
        "did you mean --lr?",
        "--hidden-size: expected",
        "--seed: expected",
        "--num-layers is missing",
        "7 is not divisible by",
        f"--data-path {tmp_path}/none: {tmp_path}/none.idx does not exist",
    ):
        assert words in told
    assert "--hidden-size is missing" not in told and "--lr is" not in told
    assert told.count("NullTokenizer needs --vocab-size") == 1


@pytest.mark.parametrize(
    ("flags", "missing"),
    [
        ("--data-path 0.3 {0}/a 0.7 {0}/b", ["b"]),
        ("--data-path {0}/a {0}/b", ["b"]),
        ("--train-data-path {0}/b --valid-data-path {0}/c --eval-iters 0", ["b"]),
        ("--train-data-path {0}/a --valid-data-path {0}/c", ["c"]),
    ],
)
def test_data_that_is_not_there(flags, missing, tmp_path):
    (tmp_path / "a.idx").touch()
    (tmp_path / "a.bin").touch()
    problems = list(missing_files(load_config(flags.format(tmp_path).split())))
    assert [problem.split(": ")[1] for problem in problems] == [
        f"{tmp_path}/{name}.idx does not exist; make it with tools/preprocess_data.py" for name in missing
    ]


@pytest.mark.parametrize("flag", ["--save", "--tensorboard-dir", "--data-cache-path"])
def test_folders_that_cannot_be_written(flag, tmp_path):
    make_output_folders(load_config([flag, str(tmp_path / "new" / "folder")]))
    assert list((tmp_path / "new").iterdir()) == [tmp_path / "new" / "folder"]
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=f"^{flag} {tmp_path}/file/x cannot be written: Not a directory$"):
        make_output_folders(load_config([flag, str(tmp_path / "file" / "x")]))


class FailingRun:
    """In place of `megatron.training.pretrain`: the run cannot go on."""

    error = RunError("it does not fit:\n  every name")

    @classmethod
    def pretrain(cls, job, task, ranks):
        raise cls.error


@pytest.mark.parametrize(("rank", "told"), [(0, "it does not fit:\n  every name"), (1, "it does not fit:")])
def test_a_run_that_fails_says_why_without_a_traceback(rank, told, as_rank, caplog, monkeypatch):
    as_rank(rank, 2)
    monkeypatch.setitem(sys.modules, "megatron.training.pretrain", FailingRun)
    monkeypatch.setattr("megatron.training.launch.configure_logging", lambda *_: None)
    assert launch("megatron.training.gpt", shlex.split(TINY + "--train-iters 3")) == 1
    assert [record.getMessage() for record in caplog.records if record.levelname == "ERROR"] == [told]


@pytest.mark.parametrize(("rank", "told"), [(0, ["it"]), (1, [])])
def test_what_all_ranks_say_is_told_once(rank, told, as_rank, caplog, monkeypatch):
    as_rank(rank, 2)
    monkeypatch.setitem(sys.modules, "megatron.training.pretrain", FailingRun)
    monkeypatch.setattr("megatron.training.launch.configure_logging", lambda *_: None)
    agreed = RunError("it")
    agreed.is_on_every_rank = True
    monkeypatch.setattr(FailingRun, "error", agreed)
    assert launch("megatron.training.gpt", shlex.split(TINY + "--train-iters 3")) == 1
    assert [record.getMessage() for record in caplog.records if record.levelname == "ERROR"] == told


@pytest.mark.parametrize(("rank", "told"), [(0, "interrupted\n"), (1, "")])
def test_ctrl_c_is_one_line(rank, told, as_rank, capsys, monkeypatch):
    as_rank(rank, 2)
    monkeypatch.setitem(sys.modules, "megatron.training.pretrain", FailingRun)
    monkeypatch.setattr("megatron.training.launch.configure_logging", lambda *_: None)
    monkeypatch.setattr(FailingRun, "error", KeyboardInterrupt())
    assert launch("megatron.training.gpt", shlex.split(TINY + "--train-iters 3")) == 130
    assert capsys.readouterr().err == told


@pytest.mark.parametrize(("rank", "told"), [(0, ["all", "one"]), (1, ["[rank 1] one"])])
def test_a_warning_of_all_ranks_is_shown_once(rank, told, monkeypatch, capsys):
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [])
    monkeypatch.setattr(root, "level", root.level)
    configure_logging(30, Ranks(rank=rank, local_rank=rank, world_size=2))
    root.warning("all", extra=ON_EVERY_RANK)
    root.warning("one")
    assert capsys.readouterr().err.splitlines() == told


def test_torch_is_not_heard_on_names_that_megatron_core_calls():
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        ignore_expected_warnings()
        for name in ("all_gather_into_tensor", "reduce_scatter_tensor"):
            with pytest.raises(ValueError, match="process group has not been initialized"):
                getattr(torch.distributed, name)(torch.empty(2), torch.ones(2))
        warnings.warn("`mine` is deprecated", FutureWarning, stacklevel=1)
    assert [str(warning.message) for warning in heard] == ["`mine` is deprecated"]


def test_help_needs_neither_torch_nor_megatron_core():
    code = "import sys; sys.argv = ['pretrain_gpt', '--help']\nimport pretrain_gpt\n"
    code += "try: pretrain_gpt.main()\nexcept SystemExit: pass\n"
    code += "assert not {'torch', 'megatron.core', 'transformers'} & set(sys.modules), 'slow imports'"
    environment = {"PYTHONPATH": ":".join(import_paths()), "PATH": ""}
    started_s = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", code], env=environment, cwd=REPO_ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "--data-parallel-sharding-strategy" in done.stdout
    assert time.perf_counter() - started_s < 5


def test_ranks_without_torchrun(monkeypatch):
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert Ranks.from_environment() == Ranks(rank=0, local_rank=0, world_size=1)


@pytest.mark.parametrize(
    ("rank", "flags", "expected"), [(0, "", logging.INFO), (1, "", logging.WARNING), (0, "--logging-level 40", 40)]
)
def test_logging_level(rank, flags, expected, monkeypatch):
    root, core = logging.getLogger(), logging.getLogger("megatron.core")
    monkeypatch.setattr(root, "handlers", list(root.handlers))
    before = root.level, core.level
    try:
        level = load_config(flags.split()).logger.logging_level
        configure_logging(level, Ranks(rank=rank, local_rank=rank, world_size=2))
        assert root.level == expected
    finally:
        root.setLevel(before[0])
        core.setLevel(before[1])


def test_versions_are_one(monkeypatch):
    assert megatron.training.__version__ == megatron_fsdp.__version__
    check_versions()
    monkeypatch.setattr(megatron_fsdp, "__version__", "9.9")
    with pytest.raises(
        RuntimeError, match=r"megatron.training 0.*megatron_fsdp 9.9 .* different versions; install one"
    ):
        check_versions()
