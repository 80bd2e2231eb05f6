"""Configuration: what resolves to what, what contradicts what, and that nothing is accepted and ignored."""

import dataclasses

import pytest
import torch

from megatron_fsdp.config import (
    _NOT_YET,
    BufferPolicy,
    DistributedDataParallelConfig,
    EngineConfig,
    MixedPrecisionPolicy,
    ShardingStrategy,
    default_config,
    resolve,
    strategy_name,
)
from megatron_fsdp.plan.strategy import OUTER_STRATEGIES, RESTING

NAMES = ["no_shard", "optim", "optim_grads", "optim_grads_params"]
PRECISION_FIELDS = [field.name for field in dataclasses.fields(MixedPrecisionPolicy)]


def resolved(precision: MixedPrecisionPolicy | None = None, **options) -> EngineConfig:
    return resolve(DistributedDataParallelConfig(**options), precision or MixedPrecisionPolicy())


@pytest.mark.parametrize(("number", "name"), list(enumerate(NAMES)))
def test_a_strategy_has_a_number_a_name_and_an_enum_member(number, name):
    assert {strategy_name(value, "x") for value in (number, name, ShardingStrategy(number))} == {name}
    assert ShardingStrategy[name.upper()] == number
    assert list(RESTING)[number] == name


@pytest.mark.parametrize("wrong", ["zero3", "OPTIM", "", 4, -1, 1.0, True, None, ["optim"]])
def test_anything_else_is_refused_with_the_choices(wrong):
    with pytest.raises(ValueError, match=r"zero_dp_strategy=.* is not a sharding strategy; .*'no_shard' \(0\).*\(3\)"):
        strategy_name(wrong, "zero_dp_strategy")


def test_the_outer_axis_knows_two_strategies():
    assert strategy_name(1, "outer_dp_sharding_strategy", OUTER_STRATEGIES) == "optim"
    with pytest.raises(ValueError, match=r"outer_dp_sharding_strategy=2 is not .*'no_shard' \(0\), 'optim' \(1\)$"):
        resolved(data_parallel_sharding_strategy=3, outer_dp_sharding_strategy=2)


@pytest.mark.parametrize("inner", [0, 1, 2])
def test_an_outer_axis_shards_only_around_a_fully_sharded_inner_one(inner):
    with pytest.raises(ValueError, match="outer_dp_sharding_strategy='optim' needs zero_dp_strategy='optim_grads_par"):
        resolved(data_parallel_sharding_strategy=inner, outer_dp_sharding_strategy="optim")
    assert resolved(data_parallel_sharding_strategy=3, outer_dp_sharding_strategy=1).outer_strategy == "optim"


@pytest.mark.parametrize("strategy", range(4))
def test_overlap_is_always_on_where_every_backward_reduces_or_gathers(strategy):
    config = resolved(data_parallel_sharding_strategy=strategy)
    assert config.overlap_grad_reduce == (strategy >= 2)
    assert config.overlap_param_gather == (strategy == 3)
    asked = resolved(data_parallel_sharding_strategy=strategy, overlap_grad_reduce=True, overlap_param_gather=True)
    assert asked.overlap_grad_reduce and asked.overlap_param_gather


@pytest.mark.parametrize("option", _NOT_YET)
def test_an_option_without_its_feature_is_refused_by_name(option):
    off, reason = _NOT_YET[option]
    assert getattr(DistributedDataParallelConfig(), option) == off
    with pytest.raises(NotImplementedError, match=f"{option}=.*{reason}"):
        resolved(**{option: True if off is False else 1000})


def test_every_option_is_read_or_refused():
    read = {
        "check_for_nan_in_grad",
        "overlap_grad_reduce",
        "overlap_param_gather",
        "bucket_size",
        "suggested_communication_unit_size",
        "megatron_fsdp_enable_fine_grained_param_gather",
        "average_in_collective",
        "data_parallel_sharding_strategy",
        "gradient_reduce_div_fusion",
        "fsdp_all_gather_in_start_param_sync",
        "outer_dp_sharding_strategy",
        "megatron_fsdp_use_decoupled_grad",
        "fsdp_residency_bytes",
        "fsdp_copy_engine_gather",
        *BUFFER_OPTIONS,
        *(f"megatron_fsdp_{name}" for name in PRECISION_FIELDS),
    }
    assert {field.name for field in dataclasses.fields(DistributedDataParallelConfig)} == read | set(_NOT_YET)


