"""Options: as users give them, and as one frozen `EngineConfig` that the engine reads."""

from __future__ import annotations

import dataclasses
import enum
import math
import os
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import nn

from megatron_fsdp.plan.strategy import NO_SHARD, OUTER_STRATEGIES, RESTING, plan_for, strategies_that

#: Units gathered ahead of the one that computes, where no number of elements is given.
UNITS_AHEAD = 1
#: Unreduced gradient buffers alive at a time, where no number of elements is given.
REDUCTIONS_IN_FLIGHT = 2


class ShardingStrategy(enum.IntEnum):
    """Strategies by number; `RESTING` in `plan/strategy.py` says what each one means."""

    NO_SHARD = 0
    OPTIM = 1
    OPTIM_GRADS = 2
    OPTIM_GRADS_PARAMS = 3


@dataclasses.dataclass(frozen=True)
class MixedPrecisionPolicy:
    """Dtypes of what the optimizer sees and of what travels."""

    main_params_dtype: torch.dtype | None = torch.float32
    """Dtype of the parameters given to the optimizer. None: the model's own dtype, without a second copy."""

    main_grads_dtype: torch.dtype | None = None
    """Dtype in which gradients accumulate, and of `.grad`. None: the dtype of the parameter's gradient."""

    grad_comm_dtype: torch.dtype | None = None
    """Dtype of gradient reductions. None: `main_grads_dtype`. No extra memory where it equals that."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            dtype = getattr(self, field.name)
            is_usable = isinstance(dtype, torch.dtype) and dtype.is_floating_point and dtype.itemsize > 1
            if dtype is not None and not is_usable:
                raise ValueError(
                    f"{field.name} is {dtype!r}; expected a torch floating-point dtype of 2 bytes or more, or None"
                )


#: Frozen, so one object can be the default of every signature.
DEFAULT_POLICY = MixedPrecisionPolicy()


@dataclasses.dataclass
class DistributedDataParallelConfig:
    """Options of `MegatronFSDP`. Read once at construction and never changed by the engine."""

    overlap_grad_reduce: bool = False
    """Reduce gradients while backward runs. Always on for strategies that reduce in every backward."""

    overlap_param_gather: bool = False
    """Gather the next unit's weights while this one computes. Always on for strategies that shard weights."""

    check_for_nan_in_grad: bool = False
    """Raise on every rank when a reduced gradient is not finite; leave off under dynamic loss scaling."""

    bucket_size: int | None = None
    """Elements after which a group of parameters outside all units is cut. None: never."""

    average_in_collective: bool = False
    """Average inside the reduction (ReduceOp.AVG) in place of scaling before a sum."""

    fp8_param_gather: bool = False
    """Compute weights are fp8 and are gathered as such."""

    data_parallel_sharding_strategy: str | int = NO_SHARD
    """One of no_shard, optim, optim_grads, optim_grads_params, or its number 0 to 3."""

    gradient_reduce_div_fusion: bool = True
    """Fuse the scaling of gradients into the reduction where the backend can."""

    suggested_communication_unit_size: int | None = None
    """Cap in elements on the weights that are gathered ahead, and on the gradients whose reduction is on its way.

    As many units as fit are prefetched, none if the next one alone does not; one reduction is always let through. None:
    one unit ahead, two reductions.
    """

    keep_fp8_transpose_cache: bool = False
    """Keep fp8 transposes between forward and backward."""

    nccl_ub: bool = False
    """Allocate communication buffers in memory registered with NCCL; implies `fsdp_double_buffer`."""

    fsdp_double_buffer: bool = False
    """Units that are alike gather, and reduce, in two persistent buffers in turn."""

    fsdp_db_use_persist_buf_on_alloc_fail: bool = False
    """Units that do not fit the double buffer get a persistent buffer of their own, not one at a time."""

    fsdp_all_gather_in_start_param_sync: bool = True
    """`start_param_sync()` issues the first gather of the next forward."""

    outer_dp_sharding_strategy: str | int = NO_SHARD
    """Strategy of the outer axis: no_shard (HSDP) or optim (HFSDP)."""

    disable_symmetric_registration: bool = False
    """With nccl_ub, register locally only."""

    fsdp_manual_registration: bool = False
    """With nccl_ub, register when `manual_buffer_registration()` is called."""

    # Read by name: megatron_fsdp_*_dtype, with the fields of `MixedPrecisionPolicy`, by `_agreed_precision`.
    megatron_fsdp_main_params_dtype: torch.dtype | None = torch.float32
    """As `MixedPrecisionPolicy.main_params_dtype`."""

    megatron_fsdp_main_grads_dtype: torch.dtype | None = None
    """As `MixedPrecisionPolicy.main_grads_dtype`."""

    megatron_fsdp_grad_comm_dtype: torch.dtype | None = None
    """As `MixedPrecisionPolicy.grad_comm_dtype`."""

    megatron_fsdp_use_decoupled_grad: bool = False
    """Attach gradients as `param.decoupled_grad`, in the dtype they accumulate in, for an optimizer that reads them and
    has an attribute `use_decoupled_grad=True`, as TransformerEngine's FusedAdam; any other is refused."""

    megatron_fsdp_cuda_graph_mode: bool = False
    """Keep gradient tensors at fixed addresses for CUDA graphs."""

    megatron_fsdp_enable_fine_grained_param_gather: bool = False
    """Gather, and reduce, every module that owns parameters by itself, in place of its unit as a whole."""

    megatron_fsdp_max_pool_double_buffer: bool = False
    """Double buffer for units of different shapes, as large as the largest need it; implies `fsdp_double_buffer`."""

    fsdp_residency_bytes: int | str = 0
    """Memory for weights that stay gathered until the optimizer steps, so that no backward or later micro-batch gathers
    them again; "auto": nine tenths of what the first step left free on the GPU with the least, nothing on the CPU."""

    fsdp_copy_engine_gather: bool = False
    """Gather weights over the inner axis, which must lie within one host, by copies out of the other GPUs' memory: they
    take less than NCCL's gathers from a computation beside them."""


