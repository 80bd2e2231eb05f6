"""The public surface, frozen: names, order and defaults of everything that users spell."""

import dataclasses
import importlib
import inspect
import re
from unittest import mock

import pytest
import torch

import megatron_fsdp
from megatron_fsdp import (
    DistributedDataParallelConfig,
    FSDPDistributedIndex,
    MegatronFSDP,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fsdp_no_shard,
    fsdp_single_owner,
    fully_shard,
    fully_shard_model,
    fully_shard_optimizer,
    package_info,
)
from megatron_fsdp.param_and_grad_buffer import ParamAndGradBuffer

REQUIRED = inspect.Parameter.empty

MESH_ARGUMENTS = {
    "device_mesh": None,
    "dp_shard_dim": None,
    "dp_outer_dim": None,
    "tp_dim": None,
    "hybrid_fsdp_group": None,
    "hybrid_fsdp_expt_group": None,
    "expt_device_mesh": None,
    "fsdp_group_ag": None,
    "expt_fsdp_group_ag": None,
}
MODEL_ARGUMENTS = {
    **MESH_ARGUMENTS,
    "fsdp_unit_modules": None,
    "zero_dp_strategy": 3,
    "outer_dp_sharding_strategy": 0,
    "device": None,
    "init_model_with_meta_device": False,
    "mixed_precision_policy": MixedPrecisionPolicy(),
    "overlap_grad_reduce": True,
    "overlap_param_gather": True,
    "sync_model_each_microbatch": True,
    "preproc_state_dict_for_dcp_ckpt": True,
    "report_nan_in_param_grad": False,
    "average_in_collective": False,
    "disable_bucketing": False,
    "calculate_per_token_loss": False,
    "keep_fp8_transpose_cache": False,
    "nccl_ub": False,
    "fsdp_double_buffer": False,
    "fsdp_db_use_persist_buf_on_alloc_fail": False,
    "disable_symmetric_registration": False,
    "enable_fine_grained_param_gather": False,
    "use_decoupled_grad": False,
    "cuda_graph_mode": False,
    "maxpool_double_buffer": False,
}
CONSTRUCTOR_ARGUMENTS = {
    "module": REQUIRED,
    "dist_index": REQUIRED,
    "ddp_config": None,
    "mixed_precision_policy": MixedPrecisionPolicy(),
    "fsdp_unit_modules": None,
    "disable_bucketing": False,
    "device": None,
    "calculate_per_token_loss": False,
    "init_model_with_meta_device": False,
    "sync_model_each_microbatch": False,
    "keep_fp8_transpose_cache": False,
    "nccl_ub": False,
    "fsdp_double_buffer": False,
    "fsdp_db_use_persist_buf_on_alloc_fail": False,
    "disable_symmetric_registration": False,
    "enable_fine_grained_param_gather_hook": False,
    "enable_fine_grained_param_gather_backward_hook": False,
    "fine_grained_recurse_module_types": None,
    "report_nan_in_param_grad": False,
}
INDEX_ARGUMENTS = {
    "device_mesh": REQUIRED,
    "dp_shard_dim": None,
    "dp_outer_dim": None,
    "tp_dim": None,
    "hybrid_fsdp_group": None,
    "hybrid_fsdp_expt_group": None,
    "hsdp_outer_dp_shard": False,
    "expt_device_mesh": None,
    "fsdp_group_ag": None,
    "expt_fsdp_group_ag": None,
}
CONFIG_FIELDS = {
    "overlap_grad_reduce": False,
    "overlap_param_gather": False,
    "check_for_nan_in_grad": False,
    "bucket_size": None,
    "average_in_collective": False,
    "fp8_param_gather": False,
    "data_parallel_sharding_strategy": "no_shard",
    "gradient_reduce_div_fusion": True,
    "suggested_communication_unit_size": None,
    "keep_fp8_transpose_cache": False,
    "nccl_ub": False,
    "fsdp_double_buffer": False,
    "fsdp_db_use_persist_buf_on_alloc_fail": False,
    "fsdp_all_gather_in_start_param_sync": True,
    "outer_dp_sharding_strategy": "no_shard",
    "disable_symmetric_registration": False,
    "fsdp_manual_registration": False,
    "megatron_fsdp_main_params_dtype": torch.float32,
    "megatron_fsdp_main_grads_dtype": None,
    "megatron_fsdp_grad_comm_dtype": None,
    "megatron_fsdp_use_decoupled_grad": False,
    "megatron_fsdp_cuda_graph_mode": False,
    "megatron_fsdp_enable_fine_grained_param_gather": False,
    "megatron_fsdp_max_pool_double_buffer": False,
    "fsdp_residency_bytes": 0,
    "fsdp_copy_engine_gather": False,
}
METHODS = {
    "forward": "(self, *args, **kwargs)",
    "set_model_auto_sync": "(self, sync_model=True)",
    "sync": "(self)",
    "no_sync": "(self)",
    "start_param_sync": "(self, *_, force_sync=False, force_dispatch=False)",
    "start_grad_sync": "(self, *_)",
    "synchronize_gradient_reduce": "(self)",
    "synchronize_param_gather": "(self)",
    "finish_grad_sync": "(self, force_all_reduce=False)",
    "attach_grad_to_optimizer_state": "(self)",
    "zero_grad_buffer": "(self)",
    "install_optimized_model_weights": "(self)",
    "scale_gradients": "(self, scaling_factor)",
    "broadcast_params": "(self)",
    "get_distributed_index": "(self)",
    "clip_grad_norm_": "(self, max_norm, norm_type=2.0)",
    "full_params": "(self, writeback=True)",
    "full_state_dict": "(self, dtype=None)",
}
INDEX_METHODS = {
    "get_submesh": "(self, mesh_dim_names, is_expert_parallel=False)",
    "get_dp_group": "(self, is_expert_parallel=False)",
    "get_fsdp_group": "(self, is_expert_parallel=False, independent_all_gather=False)",
    "get_outer_fsdp_group": "(self, is_expert_parallel=False)",
    "get_root_mesh": "(self, is_expert_parallel=False)",
    "get_logical_hybrid_fsdp_rank": "(self, is_expert_parallel=False)",
}
BUFFER_METHODS = {
    "manual_buffer_registration": "(self)",
    "copy_main_weights_to_model_weights": "(self)",
    "update_main_grads": "(self)",
    "zero_grad": "(self, params=None)",
    "scale_gradients": "(self, factor)",
}
UNEVEN_DTENSOR = {
    "gather_and_compute_chunk_metadata": "(dtensor)",
    "update_uneven_dtensor_chunk_metadata": "(dtensor)",
    "validate_uneven_dtensor": "(dtensor)",
    "get_unflattened_state_dict": "(state_dict, key_chain=None)",
    "preprocess_state_dict_for_uneven_dtensor": "(state_dict)",
    "uneven_dtensor_to_full_tensor": "(dtensor)",
    "redistribute_uneven_dtensor_to_replicated": "(dtensor)",
    "gather_uneven_dtensor_to_full_tensor": "(dtensor)",
    "split_dtensor": "(dtensor, split_size_or_sections, dim=0, update_uneven_dtensor_chunk_meta=False)",
}
EXPORTS = {
    "DistributedDataParallelConfig",
    "FSDPDistributedIndex",
    "MegatronFSDP",
    "MixedPrecisionPolicy",
    "ShardingStrategy",
    "fsdp_no_shard",
    "fsdp_single_owner",
    "fully_shard",
    "fully_shard_model",
    "fully_shard_optimizer",
    "__version__",
    "__shortversion__",
    "__package_name__",
    "__contact_names__",
    "__contact_emails__",
    "__homepage__",
    "__repository_url__",
    "__download_url__",
    "__description__",
    "__license__",
    "__keywords__",
}


