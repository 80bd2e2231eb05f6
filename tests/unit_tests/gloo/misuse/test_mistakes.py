"""Every mistake of a user: raised on every rank, before anything is communicated, with what to do."""

import copy
import functools

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron_fsdp import FSDPDistributedIndex, MegatronFSDP, fully_shard, fully_shard_model, fully_shard_optimizer
from megatron_fsdp.config import DistributedDataParallelConfig
from tests.unit_tests.harness.communication import no_collectives
from tests.unit_tests.harness.mistakes import Mistake, assert_each_raises
from tests.unit_tests.harness.models import MLPBlock, TinyMLP
from tests.unit_tests.harness.sharded import flat_mesh, hybrid_mesh
from tests.unit_tests.harness.strategies import NO_STRATEGY


class Expert(nn.Linear):
    """Its parameters live on the expert mesh."""

    def __init__(self) -> None:
        super().__init__(3, 3)
        for param in self.parameters():
            param.allreduce = False


class Integers(nn.Module):
    """Has a parameter that cannot be trained."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.zeros(3, dtype=torch.int32), requires_grad=False)


class Holder(nn.Module):
    """Something at a name."""

    def __init__(self, inner: nn.Module | nn.Parameter) -> None:
        super().__init__()
        self.inner = inner


def bag(**options: bool) -> nn.Module:
    return Holder(nn.EmbeddingBag(4, 4, **options))


def frozen_bag() -> nn.Module:
    model = bag(sparse=True)
    model.inner.weight.requires_grad_(False)
    return model


def mesh_arguments(kind: str) -> dict:
    """The default mesh, a given one, or one with an outer axis; made before anything is forbidden."""
    if kind == "default":
        return {}
    if kind == "flat":
        return {"device_mesh": flat_mesh(), "dp_shard_dim": "dp"}
    return {"device_mesh": hybrid_mesh(), "dp_shard_dim": "dp"}


MODULES = {
    "mlp": TinyMLP,
    "expert": Expert,
    "integers": Integers,
    "nothing": nn.ReLU,
    "function": lambda: torch.relu,
    "sparse embedding": lambda: nn.Embedding(4, 4, sparse=True),
    "sparse bag": lambda: bag(sparse=True),
    "expanded": lambda: Holder(nn.Parameter(torch.ones(3).expand(4, 3))),
    "expanded column": lambda: Holder(nn.Parameter(torch.ones(50, 100)[:, :1].expand(50, 3))),
    "overlapping": lambda: Holder(nn.Parameter(torch.ones(5).as_strided((3, 3), (1, 1)))),
    "lazy": lambda: nn.Sequential(nn.Linear(4, 4), nn.LazyLinear(4)),
    "lazy buffer": lambda: nn.Sequential(nn.Linear(4, 4), nn.LazyBatchNorm1d(affine=False)),
}


def call_model(mesh: str, options: dict, module: str = "mlp") -> None:
    given = mesh_arguments(mesh)
    if options.get("hybrid_fsdp_group") == "world":
        options = {**options, "hybrid_fsdp_group": dist.group.WORLD}
    with no_collectives():
        fully_shard_model(MODULES[module](), **{**given, **options})


def path_to(name: str) -> str:
    return f"tests.unit_tests.harness.models.{name}"


OPTIONS = [
    ({"zero_dp_strategy": "zero3"}, ValueError, r"zero_dp_strategy='zero3' is not a sharding strategy; expected"),
    ({"zero_dp_strategy": NO_STRATEGY}, ValueError, rf"zero_dp_strategy={NO_STRATEGY} is not"),
    ({"outer_dp_sharding_strategy": 2}, ValueError, r"outer_dp_sharding_strategy=2 is not .*'optim' \(1\)"),
    (
        {"outer_dp_sharding_strategy": 1, "zero_dp_strategy": 2},
        ValueError,
        "outer_dp_sharding_strategy='optim' needs zero_dp_strategy='optim_grads_params'",
    ),
    ({"outer_dp_sharding_strategy": 1}, ValueError, "shards an outer axis; pass device_mesh, dp_outer_dim"),
    ({"fsdp_unit_modules": ["no.such.Thing"]}, ImportError, "'no.such.Thing', which cannot be imported"),
    ({"fsdp_unit_modules": [path_to("Missing")]}, ImportError, "Missing', which cannot be imported"),
    ({"fsdp_unit_modules": ["MLPBlock"]}, ImportError, "give the full dotted path"),
    ({"fsdp_unit_modules": [path_to("square_loss")]}, TypeError, "expected torch.nn.Module classes"),
    ({"fsdp_unit_modules": [int]}, TypeError, "expected torch.nn.Module classes"),
    ({"fsdp_unit_modules": MLPBlock}, TypeError, "expected a list"),
    ({"fsdp_unit_modules": path_to("MLPBlock")}, TypeError, "expected a list"),
    (
        {"fsdp_unit_modules": [nn.Conv2d]},
        ValueError,
        "no module of TinyMLP is a Conv2d; classes present are: .*MLPBlo",
    ),
    ({"mixed_precision_policy": torch.float32}, TypeError, "expected a MixedPrecisionPolicy"),
    ({"residency_bytes": "1GB"}, ValueError, r"^residency_bytes \(fsdp_residency_bytes\) is '1GB'; expected bytes"),
    ({"residency_bytes": 1, "fsdp_double_buffer": True}, ValueError, "^residency_bytes .* is 1, .*leave out one of"),
    ({"fsdp_double_buffer": "False"}, ValueError, "^fsdp_double_buffer is 'False'; expected True or False"),
    ({"maxpool_double_buffer": 2}, ValueError, "^megatron_fsdp_max_pool_double_buffer is 2; expected True or False"),
    ({"sync_model_each_microbatch": "False"}, ValueError, "^sync_model_each_microbatch is 'False'; expected True or"),
    ({"preproc_state_dict_for_dcp_ckpt": "no"}, ValueError, "^preproc_state_dict_for_dcp_ckpt is 'no'; expected True"),
    ({"device": "meta"}, ValueError, "^device is 'meta'; expected one to compute on"),
    ({"device": "nonsense"}, ValueError, "^device is 'nonsense', which torch does not know; expected cpu or cuda"),
    ({"average_in_collective": True, "calculate_per_token_loss": True}, ValueError, "exclude each other: a per-token"),
    ({"average_in_collective": None}, ValueError, "^average_in_collective is None; expected True or False"),
    ({"nccl_ub": True}, ValueError, "nccl_ub=True registers memory with NCCL, but the model computes on cpu"),
    ({"copy_engine_gather": True}, ValueError, r"^copy_engine_gather=True \(fsdp_copy.* on cpu; leave it"),
    ({"copy_engine_gather": True, "zero_dp_strategy": 0}, ValueError, "about gathers, but zero_dp_strategy='no_shard'"),
    ({"copy_engine_gather": True, "nccl_ub": True}, ValueError, "gathers without NCCL, with which nccl_ub=True"),
    ({"fsdp_db_use_persist_buf_on_alloc_fail": True}, ValueError, "on_alloc_fail=True needs fsdp_double_buffer=True"),
    ({"disable_symmetric_registration": True}, ValueError, "disable_symmetric_registration=True needs nccl_ub=True"),
    ({"keep_fp8_transpose_cache": True}, NotImplementedError, "keep_fp8_transpose_cache=True is not"),
    ({"cuda_graph_mode": True}, NotImplementedError, "cuda_graph_mode=True is not"),
    ({"root_params": ["head.weight"]}, ValueError, r"root_params\[0\] is 'head.weight', not a parameter of this TinyM"),
    ({"root_params": [torch.ones(2)]}, ValueError, r"root_params\[0\] is a tensor of shape \(2,\), not a parameter"),
    ({"init_model_with_meta_device": True, "zero_dp_strategy": 0}, ValueError, "choose a strategy that shards"),
]
MODULE_MISTAKES = [
    ("expert", ValueError, r"weight is an expert parameter \(allreduce=False\); pass expt_device_mesh"),
    ("integers", ValueError, "table has dtype torch.int32; parameters must be floating-point"),
    ("nothing", ValueError, "ReLU has no parameters; there is nothing to shard"),
    ("sparse embedding", NotImplementedError, "the model is an embedding with sparse=True"),
    ("sparse bag", NotImplementedError, "inner is an embedding with sparse=True.*Leave sparse out"),
    ("expanded", ValueError, r"inner has shape \(4, 3\) and strides \(0, 1\), so that elements share memory"),
    ("expanded column", ValueError, r"inner has shape \(50, 3\) and strides \(100, 0\)"),
    ("overlapping", ValueError, r"inner has shape \(3, 3\) and strides \(1, 1\)"),
    ("lazy", ValueError, "1.weight is not initialised: its lazy module makes it in the first forward"),
    ("lazy buffer", ValueError, "1.running_mean is not initialised"),
    ("function", TypeError, "expected a torch.nn.Module to shard, got builtin_function"),
]
MESHES = [
    (
        "flat",
        {"dp_shard_dim": "fsdp"},
        r"dp_shard_dim='fsdp' is not a dimension of device_mesh, which has \('dp',\)",
    ),
    ("flat", {"dp_shard_dim": None}, "dp_shard_dim is None; name the dimension"),
    ("flat", {"tp_dim": "tp"}, "tp_dim='tp' is not a dimension"),
    ("hybrid", {"dp_outer_dim": "outer"}, "dp_outer_dim is given without hybrid_fsdp_group"),
    ("hybrid", {"hybrid_fsdp_group": "world"}, "hybrid_fsdp_group is given without dp_outer_dim"),
    ("default", {"dp_outer_dim": "outer"}, "dp_outer_dim is given without device_mesh"),
    ("default", {"hybrid_fsdp_group": "world"}, "hybrid_fsdp_group is given without device_mesh"),
    ("default", {"dp_shard_dim": "x", "tp_dim": "x"}, "dp_shard_dim and tp_dim are both 'x'"),
]


def test_wrong_options(ranks2):
    """Calls for which the engine would have to make the mesh."""
    assert_each_raises(ranks2, [Mistake(call_model, ("default", options), *error) for options, *error in OPTIONS])


def test_wrong_modules(ranks2):
    calls = [(mesh, *case) for mesh in ("default", "flat") for case in MODULE_MISTAKES]
    assert_each_raises(ranks2, [Mistake(call_model, (mesh, {}, module), *error) for mesh, module, *error in calls])


def strides_that_are_fine() -> tuple:
    """A frozen sparse embedding, and parameters whose elements lie apart in whatever order."""
    columns, every_second = torch.arange(12.0).view(3, 4).t(), torch.arange(12.0)[::2]
    models = [Holder(nn.Parameter(values)) for values in (columns, every_second)]
    came = [fully_shard_model(model, **mesh_arguments("flat")) for model in [*models, frozen_bag()]]
    return [model.module.inner.full_tensor().tolist() for model in came[:2]], [columns.tolist(), every_second.tolist()]


def test_what_looks_like_a_wrong_module_and_is_none(ranks2):
    for came, expected in ranks2.run(strides_that_are_fine):
        assert came == expected


def test_wrong_meshes(ranks4):
    calls = [((mesh, options), message) for mesh, options, message in MESHES]
    assert_each_raises(ranks4, [Mistake(call_model, call, ValueError, message) for call, message in calls])


def call_without_process_group() -> None:
    fully_shard_model(TinyMLP())


def test_a_missing_process_group_is_a_wrong_moment():
    assert not dist.is_initialized()
    with pytest.raises(RuntimeError, match=r"torch.distributed is not initialised; launch with torchrun"):
        call_without_process_group()


# -- optimizers -------------------------------------------------------------------------------------------------------


def sharded() -> MegatronFSDP:
    return fully_shard_model(TinyMLP(), **mesh_arguments("flat"))


def optimizer_of_another_model() -> None:
    model, other = TinyMLP(), TinyMLP()
    mixed = torch.optim.SGD([*model.parameters(), *other.head.parameters()])
    given = mesh_arguments("flat")
    with no_collectives():
        fully_shard(model, mixed, **given)


def optimizer_that_is_none() -> None:
    with no_collectives():
        fully_shard(TinyMLP(), "adam")


def optimizer_without_parameters() -> None:
    optimizer = torch.optim.SGD(TinyMLP().parameters())
    optimizer.param_groups.clear()
    with no_collectives():
        fully_shard_optimizer(optimizer)


def optimizer_of_a_plain_model() -> None:
    with no_collectives():
        fully_shard_optimizer(torch.optim.SGD(TinyMLP().parameters()))


def optimizer_of_the_original_parameters() -> None:
    module = TinyMLP()
    optimizer = torch.optim.SGD(module.parameters())
    fully_shard_model(module, **mesh_arguments("flat"))
    with no_collectives():
        fully_shard_optimizer(optimizer)


def optimizer_of_two_models() -> None:
    first, second = sharded(), sharded()
    with no_collectives():
        fully_shard_optimizer(torch.optim.SGD([*first.parameters(), *second.parameters()]))


def optimizer_made_after_sharding_given_to_fully_shard() -> None:
    model = sharded()
    with no_collectives():
        fully_shard(model, torch.optim.SGD(model.parameters()))


class Decoupled(torch.optim.SGD):
    """Says that it reads `decoupled_grad`."""

    use_decoupled_grad = True


def optimizer_of_other_grads(is_sharded: bool, is_decoupled: bool) -> None:
    """An optimizer that would find no gradient, so that weights would never move."""
    given, module = {**mesh_arguments("flat"), "use_decoupled_grad": is_decoupled}, TinyMLP()
    kind = torch.optim.AdamW if is_decoupled else Decoupled
    model = fully_shard_model(module, **given) if is_sharded else module
    optimizer = kind(model.parameters(), lr=1e-3)
    with no_collectives():
        fully_shard_optimizer(optimizer) if is_sharded else fully_shard(module, optimizer, **given)


OPTIMIZERS = [
    (
        optimizer_of_another_model,
        ValueError,
        r"of the optimizer's 10 parameters 2 are not of this TinyMLP .*\(6, 6\)",
    ),
    (optimizer_that_is_none, TypeError, "expected a torch.optim.Optimizer to shard, got str"),
    (optimizer_without_parameters, ValueError, "the optimizer has no parameters; build it from"),
    (optimizer_of_a_plain_model, ValueError, r"parameter 0 of the optimizer, shape \(6, 6\), is not of a sharded"),
    (optimizer_of_the_original_parameters, ValueError, "or pass both to fully_shard"),
    (optimizer_of_two_models, ValueError, "holds parameters of 2 sharded models"),
    (optimizer_made_after_sharding_given_to_fully_shard, ValueError, "the module is sharded already"),
]


def test_wrong_optimizers(ranks2):
    assert_each_raises(ranks2, [Mistake(function, (), *error) for function, *error in OPTIMIZERS])


def test_optimizers_that_would_find_no_gradient(ranks2):
    messages = {
        True: "AdamW reads `.grad`, but with use_decoupled_grad=True the model attaches gradients as `.decoupled_grad`",
        False: "Decoupled reads `.decoupled_grad`, but with use_decoupled_grad=False the model attaches",
    }
    calls = [(is_sharded, is_decoupled) for is_sharded in (False, True) for is_decoupled in (False, True)]
    assert_each_raises(
        ranks2, [Mistake(optimizer_of_other_grads, call, ValueError, messages[call[1]]) for call in calls]
    )


# -- what cannot be done to a sharded model ---------------------------------------------------------------------------


def shard_twice() -> None:
    model = sharded()
    with no_collectives():
        fully_shard_model(model.module, **mesh_arguments("flat"))


def shard_a_part_of_a_sharded_model() -> None:
    model = sharded()
    with no_collectives():
        fully_shard_model(nn.Sequential(model.module.head, nn.Linear(6, 6)), **mesh_arguments("flat"))


def do(action: str) -> None:
    model = sharded()
    actions = {
        "half": model.half,
        "bfloat16": model.bfloat16,
        "to": functools.partial(model.to, torch.float64),
        "meta": functools.partial(model.to, "meta"),
        "inner half": model.module.half,
        "inner to": functools.partial(model.module.to, torch.float64),
        "inner meta": functools.partial(model.module.to, "meta"),
        "outside": nn.Sequential(model.module).bfloat16,
        "unit": functools.partial(model.module.blocks[0].to, torch.bfloat16),
        "list": model.module.blocks.half,
        "part of a unit": functools.partial(model.module.blocks[0].linear.to, "meta"),
        "copy": functools.partial(copy.deepcopy, model),
        "force": functools.partial(model.finish_grad_sync, force_all_reduce=True),
        "register": model.param_and_grad_buffer.manual_buffer_registration,
        "integers": functools.partial(model.full_state_dict, torch.int64),
        "bytes": functools.partial(model.full_state_dict, torch.float8_e4m3fn),
        "no dtype": functools.partial(model.full_state_dict, "bfloat16"),
        "submesh": functools.partial(model.dist_index.get_submesh, "tp"),
    }
    with no_collectives():
        actions[action]()


ACTIONS = [
    ("half", RuntimeError, r"cannot be moved or cast \(from torch.float32 .* to torch.float16"),
    ("bfloat16", RuntimeError, "do it before sharding"),
    ("to", RuntimeError, "do it before sharding"),
    ("meta", RuntimeError, "do it before sharding"),
    ("inner half", RuntimeError, r"cannot be moved or cast \(from torch.float32 .* to torch.float16"),
    ("inner to", RuntimeError, "do it before sharding"),
    ("inner meta", RuntimeError, "do it before sharding"),
    ("outside", RuntimeError, "do it before sharding"),
    ("unit", RuntimeError, r"or a part of it, cannot be moved or cast \(from torch.float32 .* to torch.bfloat16"),
    ("list", RuntimeError, "do it before sharding"),
    ("part of a unit", RuntimeError, "do it before sharding"),
    ("copy", NotImplementedError, "copy the module before sharding"),
    ("force", ValueError, "sharded ones are reduced to their owners"),
    ("register", RuntimeError, "needs nccl_ub=True"),
    ("integers", ValueError, r"full_state_dict\(dtype=torch.int64\) would lose the weights; expected a torch floating"),
    ("bytes", ValueError, r"full_state_dict\(dtype=torch.float8_e4m3fn\)"),
    ("no dtype", ValueError, r"full_state_dict\(dtype='bfloat16'\)"),
    ("submesh", ValueError, "tp_dim is None: pass tp_dim"),
]


def test_sharding_twice(ranks2):
    message = "the module is sharded already; pass the original one"
    twice = (shard_twice, shard_a_part_of_a_sharded_model)
    assert_each_raises(ranks2, [Mistake(function, (), ValueError, message) for function in twice])


def test_what_a_sharded_model_cannot_do(ranks2):
    assert_each_raises(ranks2, [Mistake(do, (action,), *error) for action, *error in ACTIONS])


def move_to_where_it_is() -> bool:
    model = sharded()
    with no_collectives():
        is_inner_same = model.module.to("cpu") is model.module and model.module.float() is model.module
        copied = copy.deepcopy(model.module.head)
        parts = [*model.module.modules(), copied]
        assert all(part.to("cpu") is part and part.float() is part for part in parts)
        return model.to("cpu") is model and model.float() is model and is_inner_same


def test_moving_a_model_to_where_it_is_does_nothing(ranks2):
    assert ranks2.run(move_to_where_it_is) == [True, True]


def construct_directly(options: dict) -> None:
    index = FSDPDistributedIndex(flat_mesh(), dp_shard_dim="dp")
    with no_collectives():
        MegatronFSDP(TinyMLP(), index, **options)


def test_options_of_the_constructor_whose_feature_is_not_there(ranks2):
    call = ({"keep_fp8_transpose_cache": True},), NotImplementedError, "keep_fp8_transpose_cache=True is not supported"
    assert_each_raises(ranks2, [Mistake(construct_directly, *call)])


ONE_ELEMENT = DistributedDataParallelConfig(suggested_communication_unit_size=True)
CONTRADICTIONS = [
    ({"report_nan_in_param_grad": "False"}, ValueError, "^report_nan_in_param_grad is 'False'; expected True or False"),
    ({"ddp_config": ONE_ELEMENT}, ValueError, "^suggested_communication_unit_size is True; expected a positive number"),
    ({"nccl_ub": True}, ValueError, "nccl_ub=True registers memory with NCCL, but"),
    ({"fsdp_db_use_persist_buf_on_alloc_fail": True}, ValueError, "needs fsdp_double_buffer=True"),
    (
        {"fine_grained_recurse_module_types": [nn.Linear]},
        ValueError,
        "fine_grained_recurse_module_types needs enable_fine_grained_param_gather_hook=True",
    ),
    (
        {"fine_grained_recurse_module_types": ["Linear"], "enable_fine_grained_param_gather_hook": True},
        ImportError,
        "give the full dotted path",
    ),
]


def test_options_of_the_constructor_that_contradict_each_other(ranks2):
    assert_each_raises(ranks2, [Mistake(construct_directly, (options,), *error) for options, *error in CONTRADICTIONS])


def do_nothing() -> None:
    """No mistake."""


@pytest.mark.parametrize(
    ("mistake", "came"),
    [
        (Mistake(do_nothing, (), ValueError, ""), "came None"),
        (Mistake(int, ("x",), TypeError, ""), "expected TypeError .*came .*ValueError"),
        (Mistake(int, ("x",), ValueError, "y"), "matching 'y', came .*invalid literal"),
    ],
)
def test_the_harness_notices_what_is_not_raised(ranks2, mistake, came):
    with pytest.raises(AssertionError, match=came):
        assert_each_raises(ranks2, [Mistake(int, ("x",), ValueError, "literal"), mistake])
