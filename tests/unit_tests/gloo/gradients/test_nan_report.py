"""Gradients that are not finite raise one error on every rank, which names the parameter, its unit and the rank."""

import re
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megatron_fsdp import FSDPDistributedIndex, MegatronFSDP
from megatron_fsdp.config import DistributedDataParallelConfig, MixedPrecisionPolicy
from megatron_fsdp.diagnostics.nan_report import NanReport, NonFiniteGradientError
from tests.unit_tests.harness.communication import collectives_heard
from tests.unit_tests.harness.models import MLPBlock, TinyMLP
from tests.unit_tests.harness.rank_pool import RankPool
from tests.unit_tests.harness.sharded import Sharding, flat_mesh, shard

#: Backwards in which a parameter's own gradient on one rank is multiplied: (name, rank, backward, factor).
Poison = tuple[str, int, int, float]


def poisoned_mlp(poison: Poison | None) -> TinyMLP:
    """An MLP one of whose gradients goes wrong on one rank."""
    module = TinyMLP(width=4, integers=True)
    if poison is not None:
        name, rank, backward, factor = poison
        seen = []

        def hook(grad: torch.Tensor) -> torch.Tensor:
            seen.append(1)
            return grad * factor if (dist.get_rank(), len(seen)) == (rank, backward) else grad

        module.get_parameter(name).register_hook(hook)
    return module


def message_of(model: MegatronFSDP, microbatches: int = 1) -> str:
    """The error of a cycle, '' if there is none; no gradient is attached after an error."""
    try:
        for _ in range(microbatches):
            model(torch.ones(2, 4)).sum().backward()
        model.finish_grad_sync()
    except NonFiniteGradientError as error:
        assert all(param.grad is None for param in model.parameters())
        return str(error)
    assert all(param.grad is not None for param in model.parameters())
    return ""


def report(strategy: int, outer: int | None, poison: Poison | None, auto_sync: bool) -> str:
    """The message of two micro-batches with both kinds of synchronization."""
    options = {"report_nan_in_param_grad": True, "sync_model_each_microbatch": auto_sync}
    model = shard(poisoned_mlp(poison), Sharding(strategy=strategy, units=(MLPBlock,), outer=outer, options=options))
    return message_of(model, 2)


def reports(cases: list[tuple]) -> list[str]:
    """The messages of several cases."""
    return [report(*case) for case in cases]


@pytest.mark.parametrize("auto_sync", [False, True])
def test_the_parameter_the_unit_and_the_rank_are_named_on_every_rank(ranks2: RankPool, auto_sync: bool) -> None:
    nan = ("blocks.1.linear.bias", 1, 1, float("nan"))
    infinite = ("head.weight", 0, 2, float("inf"))
    cases = [(strategy, None, poison, auto_sync) for strategy in range(4) for poison in (nan, infinite, None)]
    first, second = ranks2.run(reports, cases)
    assert first == second
    for (_, _, poison, _), message in zip(cases, first, strict=True):
        expected = {
            nan: "of 1 parameters .* blocks.1.linear.bias \\(unit blocks.1\\): the own gradient of rank 1. None is",
            infinite: "of 1 parameters .* head.weight \\(unit \\(root\\)\\): the own gradient of rank 0. None is",
        }.get(poison, "^$")
        assert re.search(expected, message), message


def test_all_ranks_of_an_outer_axis_learn_of_it(ranks4: RankPool) -> None:
    poison = ("blocks.0.linear.weight", 3, 2, float("nan"))
    for messages in ranks4.run(reports, [(3, 0, poison, False), (3, 1, poison, False), (1, 0, poison, False)]):
        assert all("the own gradient of rank 3" in message for message in messages), messages


def overflow_of_a_sum() -> str:
    """Every rank's gradient fits fp16, their sum does not."""
    module = TinyMLP(width=4, integers=True)
    module.head.bias.register_hook(lambda grad: torch.full_like(grad, 6e4))
    policy = MixedPrecisionPolicy(grad_comm_dtype=torch.float16)
    options = {"report_nan_in_param_grad": True, "calculate_per_token_loss": True, "mixed_precision_policy": policy}
    index = FSDPDistributedIndex(flat_mesh(), dp_shard_dim="dp")
    return message_of(MegatronFSDP(module, index, **options))


