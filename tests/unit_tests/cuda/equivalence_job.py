"""Job of one rank of `test_equivalence.py`: the equivalence matrix's cells of this many ranks.

    torchrun ... -m tests.unit_tests.cuda.equivalence_job DEVICE SECONDS STRIDE RESULTS

DEVICE is cuda (NCCL) or cpu (gloo). If there are several hosts they are taken for one machine's (`hosts.py`).
Cells that do not start within SECONDS are left out by name; of STRIDE cells one is run (1: all).
"""

import dataclasses
import json
import os
import platform
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_fsdp.runtime import linear_grads
from tests.unit_tests.harness import matrix, matrix_runs
from tests.unit_tests.harness.matrix_runs import Measure

#: Cells between two looks at the clock, and in one exchange of results.
CHUNK = 8


def places(world: int, stride: int) -> list[int]:
    """Indices of this world's cells in `matrix.CELLS`, neighbours apart: cells that time cuts off are of all kinds."""
    mine = [place for place, cell in enumerate(matrix.CELLS) if cell.topology.world == world][::stride]
    return [place for start in range(7) for place in mine[start::7]]


def run(device: str, seconds: float, stride: int) -> dict[str, Any] | None:
    """Results on the first rank, None on others. **Collective.**"""
    started = time.monotonic()
    objects = dist.new_group(backend="gloo")  # NCCL would take objects through the GPU
    todo = places(dist.get_world_size(), stride)
    measures: dict[int, Measure] = {}
    while todo:
        is_late = [time.monotonic() - started > seconds]
        dist.broadcast_object_list(is_late, src=0, group=objects)
        if is_late[0]:
            break
        now, todo = todo[:CHUNK], todo[CHUNK:]
        cells = [matrix.CELLS[place] for place in now]
        mine = matrix_runs.run_cells(cells, device)
        everyone = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
        dist.gather_object(mine, everyone, dst=0, group=objects)
        if everyone is not None:
            measures |= zip(now, matrix_runs.measured(cells, everyone, device), strict=True)
    if dist.get_rank() != 0:
        return None
    done = sorted(measures)
    return {
        "ranks": dist.get_world_size(),
        "machine": machine(device),
        "seconds": time.monotonic() - started,
        "cells": done,
        "measures": [dataclasses.asdict(measures[place]) for place in done],
        "not_run": sorted(todo),
    }


def machine(device: str) -> str:
    """Number of ranks, number and kind of processors, and the versions. Ranks of several hosts share them."""
    versions = f"torch {torch.__version__}, Python {platform.python_version()}"
    kind = f"{platform.machine()} CPU"
    if device == "cuda":
        versions = f"NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}, {versions}"
        kind = torch.cuda.get_device_name()
    ranks, local, hosts = (os.environ[name] for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE"))
    if hosts == "1":
        return f"{ranks} x {kind}, {versions}"
    return f"{ranks} ranks on {local} x {kind} as {hosts} hosts, {versions}"


def main() -> None:
    """Runs what the command line says and writes the results on rank 0."""
    device, seconds, stride, results = sys.argv[1:]
    linear_grads.LEAST_NUMEL = 1  # the matrix' models are small
    if device == "cuda":
        local = int(os.environ["LOCAL_RANK"])
        torch.cuda.set_device(local)
        dist.init_process_group("nccl", device_id=torch.device("cuda", local), timeout=timedelta(seconds=120))
        # TF32 would not round these integers, but the floats of any kernel that is chosen for another alignment.
        torch.backends.cuda.matmul.allow_tf32 = False
    else:
        dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    found = run(device, float(seconds), int(stride))
    if found is not None:
        Path(results).write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
