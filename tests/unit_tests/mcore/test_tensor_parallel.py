"""GPT models on megatron-core's tensor-parallel ranks, sharded over data-parallel ones, against one process."""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch

from tests.unit_tests.harness.rank_pool import RankPool
from tests.unit_tests.mcore.models import gpt_config, gpt_model, initialize_groups, tokens
from tests.unit_tests.mcore.training import (
    STEPS,
    Case,
    Record,
    build_optimizer,
    connect,
    forward_step,
    global_name,
    mean_loss,
    train_whole,
    whole_weights,
)

SWIGLU = {"gated_linear_unit": True, "activation_func": torch.nn.functional.silu, "add_bias_linear": False}
EXPERTS = {
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_router_load_balancing_type": "none",
    "moe_token_dispatcher_type": "alltoall",
    "add_bias_linear": False,
}
#: gloo gathers no parts of different sizes, which the other way needs on tensor-parallel ranks.
GATHERED = {**EXPERTS, "moe_token_dispatcher_type": "allgather"}
GROUPED = {"num_query_groups": 2, "normalization": "RMSNorm", "qk_layernorm": True}


@dataclasses.dataclass(frozen=True)
class Split:
    """Options of a case on tensor-parallel ranks."""

    tp: int = 2
    ep: int = 1
    sequence_parallel: bool = False


@contextlib.contextmanager
def norms_that_know_of_sequence_parallelism() -> Iterator[None]:
    """megatron-core's norm without Apex and TransformerEngine refuses it, for want of a tag on its parameters."""
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    def tagged_norm(cls: type, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> torch.nn.Module:
        kind = torch.nn.LayerNorm if config.normalization == "LayerNorm" else torch.nn.RMSNorm
        norm = kind(hidden_size, eps=eps)
        for param in norm.parameters():
            param.sequence_parallel = config.sequence_parallel
        return norm

    with mock.patch.object(WrappedTorchNorm, "__new__", staticmethod(tagged_norm)):
        yield


def build(case: Case, split: Split) -> torch.nn.Module:
    from megatron_fsdp.mcore import DistributedDataParallelConfig, FullyShardedDataParallel

    initialize_groups()
    whole = dict(case.model().named_parameters())
    initialize_groups(tensor_model_parallel_size=split.tp, expert_model_parallel_size=split.ep)
    config = gpt_config(
        calculate_per_token_loss=case.per_token,
        tensor_model_parallel_size=split.tp,
        expert_model_parallel_size=split.ep,
        sequence_parallel=split.sequence_parallel,
        **case.config,
        **case.recompute,
    )
    with norms_that_know_of_sequence_parallelism():
        model = gpt_model(config, tied=case.tied, seed=case.seed)
    ddp_config = DistributedDataParallelConfig(data_parallel_sharding_strategy=case.strategy, **case.ddp)
    own = {name: global_name(name, config) for name, _ in model.named_parameters()}
    sharded = FullyShardedDataParallel(config, ddp_config, model)
    if split.ep > 1:  # experts are drawn by each rank for itself
        sharded.load_state_dict({name: whole[other].detach() for name, other in own.items()})
    return sharded


def schedule(case: Case, model: torch.nn.Module, step: int) -> list[dict]:
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel import get_forward_backward_func

    number = parallel_state.get_data_parallel_rank()
    batches = iter([tokens(number, step, micro) for micro in range(case.microbatches)])
    return get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=batches,
        model=[model],
        num_microbatches=case.microbatches,
        seq_length=None,
        micro_batch_size=None,
        forward_only=False,
    )


def train(case: Case, split: Split) -> list[Record]:
    """A pool job."""
    model = build(case, split)
    optimizer = build_optimizer(case, model)
    connect(model, optimizer)
    records = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = mean_loss(schedule(case, model, step), case)
        success, norm, zeros = optimizer.step()
        assert success
        records.append(Record(loss, float(norm), int(zeros), whole_weights(model)))
    return records


CASES: dict[str, tuple[Case, Split]] = {
    "plain": (Case(), Split()),
    "whole on every rank": (Case(strategy=0), Split()),
    "sequence": (Case(strategy=2), Split(sequence_parallel=True)),
    "per token": (Case(per_token=True), Split(sequence_parallel=True)),
    "tied": (Case(tied=True, strategy=1), Split(sequence_parallel=True)),
    "gated": (Case(config=SWIGLU), Split(sequence_parallel=True)),
    "two copies": (Case(ddp={"num_distributed_optimizer_instances": 2}), Split(sequence_parallel=True)),
    "two copies, cut": (
        Case(ddp={"num_distributed_optimizer_instances": 2, "outer_dp_sharding_strategy": "optim"}),
        Split(sequence_parallel=True),
    ),
    "experts": (Case(config=EXPERTS), Split(sequence_parallel=True)),
    "experts on other ranks": (Case(config=GATHERED), Split(ep=2, sequence_parallel=True)),
    "grouped": (Case(config=GROUPED), Split(sequence_parallel=True)),
}


@pytest.mark.parametrize("name", CASES)
def test_split_models_train_like_one_process(mcore_ranks2: RankPool, mcore_ranks4: RankPool, name: str) -> None:
    case, split = CASES[name]
    expected = mcore_ranks2.run(train_whole, case.reference())[0]
    seen: set[str] = set()
    for records in mcore_ranks4.run(train, case, split):
        compare(records, expected)
        seen |= records[0].weights.keys()  # of spread experts each rank knows its own
    assert seen == expected[0].weights.keys()


def compare(records: list[Record], expected: list[Record], *, rtol: float = 1e-5, atol: float = 1e-6) -> None:
    for record, wanted in zip(records, expected, strict=True):
        assert record.loss == pytest.approx(wanted.loss, rel=rtol)
        assert record.norm == pytest.approx(wanted.norm, rel=10 * rtol)
        assert record.zeros == wanted.zeros
        for name, weight in record.weights.items():
            say: Any = lambda text, name=name: f"{name}: {text}"  # noqa: E731
            torch.testing.assert_close(weight, wanted.weights[name], rtol=rtol, atol=atol, msg=say)
