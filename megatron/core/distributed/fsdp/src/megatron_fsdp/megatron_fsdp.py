"""`MegatronFSDP`: the sharded model, built in one pass; its methods delegate."""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from megatron_fsdp.build.build_units import BuildRequest, build_units, grad_scales
from megatron_fsdp.build.check_arguments import plan_model
from megatron_fsdp.build.find_units import UnitPlan
from megatron_fsdp.build.storage import make_pool, prepare
from megatron_fsdp.config import (
    DEFAULT_POLICY,
    DistributedDataParallelConfig,
    EngineConfig,
    MixedPrecisionPolicy,
    default_config,
)
from megatron_fsdp.diagnostics.guards import ForwardGuard, StepGuard
from megatron_fsdp.diagnostics.hang_report import report_hangs
from megatron_fsdp.diagnostics.nan_report import NanReport, NonFiniteGradientError
from megatron_fsdp.diagnostics.overlap_report import OverlapReport
from megatron_fsdp.diagnostics.refusals import check_stays, refuse_hooks, refuse_moves
from megatron_fsdp.diagnostics.summary import build_summary, one_unit_warning
from megatron_fsdp.dtensor.shard_spec import make_sharded_param, tensor_parallel_group
from megatron_fsdp.dtensor.tensor_parallel_checks import check_replicas, check_tensor_parallel
from megatron_fsdp.machine.allocator import StoragePool
from megatron_fsdp.machine.device import Device
from megatron_fsdp.machine.mesh import FSDPDistributedIndex
from megatron_fsdp.machine.torch_compat import uncompiled
from megatron_fsdp.optim.grad_norm import clip_grad_norm
from megatron_fsdp.param_and_grad_buffer import ParamAndGradBuffer
from megatron_fsdp.plan.strategy import Placement
from megatron_fsdp.runtime.hooks import install_hooks
from megatron_fsdp.runtime.schedule import Schedule
from megatron_fsdp.runtime.unit import Unit
from megatron_fsdp.state.param_tags import OWNER_TAG
from megatron_fsdp.state_dict.full import check_is_whole, full_params, full_state_dict
from megatron_fsdp.state_dict.hooks import StateDictHooks, names_inner_module, with_extra_state

logger = logging.getLogger(__name__)


