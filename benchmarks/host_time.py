"""Host time that sharding adds to a step, per unit: hooks, waits for events, views and the schedule, without a GPU.

    PYTHONPATH=megatron/core/distributed/fsdp/src python benchmarks/host_time.py --json host_time.json

Tiny units are trained sharded and unsharded in turns; what is shown is the difference, in microseconds per unit. With
--ranks above 1 (the default) the collectives are torch's fake ones, which return at once, so that everything but the
communication itself is measured as on that many ranks. --ranks 1 is one real gloo process, where nothing is sharded.
--parts then counts where in the engine that time goes, each part without the others inside it; being counted costs
time as well, so these figures are larger. --profile shows the functions that take most, by cProfile.
"""

import argparse
import contextlib
import cProfile
import functools
import gc
import json
import os
import platform
import pstats
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

from megatron_fsdp import fully_shard
from megatron_fsdp.runtime import hooks
from megatron_fsdp.runtime.communication import Gatherer, Reducer
from megatron_fsdp.runtime.schedule import Schedule
from megatron_fsdp.runtime.unit import Unit

PHASES = ("forward", "backward", "step")
OPTIMIZERS = {
    "sgd": functools.partial(torch.optim.SGD, lr=1e-6, foreach=False),
    "adamw": functools.partial(torch.optim.AdamW, lr=1e-6, fused=True),
}
PARTS = {
    "hooks": (hooks._UnitHooks, ("pre_forward", "post_forward", "pre_backward")),
    "schedule": (Schedule, ("enter", "exit", "gradient_arrived", "finish_backward")),
    "gathers": (Gatherer, ("gather", "refresh", "reshard")),
    "event waits": (Gatherer, ("wait_for",)),
    "reductions": (Reducer, ("reduce", "finalize", "drain", "drain_all")),
    "view swaps": (Unit, ("show_unsharded", "show_sharded")),
}
"""Parts that --parts counts: name -> (class, methods)."""


class TinyUnit(nn.Module):
    """As many parameters as a transformer layer has, and next to no arithmetic."""

    def __init__(self, params: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.full((8, 8), 0.1) for _ in range(params))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for weight in self.weights:
            x = x + weight[0]
        return x


@dataclass
class Subject:
    """A model to be timed."""

    model: nn.Module
    optimizer: torch.optim.Optimizer

    def step(self) -> tuple[float, float, float]:
        """Seconds of forward, backward and the rest of one step."""
        moments = [time.thread_time()]
        loss = self.model(torch.ones(1, 8)).sum()
        moments.append(time.thread_time())
        loss.backward()
        moments.append(time.thread_time())
        self.optimizer.step()
        self.optimizer.zero_grad()
        moments.append(time.thread_time())
        return tuple(end - start for start, end in zip(moments, moments[1:], strict=False))

    def medians(self, steps: int) -> list[float]:
        """Median seconds of each phase over so many steps."""
        return [statistics.median(times) for times in zip(*(self.step() for _ in range(steps)), strict=True)]


def build(options: argparse.Namespace, *, sharded: bool) -> Subject:
    """The model, of units alike."""
    torch.manual_seed(0)
    model = nn.Sequential(*(TinyUnit(options.params) for _ in range(options.units)))
    optimizer = OPTIMIZERS[options.optimizer](model.parameters())
    if sharded:
        model, optimizer = fully_shard(
            model, optimizer, fsdp_unit_modules=[TinyUnit], zero_dp_strategy=options.strategy
        )
    return Subject(model, optimizer)


def measure(options: argparse.Namespace) -> dict[str, list[float]]:
    """By phase, microseconds per unit that sharding adds, one for each repeat."""
    plain, sharded = build(options, sharded=False), build(options, sharded=True)
    for subject in (plain, sharded):
        subject.medians(options.warmup)
    added: dict[str, list[float]] = {phase: [] for phase in PHASES}
    gc.disable()
    for _ in range(options.repeats):
        base, ours = plain.medians(options.steps), sharded.medians(options.steps)
        gc.collect()
        for phase, without, with_it in zip(PHASES, base, ours, strict=True):
            added[phase].append((with_it - without) / options.units * 1e6)
    gc.enable()
    return added