def test_a_sum_that_overflows_is_told_from_a_gradient_that_does(ranks2: RankPool) -> None:
    (message, _) = ranks2.run(overflow_of_a_sum)
    assert re.search(r"head.bias \(unit \(root\)\): the reduced gradient in .*finite: their sum overflowed", message)


def check_only(poison: Poison | None) -> tuple[str, list[str]]:
    """The message without blame, and the collectives of `finish_grad_sync`."""
    config = DistributedDataParallelConfig(data_parallel_sharding_strategy=3, check_for_nan_in_grad=True)
    index = FSDPDistributedIndex(flat_mesh(), dp_shard_dim="dp")
    model = MegatronFSDP(poisoned_mlp(poison), index, config)
    model(torch.ones(2, 4)).sum().backward()
    model.start_grad_sync()
    model.synchronize_gradient_reduce()
    with collectives_heard() as heard:
        return message_of(model, 0), heard


def test_the_cheap_check_costs_one_small_reduction_and_names_the_owner(ranks2: RankPool) -> None:
    for message, heard in ranks2.run(check_only, None):
        assert (message, heard) == ("", ["allreduce"])
    for message, _ in ranks2.run(check_only, ("head.bias", 0, 1, float("nan"))):
        assert re.search("head.bias .*: the reduced gradient in the rows of rank.*report_nan_in_param_grad", message)


def go_on() -> tuple[bool, list[torch.Tensor]]:
    """A poisoned step is left out after zero_grad; asking again before that raises again."""
    from megatron_fsdp import fully_shard_optimizer

    weights = []
    for poison in (("head.bias", 1, 1, float("nan")), None):
        options = {"report_nan_in_param_grad": True}
        model = shard(poisoned_mlp(poison), Sharding(strategy=3, units=(MLPBlock,), options=options))
        optimizer = fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=1.0))
        if poison is not None:
            assert "rank 1" in message_of(model)
            with pytest.raises(NonFiniteGradientError, match="own gradient of rank 1"):
                optimizer.step()
            optimizer.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        weights.append(model.module.head.bias.full_tensor())
    return weights


def test_a_step_can_be_left_out(ranks2: RankPool) -> None:
    for after, expected in ranks2.run(go_on):
        assert torch.equal(after, expected) and after.isfinite().all()


def attached_when_looked_at() -> list[bool]:
    options = {"report_nan_in_param_grad": True}
    model = shard(poisoned_mlp(None), Sharding(strategy=3, units=(MLPBlock,), options=options))
    found = []
    check = NanReport.check

    def look(report: NanReport) -> None:
        found.append(all(param.grad is not None for param in model.parameters()))
        check(report)

    with mock.patch.object(NanReport, "check", look):
        assert message_of(model) == ""
    return found


def test_the_host_attaches_gradients_before_it_waits_to_look_at_them(ranks2: RankPool) -> None:
    assert ranks2.run(attached_when_looked_at) == [[True]] * 2


def drop_what_was_made_infinite() -> bool:
    """A gradient that a user has spoilt after synchronization, and dropped, is no concern of the step's."""
    from megatron_fsdp import fully_shard_optimizer

    model = shard(poisoned_mlp(None), Sharding(units=(MLPBlock,), options={"report_nan_in_param_grad": True}))
    optimizer = fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    assert message_of(model) == ""
    weight = model.module.head.weight
    weight.grad.mul_(float("inf"))
    weight.grad = None
    optimizer.step()  # synchronizes once more
    return all(param.to_local().isfinite().all() for param in model.parameters())


def test_dropped_gradients_are_not_reported(ranks2: RankPool) -> None:
    assert ranks2.run(drop_what_was_made_infinite) == [True, True]
