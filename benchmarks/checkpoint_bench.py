"""Saving and loading the benchmark's Llama with its optimizer: seconds, disk and memory, of one engine.

    PYTHONPATH=megatron/core/distributed/fsdp/src:. torchrun --nproc-per-node 4 benchmarks/checkpoint_bench.py \\
        --engine ours --size 8b --folder /local/checkpoints

`ours` is what the training loop does for --save, --async-save and --load, on a run that the loop has built; `fsdp2` is
torch's distributed checkpoint of an FSDP2 model. Both have fp32 main weights and Adam's two moments, filled with random
numbers. Rank 0 prints one line, RESULT and JSON. Its figures are the largest of all ranks:

- seconds: of a save that training waits for (`save_s`, the median); that training stands still for one that it does not
  wait for (`stall_s`, of the first and the second), and until that one is complete (`async_s`); of loading (`load_s`,
  of ours with and `load_unverified_s` without looking at checksums). The page cache is not dropped: a load finds in it
  whatever has stayed there since the save.
- GiB above what there was before: of the GPU (`gpu_*_gib`), and of the host in this process and those that it has
  started (`host_*_gib`: memory of their own and, once, what they share; not the page cache).

After each load everything is compared with what was saved, bit for bit; so is what was written while the weights were
changed. One checkpoint is on the disk at a time. CPU processes and gloo take the place of GPUs where there are none.
"""

import argparse
import contextlib
import json
import logging
import os
import shutil
import statistics
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parent))
import fsdp_bench  # noqa: E402
from checkpoint_engines import ENGINES, Engine  # noqa: E402

GIB = 1 << 30
_SAMPLED_EVERY_S = 0.02
_STEP = 7.0
"""Value of every count of optimizer steps."""


# ---- what is saved, and whether it came back ----