class Clock:
    """Adds up the time of parts, each without the parts called inside it."""

    def __init__(self) -> None:
        self.spent_s = dict.fromkeys(PARTS, 0.0)
        self._open: list[str] = []
        self._since_s = 0.0

    def _turn(self) -> None:
        now_s = time.thread_time()
        if self._open:
            self.spent_s[self._open[-1]] += now_s - self._since_s
        self._since_s = now_s

    def counted(self, part: str, function: Callable) -> Callable:
        """`function`, whose time belongs to `part`."""

        @functools.wraps(function)
        def call(*args, **kwargs):
            self._turn()
            self._open.append(part)
            try:
                return function(*args, **kwargs)
            finally:
                self._turn()
                self._open.pop()

        return call


@contextlib.contextmanager
def counting(clock: Clock) -> Iterator[None]:
    """Inside, models that are built have their parts counted."""
    with contextlib.ExitStack() as stack:
        for part, (owner, names) in PARTS.items():
            for name in names:
                counted = clock.counted(part, getattr(owner, name))
                stack.enter_context(mock.patch.object(owner, name, counted))
        yield


def measure_parts(options: argparse.Namespace) -> dict[str, float]:
    """By part, microseconds per unit and step."""
    clock = Clock()
    with counting(clock):
        sharded = build(options, sharded=True)
        sharded.medians(options.warmup)
        clock.spent_s = dict.fromkeys(PARTS, 0.0)
        steps = options.steps * options.repeats
        sharded.medians(steps)
    return {part: spent_s / steps / options.units * 1e6 for part, spent_s in clock.spent_s.items()}


def show_profile(options: argparse.Namespace) -> None:
    """Prints the functions in which most time was spent."""
    sharded = build(options, sharded=True)
    sharded.medians(options.warmup)
    with cProfile.Profile() as profile:
        sharded.medians(options.steps * options.repeats)
    pstats.Stats(profile).sort_stats("tottime").print_stats(40)


@contextlib.contextmanager
def group(ranks: int) -> Iterator[None]:
    """Inside there is a process group of so many ranks, of which this process is the first."""
    if ranks == 1:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    else:
        from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: PLC0415  registers the backend

        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


def summary(values: list[float]) -> dict[str, float]:
    """Median, least and most."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--units", type=int, default=24)
    parser.add_argument("--params", type=int, default=9, help="parameters of a unit")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--strategy", default="optim_grads_params")
    parser.add_argument("--optimizer", default="sgd", choices=OPTIMIZERS)
    parser.add_argument("--steps", type=int, default=30, help="steps of a repeat")
    parser.add_argument("--repeats", type=int, default=11)
    parser.add_argument("--warmup", type=int, default=10, help="steps before all repeats")
    parser.add_argument("--parts", action="store_true")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--json", help="file to write the figures to")
    options = parser.parse_args(arguments)
    for name in ("units", "params", "ranks", "steps", "repeats", "warmup"):
        value, least = getattr(options, name), 0 if name == "warmup" else 1
        if value < least:
            parser.error(f"--{name} is {value}; it should be at least {least}")
    return options


def main(arguments: list[str] | None = None) -> dict:
    """Measures, prints, and gives back what --json writes."""
    options = parse(arguments)
    torch.set_num_threads(1)
    with group(options.ranks):
        if options.profile:
            show_profile(options)
        phases = {phase: summary(values) for phase, values in measure(options).items()}
        parts = measure_parts(options) if options.parts else {}
    figures = {
        "us_per_unit": phases,
        "parts_us_per_unit": parts,
        "options": {
            name: getattr(options, name)
            for name in ("units", "params", "ranks", "strategy", "optimizer", "steps", "repeats")
        },
        "machine": {"cpus": os.cpu_count(), "python": platform.python_version(), "torch": torch.__version__},
    }
    print(
        f"us per unit, {options.units} units of {options.params} parameters, {options.strategy}, {options.ranks} ranks"
    )
    for phase, values in phases.items():
        print(f"  {phase:<12} {values['median']:8.1f}   ({values['min']:.1f} to {values['max']:.1f})")
    for part, value in parts.items():
        print(f"    {part:<12} {value:8.1f}")
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(figures, file, indent=1)
    return figures


if __name__ == "__main__":
    main()
