"""Times engines in turns, in the same processes: where the hosts decide and are uneven, only that compares engines.

    PYTHONPATH=megatron/core/distributed/fsdp/src torchrun --nproc-per-node 2 benchmarks/alternate.py \\
        --row 1b-bf16 --engines nocomm fsdp2 ours ours-copy-engine --out 1b.json

Rows and engines are those of `table.py`; all models are in memory at once. In each round every engine makes --steps
steps, after one round that does not count. Shown per engine, each the slowest rank's: the median of all steps; the
median, least and greatest of its rounds' ratios to the first engine's step in that round; and the time in which the
host has issued forward, backward, and the optimizer's step with `zero_grad`. CPU processes and gloo take the place of
GPUs where there are none. `mfsdp`, which has our import name, cannot take part.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parent))
import fsdp_bench  # noqa: E402
import table  # noqa: E402
from report_cost import join, wait  # noqa: E402

PHASES = ("step", "forward", "backward", "optimizer")


class Subject:
    """One engine's model, of which steps are timed."""

    def __init__(self, arguments: Sequence[str], device: torch.device):
        self._args = fsdp_bench.parser().parse_args(arguments)
        self._device = device
        torch.manual_seed(0)
        self._model, self._optimizer, self._micro = fsdp_bench.make_engine(self._args, device)

    def step(self) -> list[float]:
        """Milliseconds: from idle devices to idle devices, then what the host took to issue each phase."""
        args, moments, phases = self._args, [], [0.0, 0.0, 0.0]
        shape = (args.mbs, args.seq + 1)
        batches = [torch.randint(fsdp_bench.SIZES[args.size][5], shape, device=self._device) for _ in range(args.accum)]
        wait(self._device)
        dist.barrier()
        wait(self._device)
        moments.append(time.perf_counter())
        for number, tokens in enumerate(batches):
            with self._micro(number == args.accum - 1):
                began = time.perf_counter()
                loss = self._model(tokens[:, :-1], tokens[:, 1:]) / args.accum
                between = time.perf_counter()
                loss.backward()
            phases[0] += between - began
            phases[1] += time.perf_counter() - between
        moments.append(time.perf_counter())
        self._optimizer.step()
        self._optimizer.zero_grad()
        phases[2] = time.perf_counter() - moments[-1]
        wait(self._device)
        return [1e3 * value for value in (time.perf_counter() - moments[0], *phases)]

    def medians(self, steps: int) -> torch.Tensor:
        """By phase, the median of so many steps, the slowest rank's; the same on every rank. **Collective.**"""
        found = [statistics.median(times) for times in zip(*(self.step() for _ in range(steps)), strict=True)]
        medians = torch.tensor(found, device=self._device)
        dist.all_reduce(medians, op=dist.ReduceOp.MAX)
        return medians.cpu()


def measure(subjects: dict[str, Subject], rounds: int, steps: int) -> dict[str, dict[str, Any]]:
    """Figures by engine, the same on every rank. **Collective.**"""
    found: dict[str, list[torch.Tensor]] = {name: [] for name in subjects}
    for number in range(rounds + 1):
        for name, subject in subjects.items():
            medians = subject.medians(steps)
            if number:
                found[name].append(medians)
    first = torch.stack(next(iter(found.values())))[:, 0]
    return {name: summary(torch.stack(medians), first) for name, medians in found.items()}


def summary(rounds: torch.Tensor, first: torch.Tensor) -> dict[str, Any]:
    """Of one engine's medians by round and phase, and the first engine's steps."""
    ratios = (rounds[:, 0] / first).tolist()
    medians = rounds.quantile(0.5, dim=0).tolist()
    figures = {f"{phase}_ms": round(value, 1) for phase, value in zip(PHASES, medians, strict=True)}
    return {
        **figures,
        "rounds_ms": [round(value, 1) for value in rounds[:, 0].tolist()],
        "ratio": round(statistics.median(ratios), 3),
        "ratios": [round(min(ratios), 3), round(max(ratios), 3)],
    }


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--row", default="1b-bf16", choices=table.ROWS)
    engines = [name for name in table.ENGINES if name != "mfsdp"]
    parser.add_argument("--engines", nargs="+", default=["nocomm", "fsdp2", "ours"], choices=engines)
    parser.add_argument("--size", help="another size than the row's")
    parser.add_argument("--seq", help="other tokens per sequence than the row's")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=12, help="of a round")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    given = parser.parse_args(arguments)
    if min(given.rounds, given.steps) < 1:
        parser.error(f"--rounds {given.rounds} and --steps {given.steps} should be at least 1")
    return given


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Command line; gives back what --out writes."""
    given = parse(arguments)
    device = join()
    others = [word for name in ("size", "seq") if getattr(given, name) for word in (f"--{name}", getattr(given, name))]
    told = {name: (*table.ENGINES[name], *table.ROWS[given.row], *others) for name in given.engines}
    subjects = {name: Subject(arguments, device) for name, arguments in told.items()}
    figures = measure(subjects, given.rounds, given.steps)
    options = {"row": given.row, "gpus": dist.get_world_size(), "rounds": given.rounds, "steps": given.steps}
    result = {**options, "others": others, "machine": table.machine(), "results": figures}
    if dist.get_rank() == 0:
        for name, figure in figures.items():
            sys.stdout.write(f"{given.row} {name}: {json.dumps(figure)}\n")
        if given.out:
            given.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    dist.destroy_process_group()
    return result


if __name__ == "__main__":
    main()
