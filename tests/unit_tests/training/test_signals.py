"""Signals that reach the whole process group, as launchers and Ctrl-C send them."""

import os
import signal
import subprocess
import sys
import textwrap

import pytest

from tests.unit_tests.harness.rank_pool import REPO_ROOT, import_paths

READER_SCRIPT = """
    import os, pathlib, signal, sys, time
    import torch
    from megatron.training.data.loader import LoaderOptions, build_data_stream

    received = []
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, lambda number, frame: received.append(number))
    options = LoaderOptions(micro_batch_size=1, data_parallel_rank=0, data_parallel_size=1, num_workers=2)
    data = [{"tokens": torch.tensor([number])} for number in range(20)]

    def opened():
        stream = build_data_stream(data, "training", 0, options)
        next(stream)
        return stream, [process.pid for process in stream._batches._workers]

    def has_ended(pid):
        stat = pathlib.Path(f"/proc/{pid}/stat")
        return not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z"

    stream, _ = opened()
    print("ready", flush=True)
    sys.stdin.readline()
    assert sorted(received) == sorted([signal.SIGINT, signal.SIGTERM, signal.SIGUSR1]), received
    assert len(list(zip(range(12), stream))) == 12
    stream.close()

    read_end, write_end = os.pipe()
    if os.fork() == 0:
        kept, pids = opened()
        os.write(write_end, " ".join(map(str, pids)).encode())
        os.kill(os.getpid(), signal.SIGKILL)
    os.wait()
    pids = os.read(read_end, 100).split()
    until = time.monotonic() + 5
    while not all(has_ended(int(pid)) for pid in pids):
        assert time.monotonic() < until, "a reader outlived its trainer"
        time.sleep(0.05)

    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    not_closed = opened()
    print("done", flush=True)
"""


@pytest.fixture
def in_own_group():
    """Starts Python code in a process group of its own, which is ended with the test."""
    started = []

    def start(code: str) -> subprocess.Popen:
        process = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(code)],
            env={**os.environ, "PYTHONPATH": ":".join(import_paths()), "OMP_NUM_THREADS": "1"},
            cwd=REPO_ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def test_readers_outlive_signals_to_the_group_but_not_their_trainer(in_own_group):
    process = in_own_group(READER_SCRIPT)
    assert process.stdout.readline() == "ready\n", process.communicate()[1]
    os.killpg(process.pid, signal.SIGTERM)
    os.killpg(process.pid, signal.SIGINT)
    os.killpg(process.pid, signal.SIGUSR1)
    told, errors = process.communicate("go on\n", timeout=30)
    assert (process.returncode, told) == (0, "done\n"), errors
