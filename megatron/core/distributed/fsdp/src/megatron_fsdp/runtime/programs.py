"""The programs of a model: recorded once for each kind of pass, agreed on by all ranks, rewritten by the options."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from megatron_fsdp.config import REDUCTIONS_IN_FLIGHT, UNITS_AHEAD, EngineConfig
from megatron_fsdp.machine.collectives import Axis, all_gather, largest
from megatron_fsdp.plan import program as plan
from megatron_fsdp.plan.double_buffer import BUFFERS
from megatron_fsdp.plan.program import ENTER, EVENTS, REDUCE, Program, Trace
from megatron_fsdp.plan.strategy import strategies_that
from megatron_fsdp.runtime.unit import Unit, contains

logger = logging.getLogger(__name__)

#: A program that would become longer than this many times the pass that it must hold is replaced by one for that pass.
_MOST_GROWTH = 2
#: More than any memory, and a number that ranks can tell each other.
_MOST_NBYTES = 2**62
_MIB = 2**20


class Key(NamedTuple):
    """The kind of a pass."""

    unit: int
    """The unit that its forward begins with: the root, or one that is called outside the root's forward."""
    is_recorded: bool
    """Autograd records the forward."""
    phase: str
    """Set by `model.schedule.phase()`."""
    is_backward: bool = False

    def text(self, units: Sequence[Unit]) -> str:
        """For messages."""
        kind = "backward" if self.is_backward else "forward" if self.is_recorded else "forward without gradients"
        kind += f" of unit {units[self.unit].label}" if self.unit else ""
        return kind + (f" in phase {self.phase!r}" if self.phase else "")


