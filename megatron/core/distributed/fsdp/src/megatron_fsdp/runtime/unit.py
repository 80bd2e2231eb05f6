"""A module, its groups, its phase."""

from __future__ import annotations

import dataclasses
import enum
import functools
import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from megatron_fsdp.machine.device import Event
from megatron_fsdp.machine.torch_compat import awaits_gradient, storage_id, version_of, versions_of, without_overrides
from megatron_fsdp.state.param_group import ParamGroup
from megatron_fsdp.state.tensor_parallel import local_part

if TYPE_CHECKING:
    from megatron_fsdp.runtime.calls import Call


class Phase(enum.Enum):
    """Where a unit stands in a step."""

    RESTING = enum.auto()
    FORWARD = enum.auto()
    BACKWARD = enum.auto()

    __hash__ = object.__hash__  # an Enum's own is Python


#: A forward may run inside backward (recomputation), and a unit may be called again before its backward.
_LEGAL = frozenset(
    {
        (Phase.RESTING, Phase.FORWARD),
        (Phase.FORWARD, Phase.RESTING),
        (Phase.FORWARD, Phase.FORWARD),
        (Phase.FORWARD, Phase.BACKWARD),
        (Phase.RESTING, Phase.BACKWARD),
        (Phase.BACKWARD, Phase.BACKWARD),
        (Phase.BACKWARD, Phase.RESTING),
        (Phase.RESTING, Phase.RESTING),
    }
)


@dataclasses.dataclass(frozen=True)
class Place:
    """One name under which a module holds a parameter. The module is not kept alive."""

    module: weakref.ref[nn.Module]
    name: str

    def hold(self, param: nn.Parameter) -> None:
        """Makes the module hold `param` under this name."""
        module = self.module()
        if module is not None:
            # Not setattr: registering a parameter checks and reorders.
            module._parameters[self.name] = param

    def holds(self, param: nn.Parameter) -> bool:
        """The module holds `param` under this name, or is gone."""
        module = self.module()
        return module is None or module._parameters.get(self.name) is param


@dataclasses.dataclass
class ManagedParam:
    """A parameter in its two forms, and every place that shows it."""

    raw: nn.Parameter
    """Full shape; what modules compute with while its unit is gathered."""
    fqns: tuple[str, ...]
    """Every name under the root module; the first one is canonical."""
    places: tuple[Place, ...]
    sharded: nn.Parameter | None = None
    """The DTensor over this rank's part of the main weight; what users and optimizers hold."""

    @property
    def fqn(self) -> str:
        """The canonical name."""
        return self.fqns[0]


class _Holder(NamedTuple):
    """A module, and by name both forms of the parameters that it holds for one unit."""

    module: weakref.ref[nn.Module]
    raw: dict[str, nn.Parameter]
    sharded: dict[str, nn.Parameter]