def default_config() -> DistributedDataParallelConfig:
    """Options of a `MegatronFSDP` that is given none: everything sharded, everything overlapped."""
    return DistributedDataParallelConfig(
        data_parallel_sharding_strategy=ShardingStrategy.OPTIM_GRADS_PARAMS,
        overlap_grad_reduce=True,
        overlap_param_gather=True,
    )


def strategy_name(value: str | int, option: str, allowed: tuple[str, ...] = tuple(RESTING)) -> str:
    """The canonical name of a strategy given by name or number.

    Raises:
        ValueError: `value` names no strategy that `option` allows.
    """
    names = tuple(RESTING)
    name = value
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < len(names):
        name = names[value]
    if not isinstance(name, str) or name not in allowed:
        choices = ", ".join(f"{name!r} ({names.index(name)})" for name in allowed)
        raise ValueError(f"{option}={value!r} is not a sharding strategy; expected one of {choices}")
    return name


def shards_anything(strategy: str | int, option: str) -> bool:
    """True for strategies that divide weights, gradients or optimizer state among ranks; `option` gives the strategy.

    Raises:
        ValueError: there is no such strategy.
    """
    return plan_for(strategy_name(strategy, option)).shards_anything


#: Options that are understood but whose feature is not there -> the reason.
_NOT_YET = {
    "fp8_param_gather": "the TransformerEngine weight codec is missing",
    "keep_fp8_transpose_cache": "the TransformerEngine weight codec is missing",
    "megatron_fsdp_cuda_graph_mode": "gradients are attached anew in every step",
}
#: Options that mean something only with another one -> that one.
_NEEDS = {
    "fsdp_db_use_persist_buf_on_alloc_fail": "fsdp_double_buffer",
    "disable_symmetric_registration": "nccl_ub",
    "fsdp_manual_registration": "nccl_ub",
}


def _hang_report_s() -> float:
    value = os.environ.get("MEGATRON_FSDP_HANG_REPORT_S", "0")
    try:
        seconds = float(value)
    except ValueError:
        seconds = -1.0
    if not 0.0 <= seconds < math.inf:
        raise ValueError(f"MEGATRON_FSDP_HANG_REPORT_S is {value!r}; expected seconds, a number of 0 or more")
    return seconds


def _is_strict() -> bool:
    return os.environ.get("MEGATRON_FSDP_STRICT", "0") not in ("", "0")


