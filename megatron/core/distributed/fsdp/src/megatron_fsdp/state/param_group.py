"""One group's weight, main weight and main gradient through the four transitions."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence

import torch

from megatron_fsdp.machine.allocator import StoragePool
from megatron_fsdp.machine.copy_engine import PeerGather
from megatron_fsdp.machine.torch_compat import storage_id
from megatron_fsdp.plan.layout import Layout
from megatron_fsdp.plan.strategy import REPLICATED, StrategyPlan
from megatron_fsdp.state.codec import Shard, WeightCodec
from megatron_fsdp.state.flat_buffer import INNER, Axes, FlatBuffer, piece_bounds
from megatron_fsdp.state.main_grad import MainGrad


@dataclasses.dataclass(frozen=True)
class GroupFacts:
    """What a group is made from."""

    name: str
    params: tuple[torch.nn.Parameter, ...]
    """The original parameters: full shape while gathered, one slot of the layout each."""
    fqns: tuple[str, ...]
    layout: Layout
    plan: StrategyPlan
    axes: Axes
    codec: WeightCodec
    main_dtype: torch.dtype
    grad_dtype: torch.dtype
    """Dtype in which gradients accumulate."""
    comm_dtype: torch.dtype
    """Dtype in which gradients travel."""
    requires_grad: bool
    is_expert: bool
    is_replicated: bool
    device: torch.device
    atom_rows: tuple[int, ...] = ()
    """By parameter, rows that no shard boundary cuts; none given: 1."""
    peers: PeerGather | None = None
    """Gathers over the inner axis; None: collectives do."""


class ParamGroup:
    """Parameters that are gathered, released and reduced by one collective each.

    The buffers carry the names that megatron-core reads: `model_weight_buffer`, `main_weight_buffer`,
    `main_grad_buffer`. Where the main weight has the dtype and values of the compute weight, both are one storage.
    """

    def __init__(self, facts: GroupFacts, pool: StoragePool):
        self.facts = facts
        self.params = facts.params
        self.plan = facts.plan
        self.layout = facts.layout
        self._pool = pool
        planes = facts.codec.planes(facts.params[0])
        self._shares_main = len(planes) == 1 and planes[0].dtype == facts.main_dtype
        # Where the two differ only by dtype, keeping the compute weight's shard would be memory for nothing.
        self._casts_on_the_way = (
            not self._shares_main
            and facts.codec.is_cast
            and facts.plan.gathers_weights
            and facts.plan.weight == facts.plan.main_weight
        )
        self._weights = tuple(self._resting(i, plane.dtype) for i, plane in enumerate(planes))
        if self._casts_on_the_way:
            self._weights[0].free()
        if self._shares_main:
            self.main_weight_buffer = self._weights[0].part(facts.plan.main_weight)
        else:
            self.main_weight_buffer = self._empty(facts.plan.main_weight, facts.main_dtype)
        self._full = tuple(self._reserve_full(i, weight) for i, weight in enumerate(self._weights))
        self._shards = self._cut()
        self.main_grad = MainGrad(facts, pool) if facts.requires_grad else None
        self._is_fresh = True
        """The resting weight holds what was installed last; False: only its main-weight part does."""
        self.is_unsharded = not facts.plan.gathers_weights

    def _empty(self, placement, dtype: torch.dtype) -> FlatBuffer:
        return FlatBuffer.empty(self.layout, self.facts.axes, placement, dtype, self.facts.device)

    def _resting(self, number: int, dtype: torch.dtype) -> FlatBuffer:
        """A plane of the resting weight, which takes part in gathers where it is not made anew for each of them."""
        lo, hi = piece_bounds(self.layout, self.facts.axes, self.plan.weight)
        is_sent = (self.plan.gathers_weights or self.plan.gathers_after_install) and not self._casts_on_the_way
        with self._pool.lasting(f"{self.facts.name}.{number}", (hi - lo) * dtype.itemsize if is_sent else 0):
            return self._empty(self.plan.weight, dtype)

    def _reserve_full(self, number: int, weight: FlatBuffer) -> FlatBuffer:
        """The whole plane: the resting weight itself, or storage from the pool that is there only while needed."""
        if not self.plan.gathers_weights:
            return weight
        key = self._key(number)
        data = self._pool.reserve(key, self.layout.size, weight.dtype, self.facts.device)
        return FlatBuffer(self.layout, self.facts.axes, REPLICATED, data)

    def _key(self, number: int) -> str:
        """The pool's name for the storage of a gathered plane."""
        return f"{self.facts.name}.{number}"

    @property
    def gathered_needs(self) -> tuple[tuple[str, int], ...]:
        """(key, bytes) of every storage that a gather takes from the pool."""
        if not self.plan.gathers_weights:
            return ()
        return tuple((self._key(number), full.nbytes) for number, full in enumerate(self._full))

    @property
    def sent_nbytes(self) -> int:
        """Bytes that this rank sends in the largest of its gathers over the inner axis; 0 if there are none."""
        if not self.plan.gathers_along_inner:
            return 0
        return self.layout.size // self.facts.axes[INNER].size * max(weight.dtype.itemsize for weight in self._weights)

    @property
    def requires_grad(self) -> bool:
        """Its parameters are trained."""
        return self.facts.requires_grad

    @property
    def model_weight_buffer(self) -> FlatBuffer:
        """The resting compute weight (its first plane); without memory where gathers cast the main weight."""
        return self._weights[0]

    @property
    def main_grad_buffer(self) -> FlatBuffer | None:
        """The accumulated gradient; None for a frozen group."""
        return self.main_grad.buffer if self.main_grad is not None else None

    @property
    def persistent_nbytes(self) -> int:
        """Bytes this rank always holds, optimizer state not counted."""
        total = 0 if self._casts_on_the_way else sum(weight.nbytes for weight in self._weights)
        return total + (0 if self._shares_main else self.main_weight_buffer.nbytes)

    @property
    def grad_nbytes(self) -> int:
        """Bytes of the accumulated gradient, which this rank holds from the first backward to `zero_grad`."""
        return self.main_grad.buffer.nbytes if self.main_grad is not None else 0

    @property
    def loses_writes(self) -> bool:
        """What a forward writes into its weights is overwritten by the main weights."""
        return self.plan.gathers_weights or not self._shares_main

    @property
    def gathered_storages(self) -> set[int]:
        """The storages that a gather fills and a release empties."""
        return {storage_id(full.data) for full in self._full} if self.plan.gathers_weights else set()

    @property
    def gathered_nbytes(self) -> int:
        """Bytes of the storage that a gather takes from the pool."""
        return sum(nbytes for _, nbytes in self.gathered_needs)

    @torch.no_grad()
    def load_initial(self, agreed: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Copies the parameters' values into the main weight, encodes them, and points the parameters here.

        **Collective** if `agreed` or the codec is. Afterwards nothing here refers to the original full tensors.

        Args:
            agreed: turns a full initial value into the one that all ranks start from, on the engine's device.
        """
        for slot, param in enumerate(self.params):
            full = agreed(self.facts.codec.initial_main(param, self.main_weight_buffer.dtype))
            rows = self.main_weight_buffer.rows(slot)
            target = self.main_weight_buffer.view(slot)
            target.copy_(full[rows.first : rows.first + rows.count] if full.dim() else full)
        self._encode()
        if self.plan.gathers_weights:  # views can only be made of a storage that is there
            for full in self._full:
                self._pool.acquire(full.data)
        for slot, param in enumerate(self.params):
            self.facts.codec.bind(param, tuple(full.view(slot) for full in self._full))
        if self.plan.gathers_weights:
            for full in self._full:
                self._pool.release(full.data)
        if self._is_fresh and not self.plan.gathers_weights:
            self.facts.codec.after_gather(self.params)

    # -- unshard ------------------------------------------------------------------------------------------------

    @property
    def needs_gather(self) -> bool:
        """An `unshard` would communicate."""
        return not (self.is_unsharded and self._is_fresh)

    @property
    def is_fresh(self) -> bool:
        """The resting weight holds what was installed last."""
        return self._is_fresh

    @property
    def keeps_installed(self) -> bool:
        """Compute weights have memory of their own: they stay what was installed while the main weight changes."""
        return not (self._shares_main or self._casts_on_the_way)

    @torch.no_grad()
    def refresh(self) -> None:
        """Makes the resting weight hold what was installed last. **Collective** unless `is_fresh`."""
        if self._is_fresh:
            return
        for weight in self._weights:
            # What goes over the outer axis is on another stream than the gathers of the inner one.
            peers = None if self.plan.refreshes_along_outer else self.facts.peers
            weight.gather_from(weight.part(self.plan.main_weight), peers)
        self._is_fresh = True

    @torch.no_grad()
    def unshard(self, *, again: bool = False) -> None:
        """Makes the full weight readable through the parameters. **Collective** if `needs_gather` or `again`.

        Args:
            again: take part in a gather of what is readable here, because other ranks may need it.
        """
        if not self.needs_gather and not again:
            return
        if not self._is_fresh:
            self.refresh()
        if not self.is_unsharded or (again and self.plan.gathers_weights):
            for full, weight in zip(self._full, self._weights, strict=True):
                if not self.is_unsharded:
                    self._pool.acquire(full.data)
                full.gather_from(self._sent(weight), self.facts.peers)
            self.is_unsharded = True
        self.facts.codec.after_gather(self.params)

    def _sent(self, weight: FlatBuffer) -> FlatBuffer:
        """What a gather starts from: the resting `weight`, or what is made of the main weight for it."""
        if not self._casts_on_the_way:
            return weight
        if self.facts.peers is not None:  # they read a cast of the main weight at once
            return self.main_weight_buffer
        self._own_shard.data.copy_(self.main_weight_buffer.data)
        return self._own_shard

    @functools.cached_property
    def _own_shard(self) -> FlatBuffer:
        """This rank's shard of the gathered weight that is cast on the way; it views what comes and goes."""
        (full,) = self._full
        return full.part(self.plan.weight)

    def reshard(self) -> None:
        """Gives the gathered storage back; nothing to do where the weight rests whole."""
        if not self.plan.gathers_weights or not self.is_unsharded:
            return
        self.facts.codec.after_release(self.params)
        for full in self._full:
            self._pool.release(full.data)
        self.is_unsharded = False

    # -- install ------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def install(self) -> None:
        """Makes the compute weight current after the main weight changed; the gather itself waits for `unshard`.

        **Collective** if the codec is.
        """
        self.reshard()
        self._encode()

    def _cut(self) -> list[Shard]:
        """What the codec encodes: this rank's rows of every parameter, as views that last as long as the buffers."""
        if self._casts_on_the_way:
            return []
        parts = [weight.part(self.plan.main_weight) for weight in self._weights]
        atom_rows = self.facts.atom_rows or (1,) * len(self.params)
        return [
            Shard(
                param,
                self.main_weight_buffer.view(slot),
                tuple(part.view(slot) for part in parts),
                first_row=self.main_weight_buffer.rows(slot).first,
                atom_rows=atom_rows[slot],
            )
            for slot, param in enumerate(self.params)
        ]

    def _encode(self) -> None:
        self.facts.codec.encode(self._shards, self._shard_groups())
        self._is_fresh = not self.plan.gathers_after_install

    def _shard_groups(self) -> Sequence[torch.distributed.ProcessGroup]:
        """Groups over which a parameter's main weight is spread."""
        pairs = zip(self.facts.axes, self.plan.main_weight, REPLICATED, strict=True)
        return [axis.group for axis, place, whole in pairs if place is not whole and axis.size > 1]
