"""The user's configuration, resolved to one frozen `EngineConfig`."""

from __future__ import annotations

import dataclasses
import enum
import math
import os
from collections.abc import Mapping

import torch

from megatron_fsdp.plan.strategy import NO_SHARD, OUTER_STRATEGIES, RESTING


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


#: Frozen, so one object can be everybody's default.
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

    data_parallel_sharding_strategy: str | int = "no_shard"
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

    outer_dp_sharding_strategy: str | int = "no_shard"
    """Strategy of the outer axis: no_shard (HSDP) or optim (HFSDP)."""

    disable_symmetric_registration: bool = False
    """With nccl_ub, register locally only."""

    fsdp_manual_registration: bool = False
    """With nccl_ub, register when `manual_buffer_registration()` is called."""

    megatron_fsdp_main_params_dtype: torch.dtype | None = torch.float32
    """As `MixedPrecisionPolicy.main_params_dtype`."""

    megatron_fsdp_main_grads_dtype: torch.dtype | None = None
    """As `MixedPrecisionPolicy.main_grads_dtype`."""

    megatron_fsdp_grad_comm_dtype: torch.dtype | None = None
    """As `MixedPrecisionPolicy.grad_comm_dtype`."""

    megatron_fsdp_use_decoupled_grad: bool = False
    """Attach gradients as `param.decoupled_grad`, in the dtype they accumulate in."""

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
        data_parallel_sharding_strategy="optim_grads_params", overlap_grad_reduce=True, overlap_param_gather=True
    )


#: Options that are understood but whose feature is not there: option -> (the value that means off, the reason).
_NOT_YET: dict[str, tuple[object, str]] = {
    "fp8_param_gather": (False, "the TransformerEngine weight codec is missing"),
    "keep_fp8_transpose_cache": (False, "the TransformerEngine weight codec is missing"),
    "megatron_fsdp_cuda_graph_mode": (False, "gradients are attached anew in every step"),
}


def agreed_precision(config: DistributedDataParallelConfig, policy: MixedPrecisionPolicy) -> MixedPrecisionPolicy:
    """The dtypes of `config` and `policy`, each of which may leave one at its default.

    Raises:
        ValueError: both ask for something else than the default, and not for the same.
    """
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


def strategy_name(value: str | int, option: str, allowed: tuple[str, ...] = tuple(RESTING)) -> str:
    """The canonical name of a strategy given by name or number.

    Raises:
        ValueError: `value` names no strategy that `option` allows.
    """
    names = tuple(RESTING)
    is_number = isinstance(value, int) and not isinstance(value, bool) and 0 <= value < len(names)
    name = names[value] if is_number else value
    if name not in allowed:
        choices = ", ".join(f"{name!r} ({names.index(name)})" for name in allowed)
        raise ValueError(f"{option}={value!r} is not a sharding strategy; expected one of {choices}")
    return name


