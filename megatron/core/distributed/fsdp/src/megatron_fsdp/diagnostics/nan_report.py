"""Gradients that are not finite: found before an optimizer sees them, named on every rank."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from megatron_fsdp.config import EngineConfig
from megatron_fsdp.machine.mesh import FSDPDistributedIndex
from megatron_fsdp.machine.torch_compat import foreach_norm
from megatron_fsdp.runtime.schedule import Schedule
from megatron_fsdp.state.main_grad import GradState
from megatron_fsdp.state.param_group import ParamGroup
from megatron_fsdp.state.tensor_parallel import local_part

#: Parameters that a message names; usually everything behind the first one is not finite either.
_MOST_NAMED = 5


class NonFiniteGradientError(ValueError):
    """A gradient is NaN or infinite. Raised on every rank; no gradient stays attached."""


class Finding(NamedTuple):
    """One parameter on one rank."""

    fqn: str
    unit: str
    rank: int
    is_own: bool
    """The rank's own gradient, before any reduction, was not finite."""
    is_reduced: bool
    """The rank's rows of the reduced gradient are not finite."""


@dataclasses.dataclass(frozen=True)
class _Trained:
    unit: str
    group: ParamGroup


class NanReport:
    """Looks at gradients for NaN and infinity.

    Cost of `check`, once per optimization cycle: one batched norm over this rank's rows of the reduced gradients, one
    all-reduce of an integer, and the host waits for it. With `blames_ranks` also one batched norm over a unit's
    gradients in every backward, without waiting: it reads every gradient once more, which is less than 5 % of a step.
    """

    def __init__(self, schedule: Schedule, index: FSDPDistributedIndex, *, blames_ranks: bool):
        self._trained = [
            _Trained(unit.label, group)
            for unit in schedule.units
            for group in unit.groups
            if group.main_grad is not None
        ]
        self._device = schedule.device.torch_device
        self._index = index
        self._blames_ranks = blames_ranks
        self._own: dict[int, torch.Tensor] = {}
        """By id of the group: which parameters' own gradients were not finite since the last check."""
        if blames_ranks:
            schedule.watch_own_grads(self.look)

    @classmethod
    def wanted(cls, schedule: Schedule, index: FSDPDistributedIndex, config: EngineConfig) -> NanReport | None:
        """The report that `config` asks for, if it does."""
        return cls(schedule, index, blames_ranks=config.blames_ranks) if config.checks_grads else None

    def forget(self) -> None:
        """The gradients seen so far are gone."""
        self._own.clear()

    @torch.no_grad()
    def look(self, group: ParamGroup) -> None:
        """Remembers which of the group's gradients, as autograd left them, are not finite. The host does not wait."""
        grads = [_own_grad(group, slot, param) for slot, param in enumerate(group.params)]
        if all(grad is None for grad in grads):
            return
        bad = _not_finite(grads, self._device)
        seen = self._own.get(id(group))
        self._own[id(group)] = bad if seen is None else seen | bad

    @torch.no_grad()
    def check(self) -> None:
        """Raises on every rank if the final gradient of any is not finite. **Collective**.

        Raises:
            NonFiniteGradientError: names the parameters, their units, and the ranks where.
        """
        reduced = [self._reduced(trained.group) for trained in self._trained]
        found = torch.cat(reduced).any() if reduced else torch.zeros((), device=self._device)
        verdict = found.to(torch.int32).view(1)
        for group in self._all_ranks():
            dist.all_reduce(verdict, op=dist.ReduceOp.MAX, group=group)
        if not verdict.item():
            self._own.clear()
            return
        findings = self._here(reduced)
        for group in self._all_ranks():
            table: list[list[Finding]] = [[] for _ in range(group.size())]
            dist.all_gather_object(table, findings, group=group)
            findings = [finding for part in table for finding in part]
        raise NonFiniteGradientError(_message(findings, blames_ranks=self._blames_ranks))

    def _reduced(self, group: ParamGroup) -> torch.Tensor:
        """Per parameter: this rank's rows of the final gradient are not finite."""
        main_grad, slots = group.main_grad, range(len(group.params))
        is_final = main_grad.state is GradState.FINAL
        views = [main_grad.final.view(slot) if is_final and slot not in main_grad.dropped else None for slot in slots]
        return _not_finite(views, self._device)

    def _here(self, reduced: Sequence[torch.Tensor]) -> list[Finding]:
        findings, rank = [], dist.get_rank()
        for trained, flags in zip(self._trained, reduced, strict=True):
            own = self._own.get(id(trained.group), torch.zeros_like(flags))
            columns = zip(trained.group.spec.fqns, flags.tolist(), own.tolist(), strict=True)
            for fqn, is_reduced, is_own in columns:
                if is_reduced or is_own:
                    findings.append(Finding(fqn, trained.unit, rank, is_own, is_reduced))
        return findings

    def _all_ranks(self) -> list[dist.ProcessGroup]:
        """Groups that together connect every rank which takes part in this model's step."""
        groups = [self._index.get_dp_group()]
        if self._index.tp_dim is not None:
            groups.append(self._index.get_submesh(self._index.tp_dim).get_group())
        return [group for group in groups if group.size() > 1]


def _own_grad(group: ParamGroup, slot: int, param: torch.nn.Parameter) -> torch.Tensor | None:
    if getattr(param, "grad_added_to_main_grad", False):  # a fused kernel wrote it past autograd
        return group.main_grad.staged_grad(slot)
    return None if param.grad is None else local_part(param.grad)


def _not_finite(tensors: Sequence[torch.Tensor | None], device: torch.device) -> torch.Tensor:
    """One flag per tensor; None and tensors without elements are finite. The largest magnitude cannot overflow."""
    full = [tensor for tensor in tensors if tensor is not None and tensor.numel()]
    if not full:
        return torch.zeros(len(tensors), dtype=torch.bool, device=device)
    largest = iter(foreach_norm(full, math.inf))
    zero = full[0].new_zeros(())
    return ~torch.isfinite(torch.stack([next(largest) if t is not None and t.numel() else zero for t in tensors]))


def _message(findings: Sequence[Finding], *, blames_ranks: bool) -> str:
    by_name: dict[tuple[str, str], list[Finding]] = {}
    for finding in findings:
        by_name.setdefault((finding.fqn, finding.unit), []).append(finding)
    # Where every rank's own gradient was finite, the sum is the culprit; what is named first should be a cause.
    named = sorted(by_name.items(), key=lambda item: not any(finding.is_own for finding in item[1]))
    parts = [_where(fqn, unit, found, blames_ranks) for (fqn, unit), found in named[:_MOST_NAMED]]
    if len(named) > _MOST_NAMED:
        parts.append(f"and {len(named) - _MOST_NAMED} more")
    hint = "" if blames_ranks else " report_nan_in_param_grad=True also finds the ranks that it came from."
    return (
        f"gradients of {len(named)} parameters are not finite (NaN or infinite): {'; '.join(parts)}. None is attached; "
        f"zero_grad() forgets them. Look at these ranks' data and loss, or lower the learning rate.{hint}"
    )


def _where(fqn: str, unit: str, found: Sequence[Finding], blames_ranks: bool) -> str:
    name = f"{fqn} (unit {unit})"
    own = sorted({finding.rank for finding in found if finding.is_own})
    owners = sorted({finding.rank for finding in found if finding.is_reduced})
    if own:
        return f"{name}: the own gradient of {_ranks(own)}"
    overflow = ", though every rank's own gradient is finite: their sum overflowed" if blames_ranks else ""
    return f"{name}: the reduced gradient in the rows of {_ranks(owners)}{overflow}"


def _ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"
