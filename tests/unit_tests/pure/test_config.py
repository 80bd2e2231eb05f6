"""Configuration: what resolves to what, what contradicts what, and that nothing is accepted and ignored."""

import dataclasses
import inspect
import types
from unittest import mock

import pytest
import torch
from torch import nn

from megatron_fsdp import FSDPDistributedIndex, MegatronFSDP, fully_shard_model
from megatron_fsdp.config import (
    _NOT_YET,
    DistributedDataParallelConfig,
    EngineConfig,
    MixedPrecisionPolicy,
    ShardingStrategy,
    default_config,
    strategy_name,
)
from megatron_fsdp.plan.strategy import OUTER_STRATEGIES, RESTING, plan_for
from tests.unit_tests.harness.strategies import NO_STRATEGY, STRATEGIES

NAMES = ["no_shard", "optim", "optim_grads", "optim_grads_params"]
PRECISION_FIELDS = [field.name for field in dataclasses.fields(MixedPrecisionPolicy)]
SWITCHES = [field.name for field in dataclasses.fields(EngineConfig) if field.type == "bool"]


@pytest.mark.parametrize(("number", "name"), list(enumerate(NAMES)))
def test_a_strategy_has_a_number_a_name_and_an_enum_member(number, name):
    assert {strategy_name(value, "x") for value in (number, name, ShardingStrategy(number))} == {name}
    assert ShardingStrategy[name.upper()] == number
    assert list(RESTING)[number] == name


@pytest.mark.parametrize("wrong", ["zero3", "OPTIM", "", NO_STRATEGY, -1, 1.0, True, None, ["optim"]])
def test_anything_else_is_refused_with_the_choices(wrong):
    with pytest.raises(ValueError, match=r"zero_dp_strategy=.* is not a sharding strategy; .*'no_shard' \(0\).*\(3\)"):
        strategy_name(wrong, "zero_dp_strategy")


def test_the_outer_axis_knows_two_strategies():
    assert strategy_name(1, "outer_dp_sharding_strategy", OUTER_STRATEGIES) == "optim"
    with pytest.raises(ValueError, match=r"outer_dp_sharding_strategy=2 is not .*'no_shard' \(0\), 'optim' \(1\)$"):
        EngineConfig(data_parallel_sharding_strategy=3, outer_dp_sharding_strategy=2)


@pytest.mark.parametrize("inner", [0, 1, 2])
def test_an_outer_axis_shards_only_around_a_fully_sharded_inner_one(inner):
    with pytest.raises(ValueError, match="outer_dp_sharding_strategy='optim' needs zero_dp_strategy='optim_grads_par"):
        EngineConfig(data_parallel_sharding_strategy=inner, outer_dp_sharding_strategy="optim")
    assert EngineConfig(data_parallel_sharding_strategy=3, outer_dp_sharding_strategy=1).shards_outer_axis


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_overlap_is_always_on_where_every_backward_reduces_or_gathers(strategy):
    config = EngineConfig(data_parallel_sharding_strategy=strategy)
    assert config.overlap_grad_reduce == plan_for(NAMES[strategy]).reduces_each_microbatch
    assert config.overlap_param_gather == plan_for(NAMES[strategy]).gathers_weights
    asked = EngineConfig(data_parallel_sharding_strategy=strategy, overlap_grad_reduce=True, overlap_param_gather=True)
    assert asked.overlap_grad_reduce and asked.overlap_param_gather


@pytest.mark.parametrize("option", _NOT_YET)
def test_an_option_without_its_feature_is_refused_by_name(option):
    assert getattr(DistributedDataParallelConfig(), option) is False
    with pytest.raises(NotImplementedError, match=f"{option}=True is not .*{_NOT_YET[option]}. Use {option}=False"):
        EngineConfig(**{option: True})


@pytest.mark.parametrize("option", SWITCHES)
@pytest.mark.parametrize("wrong", ["False", None, 2])
def test_a_switch_is_on_or_off(option, wrong):
    with pytest.raises(ValueError, match=f"^{option} is {wrong!r}; expected True or False"):
        EngineConfig(**{option: wrong})