class Unit:
    """Parameters that are gathered, released and reduced together, with the module whose calls say when."""

    def __init__(
        self, fqn: str, module: nn.Module, groups: list[ParamGroup], params: list[ManagedParam], *, is_root: bool
    ):
        self.fqn = fqn
        self.module = weakref.ref(module)
        self.groups = groups
        self.params = params
        self.is_root = is_root
        self.phase = Phase.RESTING
        self.trainable = [param.raw for param in params if param.raw.requires_grad]
        self._tensor_parallel = [raw for raw in self.trainable if isinstance(raw, DTensor)]
        self.gather_event: Event | None = None
        self.refresh_event: Event | None = None
        # What is asked several times in every call is worked out once: the host must run ahead of the device.
        self._gathering = [group for group in groups if group.plan.gathers_weights]
        self._refreshing = [group for group in groups if group.plan.refreshes_along_outer]
        self.gathers_weights = bool(self._gathering)
        """Some of its weights are there only while it computes."""
        self.gathered_numel = sum(group.layout.size for group in self._gathering)
        """Elements of the weights that are there only while it computes, padding included."""
        self._storages = {storage for group in groups for storage in group.gathered_storages}
        self._calls: list[weakref.ref[Call]] = []
        self.open_calls: list[Call | None] = []
        """Its forwards that have not ended, the innermost one last; None for one outside the root's."""
        self.is_ahead = False
        """Gathered before the forward began in which its turn is."""
        self.joins_backward = bool(self.trainable)
        """Has a turn in every backward; a frozen unit only after one in which gradients have flowed through it."""
        self.is_in_backward = False
        """Gradients flow through it in the backward that runs."""
        self.input_versions: dict[int, int] = {}
        """Version counters of the tensors that the forward in progress was given."""
        self._unwritable = [raw for group in groups if group.loses_writes for raw in group.params]
        self._weight_versions: list[int | None] = []
        """Version counters of those weights when the forward in progress began."""
        self.is_resident = False
        """Stays gathered, on all ranks, until the optimizer steps."""
        self.shows_raw = True
        """Modules hold the full parameters."""

    @property
    def gathered_nbytes(self) -> int:
        """Bytes of the weights that are there only while it computes."""
        return sum(group.gathered_nbytes for group in self.groups)

    @property
    def label(self) -> str:
        """Name for messages."""
        return self.fqn or "(root)"

    @property
    def needs_gather(self) -> bool:
        """Some group would communicate to be readable."""
        return any(group.needs_gather for group in self.groups)

    @property
    def needs_refresh(self) -> bool:
        """Something is left to do over the outer axis."""
        return any(not group.is_fresh for group in self._refreshing)

    @property
    def holds_gathered(self) -> bool:
        """Some of its weights are there that a release would free."""
        return any(group.is_unsharded for group in self._gathering)

    @property
    def is_unsharded(self) -> bool:
        """Every group is readable in full (its gather may still be running)."""
        return all(group.is_unsharded for group in self.groups)

    @property
    def is_held(self) -> bool:
        """It will be released before its next turn, which must not be taken yet."""
        return self.gathers_weights and self.is_unsharded and not self.is_ahead and not self.is_resident

    @property
    def calls(self) -> list[Call]:
        """Its forwards inside the root's, in their order, as long as their backward may come."""
        return [call for call in (ref() for ref in self._calls) if call is not None]

    def note_call(self, call: Call) -> None:
        """Remembers a forward that has begun."""
        self._calls = [ref for ref in self._calls if ref() is not None]
        self._calls.append(weakref.ref(call))

    def note_weights(self) -> None:
        """Remembers the weights that a forward must not change."""
        self._weight_versions = versions_of(self._unwritable)

    def check_weights(self) -> None:
        """Raises RuntimeError if the forward that ends has changed a weight in place: the change would be lost."""
        versions = versions_of(self._unwritable)
        if versions == self._weight_versions:
            return
        for raw, version, before in zip(self._unwritable, versions, self._weight_versions, strict=False):
            if version != before:
                fqn = next(param.fqn for param in self.params if param.raw is raw)
                raise RuntimeError(
                    f"the forward of unit {self.label} has changed {fqn} in place, which would be lost: the weights "
                    "that modules see are copies of the main weights. Change parameters between steps, through "
                    "to_local() or full_params()."
                )

    def left_alone(self, value: object) -> bool:
        """`value`, an input of the unit's forward, has not been changed in place by it."""
        return self.input_versions.get(id(value)) in (None, version_of(value))

    def lends(self, outputs: Iterable[torch.Tensor]) -> bool:
        """Some of `outputs` are views of gathered weights, which others will read after the unit's forward."""
        local = map(local_part, outputs)
        plain = (tensor for tensor in local if type(tensor.data) is torch.Tensor)
        return any(storage_id(tensor) in self._storages for tensor in plain if tensor.layout is torch.strided)

    def enter(self, phase: Phase) -> None:
        """Changes phase.

        Raises:
            RuntimeError: the move is impossible, so hooks ran in an order that the schedule does not know.
        """
        if (self.phase, phase) not in _LEGAL:
            raise RuntimeError(f"unit {self.label} cannot go from {self.phase.name} to {phase.name}")
        self.phase = phase

    def show_raw(self) -> None:
        """Lets modules see the full parameters."""
        if not self.shows_raw:
            self._show("raw")
            self.shows_raw = True

    def show_sharded(self) -> None:
        """Lets modules, and so users and optimizers, see the sharded parameters."""
        if self.shows_raw:
            self._show("sharded")
            self.shows_raw = False

    def _show(self, form: Literal["raw", "sharded"]) -> None:
        for holder in self._holders:
            module = holder.module()
            if module is not None:
                # As `Place.hold` does, but a whole module at once: all units come here four times a step.
                module._parameters.update(getattr(holder, form))

    @functools.cached_property
    def _holders(self) -> list[_Holder]:
        """Every module that shows its parameters; asked for when they have both forms."""
        holders: dict[int, _Holder] = {}
        for param in self.params:
            for place in param.places:
                holder = holders.setdefault(id(place.module()), _Holder(place.module, {}, {}))
                holder.raw[place.name], holder.sharded[place.name] = param.raw, param.sharded
        return list(holders.values())

    def align_grads(self) -> None:
        """Makes gradients lie over tensor-parallel ranks as their parameters do. **Collective** over these ranks.

        Autograd leaves the gradient of a replicated norm, say, as a sum still to be taken. Ranks come here alike: they
        have one batch and run one program. They walk parameters, not groups, in one order.
        """
        if not self._tensor_parallel:
            return
        with torch.no_grad():
            for raw in self._tensor_parallel:
                if raw.grad is not None and raw.grad.placements != raw.placements:
                    raw.grad = raw.grad.redistribute(placements=raw.placements)

    def awaits_grads(self) -> bool:
        """The backward that runs now will bring more gradients; False also for parameters that it does not reach."""
        with without_overrides():
            missing = [raw for raw in self.trainable if raw.grad is None]
        return any(awaits_gradient(raw) for raw in missing if not getattr(raw, "grad_added_to_main_grad", False))

    @property
    def has_staged_grads(self) -> bool:
        """Gradients of this backward are being written to where they are reduced from."""
        return any(group.main_grad is not None and group.main_grad.is_staged for group in self.groups)

    def has_stray_grads(self) -> bool:
        """Gradients have arrived that no reduction has taken."""
        with without_overrides():
            return any(raw.grad is not None for raw in self.trainable)


def contains(unit: Unit, other: Unit) -> bool:
    """`other`'s module lies inside `unit`'s."""
    return unit.is_root or other.fqn.startswith(f"{unit.fqn}.")