BUFFER_OPTIONS = {
    "nccl_ub": BufferPolicy(has_slots=True, is_registered=True),
    "fsdp_double_buffer": BufferPolicy(has_slots=True),
    "megatron_fsdp_max_pool_double_buffer": BufferPolicy(has_slots=True, only_alike=False),
    "fsdp_db_use_persist_buf_on_alloc_fail": BufferPolicy(has_slots=True, keeps_misfits=True),
    "disable_symmetric_registration": BufferPolicy(has_slots=True, is_registered=True, is_symmetric=False),
    "fsdp_manual_registration": BufferPolicy(has_slots=True, is_registered=True, registers_late=True),
}
#: Options without which they mean nothing.
NEEDED = {
    "fsdp_db_use_persist_buf_on_alloc_fail": "fsdp_double_buffer",
    "disable_symmetric_registration": "nccl_ub",
    "fsdp_manual_registration": "nccl_ub",
}


@pytest.mark.parametrize("option", BUFFER_OPTIONS)
def test_communication_buffers_are_what_the_options_ask_for(option):
    needed = NEEDED.get(option)
    assert resolved().buffers == BufferPolicy()
    assert resolved(**{option: True, **({needed: True} if needed else {})}).buffers == BUFFER_OPTIONS[option]
    if needed:
        with pytest.raises(ValueError, match=f"{option}=True needs {needed}=True"):
            resolved(**{option: True})


@pytest.mark.parametrize("variable", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_segments_that_grow_cannot_be_registered(variable, monkeypatch):
    monkeypatch.setenv(variable, "max_split_size_mb:64, expandable_segments: True")
    with pytest.raises(ValueError, match=f"nccl_ub=True registers memory .*{variable}=.*take expandable_segments out"):
        resolved(nccl_ub=True)
    assert resolved(fsdp_double_buffer=True).buffers.has_slots
    monkeypatch.setenv(variable, "expandable_segments:False")
    assert resolved(nccl_ub=True).buffers.is_registered


def test_bucket_sizes():
    assert resolved().bucket_numel is None and resolved(bucket_size=5).bucket_numel == 5
    unbucketed = resolve(DistributedDataParallelConfig(bucket_size=5), MixedPrecisionPolicy(), disable_bucketing=True)
    assert unbucketed.bucket_numel is None
    with pytest.raises(ValueError, match="bucket_size is 0; expected a positive"):
        resolved(bucket_size=0)


@pytest.mark.parametrize("name", PRECISION_FIELDS)
def test_dtypes_may_be_set_in_either_place_but_not_differently(name):
    option = f"megatron_fsdp_{name}"
    assert getattr(resolved(**{option: torch.bfloat16}).precision, name) is torch.bfloat16
    policy = MixedPrecisionPolicy(**{name: torch.bfloat16})
    assert resolved(policy).precision == policy == resolved(policy, **{option: torch.bfloat16}).precision
    with pytest.raises(ValueError, match=f"mixed_precision_policy.{name}=torch.bfloat16 contradicts .*float16"):
        resolved(policy, **{option: torch.float16})


def test_no_main_weights_can_be_asked_for_in_either_place():
    policy = MixedPrecisionPolicy(main_params_dtype=None)
    assert resolved(policy).precision.main_params_dtype is None
    assert resolved(megatron_fsdp_main_params_dtype=None).precision.main_params_dtype is None


@pytest.mark.parametrize("name", PRECISION_FIELDS)
@pytest.mark.parametrize("wrong", [torch.int32, torch.float8_e4m3fn, "float32", 32])
def test_a_dtype_must_be_able_to_add(name, wrong):
    with pytest.raises(ValueError, match=f"{name} is .*; expected a torch floating-point dtype"):
        MixedPrecisionPolicy(**{name: wrong})


def test_a_resolved_config_is_frozen_and_its_source_untouched():
    source = DistributedDataParallelConfig(data_parallel_sharding_strategy=3)
    before = dataclasses.asdict(source)
    config = resolve(source, MixedPrecisionPolicy(), calculate_per_token_loss=True)
    assert dataclasses.asdict(source) == before and config.calculate_per_token_loss
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.prefetch_depth = 7
    with pytest.raises(dataclasses.FrozenInstanceError):
        MixedPrecisionPolicy().main_params_dtype = None


def test_the_default_shards_and_overlaps_everything():
    config = resolve(default_config(), MixedPrecisionPolicy())
    assert config.inner_strategy == config.strategy_label == "optim_grads_params"
    assert config.overlap_grad_reduce and config.overlap_param_gather


def test_labels_name_an_outer_strategy_that_shards():
    config = resolved(data_parallel_sharding_strategy=3, outer_dp_sharding_strategy=1)
    assert config.strategy_label == "optim_grads_params inside optim"
