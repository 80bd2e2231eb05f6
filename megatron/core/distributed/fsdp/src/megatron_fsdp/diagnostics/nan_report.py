"""NaN report: finds gradients that are not finite before an optimizer uses them, and names them on every rank."""

from __future__ import annotations

import collections
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from megatron_fsdp.machine.mesh import FSDPDistributedIndex
from megatron_fsdp.machine.torch_compat import foreach_norm
from megatron_fsdp.runtime.schedule import Schedule
from megatron_fsdp.state.group_spec import GroupSpec
from megatron_fsdp.state.main_grad import GradState
from megatron_fsdp.state.param_group import ParamGroup
from megatron_fsdp.state.tensor_parallel import local_part

#: Parameters that a message names; usually everything behind the first one is not finite either.
_MOST_NAMED = 5


class NonFiniteGradientError(ValueError):
    """A gradient is NaN or infinite. Raised on every rank; no gradient stays attached."""


class Finding(NamedTuple):
    """One parameter on one rank whose gradient is not finite."""

    name: str
    """With its unit."""
    rank: int
    is_own: bool
    """True: the rank's own gradient, before any reduction; False: the rank's rows of the reduced gradient."""


class NanReport:
    """Looks at gradients for NaN and infinity.

    Cost of `check`, once per optimization cycle: one batched norm over this rank's rows of the reduced gradients, one
    all-reduce of an integer, and the host waits for it. With `blames_ranks` also one batched norm over a unit's
    gradients in every backward, without waiting: it reads every gradient once more, which is less than 5 % of a step.
    """

    def __init__(self, schedule: Schedule, index: FSDPDistributedIndex, *, blames_ranks: bool):
        groups = [(unit.label, group) for unit in schedule.units for group in unit.groups]
        self._trained = [(label, group) for label, group in groups if group.main_grad is not None]
        self._device = schedule.device.torch_device
        self._blames_ranks = blames_ranks
        self._own: dict[int, torch.Tensor] = {}
        """By id of the group, one flag per parameter: its own gradient was not finite since the last check."""
        process_groups = [index.get_dp_group()]
        if index.tp_dim is not None:
            process_groups.append(index.get_submesh(index.tp_dim).get_group())
        self._process_groups = [group for group in process_groups if group.size() > 1]
        """Together they connect every rank that takes part in this model's step."""
        if blames_ranks:
            schedule.watch_own_grads(self.look)

    def forget(self) -> None:
        """Forgets the findings of `look`: the gradients are gone."""
        self._own.clear()

    @torch.no_grad()
    def look(self, group: ParamGroup) -> None:
        """Remembers which of the group's gradients, as autograd left them, are not finite. The host does not wait."""
        grads = [None if param.grad is None else local_part(param.grad) for param in group.params]
        for slot, param in enumerate(group.params):
            if getattr(param, "grad_added_to_main_grad", False):  # a fused kernel wrote it past autograd
                assert group.main_grad is not None, "a trainable group"
                grads[slot] = group.main_grad.staged_grad(slot)
        bad = _not_finite(grads, group.spec, group.params[0].dtype)
        seen = self._own.get(id(group))
        self._own[id(group)] = bad if seen is None else seen | bad

    @torch.no_grad()
    def check(self) -> None:
        """Raises on every rank if the final gradient of any is not finite. **Collective**.

        Raises:
            NonFiniteGradientError: names the parameters, their units and ranks.
        """
        reduced = [_reduced_flags(group) for _, group in self._trained]
        verdict = torch.zeros(1, dtype=torch.int32, device=self._device)
        if reduced:
            verdict += torch.cat(reduced).any()
        for process_group in self._process_groups:
            dist.all_reduce(verdict, op=dist.ReduceOp.MAX, group=process_group)
        if not verdict.item():
            self._own.clear()
            return
        findings, rank = [], dist.get_rank()
        for (label, group), flags in zip(self._trained, reduced, strict=True):
            own = self._own.get(id(group), torch.zeros_like(flags))
            for found, is_own in ((own.tolist(), True), (flags.tolist(), False)):
                bad = [fqn for fqn, is_bad in zip(group.spec.fqns, found, strict=True) if is_bad]
                findings += [Finding(f"{fqn} (unit {label})", rank, is_own) for fqn in bad]
        for process_group in self._process_groups:
            table: list[list[Finding]] = [[] for _ in range(process_group.size())]
            dist.all_gather_object(table, findings, group=process_group)
            findings = [finding for part in table for finding in part]
        raise NonFiniteGradientError(_message(findings, blames_ranks=self._blames_ranks))


def _reduced_flags(group: ParamGroup) -> torch.Tensor:
    """One flag per parameter: this rank's rows of the final gradient are not finite."""
    grad = group.main_grad
    assert grad is not None, "a trainable group"
    slots = range(len(group.params)) if grad.state is GradState.FINAL else ()
    views = {slot: grad.final.view(slot) for slot in slots if slot not in grad.dropped}
    return _not_finite([views.get(slot) for slot in range(len(group.params))], group.spec, group.spec.grad_dtype)


def _not_finite(tensors: Sequence[torch.Tensor | None], spec: GroupSpec, dtype: torch.dtype) -> torch.Tensor:
    """One flag per tensor; None and tensors without elements are finite. The largest magnitude cannot overflow."""
    zero = torch.zeros((), dtype=dtype, device=spec.device)
    full = [zero if tensor is None or not tensor.numel() else tensor for tensor in tensors]
    return ~torch.isfinite(torch.stack(foreach_norm(full, math.inf)))


def _message(findings: Sequence[Finding], *, blames_ranks: bool) -> str:
    own: dict[str, set[int]] = collections.defaultdict(set)
    reduced: dict[str, set[int]] = collections.defaultdict(set)
    for finding in findings:
        (own if finding.is_own else reduced)[finding.name].add(finding.rank)
    overflow = ", though every rank's own gradient is finite: their sum overflowed" if blames_ranks else ""
    # Causes first: a parameter is only said to overflow where every rank's own gradient was finite.
    parts = [f"{name}: the own gradient of {_ranks(ranks)}" for name, ranks in own.items()]
    parts += [
        f"{name}: the reduced gradient in the rows of {_ranks(ranks)}{overflow}"
        for name, ranks in reduced.items()
        if name not in own
    ]
    shown = "; ".join(parts[:_MOST_NAMED]) + (f"; and {len(parts) - _MOST_NAMED} more" if parts[_MOST_NAMED:] else "")
    hint = "" if blames_ranks else " report_nan_in_param_grad=True also finds the ranks that it came from."
    return (
        f"gradients of {len(parts)} parameters are not finite (NaN or infinite): {shown}. None is attached; "
        f"zero_grad() forgets them. Look at these ranks' data and loss, or lower the learning rate.{hint}"
    )


def _ranks(ranks: set[int]) -> str:
    shown = ", ".join(map(str, sorted(ranks)[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"
