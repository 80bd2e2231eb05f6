"""Plausible uses that once gave a silent wrong result, crashed or hung."""

import contextlib
import copy
import math
import re
import unittest

import pytest
import torch
from torch import nn

from megatron_fsdp import MixedPrecisionPolicy, fully_shard, fully_shard_model, fully_shard_optimizer
from tests.unit_tests.harness.rank_pool import RankPool


def sharded(strategy: int = 3, **options: object) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Two Linear units and SGD."""
    torch.manual_seed(0)
    model = fully_shard_model(
        nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)),
        fsdp_unit_modules=[nn.Linear],
        zero_dp_strategy=strategy,
        **options,
    )
    return model, fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=1.0))


def clip_in_another_dtype(auto_sync: bool) -> float:
    """Largest change of a weight by a step of lr 1 whose gradient was clipped to norm 1e-3 in a copy."""
    policy = MixedPrecisionPolicy(main_grads_dtype=torch.bfloat16)
    model, optimizer = sharded(mixed_precision_policy=policy, sync_model_each_microbatch=auto_sync)
    before = [param.full_tensor() for param in model.parameters()]
    model(torch.ones(2, 4)).sum().backward()
    model.clip_grad_norm_(1e-3)
    optimizer.step()
    return max((param.full_tensor() - old).abs().max().item() for param, old in zip(model.parameters(), before))


@pytest.mark.parametrize("auto_sync", [True, False])
def test_clipping_survives_until_the_step(ranks2: RankPool, auto_sync: bool) -> None:
    for change in ranks2.run(clip_in_another_dtype, auto_sync):
        assert 1e-5 < change < 2e-3


def norm_before_sync() -> float:
    """The norm of gradients that nobody has synchronized."""
    model, _ = sharded(1, sync_model_each_microbatch=False)
    model(torch.ones(2, 4)).sum().backward()
    return model.clip_grad_norm_(1.0).item()


def test_clipping_synchronizes_first(ranks2: RankPool) -> None:
    assert all(norm > 0.1 for norm in ranks2.run(norm_before_sync))


def sync_switched_on_late() -> float:
    """Distance that a step moves when automatic synchronization is switched on after the backward."""
    model, optimizer = sharded(1, sync_model_each_microbatch=False)
    before = [param.full_tensor() for param in model.parameters()]
    with model.no_sync():
        model(torch.ones(2, 4)).sum().backward()
    model.set_model_auto_sync(True)
    optimizer.step()
    return sum((param.full_tensor() - old).abs().sum().item() for param, old in zip(model.parameters(), before))


def test_a_step_takes_gradients_that_are_not_synchronized(ranks2: RankPool) -> None:
    assert all(moved > 0.1 for moved in ranks2.run(sync_switched_on_late))


def norm_of_doubles_with_an_empty_rank() -> float:
    """fp64 gradients of which one rank holds none."""
    model = fully_shard_model(
        nn.Linear(2, 1, bias=False).double(), mixed_precision_policy=MixedPrecisionPolicy(main_params_dtype=None)
    )
    model(torch.ones(1, 2).double()).sum().backward()
    return model.clip_grad_norm_(10.0).item()


def test_ranks_reduce_one_dtype(ranks2: RankPool) -> None:
    assert ranks2.run(norm_of_doubles_with_an_empty_rank) == [pytest.approx(math.sqrt(2))] * 2


def penalty_on_sharded_parameters() -> None:
    """A loss term on the parameters themselves."""
    model, optimizer = sharded()
    params = list(model.parameters())
    loss = model(torch.ones(2, 4)).sum() + sum(param.to_local().square().sum() for param in params)
    loss.backward()


def test_a_gradient_that_would_be_lost_is_refused(ranks2: RankPool) -> None:
    ranks2.run_expecting(RuntimeError, "did not come through the model's forward", penalty_on_sharded_parameters)


def odd_buffers() -> list[float]:
    """16-bit integers, and one element shown as many."""
    model = nn.Linear(2, 2)
    model.register_buffer("small", torch.tensor([torch.distributed.get_rank()], dtype=torch.int16))
    model.register_buffer("same", torch.tensor(float(torch.distributed.get_rank())).expand(3))
    sharded_model, _ = fully_shard(model, torch.optim.SGD(model.parameters(), lr=1.0))
    return [sharded_model.module.small.item(), *sharded_model.module.same.tolist()]


def test_buffers_of_any_dtype_follow_the_first_rank(ranks2: RankPool) -> None:
    assert ranks2.run(odd_buffers) == [[0, 0.0, 0.0, 0.0]] * 2


def step_between_forward_and_backward() -> None:
    """An optimizer step while a graph of the old weights waits for its backward."""
    model, optimizer = sharded()
    model(torch.ones(2, 4)).sum().backward()
    loss = model(torch.ones(2, 4)).sum()
    optimizer.step()
    loss.backward()


def test_a_backward_belongs_to_the_weights_of_its_forward(ranks2: RankPool) -> None:
    ranks2.run_expecting(RuntimeError, "have changed since its forward", step_between_forward_and_backward)


def write_by_hand(options: dict[str, object], how: str) -> list[str]:
    """Log lines about values that are written between two forwards, and not installed."""
    model, _ = sharded(**options)
    with contextlib.suppress(AssertionError), unittest.TestCase().assertLogs("megatron_fsdp.diagnostics") as logs:
        with torch.no_grad():
            model(torch.ones(2, 4))
            for param in model.module[0].parameters():
                (param if how == "DTensor" else param.to_local()).mul_(1.0)
            model(torch.ones(2, 4))
            model.install_optimized_model_weights()
            model(torch.ones(2, 4))
    return [record.getMessage() for record in logs.records]


def test_what_is_written_by_hand_and_not_installed_is_a_warning(ranks2: RankPool) -> None:
    """Not an error: the values may be those that were there."""
    for options in ({"strategy": 1}, {"strategy": 3, "residency_bytes": 1000}):
        for how in ("DTensor", "its local tensor"):
            for (message,) in ranks2.run(write_by_hand, options, how):
                assert re.match("0.weight, 0.bias were written to, perhaps with equal values, and nothing was", message)
                assert "Call install_optimized_model_weights()" in message


def step_unseen(options: dict[str, object], kind: dict[str, bool], installs: bool) -> None:
    """Two steps of an optimizer that the model does not know, made from its parameters."""
    torch.manual_seed(0)
    model = fully_shard_model(nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)), fsdp_unit_modules=[nn.Linear], **options)
    optimizer = torch.optim.AdamW(model.parameters(), **kind)
    for _ in range(2):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        model.zero_grad()
        if installs:
            model.install_optimized_model_weights()


UNSEEN = [
    ({"zero_dp_strategy": 1}, {}),
    ({"zero_dp_strategy": 2}, {"fused": True}),
    ({"zero_dp_strategy": 2}, {"foreach": True}),
    ({"zero_dp_strategy": 0, "mixed_precision_policy": MixedPrecisionPolicy(torch.float64, torch.float64)}, {}),
]
OTHER_VALUES = "^0.weight, 0.bias of unit 0 have other values .* fully_shard_optimizer.*install_optimized_model_weights"


def test_a_step_that_the_model_does_not_see_is_refused(ranks2: RankPool) -> None:
    """Compute weights would stay what they were, for ever."""
    for options, kind in UNSEEN:
        ranks2.run_expecting(RuntimeError, OTHER_VALUES, step_unseen, options, kind, False)
        ranks2.run(step_unseen, options, kind, True)
    for kind in ({}, {"foreach": True}):
        ranks2.run(step_unseen, {"zero_dp_strategy": 3}, kind, False)  # Gathers read what is there.


def drop_gradients(changes: bool) -> None:
    """Cycles without a step, between which weights may be changed by the contract: legal, whoever steps."""
    torch.manual_seed(0)
    model = fully_shard_model(nn.Linear(4, 3), zero_dp_strategy=2)
    for _ in range(3):
        for _ in range(2):
            model(torch.ones(2, 4)).sum().backward()
        model.zero_grad()
        if changes:
            with model.full_params(), torch.no_grad():
                model.module.weight.add_(1.0)


def look_whether_weights_are_watched() -> tuple[bool, list[bool]]:
    """With an optimizer that is known, and with none, after each of some cycles."""
    from megatron_fsdp.diagnostics.guards import FIRST_CYCLES

    known, _ = sharded()
    model = fully_shard_model(nn.Linear(4, 3), zero_dp_strategy=2)
    seen = []
    for _ in range(FIRST_CYCLES):
        seen.append(model.step_guard.is_active)
        model(torch.ones(2, 4)).sum().backward()
        model.zero_grad()
    return known.step_guard.is_active, [*seen, model.step_guard.is_active]


def test_weights_are_watched_in_the_first_cycles_of_a_model_without_an_optimizer(ranks2: RankPool) -> None:
    for is_known_watched, (*first, later) in ranks2.run(look_whether_weights_are_watched):
        assert not is_known_watched
        assert all(first)
        assert not later


def test_gradients_may_be_dropped_without_a_step(ranks2: RankPool) -> None:
    for changes in (False, True):
        ranks2.run(drop_gradients, changes)


class Residual(nn.Module):
    """Adds to its input in place and hands it on."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shape (batch, 4), kept."""
        x += self.net(torch.sin(x))
        return x