def options_of(function, *arguments, **options) -> EngineConfig:
    """The options with which `function` plans the model that it is to shard."""
    with mock.patch(f"{function.__module__}.plan_model", side_effect=ZeroDivisionError) as plan_model:
        with pytest.raises(ZeroDivisionError):
            function(nn.Linear(1, 1), *arguments, **options)
    return plan_model.call_args.args[1]


#: Some value of every option, other than its default, beside which no other option is needed.
CHANGED = {
    "data_parallel_sharding_strategy": "optim",
    "bucket_size": 5,
    "suggested_communication_unit_size": 5,
    "outer_dp_sharding_strategy": "optim",
    "fsdp_residency_bytes": 5,
    **{f"megatron_fsdp_{name}": torch.bfloat16 for name in PRECISION_FIELDS},
}


@pytest.mark.parametrize("field", dataclasses.fields(DistributedDataParallelConfig), ids=lambda field: field.name)
def test_every_option_arrives_or_is_refused(field):
    index = types.SimpleNamespace(expt_fsdp_group=None)
    given = CHANGED[field.name] if field.name in CHANGED else not field.default
    others = DistributedDataParallelConfig(data_parallel_sharding_strategy=3, nccl_ub=field.name in NEEDED)
    config = dataclasses.replace(others, **{field.name: given})
    if field.name in _NOT_YET:
        with pytest.raises(NotImplementedError, match=field.name):
            MegatronFSDP(nn.Linear(1, 1), index, config)
        return
    assert getattr(options_of(MegatronFSDP, index, config), field.name) == given
    if field.name in inspect.signature(MegatronFSDP).parameters:
        assert getattr(options_of(MegatronFSDP, index, others, **{field.name: given}), field.name) == given


#: Arguments of `fully_shard_model` that have another name in the configuration.
RENAMED = {
    "zero_dp_strategy": "data_parallel_sharding_strategy",
    "use_decoupled_grad": "megatron_fsdp_use_decoupled_grad",
    "cuda_graph_mode": "megatron_fsdp_cuda_graph_mode",
    "maxpool_double_buffer": "megatron_fsdp_max_pool_double_buffer",
    "enable_fine_grained_param_gather": "megatron_fsdp_enable_fine_grained_param_gather",
    "residency_bytes": "fsdp_residency_bytes",
    "copy_engine_gather": "fsdp_copy_engine_gather",
}
OPTIONS = {field.name for field in dataclasses.fields(EngineConfig)}
ARGUMENTS = inspect.signature(fully_shard_model).parameters.values()


@pytest.mark.parametrize(
    "argument", [arg for arg in ARGUMENTS if RENAMED.get(arg.name, arg.name) in OPTIONS], ids=lambda arg: arg.name
)
def test_every_argument_of_fully_shard_model_arrives_or_is_refused(argument):
    field = RENAMED.get(argument.name, argument.name)
    precision = MixedPrecisionPolicy(main_params_dtype=torch.bfloat16)
    changed = {**CHANGED, "mixed_precision_policy": precision, "fsdp_unit_modules": [nn.Linear], "device": "cpu"}
    given = changed[field] if field in changed else not argument.default
    # The least strategy that all but an outer one can be combined with: it implies the fewest options.
    others = {"zero_dp_strategy": 3 if field == "outer_dp_sharding_strategy" else 1, "nccl_ub": field in NEEDED}
    if field in _NOT_YET:
        with pytest.raises(NotImplementedError, match=field):
            fully_shard_model(nn.Linear(1, 1), **{argument.name: given})
        return
    came = options_of(fully_shard_model, **{**others, argument.name: given})
    assert getattr(came, field) == given


def test_no_argument_of_fully_shard_model_is_left_out():
    mesh = set(inspect.signature(FSDPDistributedIndex).parameters) - {"hsdp_outer_dp_shard"}
    assert {RENAMED.get(arg.name, arg.name) for arg in ARGUMENTS} <= OPTIONS | mesh | {"module"}


#: Options without which they mean nothing.
NEEDED = {
    "fsdp_db_use_persist_buf_on_alloc_fail": "fsdp_double_buffer",
    "disable_symmetric_registration": "nccl_ub",
    "fsdp_manual_registration": "nccl_ub",
}