#: Arguments that this package adds to fully_shard and fully_shard_model, by keyword only.
ADDED = {"root_params": (), "residency_bytes": 0, "copy_engine_gather": False}
ADDED_TO_THE_CLASS = {"root_params": ()}


def arguments(function, added=()):
    """Names and defaults in order; all of them can be given by position and by name, but for those `added`."""
    params = dict(inspect.signature(function).parameters)
    for name in added:
        param = params.pop(name)
        assert (param.kind, param.default) == (inspect.Parameter.KEYWORD_ONLY, added[name])
    assert {p.kind for p in params.values()} == {inspect.Parameter.POSITIONAL_OR_KEYWORD}, params
    return [(name, param.default) for name, param in params.items()]


def written(function):
    """The signature without annotations."""
    signature = inspect.signature(function)
    bare = [param.replace(annotation=REQUIRED) for param in signature.parameters.values()]
    return str(signature.replace(parameters=bare, return_annotation=REQUIRED))


def test_fully_shard_model():
    assert arguments(fully_shard_model, ADDED) == [("module", REQUIRED), *MODEL_ARGUMENTS.items()]


def test_fully_shard_has_every_argument_of_fully_shard_model():
    assert arguments(fully_shard, ADDED) == [("module", REQUIRED), ("optimizer", REQUIRED), *MODEL_ARGUMENTS.items()]
    annotations = dict(fully_shard.__annotations__)
    del annotations["optimizer"], annotations["return"]
    assert annotations == {name: kind for name, kind in fully_shard_model.__annotations__.items() if name != "return"}


def test_fully_shard_hands_every_argument_on():
    module = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    given = {name: object() for name in (*MODEL_ARGUMENTS, *ADDED)} | {"zero_dp_strategy": 2}
    optimizer.use_decoupled_grad = True
    with mock.patch("megatron_fsdp.fully_shard.fully_shard_model", side_effect=ZeroDivisionError) as model:
        with pytest.raises(ZeroDivisionError):
            fully_shard(module, optimizer, **given)
    assert (model.call_args.args, model.call_args.kwargs) == ((module,), given)


