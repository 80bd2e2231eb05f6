"""Which units stay gathered from their first use in a step until the optimizer steps, within a budget of bytes."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch.distributed as dist

from megatron_fsdp.machine.device import Device
from megatron_fsdp.runtime.inquiry import Forum
from megatron_fsdp.runtime.unit import Unit

logger = logging.getLogger(__name__)

#: Of free memory; the rest is left to fragments and to what the first step did not need.
_USABLE = 0.9
_MIB = 2**20
#: More than any memory, and a number that ranks can tell each other.
_MOST = 2**62


def keep_resident(order: Sequence[Unit], budget_nbytes: int) -> int:
    """Marks the units that stay, for good, and gives their bytes. The same on every rank with equal arguments.

    The last ones of the forward come first: backward needs them at once, with nothing to hide their gathers behind.
    """
    left = budget_nbytes
    for unit in reversed(order):
        nbytes = unit.gathered_nbytes
        if 0 < nbytes <= left and not unit.is_resident:
            unit.is_resident = True
            left -= nbytes
    return budget_nbytes - left


def _warn(units: Sequence[Unit], budget_nbytes: int) -> None:
    sizes = [unit.gathered_nbytes for unit in units if unit.gathered_nbytes]
    if sizes:
        logger.warning(
            "residency_bytes=%d keeps nothing gathered: the smallest unit has %d bytes.", budget_nbytes, min(sizes)
        )
    else:
        logger.warning(
            "residency_bytes=%d has no effect: no unit's weights come and go. Use it with zero_dp_strategy 3, and name "
            "the modules that are units.",
            budget_nbytes,
        )


class Residency:
    """Spends the budget: the least given one when the model is built, else what the first step leaves free.

    **Collective** to build, with a budget.
    """

    def __init__(self, forum: Forum, device: Device, budget_nbytes: int | None):
        self._forum = forum
        self._device = device
        self._is_open = budget_nbytes is None and device.is_cuda and bool(forum.units)
        if budget_nbytes:
            # What ranks worked out from their free memory differs: some would not gather what others wait for.
            budget_nbytes = -forum.highest([-min(budget_nbytes, _MOST)])[0]
            if not keep_resident(forum.units, budget_nbytes) and dist.get_rank() == 0:
                _warn(forum.units, budget_nbytes)

    def decide(self) -> None:
        """After a step, once: finds the budget if none was given. **Collective** then."""
        if not self._is_open:
            return
        self._is_open = False
        free = int(_USABLE * self._device.free_nbytes())
        budget = -self._forum.highest([-free])[0]
        kept = keep_resident(self._forum.units, budget)
        logger.info("%.1f of %.1f MiB that the first step left free keep weights gathered", kept / _MIB, budget / _MIB)
