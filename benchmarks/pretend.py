"""Runs a training script as the first of many ranks, on one device: memory and host time as there, and nothing sent.

    python benchmarks/pretend.py 8 pretrain_gpt.py --use-megatron-fsdp --train-iters 14 ...

Its collectives are torch's fake ones, which return at once and leave what they should have written as it was. So
weights, losses and gradients mean nothing, and may not be finite (--no-check-for-nan-in-loss-and-grad goes on all the
same); a step waits for no wire. What the script takes from the environment (RANK, LOCAL_RANK, WORLD_SIZE) and from the
default process group is as for the first of so many ranks on one host.
"""

import os
import runpy
import sys
from pathlib import Path

import torch.distributed as dist

USAGE = "usage: pretend.py RANKS SCRIPT [the script's arguments]"


def main(arguments: list[str]) -> None:
    """Command line: how many ranks, the script, its own arguments."""
    if len(arguments) < 2 or not arguments[0].isdigit() or int(arguments[0]) < 1:
        raise SystemExit(USAGE)
    ranks, script = int(arguments[0]), arguments[1]
    if not Path(script).is_file():
        raise SystemExit(f"{USAGE}\nthere is no file {script}")
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE=str(ranks))
    from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: PLC0415  registers the backend

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    sys.argv = arguments[1:]
    sys.path[0] = str(Path(script).resolve().parent)  # as if Python had been given the script
    try:
        runpy.run_path(script, run_name="__main__")
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