@dataclasses.dataclass(frozen=True)
class Consensus:
    """Agreement between all ranks of a model, for passes that no program covers yet. Steady steps ask nothing."""

    axes: tuple[Axis, ...]
    """Data-parallel axes that reach all ranks, as those of experts need not; empty if there is nothing to agree on."""
    device: torch.device

    @classmethod
    def of(cls, units: Sequence[Unit], device: torch.device) -> Consensus:
        """The ranks over which these units are spread. A single unit has one order by itself."""
        specs = [group.spec for unit in units for group in unit.groups] if len(units) > 1 else []
        return cls(min(specs, key=lambda spec: spec.is_expert).axes if specs else (), device)

    def largest(self, numbers: Sequence[int | bool]) -> list[int]:
        """The largest of each of the numbers over all ranks. **Collective**."""
        return largest(numbers, [axis.gather_group for axis in self.axes if axis.gather_group is not None], self.device)

    def smallest(self, numbers: Sequence[int | bool]) -> list[int]:
        """The smallest of each of the numbers over all ranks. **Collective**."""
        return [-number for number in self.largest([-number for number in numbers])]

    def traces(self, own: Trace) -> list[Trace]:
        """The different traces of all ranks: a single one if all are alike. **Collective**."""
        codes = [EVENTS.index(event) + len(EVENTS) * unit for event, unit in own]
        (length,) = self.largest([len(codes)])
        table = torch.tensor([[*codes, *[-1] * (length - len(codes))]], device=self.device)
        for axis in self.axes:
            rows = table.repeat(axis.size, 1)
            all_gather(rows.view(-1), table.view(-1), axis)
            table = rows
        found = set(map(tuple, table.tolist()))
        return [tuple((EVENTS[code % len(EVENTS)], code // len(EVENTS)) for code in row if code >= 0) for row in found]


class Programs:
    """Programs of all kinds of passes, by key; the same on all ranks."""

    def __init__(self, units: Sequence[Unit], config: EngineConfig, consensus: Consensus):
        self.facts = [_facts_of(unit, units) for unit in units]
        self._units = units
        self._consensus = consensus
        self.gathered = frozenset(unit.number for unit in units if unit.gathered_numel)
        """Units whose weights are there only while they are gathered."""
        self.resident: frozenset[int] = frozenset()
        """Of those, the ones that stay gathered until the optimizer steps."""
        has_slots, numel = config.fsdp_double_buffer, config.suggested_communication_unit_size
        depth, ahead_numel = (UNITS_AHEAD, numel) if config.overlap_param_gather else (0, None)
        self._ahead = plan.Ahead(depth, ahead_numel, BUFFERS - 1 if has_slots else None)
        self.in_flight = plan.InFlight(REDUCTIONS_IN_FLIGHT, numel, has_slots)
        """Number of reductions that may be on their way."""
        self.recorded: dict[Key, Program] = {}
        """Programs that do everything in place."""
        self._rewritten: dict[Key, Program] = {}
        """Programs that run."""
        nbytes = config.fsdp_residency_bytes
        if isinstance(nbytes, int) and nbytes != 0:
            self.keep_resident(min(nbytes, _MOST_NBYTES), range(1, len(units)))
            if not self.resident and dist.get_rank() == 0:
                self._warn_of_residency(nbytes)

    @property
    def resharded(self) -> frozenset[int]:
        """Units that passes reshard."""
        return self.gathered - self.resident

    def get(self, key: Key) -> Program | None:
        """The program that passes of this kind run; None: none has been recorded."""
        return self._rewritten.get(key)

    def forget(self) -> None:
        """Drops everything that has been recorded."""
        self.recorded.clear()
        self._rewritten.clear()

    def record(self, key: Key, own: Trace) -> None:
        """Makes the program of passes like one that has just ended with this rank's trace `own`. **Collective**."""
        traces = self._consensus.traces(own)
        before, forward_key = self.recorded.get(key), key._replace(is_backward=False)
        forward = self.recorded.get(forward_key)
        is_spmd = len(traces) == 1 and all(known is None or known.is_spmd for known in (before, forward))
        trace = plan.union(traces)
        if before is not None and len(grown := plan.union([trace, before.trace])) <= _MOST_GROWTH * len(trace):
            trace = grown
        if not is_spmd and key.unit == 0:
            ran = {unit for _, unit in forward.trace} if forward is not None and key.is_backward else ()
            trace = plan.completed(trace, self.facts, ran)
        self.recorded[key] = plan.build(trace, self.facts, is_spmd=is_spmd)
        for changed in {key, forward_key} & self.recorded.keys():
            self._rewrite(changed)

    def _rewrite(self, key: Key) -> None:
        program, backward = self.recorded[key], self.recorded.get(key._replace(is_backward=True))
        if not key.is_backward and backward is not None:
            program = plan.carry(program, backward)
        program = plan.resident(program, self.resident)
        program = plan.prefetch(program, self._ahead, self.facts)
        self._rewritten[key] = plan.limit_in_flight(program, self.in_flight, self.facts)

    def keep_resident(self, budget_nbytes: int, order: Sequence[int]) -> None:
        """Keeps units gathered, as many as the smallest budget of all ranks allows. **Collective**."""
        (budget_nbytes,) = self._consensus.smallest([budget_nbytes])
        self.resident = plan.choose_resident(order, self.facts, budget_nbytes)
        kept = sum(self.facts[number].nbytes for number in self.resident)
        logger.info("%.1f of %.1f MiB keep weights gathered between uses", kept / _MIB, budget_nbytes / _MIB)
        for key in self.recorded:
            self._rewrite(key)

    def _warn_of_residency(self, budget_nbytes: int) -> None:
        sizes = [fact.nbytes for fact in self.facts[1:] if fact.nbytes]
        reason = (
            "has no effect: no unit's weights come and go. Use it with zero_dp_strategy="
            f"{strategies_that(lambda row: row.gathers_weights)}, and name the modules that are units."
        )
        if sizes:
            reason = f"keeps nothing gathered: the smallest unit has {min(sizes)} bytes."
        logger.warning("residency_bytes=%d %s", budget_nbytes, reason)

    def forward_order(self) -> tuple[int, ...]:
        """Units as the training forward enters them; before one was recorded, as they are registered."""
        program = self.recorded.get(Key(0, True, ""))
        if program is None:
            return tuple(range(len(self.facts)))
        return tuple(dict.fromkeys(unit for event, unit in program.trace if event == ENTER))

    def reduction_order(self, phase: str) -> list[int]:
        """Trained units as backward reduces them; before one was recorded, as if it mirrored their registration."""
        program = self.recorded.get(Key(0, True, phase, is_backward=True))
        if program is not None:
            return [op.unit for op in program.ops if op.kind == REDUCE]
        return [unit for unit in reversed(range(len(self.facts))) if self.facts[unit].reduces]

    def peaks(self) -> dict[str, plan.Peak]:
        """By kind of pass, the most memory for communication: simulated, without running anything."""
        return {
            key.text(self._units): plan.simulate(program, self.facts, self.resident)[0]
            for key, program in self._rewritten.items()
        }

    def __str__(self) -> str:
        """Every program with its peak memory."""
        labels = [unit.label for unit in self._units]
        texts = []
        for (kind, peak), program in zip(self.peaks().items(), self._rewritten.values(), strict=True):
            ranks = "all ranks alike" if program.is_spmd else "ranks differ"
            weights = f"{peak.weights / _MIB:.1f} MiB of gathered weights at {peak.weights_pc}"
            grads = f"{peak.grads / _MIB:.1f} MiB of gradients in flight at {peak.grads_pc}"
            title = f"{kind}: {len(labels)} units, {ranks}; peak {weights}, {grads}"
            texts.append(f"{title}\n{program.text(labels)}")
        return "\n\n".join(texts) or "no pass has been recorded yet"


def _facts_of(unit: Unit, units: Sequence[Unit]) -> plan.UnitFacts:
    around = [other for other in units if other is not unit and contains(other, unit)]
    grads = [group.main_grad for group in unit.groups if group.main_grad is not None]
    return plan.UnitFacts(
        label=unit.label,
        parent=max(around, key=lambda other: len(other.fqn)).number if around else None,
        gathers=any(group.plan.gathers_weights or group.plan.gathers_after_install for group in unit.groups),
        numel=unit.gathered_numel,
        nbytes=unit.gathered_nbytes,
        refreshes=bool(unit.refreshing),
        reduces=bool(grads),
        staged_numel=sum(grad.staged_numel for grad in grads),
        staged_nbytes=sum(grad.staged_nbytes for grad in grads),
    )