@pytest.mark.parametrize(("option", "needed"), NEEDED.items())
def test_an_option_without_the_one_that_it_needs(option, needed):
    assert getattr(EngineConfig(**{option: True, needed: True}), option)
    with pytest.raises(ValueError, match=f"{option}=True needs {needed}=True"):
        EngineConfig(**{option: True})


@pytest.mark.parametrize("option", ["nccl_ub", "megatron_fsdp_max_pool_double_buffer", "fsdp_double_buffer"])
def test_double_buffers_are_implied(option):
    assert not EngineConfig().fsdp_double_buffer
    assert EngineConfig(**{option: True}).fsdp_double_buffer


def test_reports_on_own_gradients_look_at_reduced_ones_too():
    assert EngineConfig(report_nan_in_param_grad=True).check_for_nan_in_grad


@pytest.mark.parametrize("variable", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_segments_that_grow_cannot_be_registered(variable, monkeypatch):
    monkeypatch.setenv(variable, "max_split_size_mb:64, expandable_segments: True")
    with pytest.raises(ValueError, match=f"nccl_ub=True registers memory .*{variable}=.*take expandable_segments out"):
        EngineConfig(nccl_ub=True)
    assert EngineConfig(fsdp_double_buffer=True).fsdp_double_buffer
    monkeypatch.setenv(variable, "expandable_segments:False")
    assert EngineConfig(nccl_ub=True).nccl_ub


def test_bucket_sizes():
    assert EngineConfig().bucket_size is None and EngineConfig(bucket_size=5).bucket_size == 5
    with pytest.raises(ValueError, match="bucket_size is 0; expected a positive"):
        EngineConfig(bucket_size=0)


@pytest.mark.parametrize("name", PRECISION_FIELDS)
def test_dtypes_may_be_set_in_either_place_but_not_differently(name):
    option = f"megatron_fsdp_{name}"
    assert getattr(EngineConfig(**{option: torch.bfloat16}).mixed_precision_policy, name) is torch.bfloat16
    policy = MixedPrecisionPolicy(**{name: torch.bfloat16})
    for also in ({}, {option: torch.bfloat16}):
        assert EngineConfig(mixed_precision_policy=policy, **also).mixed_precision_policy == policy
    with pytest.raises(ValueError, match=f"mixed_precision_policy.{name}=torch.bfloat16 contradicts .*float16"):
        EngineConfig(mixed_precision_policy=policy, **{option: torch.float16})


def test_no_main_weights_can_be_asked_for_in_either_place():
    policy = MixedPrecisionPolicy(main_params_dtype=None)
    assert EngineConfig(mixed_precision_policy=policy).mixed_precision_policy.main_params_dtype is None
    assert EngineConfig(megatron_fsdp_main_params_dtype=None).mixed_precision_policy.main_params_dtype is None


@pytest.mark.parametrize("name", PRECISION_FIELDS)
@pytest.mark.parametrize("wrong", [torch.int32, torch.float8_e4m3fn, "float32", 32])
def test_a_dtype_must_be_able_to_add(name, wrong):
    with pytest.raises(ValueError, match=f"{name} is .*; expected a torch floating-point dtype"):
        MixedPrecisionPolicy(**{name: wrong})


def test_an_engines_options_are_frozen_and_their_source_untouched():
    source = DistributedDataParallelConfig(data_parallel_sharding_strategy=3)
    before = dataclasses.asdict(source)
    config = EngineConfig.of(source, calculate_per_token_loss=True)
    assert dataclasses.asdict(source) == before and config.calculate_per_token_loss
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.nccl_ub = True
    with pytest.raises(dataclasses.FrozenInstanceError):
        MixedPrecisionPolicy().main_params_dtype = None


def test_the_default_shards_and_overlaps_everything():
    config = EngineConfig.of(default_config())
    assert config.data_parallel_sharding_strategy == config.strategy_label == "optim_grads_params"
    assert config.overlap_grad_reduce and config.overlap_param_gather


def test_labels_name_an_outer_strategy_that_shards():
    config = EngineConfig(data_parallel_sharding_strategy=3, outer_dp_sharding_strategy=1)
    assert config.strategy_label == "optim_grads_params inside optim"
