"""Trains the benchmark's model with each engine and option from the same weights on the same data, and compares losses.

    torchrun --nproc-per-node 4 benchmarks/losses.py --size 1b --seq 1024 --steps 50 --out losses.json

Each rank trains on one batch of its own over and over, so that the loss falls and a wrong gradient shows. Printed per
run: the losses of the first, middle and last step; the largest relative difference from FSDP2's with gradients
communicated in the same dtype; and whether every loss has the bits of our own plain schedule, which overlaps nothing.
How far FSDP2's losses in the two dtypes are from each other is the noise to compare with.
"""

import argparse
import gc
import json
import os
import sys
from collections.abc import Sequence

import torch
import torch.distributed as dist
from fsdp_bench import SIZES, make_engine
from fsdp_bench import parser as bench_parser
from table import ENGINES

#: Arguments of `fsdp_bench.py`, by run; each is made once for each communication dtype.
RUNS = {
    "fsdp2": ENGINES["fsdp2"],
    "plain": (*ENGINES["ours"], "--plain"),
    **{name: told for name, told in ENGINES.items() if name.startswith("ours")},
}


def losses_of(run: str, comm: str, given: argparse.Namespace, device: torch.device) -> list[float]:
    """The mean loss over ranks of every step. **Collective.**"""
    args = bench_parser().parse_args([*RUNS[run], "--grad-comm", comm, "--size", given.size, "--seq", str(given.seq)])
    torch.manual_seed(0)
    model, optimizer, micro = make_engine(args, device)
    for group in optimizer.param_groups:
        group["lr"] = given.lr
    generator = torch.Generator(device=device).manual_seed(777 + dist.get_rank())
    shape = (given.accum, 1, given.seq + 1)
    tokens = torch.randint(0, SIZES[given.size][5], shape, device=device, generator=generator)
    totals = []
    for _ in range(given.steps):
        total = torch.zeros((), dtype=torch.float64, device=device)
        for number, batch in enumerate(tokens):
            with micro(number == given.accum - 1):
                loss = model(batch[:, :-1], batch[:, 1:]) / given.accum
                loss.backward()
            total += loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(total)
        totals.append(total / dist.get_world_size())
    return [total.item() for total in totals]


def difference(losses: Sequence[float], others: Sequence[float]) -> float:
    """The largest over the steps, relative to the others' loss."""
    return max(abs(a - b) / abs(b) for a, b in zip(losses, others, strict=True))


def table(found: dict[str, dict[str, list[float]]]) -> str:
    """As Markdown."""
    lines = [
        "| gradients | run | first, middle, last loss | from fsdp2 | bits of the plain schedule |",
        "|---|---|---|---|---|",
    ]
    for comm, runs in found.items():
        for run, losses in runs.items():
            shown = ", ".join(f"{losses[place]:.5f}" for place in (0, len(losses) // 2, -1))
            off = f"{difference(losses, runs['fsdp2']):.1e}" if "fsdp2" in runs and run != "fsdp2" else ""
            same = (
                ("all" if losses == runs["plain"] else "no")
                if "plain" in runs and run not in ("fsdp2", "plain")
                else ""
            )
            lines.append(f"| {comm} | {run} | {shown} | {off} | {same} |")
    if all("fsdp2" in runs for runs in found.values()) and len(found) == 2:
        first, second = (runs["fsdp2"] for runs in found.values())
        lines.append(f"\nfsdp2 with {' and '.join(found)} gradients: {difference(first, second):.1e} apart.")
    return "\n".join(lines)


def parser() -> argparse.ArgumentParser:
    """Of the command line."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--size", default="1b", choices=SIZES)
    made.add_argument("--seq", type=int, default=1024)
    made.add_argument("--accum", type=int, default=1)
    made.add_argument("--steps", type=int, default=50)
    made.add_argument("--lr", type=float, default=1e-4)
    made.add_argument("--runs", nargs="+", default=list(RUNS), choices=RUNS)
    made.add_argument("--comms", nargs="+", default=["bf16", "fp32"], choices=["bf16", "fp32"])
    made.add_argument("--out", default="", help="JSON file of all losses")
    return made


def main() -> None:
    """Runs all of it; writes and prints on the first rank."""
    given = parser().parse_args()
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    torch.use_deterministic_algorithms(True)  # else attention adds gradients in any order
    torch.utils.deterministic.fill_uninitialized_memory = False
    found: dict[str, dict[str, list[float]]] = {}
    for comm in given.comms:
        for run in given.runs:
            found.setdefault(comm, {})[run] = losses_of(run, comm, given, device)
            gc.collect()
            torch.cuda.empty_cache()
            if dist.get_rank() == 0:
                sys.stderr.write(f"{comm} {run}: {found[comm][run][-1]:.5f}\n")
    if dist.get_rank() == 0:
        if given.out:
            with open(given.out, "w", encoding="utf-8") as file:
                json.dump({**vars(given), "ranks": dist.get_world_size(), "losses": found}, file)
        sys.stdout.write(table(found) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
