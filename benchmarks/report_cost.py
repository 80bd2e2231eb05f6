"""Cost of an open overlap report: steps with one and without one in turns, in one process.

    PYTHONPATH=megatron/core/distributed/fsdp/src \\
        torchrun --nproc-per-node 4 benchmarks/report_cost.py --size 1b --seq 2048 --grad-comm bf16

Options are those of `fsdp_bench.py`. Prints one line on the first rank, RESULT and JSON: the median step of the slowest
rank in milliseconds by the host's clock, from idle GPUs to idle GPUs, with a report (`open_ms`; making its figures is
part of it) and without (`closed_ms`), and the quartiles of both. CPU processes and gloo take the place of GPUs where
there are none.
"""

import argparse
import contextlib
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parent))
import fsdp_bench  # noqa: E402

WARMUP, PAIRS = 5, 30


def measure(args: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Trains, and gives the result, the same on every rank. **Collective.**"""
    model, optimizer, micro = fsdp_bench.make_engine(args, device)
    tokens = torch.randint(0, fsdp_bench.SIZES[args.size][5], (args.mbs, args.seq + 1), device=device)

    def step(report: contextlib.AbstractContextManager) -> float:
        dist.barrier()
        wait(device)
        began_s = time.perf_counter()
        with report:
            with micro(True):
                model(tokens[:, :-1], tokens[:, 1:]).backward()
            optimizer.step()
            optimizer.zero_grad()
        wait(device)
        return 1e3 * (time.perf_counter() - began_s)

    for _ in range(WARMUP):
        step(contextlib.nullcontext())
    times: dict[str, list[float]] = {"closed": [], "open": []}
    for _ in range(PAIRS):
        times["closed"].append(step(contextlib.nullcontext()))
        times["open"].append(step(model.overlap_report()))
    found = torch.tensor([statistics.quantiles(each, n=4) for each in times.values()], device=device)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    quartiles = {name: [round(value, 2) for value in row] for name, row in zip(times, found.tolist(), strict=True)}
    about = {"size": args.size, "seq": args.seq, "ranks": dist.get_world_size(), "pairs": PAIRS}
    return {**about, **{f"{name}_ms": row[1] for name, row in quartiles.items()}, "quartiles": quartiles}


def join() -> torch.device:
    """This rank's device, once all ranks have joined: NCCL on GPUs, gloo on CPUs. **Collective.**"""
    if not torch.cuda.is_available():
        dist.init_process_group("gloo")
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    return device


def wait(device: torch.device) -> None:
    """Waits for the device, where the host runs ahead of it."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def main() -> None:
    """Command line."""
    args = fsdp_bench.parser().parse_args(["--engine", "ours", *sys.argv[1:]])
    device = join()
    result = measure(args, device)
    if dist.get_rank() == 0:
        sys.stdout.write("RESULT " + json.dumps(result) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
