"""Weight formats of other kinds: float8 with a scale of the whole parameter, stored and gathered as bytes; eighths."""

import functools
from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist

from megatron_fsdp import fully_shard_optimizer
from megatron_fsdp.state.codec import Shard, WeightCodec, register_codec
from tests.unit_tests.harness.communication import collectives_heard
from tests.unit_tests.harness.float8_reference import Float8Tensor, encoded, scale_of
from tests.unit_tests.harness.models import MLPBlock
from tests.unit_tests.harness.parity import TASKS, Case, check
from tests.unit_tests.harness.rank_pool import RankPool
from tests.unit_tests.harness.reference import DtypePolicy
from tests.unit_tests.harness.sharded import Sharding, build_sharded, full_weights, shard, train_step
from tests.unit_tests.harness.strategies import STRATEGIES

UNIT_LISTS = (None, (MLPBlock,), (MLPBlock, "torch.nn.Linear"))


def units_of(ranks: int, strategy: int) -> tuple | None:
    """Unit lists in turn."""
    return UNIT_LISTS[(ranks + strategy) % len(UNIT_LISTS)]


@pytest.mark.parametrize("task", ["float8", "float8_recompute", "float8_frozen"])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_float8_weights_train_like_one_process_with_the_same_quantizer(
    rank_pools: dict[int, RankPool], task: str, ranks: int
) -> None:
    check(
        rank_pools[ranks],
        [
            Case(
                task=task,
                microbatches=2,
                steps=3 if ranks < 3 else 2,
                sharding=Sharding(strategy=strategy, units=units_of(ranks, strategy), is_poisoned=strategy != 1),
            )
            for strategy in STRATEGIES
        ],
    )


def test_float8_weights_on_two_axes_and_with_other_dtypes(ranks4: RankPool) -> None:
    fp64 = DtypePolicy(main_params=torch.float64, main_grads=torch.float32, grad_comm=torch.float64)
    check(
        ranks4,
        [
            Case(task="float8", dtypes=dtypes, sharding=Sharding(strategy=inner, outer=outer, units=(MLPBlock,)))
            for inner, outer, dtypes in [(1, 0, DtypePolicy()), (3, 0, fp64), (3, 1, DtypePolicy()), (3, 1, fp64)]
        ],
    )


def job_storage(strategy: int) -> dict:
    """Dtypes of the buffers, bytes that travel, and what a forward reads."""
    case = Case(task="float8", sharding=Sharding(strategy=strategy, units=(MLPBlock,)))
    model, optimizer = build_sharded(TASKS["float8"].build, case.recipe, case.sharding)
    groups = model.param_and_grad_buffer.parameter_groups
    quantized = [group for group in groups if isinstance(group.params[0].data, Float8Tensor)]
    for microbatches in case.batches(dist.get_world_size()):
        train_step(model, optimizer, case.recipe, microbatches)
    weights = full_weights(model)
    seen = {}
    handles = [
        block.linear.register_forward_pre_hook(lambda linear, _, n=n: seen.update({n: linear.weight.data_bytes + 0}))
        for n, block in enumerate(model.module.blocks)
    ]
    with torch.no_grad():
        model(torch.ones(2, 6))  # the first one also finds the order of units
        model.install_optimized_model_weights()
        with collectives_heard() as heard:
            model(torch.ones(2, 6))
    for handle in handles:
        handle.remove()
    return {
        "weight": {group.model_weight_buffer.dtype for group in quantized},
        "main": {group.main_weight_buffer.dtype for group in quantized},
        "grad": {group.main_grad_buffer.dtype for group in quantized},
        "groups": (len(quantized), len(groups) - len(quantized)),
        "rest": sum(group.model_weight_buffer.nbytes for group in quantized),
        "is_exact": [
            torch.equal(seen[n], encoded(full, scale_of(full.abs().max())))
            for n in range(3)
            for full in [weights[f"blocks.{n}.linear.weight"]]
        ],
        "gathers": len([name for name in heard if "gather" in name]),
    }


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_weights_rest_and_travel_as_bytes(ranks2: RankPool, strategy: int) -> None:
    for facts in ranks2.run(job_storage, strategy):
        assert facts["weight"] == {torch.uint8}
        assert facts["main"] == facts["grad"] == {torch.float32}
        assert facts["groups"] == (4, 4), "biases keep a buffer of their own dtype"
        assert facts["rest"] == 4 * 36 // (2 if strategy == 3 else 1)
        assert facts["is_exact"] == [True] * 3
        assert facts["gathers"] == (0 if strategy == 0 else 8)


class RoundingCodec(WeightCodec):
    """Stores eighths, in the parameter's own dtype, of parameters with the attribute `has_eighths`."""

    is_cast = False

    def handles(self, param: torch.nn.Parameter) -> bool:
        return getattr(param, "has_eighths", False)

    def encode(self, shards: Sequence[Shard], groups: Sequence[dist.ProcessGroup]) -> None:
        for each in shards:
            each.stored.copy_((each.main * 8).round() / 8)


register_rounding = functools.cache(lambda: register_codec(RoundingCodec()))


def job_rounding(strategy: int, outer: str | None, is_frozen: bool) -> None:
    """Main weights take steps that are smaller than what a forward can see, and forwards see eighths of them."""
    register_rounding()
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(6, 5, bias=False), torch.nn.Linear(5, 3, bias=False))
    first = module[0].weight
    first.has_eighths = True
    first.requires_grad_(not is_frozen)
    initial = first.detach().clone()
    model = shard(module, Sharding(strategy=strategy, outer=outer, units=(torch.nn.Linear,)))
    optimizer = fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.01))
    seen = []
    model.module[0].register_forward_pre_hook(lambda linear, _: seen.append(linear.weight.detach().clone()))
    for _ in range(4):
        main = full_weights(model)["0.weight"]
        model(torch.ones(2, 6)).sum().backward()
        model.finish_grad_sync()
        optimizer.step()
        optimizer.zero_grad()
        assert torch.equal(seen[-1], (main * 8).round() / 8)
        assert is_frozen == torch.equal(full_weights(model)["0.weight"], main)
    moved = (full_weights(model)["0.weight"] - initial).abs().max()
    assert (moved == 0) if is_frozen else (0 < moved < 1 / 8), moved


@pytest.mark.parametrize("is_frozen", [False, True])
def test_a_codec_that_is_no_cast_leaves_main_weights_of_its_own_dtype_alone(
    rank_pools: dict[int, RankPool], is_frozen: bool
) -> None:
    for strategy in STRATEGIES:
        rank_pools[2].run(job_rounding, strategy, None, is_frozen)
    rank_pools[4].run(job_rounding, 3, "optim", is_frozen)


class Strange(torch.Tensor):
    """A class of weights that no codec knows."""


def job_unknown() -> None:
    from megatron_fsdp import fully_shard_model

    module = torch.nn.Linear(2, 2)
    module.weight = torch.nn.Parameter(torch.ones(2, 2).as_subclass(Strange))
    fully_shard_model(module)


def test_a_format_that_no_codec_knows_is_refused_by_name(ranks2: RankPool) -> None:
    ranks2.run_expecting(ValueError, "no weight codec handles parameters of class Strange", job_unknown)
