"""Job of one rank of `test_resume.py`: a run that never stops, and one that stops in the middle and is resumed.

torchrun ... -m tests.unit_tests.cuda.resume_job FOLDER ITERATIONS FLAGS
"""

import json
import os
import sys

import torch
import torch.distributed as dist

from tests.unit_tests.training.runs import logged, train


def compare(folder: str, iterations: int, flags: str) -> dict[str, object]:
    """Differences on this rank, and figures that show that something was trained. **Collective.**"""
    flags += f" --train-iters {iterations} "
    whole = train(flags)
    first = train(flags + f"--save {folder} --exit-interval {iterations // 2}")
    second = train(flags + f"--load {folder} --save {folder}")
    differing = [
        f"{part} {name}"
        for part in ("weights", "optimizer")
        for name, value in getattr(whole, part).items()
        if not torch.equal(value, getattr(second, part)[name])
    ]
    for name in ("losses", "norms"):
        if getattr(first, name) + getattr(second, name) != getattr(whole, name):
            differing.append(name)
    if second.state != whole.state:
        differing.append("counters")
    if logged(first) + logged(second) != logged(whole):
        differing.append("log")
    return {
        "differing": differing,
        "steps": [len(first.losses), len(second.losses), len(logged(whole))],
        "losses": [whole.losses[0], whole.losses[-1]],
        "tensors": len(whole.weights) + len(whole.optimizer),
    }


def main() -> None:
    """Compares and prints one line on rank 0."""
    folder, iterations, flags = sys.argv[1:]
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    else:
        dist.init_process_group("gloo")
    found = compare(folder, int(iterations), flags)
    everyone: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, found)
    if dist.get_rank() == 0:
        print("RESULT " + json.dumps(everyone), flush=True)  # noqa: T201  (the test reads it)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