@dataclasses.dataclass(frozen=True, kw_only=True)
class BufferPolicy:
    """Memory policy of gathered weights, and of gradients on their way."""

    has_slots: bool = False
    """Units take turns in two fixed slots."""
    only_alike: bool = True
    """Slots are for the largest set of alike units; False: large enough for every unit."""
    keeps_misfits: bool = False
    """Storages that do not fit the slots have memory of their own that they never give back."""
    is_registered: bool = False
    """The memory is NCCL's, and known to its communicators."""
    is_symmetric: bool = True
    """Registered as symmetric windows where NCCL can."""
    registers_late: bool = False
    """Registered when the user says so."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Everything the engine reads, validated; nothing in it changes after construction."""

    inner_strategy: str
    outer_strategy: str
    precision: MixedPrecisionPolicy
    overlap_grad_reduce: bool
    overlap_param_gather: bool
    average_in_collective: bool
    calculate_per_token_loss: bool
    gradient_reduce_div_fusion: bool
    use_decoupled_grad: bool
    gather_in_start_param_sync: bool
    bucket_numel: int | None
    checks_grads: bool = False
    """Reduced gradients that are not finite raise."""
    blames_ranks: bool = False
    """Unreduced gradients are looked at too, to say whose they were."""
    prefetch_depth: int = 1
    """Units gathered ahead of the one that computes."""
    prefetch_numel: int | None = None
    """Elements gathered ahead; replaces `prefetch_depth`."""
    reductions_in_flight: int = 2
    """Unreduced gradient buffers alive at a time."""
    reduction_numel: int | None = None
    """Elements of those buffers; replaces `reductions_in_flight`, but one buffer is always allowed."""
    is_fine_grained: bool = False
    """Modules inside units that own parameters are units."""
    buffers: BufferPolicy = BufferPolicy()
    """Memory of what is communicated."""
    residency_nbytes: int | None = 0
    """Bytes for weights that stay gathered through a step; None: what the first step leaves free."""
    gathers_by_copies: bool = False
    """Over the inner axis ranks copy weights out of each other's memory."""
    hang_report_s: float = 0.0
    """Seconds without any event after which a rank logs where it is; 0: never."""
    is_strict: bool = False
    """Every forward is checked for mistakes, not the first ones only."""

    @property
    def strategy_label(self) -> str:
        """The strategies for people, an outer one only where it shards."""
        return self.inner_strategy + (f" inside {self.outer_strategy}" if self.outer_strategy != NO_SHARD else "")


#: Options that mean something only with another one: option -> (that one, in words, and whether it is on).
_NEEDS = {
    "fsdp_db_use_persist_buf_on_alloc_fail": ("fsdp_double_buffer=True", lambda policy: policy.has_slots),
    "disable_symmetric_registration": ("nccl_ub=True", lambda policy: policy.is_registered),
    "fsdp_manual_registration": ("nccl_ub=True", lambda policy: policy.is_registered),
}


def buffer_policy(config: DistributedDataParallelConfig) -> BufferPolicy:
    """Policy of communication buffers that the options ask for.

    Raises:
        ValueError: an option has no meaning without another one, or memory that can be registered without a fixed
            place cannot be had.
    """
    policy = BufferPolicy(
        has_slots=config.fsdp_double_buffer or config.megatron_fsdp_max_pool_double_buffer or config.nccl_ub,
        only_alike=not config.megatron_fsdp_max_pool_double_buffer,
        keeps_misfits=config.fsdp_db_use_persist_buf_on_alloc_fail,
        is_registered=config.nccl_ub,
        is_symmetric=not config.disable_symmetric_registration,
        registers_late=config.fsdp_manual_registration,
    )
    for option, (needed, is_on) in _NEEDS.items():
        if getattr(config, option) and not is_on(policy):
            raise ValueError(f"{option}=True needs {needed}; set that too, or leave it out.")
    for variable in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        if config.nccl_ub and "expandable_segments:true" in os.environ.get(variable, "").replace(" ", "").lower():
            raise ValueError(
                f"nccl_ub=True registers memory with NCCL, whose segments must stay what they are, but {variable}="
                f"{os.environ[variable]!r}; take expandable_segments out of it."
            )
    return policy