def shards(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """This rank's part of every weight and moment, in an order of its own."""
    for group in optimizer.param_groups:
        for param in group["params"]:
            state = optimizer.state[param]
            for tensor in (param.detach(), state["exp_avg"], state["exp_avg_sq"]):
                yield tensor.to_local()


def counts(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """The count of steps of every parameter."""
    params = (param for group in optimizer.param_groups for param in group["params"])
    steps = (optimizer.state[param]["step"] for param in params)
    return [step.to_local() if hasattr(step, "to_local") else step for step in steps]


def drawn(optimizer: torch.optim.Optimizer) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Each shard with its random numbers: the same ones each time."""
    generator: torch.Generator | None = None
    for shard in shards(optimizer):
        generator = generator or torch.Generator(device=shard.device).manual_seed(dist.get_rank())
        yield shard, torch.randn(shard.shape, dtype=shard.dtype, device=shard.device, generator=generator)


def fill(optimizer: torch.optim.Optimizer) -> None:
    """Draws everything."""
    for shard, numbers in drawn(optimizer):
        shard.copy_(numbers)
    for step in counts(optimizer):
        step.fill_(_STEP)


def wipe(optimizer: torch.optim.Optimizer) -> None:
    """Sets everything to zero."""
    for tensor in (*shards(optimizer), *counts(optimizer)):
        tensor.zero_()


def is_whole(optimizer: torch.optim.Optimizer) -> bool:
    """True if everything is as `fill` left it, bit for bit."""
    same = all([torch.equal(shard, numbers) for shard, numbers in drawn(optimizer)])
    return same and all(float(step) == _STEP for step in counts(optimizer))


# ---- memory ----


class Memory:
    """Most memory that is taken inside the context, above what was at its beginning: (GPU, host) in bytes."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._done = device, threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self.host_resting = self.host_peak = host_nbytes()
        self.gpu_resting = torch.cuda.memory_allocated() if device.type == "cuda" else 0
        self.gpu_peak = self.gpu_resting

    def __enter__(self) -> "Memory":
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()
        if self._device.type == "cuda":
            self.gpu_peak = torch.cuda.max_memory_allocated()

    def _watch(self) -> None:
        while not self._done.wait(_SAMPLED_EVERY_S):
            self.host_peak = max(self.host_peak, host_nbytes())

    def above(self, name: str) -> dict[str, float]:
        """The figures of the result."""
        return {
            f"gpu_{name}_gib": (self.gpu_peak - self.gpu_resting) / GIB,
            f"host_{name}_gib": (self.host_peak - self.host_resting) / GIB,
        }


def host_nbytes() -> int:
    """Memory of this process and those below it; what they share is counted once."""
    found = [_status(pid) for pid in _family()]
    return sum(own for own, _ in found) + max(shared for _, shared in found)


def _family() -> list[int]:
    parents: dict[int, int] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
    family = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in family} - family:
        family |= more
    return sorted(family)


def _status(pid: int) -> tuple[int, int]:
    """(memory of its own, memory that it shares) of a process, in bytes; files that are mapped are neither."""
    with contextlib.suppress(OSError):
        lines = (line.split() for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        values = {words[0]: int(words[1]) << 10 for words in lines if len(words) == 3 and words[2] == "kB"}
        if "RssAnon:" in values:
            return values["RssAnon:"], values["RssShmem:"]
        return values.get("VmRSS:", 0), 0
    return 0, 0


# ---- measuring ----


class Bench:
    """One engine's figures."""

    def __init__(self, engine: Engine, options: argparse.Namespace, device: torch.device) -> None:
        self._engine, self._options, self._device = engine, options, device
        self._root = Path(options.folder) / "checkpoint_bench"
        self._began_s = time.monotonic()
        self.figures: dict[str, Any] = {}
        self.is_identical = True

    def run(self) -> None:
        """Saves, loads, saves in the background and loads again; what the budget has no time for is left out."""
        fill(self._engine.optimizer)
        if self._options.asyncs:
            self._engine.prepare(self._root)
        expected_s = 0.0
        if self._options.syncs:
            self._save()
            self._load()
            expected_s = 2 * self.figures["save_s"] + self.figures["load_s"]
        if self._options.asyncs and self._has_time(expected_s):
            self._save_in_background()
            self._read_back()
        self._empty()

    def _save(self) -> None:
        times: list[float] = []
        for turn in range(self._options.syncs):
            if turn and not self._has_time(3 * times[0]):
                break
            self._empty()
            with Memory(self._device) as memory:
                times.append(self._timed(lambda: self._engine.save(self._root)))
            self._note(memory.above("save"))
            self.figures.setdefault("host_resting_gib", memory.host_resting / GIB)
            self.figures.setdefault("gpu_resting_gib", memory.gpu_resting / GIB)
        self.figures |= {"save_s": statistics.median(times), "saves_s": times}
        files = [path for path in self._root.rglob("*") if path.is_file()]
        self.figures["disk_gib"] = sum(path.stat().st_size for path in files) / GIB

    def _load(self) -> None:
        if self._engine.can_skip_verification:
            wipe(self._engine.optimizer)
            self.figures["load_unverified_s"] = self._timed(lambda: self._engine.load(self._root, verify=False))
        wipe(self._engine.optimizer)
        with Memory(self._device) as memory:
            self.figures["load_s"] = self._timed(lambda: self._engine.load(self._root, verify=True))
        self._note(memory.above("load"))
        self.is_identical &= is_whole(self._engine.optimizer)

    def _save_in_background(self) -> None:
        stalls: list[float] = []
        totals: list[float] = []
        with Memory(self._device) as memory:
            for turn in range(self._options.asyncs):
                if turn and not self._has_time(2 * totals[0]):
                    break
                self._empty()
                fill(self._engine.optimizer)
                began_s = time.monotonic()
                stalls.append(self._timed(lambda: self._engine.begin(self._root)))
                wipe(self._engine.optimizer)  # As if training went on.
                self._timed(self._engine.finish)
                totals.append(time.monotonic() - began_s)
        self._note(memory.above("async"))
        self.figures |= {"stall_s": stalls, "async_s": totals}

    def _read_back(self) -> None:
        self._timed(lambda: self._engine.load(self._root, verify=False))
        self.is_identical &= is_whole(self._engine.optimizer)

    def _timed(self, function: Callable[[], None]) -> float:
        """Seconds until all ranks are through."""
        self._wait()
        began_s = time.monotonic()
        function()
        self._wait()
        return time.monotonic() - began_s

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize()
        dist.barrier()

    def _has_time(self, seconds: float) -> bool:
        """True if rank 0 finds that much time left."""
        left_s = self._options.budget_s - (time.monotonic() - self._began_s)
        answer = torch.tensor(int(left_s > seconds), device=self._device)
        dist.broadcast(answer, src=0)
        return bool(answer.item())

    def _empty(self) -> None:
        """Deletes what was written, not the folder itself: runs that write in the background have it."""
        self._wait()
        if dist.get_rank() == 0:
            for path in self._root.iterdir() if self._root.exists() else ():
                shutil.rmtree(path) if path.is_dir() else path.unlink()
            self._root.mkdir(parents=True, exist_ok=True)
        self._wait()

    def _note(self, figures: dict[str, float]) -> None:
        for name, value in figures.items():
            self.figures[name] = max(value, self.figures.get(name, 0.0))


def _largest(figures: dict[str, Any]) -> dict[str, Any]:
    """The largest of each figure over all ranks, rounded. **Collective.**"""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, figures)

    def merge(values: list[Any]) -> Any:
        return (
            [merge(list(each)) for each in zip(*values, strict=True)]
            if isinstance(values[0], list)
            else round(max(values), 3)
        )

    return {name: merge([each[name] for each in everyone]) for name in figures}


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", required=True, choices=ENGINES)
    parser.add_argument("--size", default="8b", choices=fsdp_bench.SIZES)
    parser.add_argument("--folder", default=tempfile.gettempdir(), help="where to write; /dev/shm/... is memory")
    parser.add_argument("--syncs", type=int, default=2, help="saves that training waits for")
    parser.add_argument("--asyncs", type=int, default=2, help="saves in the background")
    parser.add_argument("--threads", type=int, default=1, help="fsdp2: thread_count of torch's writer")
    parser.add_argument("--async-by", default="process", choices=["process", "thread"], help="fsdp2: what writes")
    parser.add_argument("--budget-s", type=float, default=1e9, help="begin nothing that would take longer than this")
    return parser.parse_args(arguments)


def main() -> None:
    """Measures one engine on this rank, as torchrun has started it."""
    options = parse()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    result = measure(options, device)
    if dist.get_rank() == 0:
        print("RESULT " + json.dumps(result))
    dist.destroy_process_group()


def measure(options: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """The report of a measurement. **Collective.**"""
    warnings.filterwarnings("ignore", category=FutureWarning)
    # Checkpoints vanish here between two saves, of which a run would be warned.
    logging.getLogger("megatron.training").setLevel(logging.ERROR)
    with contextlib.ExitStack() as stack:
        engine = ENGINES[options.engine](options, device, stack)
        stack.callback(engine.close)
        bench = Bench(engine, options, device)
        bench.run()
        figures = _largest(bench.figures | {"differs": int(not bench.is_identical)})
    about = {name: getattr(options, name) for name in ("engine", "size", "folder", "threads", "async_by")}
    is_identical = not figures.pop("differs")
    return {**about, "ranks": dist.get_world_size(), **figures, "identical": is_identical}


if __name__ == "__main__":
    main()