@dataclasses.dataclass(kw_only=True)
class EngineConfig(DistributedDataParallelConfig):
    """Every option of one sharded model, checked, complete and frozen. The engine reads options from here only.

    Strategies may be given by number and are then known by name; what other options imply is turned on.

    Raises:
        ValueError: an option has no meaning, or two contradict each other.
        TypeError: the mixed-precision policy is not a `MixedPrecisionPolicy`.
        NotImplementedError: an option asks for a feature that is not there.
    """

    data_parallel_sharding_strategy: str = NO_SHARD
    """By name."""
    outer_dp_sharding_strategy: str = NO_SHARD
    """By name."""
    mixed_precision_policy: MixedPrecisionPolicy = DEFAULT_POLICY
    """The dtypes to use: those of the policy that was given, and of the fields `megatron_fsdp_*_dtype`."""
    fsdp_unit_modules: Sequence[type | str] | None = None
    root_params: Collection[nn.Parameter] = ()
    fine_grained_recurse_module_types: Sequence[type | str] | None = None
    device: torch.device | str | None = None
    disable_bucketing: bool = False
    """Ignore `bucket_size`."""
    calculate_per_token_loss: bool = False
    init_model_with_meta_device: bool = False
    sync_model_each_microbatch: bool = False
    preproc_state_dict_for_dcp_ckpt: bool = True
    report_nan_in_param_grad: bool = False
    """Implies `check_for_nan_in_grad`."""
    hang_report_s: float = dataclasses.field(default_factory=_hang_report_s)
    """Seconds without any event after which a rank logs where it is; 0: never."""
    is_strict: bool = dataclasses.field(default_factory=_is_strict)
    """Every forward is checked for mistakes, not the first ones only."""

    @classmethod
    def of(cls, ddp_config: DistributedDataParallelConfig, **options: Any) -> EngineConfig:
        """The options of `ddp_config`, but for those in `options`, which are fields of this class."""
        fields = dataclasses.fields(DistributedDataParallelConfig)
        return cls(**({field.name: getattr(ddp_config, field.name) for field in fields} | options))

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.type == "bool" and value not in (True, False):  # any text, "False" too, would mean True
                raise ValueError(f"{field.name} is {value!r}; expected True or False")
            if field.name in _NOT_YET and value:
                raise NotImplementedError(
                    f"{field.name}=True is not supported yet: {_NOT_YET[field.name]}. Use {field.name}=False."
                )
        self._complete()
        self._check_strategies()
        self._check_buffers()
        for name in ("bucket_size", "suggested_communication_unit_size"):
            numel = getattr(self, name)
            if numel is not None and (isinstance(numel, bool) or not isinstance(numel, int) or numel < 1):
                raise ValueError(f"{name} is {numel!r}; expected a positive number of elements, or None")
        if self.average_in_collective and self.calculate_per_token_loss:
            raise ValueError(
                "average_in_collective=True and calculate_per_token_loss=True exclude each other: a per-token loss is "
                "divided by its tokens after a plain sum. Leave out one of the two."
            )
        is_cut = self.megatron_fsdp_enable_fine_grained_param_gather
        if self.fine_grained_recurse_module_types is not None and not is_cut:
            raise ValueError("fine_grained_recurse_module_types needs enable_fine_grained_param_gather_hook=True.")
        self._is_frozen = True

    def __setattr__(self, name: str, value: object) -> None:
        # By hand, because a frozen dataclass cannot extend one that its users may change.
        if hasattr(self, "_is_frozen"):
            raise dataclasses.FrozenInstanceError(f"cannot assign to {name!r}")
        super().__setattr__(name, value)

    def _complete(self) -> None:
        """Gives every option its one meaning."""
        inner = strategy_name(self.data_parallel_sharding_strategy, "zero_dp_strategy")
        self.data_parallel_sharding_strategy = inner
        outer = strategy_name(self.outer_dp_sharding_strategy, "outer_dp_sharding_strategy", OUTER_STRATEGIES)
        self.outer_dp_sharding_strategy = outer
        self.mixed_precision_policy = _agreed_precision(self, self.mixed_precision_policy)
        self.overlap_grad_reduce |= plan_for(inner).reduces_each_microbatch
        self.overlap_param_gather |= plan_for(inner).gathers_weights
        self.check_for_nan_in_grad |= self.report_nan_in_param_grad
        self.fsdp_double_buffer |= self.nccl_ub or self.megatron_fsdp_max_pool_double_buffer

    def _check_strategies(self) -> None:
        inner = self.data_parallel_sharding_strategy
        if self.shards_outer_axis and not plan_for(inner).gathers_weights:
            raise ValueError(
                f"outer_dp_sharding_strategy={self.outer_dp_sharding_strategy!r} needs zero_dp_strategy="
                f"{strategies_that(lambda plan: plan.gathers_weights)}, got {inner!r}: sharding the optimizer outside "
                "an inner axis that keeps more than shards leaves no contiguous piece."
            )
        if self.init_model_with_meta_device and not plan_for(inner).shards_anything:
            raise ValueError(
                "init_model_with_meta_device=True is for models that do not fit on one device, but zero_dp_strategy="
                f"{inner!r} keeps the whole model on each; choose a strategy that shards, or initialise it first."
            )
        if self.fsdp_copy_engine_gather and not plan_for(inner).shards_anything:
            raise ValueError(
                "copy_engine_gather=True (fsdp_copy_engine_gather) is about gathers, but zero_dp_strategy="
                f"{inner!r} makes none; leave it out."
            )

    def _check_buffers(self) -> None:
        for option, needed in _NEEDS.items():
            if getattr(self, option) and not getattr(self, needed):
                raise ValueError(f"{option}=True needs {needed}=True; set that too, or leave it out.")
        for variable in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
            if self.nccl_ub and "expandable_segments:true" in os.environ.get(variable, "").replace(" ", "").lower():
                raise ValueError(
                    f"nccl_ub=True registers memory with NCCL, whose segments must stay what they are, but {variable}="
                    f"{os.environ[variable]!r}; take expandable_segments out of it."
                )
        if self.fsdp_copy_engine_gather and self.nccl_ub:
            raise ValueError(
                "copy_engine_gather=True (fsdp_copy_engine_gather) gathers without NCCL, with which nccl_ub=True "
                "registers the memory of gathers; leave out one of the two."
            )
        nbytes = self.fsdp_residency_bytes
        if nbytes != "auto" and (not isinstance(nbytes, int) or isinstance(nbytes, bool) or nbytes < 0):
            raise ValueError(
                f"residency_bytes (fsdp_residency_bytes) is {nbytes!r}; expected bytes, an int of 0 or more, or 'auto'"
            )
        if nbytes != 0 and self.fsdp_double_buffer:
            raise ValueError(
                f"residency_bytes (fsdp_residency_bytes) is {nbytes!r}, which lets units keep their memory, but in a "
                "double buffer they take turns; leave out one of the two."
            )

    @property
    def shards_outer_axis(self) -> bool:
        """The optimizer state is divided along the outer axis too."""
        return plan_for(self.outer_dp_sharding_strategy).shards_anything

    @property
    def strategy_label(self) -> str:
        """The strategies for people, an outer one only where it shards."""
        outer = f" inside {self.outer_dp_sharding_strategy}" if self.shards_outer_axis else ""
        return self.data_parallel_sharding_strategy + outer


def _agreed_precision(config: DistributedDataParallelConfig, policy: MixedPrecisionPolicy) -> MixedPrecisionPolicy:
    """The dtypes of `config` and `policy`, each of which may leave one at its default.

    Raises:
        TypeError: `policy` is not one.
        ValueError: both ask for something else than the default, and not for the same.
    """
    if not isinstance(policy, MixedPrecisionPolicy):
        raise TypeError(f"mixed_precision_policy is {policy!r}; expected a MixedPrecisionPolicy.")
    chosen = {}
    for field in dataclasses.fields(MixedPrecisionPolicy):
        ours, theirs = getattr(policy, field.name), getattr(config, f"megatron_fsdp_{field.name}")
        if ours != theirs and field.default not in (ours, theirs):
            raise ValueError(
                f"mixed_precision_policy.{field.name}={ours} contradicts ddp_config's megatron_fsdp_{field.name}="
                f"{theirs}; set one of them, or both alike."
            )
        chosen[field.name] = theirs if ours == field.default else ours
    return MixedPrecisionPolicy(**chosen)
