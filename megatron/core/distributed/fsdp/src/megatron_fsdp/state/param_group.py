"""One group's weight, main weight and main gradient through the four transitions."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch

from megatron_fsdp.machine.allocator import StoragePool
from megatron_fsdp.machine.torch_compat import storage_id
from megatron_fsdp.plan.strategy import REPLICATED
from megatron_fsdp.state.codec import Shard
from megatron_fsdp.state.flat_buffer import INNER, FlatBuffer
from megatron_fsdp.state.group_spec import GroupSpec
from megatron_fsdp.state.main_grad import MainGrad


class ParamGroup:
    """Parameters that are gathered, released and reduced by one collective each.

    The buffers carry the names that megatron-core reads: `model_weight_buffer`, `main_weight_buffer`,
    `main_grad_buffer`. Where the main weight has the dtype and values of the compute weight, both share one storage.
    """

    def __init__(self, spec: GroupSpec, pool: StoragePool):
        plan, dtype = spec.plan, spec.codec.storage_dtype(spec.params[0])
        self.spec, self.plan, self.layout, self.params = spec, plan, spec.layout, spec.params
        self.requires_grad = spec.requires_grad
        self._pool = pool
        shares_main = spec.codec.is_cast and dtype == spec.main_dtype  # other codecs would encode over the main weight
        # Where the two differ only by dtype, keeping the compute weight's shard would be memory for nothing.
        can_cast = spec.codec.is_cast and not shares_main
        self._casts_in_gather = can_cast and plan.gathers_weights and plan.weight == plan.main_weight
        self.keeps_installed = not (shares_main or self._casts_in_gather)
        """Compute weights have memory of their own: they keep the installed values while the main weight changes."""
        self.loses_writes = plan.gathers_weights or not shares_main
        """The next gather or install overwrites what a forward writes into its weights."""
        self.weight_key = f"{spec.name}.weight"
        """The pool's name for the storage of the gathered weight."""
        self.model_weight_buffer = spec.new_buffer(plan.weight, dtype)
        """The resting compute weight; without memory where gathers cast the main weight."""
        if not self._casts_in_gather:
            is_sent = plan.gathers_weights or plan.gathers_after_install
            with pool.lasting(self.weight_key, self.model_weight_buffer.nbytes if is_sent else 0):
                self.model_weight_buffer.allocate()
        if shares_main:
            self.main_weight_buffer = self.model_weight_buffer.part(plan.main_weight)
        else:
            self.main_weight_buffer = spec.new_buffer(plan.main_weight, spec.main_dtype)
            self.main_weight_buffer.allocate()
        self._full = self.model_weight_buffer
        """The whole weight: the resting weight itself, or storage from the pool that is there only while needed."""
        if plan.gathers_weights:
            data = pool.reserve(self.weight_key, spec.layout.size, dtype, spec.device)
            self._full = FlatBuffer(spec.layout, spec.axes, REPLICATED, data)
        self._shards = [] if self._casts_in_gather else self._make_shards()
        self.main_grad = MainGrad(spec, pool) if spec.requires_grad else None
        self.main_grad_buffer = self.main_grad.buffer if self.main_grad is not None else None
        """The accumulated gradient; None for a frozen group."""
        self.is_fresh = True
        """The resting weight holds the installed values; False: only its part under the main weight does."""
        self.is_unsharded = not plan.gathers_weights

    def _make_shards(self) -> list[Shard]:
        """Input of the codec: this rank's rows of every parameter, as views that last as long as the buffers."""
        main, weight = self.main_weight_buffer, self.model_weight_buffer.part(self.plan.main_weight)
        return [
            Shard(param, main.view(slot), weight.view(slot), main.rows(slot).first, self.spec.atom_rows[slot])
            for slot, param in enumerate(self.params)
        ]

    @property
    def gathered_nbytes(self) -> int:
        """Bytes of the storage that a gather takes from the pool under `weight_key`; 0 where the weight rests whole."""
        return self._full.nbytes if self.plan.gathers_weights else 0

    @property
    def gathered_storages(self) -> set[int]:
        """The storages that a gather fills and a release empties."""
        return {storage_id(self._full.data)} if self.plan.gathers_weights else set()

    @property
    def sent_nbytes(self) -> int:
        """Bytes that this rank sends in a gather over the inner axis; 0 if there are none."""
        return self._full.nbytes // self.spec.axes[INNER].size if self.plan.gathers_along_inner else 0

    @property
    def persistent_nbytes(self) -> int:
        """Bytes that this rank always holds, optimizer state not counted."""
        main, weight = self.main_weight_buffer.nbytes, self.model_weight_buffer.nbytes
        return main + weight if self.keeps_installed else main if self._casts_in_gather else weight

    @property
    def grad_nbytes(self) -> int:
        """Bytes of the accumulated gradient, which this rank holds from the first backward to `zero_grad`."""
        return self.main_grad_buffer.nbytes if self.main_grad_buffer is not None else 0

    @property
    def needs_gather(self) -> bool:
        """An `unshard` would communicate."""
        return not (self.is_unsharded and self.is_fresh)

    @torch.no_grad()
    def load_initial(self, agreed: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Copies the parameters' values into the main weight, encodes them, and points the parameters here.

        **Collective** if `agreed` or the codec is. Afterwards nothing here refers to the original full tensors.

        Args:
            agreed: turns a full initial value into the one that all ranks start from, on the engine's device.
        """
        for slot, param in enumerate(self.params):
            full = agreed(self.spec.codec.initial_main(param, self.main_weight_buffer.dtype))
            rows = self.main_weight_buffer.rows(slot)
            self.main_weight_buffer.view(slot).copy_(full[rows.first : rows.first + rows.count] if full.dim() else full)
        self._encode()
        if self.plan.gathers_weights:  # views can only be made of a storage that is there
            self._pool.acquire(self._full.data)
        for slot, param in enumerate(self.params):
            self.spec.codec.bind(param, self._full.view(slot))
        if self.plan.gathers_weights:
            self._pool.release(self._full.data)

    # -- unshard ------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def refresh(self) -> None:
        """Makes the resting weight hold the installed values. **Collective** unless `is_fresh`."""
        if not self.is_fresh:
            weight = self.model_weight_buffer
            # The outer axis has another stream than the gathers of the inner one.
            peers = None if self.plan.refreshes_along_outer else self.spec.peers
            weight.gather_from(weight.part(self.plan.main_weight), peers)
            self.is_fresh = True

    @torch.no_grad()
    def unshard(self, *, again: bool = False) -> None:
        """Makes the full weight readable through the parameters. **Collective** if `needs_gather` or `again`.

        Args:
            again: join the all-gather of a weight that is readable here, because other ranks may need it.
        """
        self.refresh()
        if not self.plan.gathers_weights or (self.is_unsharded and not again):
            return
        if not self.is_unsharded:
            self._pool.acquire(self._full.data)
        source = self.model_weight_buffer
        if self._casts_in_gather:
            source = self.main_weight_buffer
            if self.spec.peers is None:  # peers read a cast of the main weight at once
                self._own_shard.data.copy_(source.data)
                source = self._own_shard
        self._full.gather_from(source, self.spec.peers)
        self.is_unsharded = True

    @functools.cached_property
    def _own_shard(self) -> FlatBuffer:
        """This rank's shard of the gathered weight; a view of storage that comes and goes."""
        return self._full.part(self.plan.weight)

    def reshard(self) -> None:
        """Gives the gathered storage back; nothing to do where the weight rests whole."""
        if self.plan.gathers_weights and self.is_unsharded:
            self._pool.release(self._full.data)
            self.is_unsharded = False

    # -- install ------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def install(self) -> None:
        """Makes the compute weight current after the main weight changed; the gather itself waits for `unshard`.

        **Collective** if the codec is.
        """
        self.reshard()
        self._encode()

    def _encode(self) -> None:
        self.spec.codec.encode(self._shards, self._sharding_groups())
        self.is_fresh = not self.plan.gathers_after_install

    def _sharding_groups(self) -> Sequence[torch.distributed.ProcessGroup]:
        """Groups over which a parameter's main weight is sharded."""
        pairs = zip(self.spec.axes, self.plan.main_weight, REPLICATED, strict=True)
        return [axis.group for axis, place, whole in pairs if place is not whole and axis.group is not None]