class Slots:
    """An output without a dictionary of attributes."""

    __slots__ = ("value",)

    def __init__(self, value: torch.Tensor) -> None:
        self.value = value


class Wrapping(nn.Module):
    """Hands its result on in an object with slots."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Residual()

    def forward(self, x: torch.Tensor) -> Slots:
        """Shape (batch, 4), kept, in a Slots."""
        return Slots(self.inner(x * 1.0))


def gradient_of(model: nn.Module) -> torch.Tensor:
    """The full gradient of the Linear inside after one backward, and on the way parameters that are always DTensors."""
    output = model(torch.arange(8.0).view(2, 4)).value
    assert all(param.to_local() is not None for param in getattr(model, "shards", list)())
    output.square().sum().backward()
    grad = next(model.parameters()).grad
    return grad.full_tensor() if hasattr(grad, "full_tensor") else grad


def changed_inputs_in_slots() -> tuple[torch.Tensor, torch.Tensor]:
    """Our gradient and plain torch's."""
    torch.manual_seed(1)
    plain = Wrapping()
    ours = Wrapping()
    ours.load_state_dict(plain.state_dict())
    ours, _ = fully_shard(ours, torch.optim.SGD(ours.parameters(), lr=1.0), fsdp_unit_modules=[Residual])
    ours.shards = ours.parameters
    return gradient_of(ours), gradient_of(plain)


