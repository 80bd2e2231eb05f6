"""`DistributedDataParallelConfig`: megatron-core's options with the engine's.

Every field is read by the engine or by megatron-core, refused, or without effect, which a warning says once.
"""

import dataclasses
import functools
import logging

import torch
from megatron.core.distributed.distributed_data_parallel_config import (
    DistributedDataParallelConfig as McoreDistributedDataParallelConfig,
)

from megatron_fsdp import config as engine

logger = logging.getLogger(__name__)

#: Spellings of dtypes on command lines and in YAML. "auto" leaves the choice to the engine.
DTYPE_NAMES: dict[str, torch.dtype | None] = {
    "auto": None,
    "fp32": torch.float32,
    "float32": torch.float32,
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "fp16": torch.float16,
    "float16": torch.float16,
}

_DTYPE_FIELDS = (
    "megatron_fsdp_main_params_dtype",
    "megatron_fsdp_main_grads_dtype",
    "megatron_fsdp_grad_comm_dtype",
)


@dataclasses.dataclass(kw_only=True)
class DistributedDataParallelConfig(engine.DistributedDataParallelConfig, McoreDistributedDataParallelConfig):
    """Options of `FullyShardedDataParallel`: megatron-core's own, the engine's, and those that neither has yet.

    Dtypes may be given by name; "auto" is None.
    """

    num_buckets: int | None = None
    """Split the parameters outside all units into this many buckets; not together with bucket_size."""

    param_name_patterns_for_fp32_local_accumulation: tuple[str, ...] = ()
    """DistributedDataParallel only: parameters whose gradients accumulate in fp32."""

    fp4_param_gather: bool = False
    """Compute weights are fp4 and are gathered as such. Not supported."""

    megatron_fsdp_version: int = 1
    """Version of the Megatron-FSDP interface; 1 is the one that exists here."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in _DTYPE_FIELDS:
            setattr(self, name, _dtype(name, getattr(self, name)))
        if self.megatron_fsdp_version not in (1, 2):
            raise ValueError(f"megatron_fsdp_version is {self.megatron_fsdp_version!r}; expected 1 or 2")
        if self.num_buckets is not None and self.num_buckets <= 0:
            raise ValueError(f"num_buckets is {self.num_buckets}; expected a positive number of buckets, or None")
        if self.num_buckets is not None and self.bucket_size is not None:
            raise ValueError(
                f"bucket_size={self.bucket_size} and num_buckets={self.num_buckets} both say where buckets end; "
                "set one of them"
            )
        if self.megatron_fsdp_max_pool_double_buffer:
            self.fsdp_double_buffer = True


#: Options that are refused: field -> (the value that means off, why).
_REFUSED: dict[str, tuple[object, str]] = {
    "fp4_param_gather": (False, "there is no fp4 weight codec"),
    "megatron_fsdp_version": (1, "there is one engine, and it has the interface of version 1"),
    "delay_wgrad_compute": (
        False,
        "gradients are reduced when their unit's backward ends, before a delayed weight gradient exists",
    ),
    "preserve_fp32_weights": (True, "it was replaced by megatron_fsdp_main_params_dtype=None"),
}

#: DistributedDataParallel's own knobs: field -> (its default, what takes its place).
_WITHOUT_EFFECT: dict[str, tuple[object, str]] = {
    "grad_reduce_in_fp32": (
        False,
        "set megatron_fsdp_main_grads_dtype or megatron_fsdp_grad_comm_dtype to torch.float32",
    ),
    "check_for_large_grads": (False, "watch the gradient norm"),
    "pad_buckets_for_high_nccl_busbw": (False, "the engine's own layout decides the padding"),
    "reduce_scatter_with_fp32_accumulation": (False, "set megatron_fsdp_grad_comm_dtype=torch.float32"),
    "param_name_patterns_for_fp32_local_accumulation": ((), "set megatron_fsdp_main_grads_dtype=torch.float32"),
    "reuse_grad_buf_for_mxfp8_param_ag": (False, "weights are gathered into buffers of their own"),
}


def resolve_ddp_config(
    config: McoreDistributedDataParallelConfig, *, unbucketed_numel: int | None = None
) -> DistributedDataParallelConfig:
    """A copy of `config`, megatron-core's own or ours, with the values that the engine and megatron-core read.

    Args:
        config: stays as it is; fields that it lacks have their defaults.
        unbucketed_numel: elements that `num_buckets` divides; needed with that option only.

    Raises:
        ValueError: a field is unknown, or has a value that it cannot have.
        NotImplementedError: an option asks for a feature that the engine does not have.
    """
    given = {field.name: getattr(config, field.name) for field in dataclasses.fields(config) if field.init}
    _refuse(given)
    for name, (default, instead) in _WITHOUT_EFFECT.items():
        if given.get(name, default) != default:
            _warn_once(f"{name}={given[name]!r} has no effect with Megatron-FSDP; {instead}")
            given[name] = default
    if (num_buckets := given.pop("num_buckets", None)) is not None:
        if unbucketed_numel is None:
            raise ValueError(f"num_buckets={num_buckets} needs the number of elements to divide; pass unbucketed_numel")
        given["bucket_size"] = max(1, -(-unbucketed_numel // num_buckets))
    return DistributedDataParallelConfig(**(given | {"use_megatron_fsdp": True, "use_distributed_optimizer": True}))


def _refuse(given: dict[str, object]) -> None:
    known = {field.name for field in dataclasses.fields(DistributedDataParallelConfig)}
    unknown = sorted(set(given) - known)
    if unknown:
        raise ValueError(
            f"ddp_config has fields {unknown}, which Megatron-FSDP does not know; "
            "use megatron_fsdp.mcore.DistributedDataParallelConfig or megatron-core 0.16.1's class"
        )
    for name, (off, reason) in _REFUSED.items():
        if given.get(name, off) != off:
            raise NotImplementedError(f"{name}={given[name]!r} is not supported: {reason}. Leave it at {off!r}.")


def _dtype(name: str, value: torch.dtype | str | None) -> torch.dtype | None:
    dtype = DTYPE_NAMES.get(value.removeprefix("torch."), value) if isinstance(value, str) else value
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name} is {value!r}; expected a torch dtype, None or one of {', '.join(DTYPE_NAMES)}")
    return dtype


@functools.cache
def _warn_once(message: str) -> None:
    logger.warning("%s", message)
