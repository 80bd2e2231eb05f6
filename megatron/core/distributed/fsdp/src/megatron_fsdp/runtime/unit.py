"""A module and the groups of its parameters: what is gathered, resharded and reduced together."""

from __future__ import annotations

import dataclasses
import functools
import weakref

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from megatron_fsdp.machine.device import Event
from megatron_fsdp.machine.torch_compat import storage_id
from megatron_fsdp.state.param_group import ParamGroup
from megatron_fsdp.state.tensor_parallel import local_part


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

    unsharded: nn.Parameter
    """Full shape; what modules compute with while its unit is gathered."""
    fqns: tuple[str, ...]
    """Every name under the root module; the first one is canonical."""
    places: tuple[Place, ...]
    sharded: nn.Parameter = dataclasses.field(init=False, repr=False)
    """The DTensor over this rank's part of the main weight; what users and optimizers hold, from the build on."""

    @property
    def fqn(self) -> str:
        """The canonical name."""
        return self.fqns[0]


_Holder = tuple[weakref.ref[nn.Module], dict[str, nn.Parameter], dict[str, nn.Parameter]]
"""A module with the unsharded and the sharded parameters that it holds, by name."""


class Unit:
    """Parameters that are gathered, resharded and reduced together, with the module whose calls say when."""

    def __init__(self, number: int, fqn: str, module: nn.Module, groups: list[ParamGroup], params: list[ManagedParam]):
        self.number = number
        """In the order of registration; the root's is 0."""
        self.is_root = number == 0
        self.fqn = fqn
        self.module = weakref.ref(module)
        self.groups = groups
        self.params = params
        self.trainable = [param.unsharded for param in params if param.unsharded.requires_grad]
        self._tensor_parallel = [param for param in self.trainable if isinstance(param, DTensor)]
        self.gather_event: Event | None = None
        self.refresh_event: Event | None = None
        # Asked several times in every call, so worked out once: the host must run ahead of the device.
        self.refreshing = [group for group in groups if group.plan.refreshes_along_outer]
        """Groups of which an optimizer step leaves something to do over the outer axis."""
        self.gathered_numel = sum(group.layout.size for group in groups if group.plan.gathers_weights)
        """Elements of the weights that are there only while it computes, padding included."""
        self.gathers_weights = any(group.plan.gathers_weights for group in groups)
        """Some of its weights are there only while it computes."""
        self.is_gathered = False
        """Some of those are there: a reshard would free them."""
        self._storages = {storage for group in groups for storage in group.gathered_storages}
        self.shows_unsharded = True
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

    def owns(self, tensor: torch.Tensor) -> bool:
        """`tensor` is a view of gathered weights, whose memory goes when the unit is resharded."""
        if not self._storages:
            return False
        tensor = local_part(tensor)
        is_plain = type(tensor) is torch.Tensor or type(tensor.data) is torch.Tensor  # or a parameter of one
        return is_plain and tensor.layout is torch.strided and storage_id(tensor) in self._storages

    def show_unsharded(self) -> None:
        """Lets modules see the full parameters."""
        if not self.shows_unsharded:
            self.shows_unsharded = True
            for module, unsharded, _ in self._holders:
                if (holder := module()) is not None:
                    # As `Place.hold` does, but a whole module at once: all units come here four times a step.
                    holder._parameters.update(unsharded)

    def show_sharded(self) -> None:
        """Lets modules, and so users and optimizers, see the sharded parameters."""
        if self.shows_unsharded:
            self.shows_unsharded = False
            for module, _, sharded in self._holders:
                if (holder := module()) is not None:
                    holder._parameters.update(sharded)

    @functools.cached_property
    def _holders(self) -> list[_Holder]:
        """Every module that holds parameters of the unit. Computed once parameters have both forms."""
        holders: dict[int, _Holder] = {}
        for param in self.params:
            for place in param.places:
                _, unsharded, sharded = holders.setdefault(id(place.module()), (place.module, {}, {}))
                unsharded[place.name], sharded[place.name] = param.unsharded, param.sharded
        return list(holders.values())

    def align_grads(self) -> None:
        """Makes gradients lie over tensor-parallel ranks as their parameters do. **Collective** over these ranks.

        Autograd leaves the gradient of a replicated norm, say, as a sum still to be taken. Ranks come here alike: they
        have one batch and run one program. They walk parameters, not groups, in one order.
        """
        for param in self._tensor_parallel:
            grad = param.grad
            if isinstance(grad, DTensor) and grad.placements != param.placements:
                param.grad = grad.redistribute(placements=param.placements)

    def has_all_grads(self) -> bool:
        """Autograd has brought a gradient for every parameter in the backward that runs."""
        return all(
            param.grad is not None or getattr(param, "grad_added_to_main_grad", False) for param in self.trainable
        )

    @property
    def has_staged_grads(self) -> bool:
        """Gradients of this backward are being written to where they are reduced from."""
        return any(group.main_grad is not None and group.main_grad.staged is not None for group in self.groups)


def contains(unit: Unit, other: Unit) -> bool:
    """`other`'s module lies inside `unit`'s."""
    return unit.is_root or other.fqn.startswith(f"{unit.fqn}.")
