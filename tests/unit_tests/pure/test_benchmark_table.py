"""The table of measurements, from files of results."""

import argparse
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

FILE = Path(__file__).parents[3] / "benchmarks/table.py"
RESULT = {
    "step_ms": 435.0, "min_ms": 433.1, "max_ms": 440.2, "tok_s_gpu": 9416, "alloc_gib": 50.0, "reserved_gib": 57.6,
    "loss": [11.9, 10.1, 9.0],
}  # fmt: skip


@pytest.fixture(scope="module")
def table():
    spec = importlib.util.spec_from_file_location("benchmark_table", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def write(folder: Path, name: str, **results: object) -> None:
    measured = {"row": "8b-bf16", "gpus": 4, "machine": {}, "results": results}
    (folder / name).write_text(json.dumps(measured), encoding="utf-8")


def test_the_latest_measurement_of_a_row_is_shown_with_what_failed(table, tmp_path, capsys):
    write(tmp_path, "20260101-000000-8b-bf16-4gpus.json", ours=RESULT | {"step_ms": 999.0})
    write(tmp_path, "20260102-000000-8b-bf16-4gpus.json", ours=RESULT, fsdp2={"error": "long\nout of memory"})
    table.main(["--show", str(tmp_path)])
    lines = capsys.readouterr().out.splitlines()
    assert lines[2:] == [
        "| 8b-bf16 | 4 | ours | 435.0 (433.1 to 440.2) | 9,416 | 50.0 / 57.6 | 11.9000, 10.1000, 9.0000 "
        "| 01-02 00:00 |",
        "| 8b-bf16 | 4 | fsdp2 | failed: out of memory | | | | 01-02 00:00 |",
    ]


def test_the_page_shows_what_was_measured(table):
    """`python benchmarks/table.py --show benchmarks/results` prints the page's tables."""
    page = (FILE.parents[1] / "docs/performance.md").read_text(encoding="utf-8")
    shown = {line for line in table.table(FILE.parent / "results").splitlines() if line.startswith("|")}
    assert shown <= set(page.splitlines())


def test_an_engine_that_gives_no_result_is_an_error_in_its_row(table, tmp_path, monkeypatch):
    monkeypatch.setattr(table, "HERE", tmp_path)  # no benchmark lies there
    given = argparse.Namespace(steps=1, gpus=1, timeout_s=60.0, pretend_ranks=0, peer_path="")
    result = table.measure("1b-bf16", "ours", given)
    assert "fsdp_bench.py" in result["error"]
    assert result["command"].startswith("torchrun --standalone --nproc-per-node 1")


def test_the_peer_sees_its_own_folder_only(table, monkeypatch):
    seen = {}

    def run(command, environment, timeout_s):
        seen[command[command.index("--engine") + 1]] = environment["PYTHONPATH"]
        return "", "nothing ran"

    monkeypatch.setattr(table, "run", run)
    monkeypatch.setenv("PYTHONPATH", "/others")
    given = argparse.Namespace(steps=1, gpus=1, timeout_s=60.0, pretend_ranks=0, peer_path="/peer")
    for engine in ("mfsdp", "ours"):
        table.measure("1b-bf16", engine, given)
    assert seen == {"mfsdp": "/peer", "ours": f"{table.ENGINE_SOURCE}:/others"}


def test_one_gpu_that_pretends_has_a_table_of_its_own(table, tmp_path, monkeypatch, capsys):
    commands = []

    def run(command, environment, timeout_s):
        commands.append((command[1:], environment.get("PYTORCH_CUDA_ALLOC_CONF")))
        return f"RESULT {json.dumps(RESULT | {'host_ms': 270.0})}", ""

    monkeypatch.setattr(table, "run", run)
    monkeypatch.setattr(table.torch.cuda, "device_count", lambda: 1)
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    table.main(
        ["--rows", "1b-bf16", "--engines", "ours", "ours-expandable", "--pretend-ranks", "8", "--out", str(tmp_path)]
    )
    assert [setting for _, setting in commands] == [None, "expandable_segments:True"]
    assert all(
        "torch.distributed.run" not in command and command[-2:] == ["--pretend-ranks", "8"] for command, _ in commands
    )
    lines = capsys.readouterr().out.splitlines()
    assert "| workload | GPUs | engine | allocated / reserved GiB | step / host ms | call |" in lines
    assert lines[-1].startswith("| 1b-bf16 | 8 | ours-expandable | 50.0 / 57.6 | 435.0 / 270.0 |")
    (file,) = tmp_path.iterdir()
    shown = json.loads(file.read_text())["results"]["ours-expandable"]["command"]
    assert shown.startswith(
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True python benchmarks/fsdp_bench.py --engine ours"
    )


@pytest.mark.parametrize(
    ("error", "shown"),
    [
        ("", "nothing was said"),
        ("a\n[rank1]: torch.OutOfMemoryError: 3 | 4\nRoot Cause:\n=====\n", "[rank1]: torch.OutOfMemoryError: 3 / 4"),
        ("[rank0]: ValueError: no\ntorch.distributed.elastic.errors.ChildFailedError:\nx", "[rank0]: ValueError: no"),
        ("Root Cause:\n traceback : Signal 9 (SIGKILL)\n=====\n", "traceback : Signal 9 (SIGKILL)"),
    ],
)
def test_an_error_is_one_cell_that_says_why(table, tmp_path, error, shown):
    write(tmp_path, "20260101-000000-8b-bf16-4gpus.json", ours={"error": error})
    assert table.table(tmp_path).splitlines()[-1] == f"| 8b-bf16 | 4 | ours | failed: {shown} | | | | 01-01 00:00 |"


def test_ranks_that_take_too_long_are_ended(table, tmp_path):
    """They stayed on the GPUs, beside the engine that was measured next."""
    rank = tmp_path / "rank.py"
    rank.write_text(f"import os, pathlib, time\npathlib.Path({str(tmp_path)!r}, 'pid').write_text(str(os.getpid()))\n"
                    "time.sleep(60)")  # fmt: skip
    launcher = f"""
import signal, subprocess, sys
rank = subprocess.Popen([sys.executable, {str(rank)!r}], start_new_session=True)
signal.signal(signal.SIGTERM, lambda *_: rank.kill())
rank.wait()
"""
    with pytest.raises(subprocess.TimeoutExpired):
        table.run([sys.executable, "-c", launcher], dict(os.environ), 2.0)
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--engines", "ours", "mfsdp"], "mfsdp needs --peer-path FOLDER"),
        (
            ["--engines", "mfsdp", "--peer-path", str(FILE.parents[1] / "megatron/core/distributed/fsdp/src")],
            "mfsdp nee",
        ),
        (["--show", "no/such/folder"], "no results"),
        (["--gpus", "9000"], "9000 GPUs are needed and"),
    ],
)
def test_what_would_measure_something_else_or_show_nothing_is_refused(table, tmp_path, capsys, arguments, message):
    """The installed engine, ours, was measured and called mfsdp."""
    with pytest.raises(SystemExit):
        table.main([*arguments, "--out", str(tmp_path / "out")])
    assert message in capsys.readouterr().err and not (tmp_path / "out").exists()
