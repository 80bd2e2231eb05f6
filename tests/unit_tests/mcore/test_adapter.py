"""GPT models trained through megatron-core's schedule, sharded, against one process in plain torch."""

import pytest
import torch

from tests.unit_tests.harness.rank_pool import RankPool
from tests.unit_tests.mcore.training import Case, Record, train_sharded, train_whole

FULL_RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
SELECTIVE_RECOMPUTE = {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}
TWO_LAYER_RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 2}


_references: dict[str, list[Record]] = {}


def reference(pool: RankPool, case: Case) -> list[Record]:
    """Whole-model records; the same for all strategies and for recomputation, so computed once."""
    key = f"{case.reference()} on {pool.world_size}"
    if key not in _references:
        _references[key] = pool.run(train_whole, case.reference())[0]
    return _references[key]


def check(pool: RankPool, case: Case, *, rtol: float = 1e-5, atol: float = 1e-6) -> None:
    expected = reference(pool, case)
    runs = pool.run(train_sharded, case)
    for step, wanted in enumerate(expected):
        assert set().union(*(records[step].weights for records in runs)) == wanted.weights.keys()
        assert len({(records[step].norm, records[step].zeros) for records in runs}) == 1
    for records in runs:
        for record, wanted in zip(records, expected, strict=True):
            assert record.loss == pytest.approx(wanted.loss, rel=rtol)
            assert record.norm == pytest.approx(wanted.norm, rel=10 * rtol)
            if case.dtype is torch.float32:
                assert record.zeros == wanted.zeros
            for name, weight in record.weights.items():
                torch.testing.assert_close(
                    weight, wanted.weights[name], rtol=rtol, atol=atol, msg=lambda m, name=name: f"{name}: {m}"
                )


@pytest.mark.parametrize(
    ("strategy", "tied"),
    [
        ("no_shard", True),
        ("optim", False),
        ("optim_grads", True),
        ("optim_grads_params", False),
        ("optim_grads_params", True),
    ],
)
def test_every_strategy_trains_like_one_process(mcore_ranks2: RankPool, strategy: str, tied: bool) -> None:
    check(mcore_ranks2, Case(strategy=strategy, tied=tied))


EMBEDDING_UNITS = (
    "megatron.core.transformer.transformer_layer.TransformerLayer",
    "megatron.core.models.common.embeddings.language_model_embedding.LanguageModelEmbedding",
    "megatron.core.tensor_parallel.layers.VocabParallelEmbedding",
)


@pytest.mark.parametrize("strategy", [1, 2, 3])
def test_a_tied_embedding_is_readable_although_it_would_be_a_unit(mcore_ranks2: RankPool, strategy: int) -> None:
    # The output layer reads the embedding's weight long after the embedding's forward, where no hook sees it.
    check(mcore_ranks2, Case(strategy=strategy, tied=True, units=EMBEDDING_UNITS))


@pytest.mark.parametrize(
    "case",
    [
        Case(recompute=FULL_RECOMPUTE),
        Case(recompute=FULL_RECOMPUTE, tied=True),
        Case(recompute=TWO_LAYER_RECOMPUTE, strategy=2),
        Case(recompute=SELECTIVE_RECOMPUTE),
        Case(per_token=True),
        Case(per_token=True, strategy=1, tied=True),
        Case(optimizer="sgd"),
        Case(strategy=0, optimizer="sgd"),
        Case(ddp={"overlap_grad_reduce": True, "overlap_param_gather": True}, strategy=1),
        Case(ddp={"average_in_collective": True}),
        Case(loss_scale=4.0),
        Case(frozen="embedding"),
        Case(frozen="decoder.layers.1", recompute=FULL_RECOMPUTE),
        Case(frozen="weight", strategy=0),
    ],
    ids=str,
)
def test_what_changes_the_schedule_does_not_change_the_result(mcore_ranks2: RankPool, case: Case) -> None:
    check(mcore_ranks2, case)


@pytest.mark.parametrize("strategy", [0, 1, 2, 3])
def test_experts_that_a_rank_does_not_use_take_part(mcore_ranks2: RankPool, strategy: int) -> None:
    experts = {
        "num_moe_experts": 8,
        "moe_router_topk": 2,
        "add_bias_linear": False,
        "moe_token_dispatcher_type": "alltoall",
    }
    check(mcore_ranks2, Case(strategy=strategy, config=experts))


INSTANCES = {"num_distributed_optimizer_instances": 2}
OUTER_SHARDS = {**INSTANCES, "outer_dp_sharding_strategy": "optim"}
HYBRIDS = [(0, INSTANCES), (1, INSTANCES), (2, INSTANCES), (3, INSTANCES), (3, OUTER_SHARDS)]


@pytest.mark.parametrize(("strategy", "ddp"), HYBRIDS, ids=str)
def test_instances_of_the_optimizer_are_an_outer_axis(mcore_ranks4: RankPool, strategy: int, ddp: dict) -> None:
    check(mcore_ranks4, Case(strategy=strategy, ddp=ddp, per_token=strategy == 1))


EXPERTS = {
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "add_bias_linear": False,
    "moe_token_dispatcher_type": "alltoall",
}
SPREAD = {"expert_model_parallel_size": 2}


@pytest.mark.parametrize("strategy", [0, 1, 2, 3])
def test_experts_spread_over_all_ranks_train_like_one_process(mcore_ranks2: RankPool, strategy: int) -> None:
    check(mcore_ranks2, Case(strategy=strategy, config=EXPERTS, groups=SPREAD, per_token=strategy == 2))


@pytest.mark.parametrize(
    ("strategy", "ddp"), [(1, {}), (3, {"average_in_collective": True}), (2, INSTANCES), (3, OUTER_SHARDS)], ids=str
)
def test_experts_have_data_parallel_ranks_of_their_own(mcore_ranks4: RankPool, strategy: int, ddp: dict) -> None:
    check(mcore_ranks4, Case(strategy=strategy, config=EXPERTS, groups=SPREAD, ddp=ddp))


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_multi_token_prediction_reads_embedding_and_output_again(mcore_ranks2: RankPool, tied: bool) -> None:
    check(mcore_ranks2, Case(tied=tied, config={"mtp_num_layers": 1}))


@pytest.mark.parametrize("strategy", [0, 1, 2, 3])
def test_bf16_follows_a_bf16_model_with_fp32_main_weights(mcore_ranks2: RankPool, strategy: int) -> None:
    fp32_grads = {"megatron_fsdp_main_grads_dtype": "fp32"}
    check(mcore_ranks2, Case(strategy=strategy, dtype=torch.bfloat16, ddp=fp32_grads), rtol=1e-2, atol=5e-4)


@pytest.mark.parametrize("strategy", [1, 3])
def test_fp16_trains_under_a_dynamic_loss_scale(mcore_ranks2: RankPool, strategy: int) -> None:
    check(mcore_ranks2, Case(strategy=strategy, dtype=torch.float16), rtol=5e-3, atol=1e-4)
