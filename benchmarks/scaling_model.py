"""Time of a step of sharded training on paper, on one host and on many; docs/scaling.md has the assumptions.

python benchmarks/scaling_model.py                    # the checks against measurements, and the table of hosts
python benchmarks/scaling_model.py --hosts 16 64 --microbatches 8
"""

import argparse
import dataclasses
import math
import sys
from collections.abc import Callable, Sequence


@dataclasses.dataclass(frozen=True, kw_only=True)
class Machine:
    """Hosts that are alike. Bandwidths are a rank's share, in bytes per second."""

    gpus_per_host: int = 8
    nvlink: float = 330e9
    """Bus bandwidth of gathers and reductions of 256 MiB and more inside a host (measured, NCCL 2.28.9 on H200)."""
    network: float = 42e9
    """One adapter of 400 Gbit/s for each GPU, at 85 % (assumed)."""
    hop_s: float = 6e-6
    """Of a message to the next host in a ring (assumed)."""
    stolen_per_byte: float = 0.6e-3 / (436e6 * 7 / 8)
    """Seconds that computing loses to each byte that a rank receives beside it: 0.6 ms to a layer of 436 MB that 8
    ranks exchange (measured beside products of 8192 x 8192)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Work:
    """Arithmetic of one rank, and bytes of the model's weights and gradients on the wire."""

    compute_s: float
    """One micro-batch, and the optimizer's part of a step, without any communication."""
    layers: int = 32
    weight_nbytes: float = 2 * 8.03e9
    grad_nbytes: float = 2 * 8.03e9
    microbatches: int = 1
    is_resident: bool = False
    """Weights stay gathered through a step."""


@dataclasses.dataclass(frozen=True)
class Step:
    """Seconds, and bytes that cross one network adapter in each direction."""

    step_s: float
    wire_s: float
    network_nbytes: float


def collective_s(machine: Machine, nbytes: float, hosts: int, local: int) -> float:
    """One gather, or reduction, of `nbytes` over `local` ranks on each of `hosts`, as rings, by their slower link."""
    ranks = hosts * local
    inside = nbytes * (ranks - 1) / ranks / machine.nvlink
    between = nbytes * (hosts - 1) / hosts / local / machine.network if hosts > 1 else 0.0
    return max(inside, between) + machine.hop_s * (hosts - 1)


def step(machine: Machine, work: Work, hosts: int, *, is_hybrid: bool, gpus: int | None = None) -> Step:
    """A step with everything sharded over all ranks, or inside hosts with an outer axis over them.

    Communication runs beside computing, from which it takes its share; what is longer than computing is exposed.
    """
    local = gpus or machine.gpus_per_host
    inner_hosts = 1 if is_hybrid else hosts
    ranks = inner_hosts * local
    gathers = 1 if work.is_resident else 2 * work.microbatches
    passes = [(work.weight_nbytes, gathers), (work.grad_nbytes, work.microbatches)]
    wire = sum(n * work.layers * collective_s(machine, b / work.layers, inner_hosts, local) for b, n in passes)
    received = sum(n * b * (ranks - 1) / ranks for b, n in passes)
    crossing = sum(n * b * (inner_hosts - 1) / inner_hosts / local for b, n in passes)
    if is_hybrid and hosts > 1:
        # Once in a step, of this rank's part: gradients to their owners, and weights (or sums) back.
        part = (work.weight_nbytes + work.grad_nbytes) / local
        outer = part * (hosts - 1) / hosts
        wire += outer / machine.network + 2 * work.layers * machine.hop_s * (hosts - 1)
        received, crossing = received + outer, crossing + outer
    busy = work.compute_s * work.microbatches + received * machine.stolen_per_byte
    return Step(max(busy, wire), wire, crossing)


#: Measured on 4 H200 of one host (docs/lab/measurements.md): what, the work, milliseconds.
MEASURED = (
    ("8B, 4096 tokens", Work(compute_s=0.3726), 429.2),
    ("8B, 4096 tokens, resident", Work(compute_s=0.378, is_resident=True), 431.2),
    ("8B, 4096 tokens, gradients in fp32", Work(compute_s=0.3726, grad_nbytes=4 * 8.03e9), 450.5),
    ("8B, 4096 tokens, 4 micro-batches", Work(compute_s=0.371, microbatches=4), 1696.2),
    ("8B, 4096 tokens, 4 micro-batches, resident", Work(compute_s=0.371, microbatches=4, is_resident=True), 1618.3),
)


def checks(machine: Machine) -> str:
    """The model beside what was measured."""
    lines = ["| workload, 4 GPUs | model (ms) | measured (ms) | model / measured |", "|---|---|---|---|"]
    for name, work, measured in MEASURED:
        paper = 1e3 * step(machine, work, 1, is_hybrid=False, gpus=4).step_s
        lines.append(f"| {name} | {paper:.0f} | {measured} | {paper / measured:.2f} |")
    return "\n".join(lines)


def hosts_table(machine: Machine, work: Work, hosts: Sequence[int]) -> str:
    """Flat and hybrid sharding over numbers of hosts."""
    lines = [
        "| hosts | GPUs | flat: step (wire) ms | GB per adapter | hybrid: step (wire) ms | GB per adapter | faster |",
        "|---|---|---|---|---|---|---|",
    ]
    for count in hosts:
        flat, hybrid = (step(machine, work, count, is_hybrid=is_hybrid) for is_hybrid in (False, True))
        is_even = math.isclose(flat.step_s, hybrid.step_s, rel_tol=0.01)
        faster = "even" if is_even else "flat" if flat.step_s < hybrid.step_s else "hybrid"
        cells = " | ".join(
            f"{1e3 * one.step_s:.0f} ({1e3 * one.wire_s:.0f}) | {one.network_nbytes / 1e9:.1f}"
            for one in (flat, hybrid)
        )
        lines.append(f"| {count} | {count * machine.gpus_per_host} | {cells} | {faster} |")
    return "\n".join(lines)


def _above_zero(kind: type) -> Callable[[str], float]:
    def number(text: str) -> float:
        value = kind(text)
        if not 0 < value < math.inf:
            raise ValueError(text)
        return value

    number.__name__ = f"{kind.__name__} above 0"
    return number


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=_above_zero(int), nargs="+", default=[1, 2, 4, 8, 16, 64, 256, 1024])
    parser.add_argument("--microbatches", type=_above_zero(int), default=1)
    compute = "of one micro-batch, without communication"
    parser.add_argument("--compute-ms", type=_above_zero(float), default=371.0, help=compute)
    given = parser.parse_args(arguments)
    machine = Machine()
    work = Work(compute_s=given.compute_ms / 1e3, microbatches=given.microbatches)
    sys.stdout.write(f"{checks(machine)}\n\n{hosts_table(machine, work, given.hosts)}\n")


if __name__ == "__main__":
    main()