def resolve(
    config: DistributedDataParallelConfig,
    precision: MixedPrecisionPolicy,
    *,
    calculate_per_token_loss: bool = False,
    disable_bucketing: bool = False,
    report_nan_in_param_grad: bool = False,
    is_fine_grained: bool = False,
) -> EngineConfig:
    """`config` and `precision` as one frozen value.

    Raises:
        ValueError: an option has no meaning, or two contradict each other.
        NotImplementedError: an option asks for a feature that is not there.
    """
    check_switches(
        {field.name: getattr(config, field.name) for field in dataclasses.fields(config) if field.type == "bool"}
    )
    for name, (off, reason) in _NOT_YET.items():
        if getattr(config, name) != off:
            came = getattr(config, name)
            raise NotImplementedError(f"{name}={came!r} is not supported yet: {reason}. Use {name}={off!r}.")
    inner = strategy_name(config.data_parallel_sharding_strategy, "zero_dp_strategy")
    outer = strategy_name(config.outer_dp_sharding_strategy, "outer_dp_sharding_strategy", OUTER_STRATEGIES)
    if outer != NO_SHARD and inner != "optim_grads_params":
        raise ValueError(
            f"outer_dp_sharding_strategy={outer!r} needs zero_dp_strategy='optim_grads_params' (3), got {inner!r}: "
            "sharding the optimizer outside an inner axis that keeps more than shards leaves no contiguous piece."
        )
    for name in ("bucket_size", "suggested_communication_unit_size"):
        numel = getattr(config, name)
        if numel is not None and (isinstance(numel, bool) or not isinstance(numel, int) or numel < 1):
            raise ValueError(f"{name} is {numel!r}; expected a positive number of elements, or None")
    row = RESTING[inner]
    return EngineConfig(
        inner_strategy=inner,
        outer_strategy=outer,
        precision=agreed_precision(config, precision),
        overlap_grad_reduce=config.overlap_grad_reduce or row.main_grad is RESTING["optim_grads"].main_grad,
        overlap_param_gather=config.overlap_param_gather or row.weight is RESTING["optim_grads_params"].weight,
        average_in_collective=config.average_in_collective,
        calculate_per_token_loss=calculate_per_token_loss,
        gradient_reduce_div_fusion=config.gradient_reduce_div_fusion,
        use_decoupled_grad=config.megatron_fsdp_use_decoupled_grad,
        gather_in_start_param_sync=config.fsdp_all_gather_in_start_param_sync,
        bucket_numel=None if disable_bucketing else config.bucket_size,
        checks_grads=config.check_for_nan_in_grad or report_nan_in_param_grad,
        blames_ranks=report_nan_in_param_grad,
        prefetch_numel=config.suggested_communication_unit_size,
        reduction_numel=config.suggested_communication_unit_size,
        is_fine_grained=is_fine_grained or config.megatron_fsdp_enable_fine_grained_param_gather,
        buffers=buffer_policy(config),
        residency_nbytes=_residency_nbytes(config),
        gathers_by_copies=_gathers_by_copies(config, inner),
        hang_report_s=_hang_report_s(),
        is_strict=os.environ.get("MEGATRON_FSDP_STRICT", "0") not in ("", "0"),
    )


def check_switches(given: Mapping[str, object]) -> None:
    """Checks options that are on or off, by name: any text, "False" too, would mean True.

    Raises:
        ValueError: one is neither True nor False.
    """
    for name, came in given.items():
        if came not in (True, False):
            raise ValueError(f"{name} is {came!r}; expected True or False")


def _hang_report_s() -> float:
    value = os.environ.get("MEGATRON_FSDP_HANG_REPORT_S", "0")
    try:
        seconds = float(value)
    except ValueError:
        seconds = -1.0
    if not 0.0 <= seconds < math.inf:
        raise ValueError(f"MEGATRON_FSDP_HANG_REPORT_S is {value!r}; expected seconds, a number of 0 or more")
    return seconds


def _residency_nbytes(config: DistributedDataParallelConfig) -> int | None:
    value = config.fsdp_residency_bytes
    if value != "auto" and (not isinstance(value, int) or isinstance(value, bool) or value < 0):
        raise ValueError(
            f"residency_bytes (fsdp_residency_bytes) is {value!r}; expected bytes, an int of 0 or more, or 'auto'"
        )
    if value != 0 and buffer_policy(config).has_slots:
        raise ValueError(
            f"residency_bytes (fsdp_residency_bytes) is {value!r}, which lets units keep their memory, but in a double "
            "buffer they take turns; leave out one of the two."
        )
    return None if value == "auto" else value


def _gathers_by_copies(config: DistributedDataParallelConfig, inner: str) -> bool:
    if not config.fsdp_copy_engine_gather:
        return False
    option = "copy_engine_gather=True (fsdp_copy_engine_gather)"
    if inner == NO_SHARD:
        raise ValueError(f"{option} is about gathers, but zero_dp_strategy={inner!r} makes none; leave it out.")
    if config.nccl_ub:
        raise ValueError(
            f"{option} gathers without NCCL, with which nccl_ub=True registers the memory of gathers; leave out one of "
            "the two."
        )
    return True
