"""Class names, megatron-core's tags and module hints tell how a parameter is split; dummies stand for the modules."""

import pytest
import torch

from megatron_fsdp.mcore.parallel_layout import modes_of, partition_dim, tensor_parallel_mode
from megatron_fsdp.state.param_tags import is_expert_param
from megatron_fsdp.state.tensor_parallel import split_dim


def module_named(name: str, **attributes: object) -> torch.nn.Module:
    module = type(name, (torch.nn.Module,), {})()
    for key, value in attributes.items():
        setattr(module, key, value)
    return module


def tagged(**tags: object) -> torch.nn.Parameter:
    param = torch.nn.Parameter(torch.zeros(2, 3))
    for key, value in tags.items():
        setattr(param, key, value)
    return param


@pytest.mark.parametrize(
    ("class_name", "leaf", "mode", "dim"),
    [
        ("ColumnParallelLinear", "weight", "column", 0),
        ("ColumnParallelLinear", "bias", "column", 0),
        ("VocabParallelEmbedding", "weight", "column", 0),
        ("RowParallelLinear", "weight", "row", 1),
        ("RowParallelLinear", "bias", "replicated", None),
        ("TERowParallelGroupedLinear", "bias3", "replicated", None),
        ("TELayerNormColumnParallelLinear", "weight", "column", 0),
        ("TELayerNormColumnParallelLinear", "layer_norm_weight", "replicated", None),
        ("TopKRouter", "weight", "replicated", None),
        ("MyOwnRMSNormalization", "weight", "replicated", None),
        ("Linear", "weight", None, None),
    ],
)
def test_the_class_name_tells(class_name: str, leaf: str, mode: str | None, dim: int | None) -> None:
    param = tagged()
    assert tensor_parallel_mode(module_named(class_name), leaf, param) == mode
    assert partition_dim(param, mode) == dim


@pytest.mark.parametrize(("dim", "mode"), [(0, "column"), (1, "row"), (2, None)])
def test_megatron_cores_tags_tell_for_unknown_classes(dim: int, mode: str | None) -> None:
    param = tagged(tensor_model_parallel=True, partition_dim=dim)
    assert tensor_parallel_mode(module_named("Custom"), "weight", param) == mode


@pytest.mark.parametrize("tags", [{}, {"partition_dim": -1}], ids=["no dim", "its default"])
def test_tags_without_a_dim_mean_the_first_as_on_what_mamba_layers_have_of_each_head(tags: dict[str, int]) -> None:
    param = tagged(tensor_model_parallel=True, **tags)
    assert tensor_parallel_mode(module_named("ExtendedRMSNorm"), "weight", param) == "column"
    assert partition_dim(param, "column") == partition_dim(param, None) == split_dim(param) == 0


def test_tags_count_only_on_split_parameters() -> None:
    assert (
        tensor_parallel_mode(module_named("Custom"), "weight", tagged(tensor_model_parallel=False, partition_dim=0))
        is None
    )
    assert partition_dim(tagged(tensor_model_parallel=True, partition_dim=2), None) == 2
    assert partition_dim(tagged(partition_dim=0), None) is None


def test_the_modules_own_declaration_tells_last() -> None:
    assert tensor_parallel_mode(module_named("TELinear", parallel_mode="row"), "weight", tagged()) == "row"
    assert tensor_parallel_mode(module_named("TELinear", parallel_mode=None), "weight", tagged()) is None


def test_experts_are_the_parameters_without_a_dense_all_reduce() -> None:
    assert is_expert_param(tagged(allreduce=False))
    assert not is_expert_param(tagged(allreduce=True))
    assert not is_expert_param(tagged())


def test_a_tied_parameter_is_listed_once() -> None:
    first, second = module_named("ColumnParallelLinear"), module_named("ColumnParallelLinear")
    first.weight = second.weight = tagged()
    assert [mode for _, mode in modes_of(torch.nn.Sequential(first, second))] == ["column"]