def test_an_input_changed_in_place_is_an_output_and_slots_are_looked_into(ranks2: RankPool) -> None:
    for came, expected in ranks2.run(changed_inputs_in_slots):
        torch.testing.assert_close(came, expected)


def embedding_that_renormalizes() -> None:
    """An embedding that changes its own weight."""
    fully_shard_model(nn.Embedding(4, 4, max_norm=1.0))


def test_weights_that_change_in_forward_are_refused(ranks2: RankPool) -> None:
    ranks2.run_expecting(NotImplementedError, "max_norm", embedding_that_renormalizes)


def penalty(model: nn.Module) -> torch.Tensor:
    """A loss that contains the norm of the input's gradient."""
    inputs = torch.ones(2, 4, requires_grad=True)
    loss = model(inputs).sum()
    (grad,) = torch.autograd.grad(loss, inputs, create_graph=True)
    return loss + grad.square().sum()


def gradient_penalty(strategy: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Our full gradients beside plain torch's."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
    plain = copy.deepcopy(model)
    model, _ = fully_shard(
        model, torch.optim.SGD(model.parameters(), lr=1.0), fsdp_unit_modules=[nn.Linear], zero_dp_strategy=strategy
    )
    for each in (model, plain):
        penalty(each).backward()
    pairs = zip(model.parameters(), plain.parameters(), strict=True)
    return [(ours.grad.full_tensor(), torch.zeros_like(p) if p.grad is None else p.grad) for ours, p in pairs]


def test_second_derivatives_are_refused_where_weights_are_released(ranks2: RankPool) -> None:
    message = r"create_graph=True.*use zero_dp_strategy='no_shard' \(0\), 'optim' \(1\) or 'optim_grads' \(2\)\."
    ranks2.run_expecting(NotImplementedError, message, gradient_penalty, 3)
    for strategy in (0, 1, 2):
        for ours, expected in ranks2.run(gradient_penalty, strategy)[0]:
            torch.testing.assert_close(ours, expected)