def test_a_misspelled_argument_of_fully_shard_is_told_by_name():
    module = torch.nn.Linear(2, 2)
    with pytest.raises(TypeError, match=r"fully_shard\(\) got an unexpected keyword argument 'fsdp_units'"):
        fully_shard(module, torch.optim.SGD(module.parameters(), lr=0.1), fsdp_units=[torch.nn.Linear])


def test_fully_shard_optimizer():
    assert arguments(fully_shard_optimizer) == [("optimizer", REQUIRED), ("preproc_state_dict_for_dcp_ckpt", True)]


def test_the_constructor_has_one_addition_that_cannot_be_hit_by_position():
    params = inspect.signature(MegatronFSDP).parameters
    assert [(name, p.default) for name, p in params.items()] == [
        *CONSTRUCTOR_ARGUMENTS.items(),
        *ADDED_TO_THE_CLASS.items(),
    ]
    kinds = {name: param.kind for name, param in params.items()}
    assert {name for name, kind in kinds.items() if kind is inspect.Parameter.KEYWORD_ONLY} == set(ADDED_TO_THE_CLASS)


def test_the_distributed_index():
    assert arguments(FSDPDistributedIndex) == list(INDEX_ARGUMENTS.items())


@pytest.mark.parametrize(
    ("owner", "signatures"),
    [(MegatronFSDP, METHODS), (FSDPDistributedIndex, INDEX_METHODS), (ParamAndGradBuffer, BUFFER_METHODS)],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_methods(owner, signatures):
    assert {name: written(getattr(owner, name)) for name in signatures} == signatures


def test_properties_of_the_model():
    assert isinstance(MegatronFSDP.model_auto_sync, property) and MegatronFSDP.model_auto_sync.fset is None
    assert isinstance(MegatronFSDP.microbatch_count, property)
    assert MegatronFSDP.is_last_microbatch.fset is not None  # pipelines set it


def test_config_fields():
    fields = dataclasses.fields(DistributedDataParallelConfig)
    assert [(field.name, field.default) for field in fields] == list(CONFIG_FIELDS.items())


def test_the_mixed_precision_policy():
    fields = dataclasses.fields(MixedPrecisionPolicy)
    expected = [("main_params_dtype", torch.float32), ("main_grads_dtype", None), ("grad_comm_dtype", None)]
    assert [(field.name, field.default) for field in fields] == expected
    assert hash(MixedPrecisionPolicy()) == hash(MixedPrecisionPolicy())


def test_sharding_strategies():
    expected = {"NO_SHARD": 0, "OPTIM": 1, "OPTIM_GRADS": 2, "OPTIM_GRADS_PARAMS": 3}
    assert {member.name: member.value for member in ShardingStrategy} == expected
    assert importlib.import_module("megatron_fsdp.fully_shard").ShardingStrategy is ShardingStrategy


def test_fsdp_no_shard():
    assert written(fsdp_no_shard) == written(fsdp_single_owner) == "(module_or_param)"


def test_exports():
    assert set(megatron_fsdp.__all__) == EXPORTS
    assert all(hasattr(megatron_fsdp, name) for name in EXPORTS)
    namespace = {}
    exec("from megatron_fsdp import *", namespace)  # what a star import gives is the list
    assert EXPORTS <= set(namespace)


def test_the_package_knows_itself():
    assert megatron_fsdp.__package_name__ == package_info.__package_name__ == "megatron_fsdp"
    assert re.fullmatch(r"\d+\.\d+\.\d+", megatron_fsdp.__shortversion__)
    assert megatron_fsdp.__version__.startswith(megatron_fsdp.__shortversion__)


def test_helpers_for_uneven_dtensors():
    module = importlib.import_module("megatron_fsdp.uneven_dtensor")
    assert {name: written(getattr(module, name)) for name in UNEVEN_DTENSOR} == UNEVEN_DTENSOR
    search = inspect.signature(module.filter_unflattened_state_dict).parameters
    assert list(search) == ["state_dict", "key_chain", "visit_condition"]
    assert set(UNEVEN_DTENSOR) | {"filter_unflattened_state_dict"} <= set(module.__all__)


def test_everything_public_is_documented():
    public = [fully_shard, fully_shard_model, fully_shard_optimizer, fsdp_no_shard, MegatronFSDP, FSDPDistributedIndex]
    public.append(fsdp_single_owner)
    public += [getattr(MegatronFSDP, name) for name in METHODS]
    public += [getattr(FSDPDistributedIndex, name) for name in INDEX_METHODS]
    assert [item for item in public if not item.__doc__] == []
    assert [name for name in MODEL_ARGUMENTS if name not in fully_shard_model.__doc__] == []