class MegatronFSDP(nn.Module):
    """A module whose parameters, gradients and optimizer state are sharded over the data-parallel ranks.

    Between steps `parameters()` are DTensors over this rank's rows of the main weights; while a unit computes, its
    modules hold the full weights. **Collective**: all data-parallel ranks construct it, with the same arguments, and
    all of them start from the first rank's values.

    Args:
        module: the model; stays reachable as `.module` and is changed in place.
        dist_index: meshes and groups.
        ddp_config: options; None means `optim_grads_params` with both overlaps.
        mixed_precision_policy: dtypes.
        fsdp_unit_modules: classes or import paths of modules that are units, all-gathered and resharded as one. None or
            empty: the whole model is one unit.
        disable_bucketing: ignore `ddp_config.bucket_size`.
        device: the device to compute on; None: the current CUDA device, or the CPU where there is none.
        calculate_per_token_loss: sum gradients and leave scaling to the caller.
        init_model_with_meta_device: the model is on the meta device; its modules' `reset_parameters` initialise it
            unit by unit.
        sync_model_each_microbatch: see `set_model_auto_sync`.
        report_nan_in_param_grad: `finish_grad_sync` raises on every rank when a gradient is not finite, and names the
            parameter, its unit and the ranks whose own gradient it was. `ddp_config.check_for_nan_in_grad` names the
            parameter only. See `NanReport` for the cost of both.
        enable_fine_grained_param_gather_hook, enable_fine_grained_param_gather_backward_hook: gather and reduce every
            module inside a unit that owns parameters by itself: less memory, more and smaller collectives.
        fine_grained_recurse_module_types: classes of the modules that are cut up so; None: all.
        root_params: parameters that are read outside the forward of the module that owns them (a tied output layer
            that reads the embedding's weight); they stay gathered while the model computes.

    Raises:
        ValueError, TypeError, ImportError: a mistake in the arguments; before the first collective, on every rank.
        NotImplementedError: an option whose feature does not exist yet.
    """

    #: Pool of the storage that units take and give back; tests replace it.
    pool_class: type[StoragePool] = StoragePool

    def __init__(
        self,
        module: nn.Module,
        dist_index: FSDPDistributedIndex,
        ddp_config: DistributedDataParallelConfig | None = None,
        mixed_precision_policy: MixedPrecisionPolicy = DEFAULT_POLICY,
        fsdp_unit_modules: Sequence[type | str] | None = None,
        disable_bucketing: bool = False,
        device: torch.device | None = None,
        calculate_per_token_loss: bool = False,
        init_model_with_meta_device: bool = False,
        sync_model_each_microbatch: bool = False,
        keep_fp8_transpose_cache: bool = False,
        nccl_ub: bool = False,
        fsdp_double_buffer: bool = False,
        fsdp_db_use_persist_buf_on_alloc_fail: bool = False,
        disable_symmetric_registration: bool = False,
        enable_fine_grained_param_gather_hook: bool = False,
        enable_fine_grained_param_gather_backward_hook: bool = False,
        fine_grained_recurse_module_types: Sequence[type] | None = None,
        report_nan_in_param_grad: bool = False,
        *,
        root_params: Collection[nn.Parameter] = (),
    ):
        ddp_config = ddp_config or default_config()
        config = EngineConfig.of(
            ddp_config,
            mixed_precision_policy=mixed_precision_policy,
            fsdp_unit_modules=fsdp_unit_modules,
            root_params=root_params,
            megatron_fsdp_enable_fine_grained_param_gather=enable_fine_grained_param_gather_hook
            or enable_fine_grained_param_gather_backward_hook
            or ddp_config.megatron_fsdp_enable_fine_grained_param_gather,
            fine_grained_recurse_module_types=fine_grained_recurse_module_types,
            device=device,
            disable_bucketing=disable_bucketing,
            calculate_per_token_loss=calculate_per_token_loss,
            init_model_with_meta_device=init_model_with_meta_device,
            sync_model_each_microbatch=sync_model_each_microbatch,
            report_nan_in_param_grad=report_nan_in_param_grad,
            keep_fp8_transpose_cache=keep_fp8_transpose_cache or ddp_config.keep_fp8_transpose_cache,
            nccl_ub=nccl_ub or ddp_config.nccl_ub,
            fsdp_double_buffer=fsdp_double_buffer or ddp_config.fsdp_double_buffer,
            fsdp_db_use_persist_buf_on_alloc_fail=fsdp_db_use_persist_buf_on_alloc_fail
            or ddp_config.fsdp_db_use_persist_buf_on_alloc_fail,
            disable_symmetric_registration=disable_symmetric_registration or ddp_config.disable_symmetric_registration,
        )
        plans = plan_model(module, config, has_expert_mesh=dist_index.expt_fsdp_group is not None)
        self._shard(module, dist_index, config, plans)

    @classmethod
    def of_plans(
        cls, module: nn.Module, dist_index: FSDPDistributedIndex, config: EngineConfig, plans: list[UnitPlan]
    ) -> MegatronFSDP:
        """The sharded model of a `module` that `plan_model` has planned under `config`. **Collective**."""
        model = cls.__new__(cls)
        model._shard(module, dist_index, config, plans)
        return model

    def _shard(
        self, module: nn.Module, dist_index: FSDPDistributedIndex, config: EngineConfig, plans: list[UnitPlan]
    ) -> None:
        super().__init__()
        check_tensor_parallel([param for plan in plans for param in plan.params], dist_index)
        self.ddp_config = config
        self.mp_policy = config.mixed_precision_policy
        self.dist_index = dist_index
        self.fsdp_unit_modules = config.fsdp_unit_modules
        self.data_parallel_sharding_strategy = config.data_parallel_sharding_strategy
        self.bucket_size = None if config.disable_bucketing else config.bucket_size
        device = Device.current() if config.device is None else Device(torch.device(config.device))
        self.device = device.torch_device
        pool = make_pool(self.pool_class(), config, dist_index, self.device)
        units = build_units(BuildRequest(module, dist_index, config, pool, self.device), plans)
        self.module = module
        schedule = self._schedule = Schedule(units, config, device, grad_scales(dist_index, config))
        prepare(pool, schedule)
        self._make_sharded_params(units)
        self.param_and_grad_buffer = ParamAndGradBuffer(schedule, pool)
        self._nan_report = None
        if config.check_for_nan_in_grad:
            self._nan_report = NanReport(schedule, dist_index, blames_ranks=config.report_nan_in_param_grad)
        self.step_guard = StepGuard(schedule)
        self.state_dict_hooks = self._attach()
        self.set_model_auto_sync(config.sync_model_each_microbatch)
        device.empty_cache()
        if dist.get_rank() == 0:
            logger.info("%s", build_summary(schedule, config, pool))
            if warning := one_unit_warning(module, schedule):
                logger.warning("%s", warning)

    def _make_sharded_params(self, units: Sequence[Unit]) -> None:
        """Replaces the user's parameters by sharded ones."""
        for unit in units:
            by_unsharded = {id(param.unsharded): param for param in unit.params}
            for group in unit.groups:
                for slot, unsharded in enumerate(group.params):
                    param = by_unsharded[id(unsharded)]
                    param.sharded = make_sharded_param(param, group, slot, self.dist_index)
                    unsharded.grad = None  # what the unsharded model left, out of reach now, would be added to
            unit.show_sharded()
        check_replicas({param.fqn: param.sharded for unit in units for param in unit.params})

    def _attach(self) -> StateDictHooks:
        """Attaches everything that sharding puts on the user's modules and parameters: hooks, attributes, methods.

        Nothing attached keeps the sharded model alive.
        """
        schedule, config, owner = self._schedule, self._schedule.config, weakref.ref(self)
        for param in (param for unit in schedule.units for param in unit.params):
            vars(param.sharded)[OWNER_TAG] = owner
            vars(param.unsharded)["__fsdp_param__"] = True  # read by megatron-core
            refuse_hooks(param.sharded, param.fqn)
        refuse_moves(self.module, owner, self.device)
        model = weakref.proxy(self)
        schedule.on_auto_sync = lambda: model.finish_grad_sync()
        if config.hang_report_s:
            report_hangs(schedule, config.hang_report_s)
        install_hooks(schedule, ForwardGuard(schedule, is_strict=config.is_strict))
        hooks = StateDictHooks(schedule)
        hooks.preprocess = config.preproc_state_dict_for_dcp_ckpt
        hooks.install(self.module)
        return hooks

    @property
    def schedule(self) -> Schedule:
        """The programs that decide when units communicate; `print(model.schedule)` shows them and their memory."""
        return self._schedule

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own forward. **Collective**; each rank may run other units of the module."""
        return self.module(*args, **kwargs)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """The sharded parameters, also in the middle of a step, when modules hold the full ones."""
        with self._schedule.showing_sharded():
            found = list(super().named_parameters(*args, **kwargs))
        yield from found

    # -- when to synchronize --------------------------------------------------------------------------------------

    @property
    def model_auto_sync(self) -> bool:
        """Every backward ends with `finish_grad_sync()`."""
        return self._schedule.model_auto_sync

    def set_model_auto_sync(self, sync_model: bool = True) -> None:
        """With `sync_model`, every backward ends with reduced gradients attached to the parameters.

        This overrides `no_sync` and `is_last_microbatch`. Gradient accumulation stays exact: micro-batches add up until
        `zero_grad`. It costs overlap, and under strategies 0 and 1 a reduction per micro-batch in place of one.
        """
        self._schedule.model_auto_sync = sync_model

    @contextlib.contextmanager
    def sync(self) -> Iterator[None]:
        """A context with `model_auto_sync` on; its former value comes back at the end."""
        before = self.model_auto_sync
        self.set_model_auto_sync(True)
        try:
            yield
        finally:
            self.set_model_auto_sync(before)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """A context for backwards that are not the last of their optimization cycle: deferred reductions wait."""
        self.is_last_microbatch = False
        try:
            yield
        finally:
            self.is_last_microbatch = True

    @property
    def is_last_microbatch(self) -> bool:
        """The coming backward is the last of its optimization cycle."""
        return self._schedule.is_last_microbatch

    @is_last_microbatch.setter
    def is_last_microbatch(self, value: bool) -> None:
        self._schedule.is_last_microbatch = value

    @property
    def microbatch_count(self) -> int:
        """Backwards since the last `finish_grad_sync()`."""
        return self._schedule.microbatch_count

    # -- gradients ------------------------------------------------------------------------------------------------

    def start_grad_sync(self, *_: Any) -> None:
        """Without overlap, starts the reductions that were deferred to the end of the cycle. **Collective**."""
        if not self._schedule.config.overlap_grad_reduce:
            self._schedule.finalize_open()

    @uncompiled
    def synchronize_gradient_reduce(self) -> None:
        """Ends the cycle's reductions: afterwards gradients are final. **Collective**."""
        self._schedule.finish_reductions()

    @uncompiled
    def finish_grad_sync(self, force_all_reduce: bool = False) -> None:
        """Waits for reductions, attaches gradients to the parameters and reshards units. **Collective**.

        Raises:
            ValueError: `force_all_reduce`; a sharded gradient is never replicated.
            NonFiniteGradientError: a gradient is not finite and the model checks gradients; then none is attached.
        """
        if force_all_reduce:
            raise ValueError(
                "force_all_reduce=True is for replicated gradients; sharded ones are reduced to their owners."
            )
        self.synchronize_gradient_reduce()
        self._schedule.reshard_all(keeps_resident=self.model_auto_sync)  # more may come
        self._schedule.microbatch_count = 0
        if self.step_guard.is_active:
            self.step_guard.check()
        self.param_and_grad_buffer.attach_grads()  # before the host waits to look: the device is still busy
        if self._nan_report is not None:
            try:
                self._nan_report.check()
            except NonFiniteGradientError:
                self.param_and_grad_buffer.detach_grads()  # an earlier backward's too: they are sums
                raise

    def attach_grad_to_optimizer_state(self) -> None:
        """Sets `.grad` (or `.decoupled_grad`) of every parameter whose gradient is final."""
        self.param_and_grad_buffer.update_main_grads()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forgets all gradients; without `set_to_none`, those that are attached stay, as zeros."""
        self.param_and_grad_buffer.forget_grads(None, set_to_none=set_to_none)
        if self._nan_report is not None:
            self._nan_report.forget()

    def zero_grad_buffer(self) -> None:
        """Forgets all gradients."""
        self.zero_grad()

    def scale_gradients(self, scaling_factor: float | torch.Tensor) -> None:
        """Multiplies all gradients."""
        self.param_and_grad_buffer.scale_gradients(scaling_factor)

    @uncompiled
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Scales gradients so that their norm over the whole model is at most `max_norm`; returns the norm before.

        **Collective**. Gradients that are not synchronized yet are synchronized first.
        """
        if self.param_and_grad_buffer.has_open_grads:
            self.finish_grad_sync()
        dp_group, tp_group = self.dist_index.get_dp_group(), tensor_parallel_group(self.dist_index)
        return clip_grad_norm(self.param_and_grad_buffer, dp_group, max_norm, norm_type, tp_group)

    def start_param_sync(self, *_: Any, force_sync: bool = False, force_dispatch: bool = False) -> None:
        """Starts the first all-gathers of the next forward; with `force_sync` or without overlap, those of an install.

        **Collective**. Optional: forward all-gathers what is missing, so `force_dispatch` changes nothing.
        """
        if force_sync or not self._schedule.config.overlap_param_gather:
            self._schedule.gather_all()
        elif self._schedule.config.fsdp_all_gather_in_start_param_sync:
            self._schedule.gather_ahead()

    def synchronize_param_gather(self) -> None:
        """Reshards all units; modules show sharded parameters."""
        self._schedule.reshard_all()

    def full_params(self, writeback: bool = True) -> AbstractContextManager[None]:
        """A context in which every parameter is whole, plain and writable, on every rank. **Collective**.

        Inside, `named_parameters()`, the modules' attributes and `state_dict()` show plain tensors of full shape that
        hold the main weights exactly (by default fp32; a frozen parameter in its own dtype). Each data-parallel rank
        holds the whole model in that dtype beside its shards. They are gathered group by group, replicated ones copied.
        Of a tensor-parallel parameter it is this tensor-parallel rank's part, in a DTensor if it was one.

        On exit every rank copies its own rows of what it has into its main weight, and compute weights follow. So all
        ranks must write the same; what one rank writes into another one's rows is gone, and replicated parameters would
        differ. If the block raises, nothing is written. Gradients and optimizer state stay as they are.

        Args:
            writeback: False: drop what is written.

        Raises:
            RuntimeError: inside the model's forward or backward, or inside another `full_params()`; before anything is
                communicated. Running the model, stepping its optimizer or loading a state dict inside raises too.
            ValueError: on exit, if a parameter has been replaced or resized; nothing has been written then.
        """
        return full_params(self._schedule, writeback=writeback)

    def full_state_dict(self, dtype: torch.dtype | None = None) -> OrderedDict[str, Any]:
        """The unsharded model's state dict in the first rank's CPU memory; empty on other ranks. **Collective**.

        Names, buffers, tied entries (one tensor under each name) and extra state are those of the original module's
        `state_dict()`. Parameters go to the first data-parallel rank one by one: it holds one whole parameter on the
        device at a time, the others none.

        Args:
            dtype: of the parameters; None: that of the main weights, whose values are exact (fp32 by default, a frozen
                parameter's own). Buffers keep theirs.

        Raises:
            RuntimeError: inside forward, backward or `full_params()`.
            NotImplementedError: tensor- or expert-parallel ranks hold parts of the model.
            ValueError: a hook of the model renames shards, or `dtype` is not a floating one of 2 bytes or more.
        """
        self._schedule.check_idle("full_state_dict()")
        check_is_whole(self.dist_index)
        shards, specs = with_extra_state(self.module, self.state_dict_hooks), self.state_dict_hooks.specs
        prefix = self._wrapper_prefix()
        return full_state_dict(shards, specs, self.dist_index, wrapper_prefix=prefix, dtype=dtype)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Loads whole tensors or shards, under the names of `state_dict()` or of the unsharded model, as torch does.

        **Collective** if a weight codec is.
        """
        load = self.module.load_state_dict if names_inner_module(state_dict, self.module) else super().load_state_dict
        return load(state_dict, strict=strict, assign=assign)

    def _wrapper_prefix(self) -> str:
        """The prefix that wrappers between `.module` and the user's model add to names."""
        return ""

    @uncompiled
    def install_optimized_model_weights(self) -> None:
        """Makes compute weights follow the main weights. Call it after changing parameters by hand.

        **Collective** if a weight codec is.
        """
        self._schedule.check_unblocked("install_optimized_model_weights()")
        self.param_and_grad_buffer.copy_main_weights_to_model_weights()

    @torch.no_grad()
    def broadcast_params(self) -> None:
        """Gives replicated parameters the first rank's values; sharded ones have one owner each. **Collective**."""
        for group in self.param_and_grad_buffer.parameter_groups:
            for axis, place in zip(group.spec.axes, group.plan.main_weight, strict=True):
                if axis.size > 1 and place is Placement.REPLICATE:
                    dist.broadcast(group.main_weight_buffer.data, group=axis.group, group_src=0)
        self.install_optimized_model_weights()

    def overlap_report(self) -> OverlapReport:
        """A context that times computation and communication, and how much of the latter is exposed."""
        return OverlapReport(self._schedule)

    def get_distributed_index(self) -> FSDPDistributedIndex:
        """The meshes and process groups."""
        return self.dist_index

    def _apply(self, fn: Any, recurse: bool = True) -> MegatronFSDP:
        """Refuses to move or cast sharded parameters; a move to their own device and dtype does nothing.

        Raises:
            RuntimeError: the device or a dtype would change.
        """
        check_stays(fn, self.parameters(), self.device)
        return self

    def __deepcopy__(self, memo: dict) -> MegatronFSDP:
        raise NotImplementedError(
            "a sharded model cannot be deep-copied; copy the module before sharding, or its state_dict()."
        )
