"""The table of measurements, from files of results."""

import argparse
import importlib.util
import json
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


def test_an_engine_that_gives_no_result_is_an_error_in_its_row(table, tmp_path, monkeypatch):
    monkeypatch.setattr(table, "HERE", tmp_path)  # no benchmark lies there
    given = argparse.Namespace(steps=1, gpus=1, timeout_s=60.0, peer_path="")
    result = table.measure("1b-bf16", "ours", given)
    assert "fsdp_bench.py" in result["error"]
    assert result["command"].startswith("torchrun --standalone --nproc-per-node 1")


def test_the_peer_sees_its_own_folder_only(table, monkeypatch):
    seen = {}

    def run(command, *, env, **_):
        seen[command[command.index("--engine") + 1]] = env["PYTHONPATH"]
        return argparse.Namespace(stdout="", stderr="nothing ran")

    monkeypatch.setattr(table.subprocess, "run", run)
    monkeypatch.setenv("PYTHONPATH", "/others")
    given = argparse.Namespace(steps=1, gpus=1, timeout_s=60.0, peer_path="/peer")
    for engine in ("mfsdp", "ours"):
        table.measure("1b-bf16", engine, given)
    assert seen == {"mfsdp": "/peer", "ours": f"{table.ENGINE_SOURCE}:/others"}
