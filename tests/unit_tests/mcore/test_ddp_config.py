"""Every field of the two configuration classes is read, refused or said to be without effect."""

import copy
import dataclasses
import logging

import pytest
import torch

from megatron_fsdp import config as engine_config

ddp_config = pytest.importorskip("megatron_fsdp.mcore.ddp_config")
from megatron.core.distributed import DistributedDataParallelConfig as McoreConfig  # noqa: E402

OurConfig = ddp_config.DistributedDataParallelConfig
resolve = ddp_config.resolve_ddp_config

#: Fields that neither the installed megatron-core nor the engine has.
NEITHERS = {
    "num_buckets",
    "param_name_patterns_for_fp32_local_accumulation",
    "fp4_param_gather",
    "megatron_fsdp_version",
}
ENGINE_FIELDS = {field.name for field in dataclasses.fields(engine_config.DistributedDataParallelConfig)}


@pytest.fixture(autouse=True)
def forget_warnings() -> None:
    ddp_config._warn_once.cache_clear()


def test_ours_is_a_megatron_core_config_with_the_engines_fields() -> None:
    assert issubclass(OurConfig, McoreConfig) and issubclass(OurConfig, engine_config.DistributedDataParallelConfig)
    theirs = {field.name for field in dataclasses.fields(McoreConfig)}
    added = {field.name for field in dataclasses.fields(OurConfig)} - theirs
    assert added - ENGINE_FIELDS == NEITHERS
    for field in dataclasses.fields(McoreConfig):
        assert getattr(OurConfig(), field.name) == getattr(McoreConfig(), field.name)


#: Fields that neither the engine reads nor a table refuses -> their reader.
READ_ELSEWHERE: dict[str, str] = {
    "align_param_gather": "pipeline schedules; with one pipeline stage there is nothing to align",
    "use_distributed_optimizer": "implied: every strategy but 0 shards the optimizer",
    "use_megatron_fsdp": "implied by building FullyShardedDataParallel",
    "use_custom_fsdp": "the former name of use_megatron_fsdp",
    "num_buckets": "turned into bucket_size",
    "num_distributed_optimizer_instances": "turned into the outer axis by build_dist_index",
}


def test_every_field_has_exactly_one_reader() -> None:
    for field in dataclasses.fields(OurConfig):
        homes = [
            field.name in table
            for table in (ENGINE_FIELDS, ddp_config._REFUSED, ddp_config._WITHOUT_EFFECT, READ_ELSEWHERE)
        ]
        assert sum(homes) == 1, field.name
    for table in (ddp_config._REFUSED, ddp_config._WITHOUT_EFFECT):
        for name, (default, _) in table.items():
            assert getattr(OurConfig(), name) == default, f"{name}: the value that means off is its default"


def test_megatron_cores_own_class_resolves_with_the_missing_fields_at_their_defaults() -> None:
    resolved = resolve(McoreConfig(data_parallel_sharding_strategy="optim_grads", average_in_collective=True))
    expected = engine_config.DistributedDataParallelConfig(
        data_parallel_sharding_strategy="optim_grads", average_in_collective=True
    )
    assert {name: getattr(resolved, name) for name in ENGINE_FIELDS} == dataclasses.asdict(expected)
    assert resolved.use_megatron_fsdp


@pytest.mark.parametrize("name", sorted(ENGINE_FIELDS))
def test_every_engine_field_arrives(name: str) -> None:
    changed = {
        bool: lambda value: not value,
        int: lambda value: value + 7,
        str: lambda _: "optim_grads_params",
        type(None): lambda _: 7,
        torch.dtype: lambda _: None,
    }
    default = getattr(OurConfig(), name)
    value = torch.bfloat16 if name.endswith("_dtype") else changed[type(default)](default)
    assert getattr(resolve(OurConfig(**{name: value})), name) == value


@pytest.mark.parametrize(
    ("given", "came"),
    [
        ("bf16", torch.bfloat16),
        ("torch.float16", torch.float16),
        (torch.float32, torch.float32),
        ("auto", None),
        (None, None),
    ],
)
def test_dtypes_are_torch_dtypes_or_names(given: object, came: torch.dtype | None) -> None:
    config = resolve(OurConfig(megatron_fsdp_main_grads_dtype=given, megatron_fsdp_grad_comm_dtype=given))
    assert (config.megatron_fsdp_main_grads_dtype, config.megatron_fsdp_grad_comm_dtype) == (came, came)
    assert config.megatron_fsdp_main_params_dtype is torch.float32


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"megatron_fsdp_main_params_dtype": "fp23"}, "megatron_fsdp_main_params_dtype is 'fp23'.*bf16"),
        ({"megatron_fsdp_grad_comm_dtype": 16}, "megatron_fsdp_grad_comm_dtype is 16"),
        ({"megatron_fsdp_version": 3}, "megatron_fsdp_version is 3; expected 1 or 2"),
        ({"num_buckets": 0}, "num_buckets is 0"),
        ({"num_buckets": 2, "bucket_size": 10}, "set one of them"),
    ],
)
def test_meaningless_values_are_named(fields: dict, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        OurConfig(**fields)


@pytest.mark.parametrize(
    "fields",
    [
        {"fp4_param_gather": True},
        {"megatron_fsdp_version": 2},
        {"delay_wgrad_compute": True},
        {"preserve_fp32_weights": False},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_unsupported_options_are_refused(fields: dict) -> None:
    (name,) = fields
    with pytest.raises(NotImplementedError, match=f"{name}=.*Leave it at"):
        resolve(OurConfig(**fields))


@pytest.mark.parametrize("name", sorted(ddp_config._WITHOUT_EFFECT))
def test_options_without_effect_are_said_once(name: str, caplog: pytest.LogCaptureFixture) -> None:
    fields = {name: ("x",) if name.startswith("param_name") else True}
    if name == "reuse_grad_buf_for_mxfp8_param_ag":
        fields["fp8_param_gather"] = True
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            resolved = resolve(OurConfig(**fields))
    assert [record.message.split("=")[0] for record in caplog.records] == [name]
    assert not getattr(resolved, name)


def test_buckets_by_count_become_buckets_by_size() -> None:
    config = OurConfig(num_buckets=3)
    assert resolve(config, unbucketed_numel=10).bucket_size == 4
    with pytest.raises(ValueError, match="num_buckets=3 needs"):
        resolve(config)


def test_the_users_config_is_left_alone() -> None:
    for config in (
        OurConfig(num_buckets=2, grad_reduce_in_fp32=True, nccl_ub=True),
        McoreConfig(check_for_large_grads=True),
    ):
        before = copy.deepcopy(config)
        resolve(config, unbucketed_numel=10)
        assert config == before


def test_the_max_pool_is_a_double_buffer() -> None:
    assert OurConfig(megatron_fsdp_max_pool_double_buffer=True).fsdp_double_buffer


def test_a_config_class_of_someone_else_is_refused() -> None:
    @dataclasses.dataclass
    class TheirConfig(McoreConfig):
        something: int = 1

    with pytest.raises(ValueError, match=r"\['something'\]"):
        resolve(TheirConfig())
