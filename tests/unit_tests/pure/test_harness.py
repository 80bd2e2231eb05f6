"""The reference loop, the simulated mesh and the small models, checked against independent plain computations."""

import functools

import pytest
import torch

from tests.unit_tests.harness import models
from tests.unit_tests.harness.file_times import FileTimes
from tests.unit_tests.harness.reference import DtypePolicy, Recipe, assert_same_training, train_reference
from tests.unit_tests.harness.simulate import Resting, SimulatedMesh, train_simulated

R, P, S = "RPS"


def sgd(module):
    return torch.optim.SGD(module.parameters(), lr=0.125)


@pytest.mark.parametrize(
    ("outer", "resting", "expected"),
    [
        (1, Resting((R, R), (R, P), (R, R)), ("", "", "", "all_reduce")),
        (1, Resting((R, R), (R, P), (R, S)), ("all_gather", "", "", "reduce_scatter")),
        (1, Resting((R, R), (R, S), (R, S)), ("all_gather", "", "reduce_scatter", "")),
        (1, Resting((R, S), (R, S), (R, S)), ("", "all_gather", "reduce_scatter", "")),
        (2, Resting((R, S), (P, S), (R, S)), ("", "all_gather", "reduce_scatter", "all_reduce_outer")),
        (
            2,
            Resting((R, S), (P, S), (S, S)),
            ("all_gather_outer", "all_gather", "reduce_scatter", "reduce_scatter_outer"),
        ),
    ],
)
def test_simulated_strategies_follow_the_plain_mean(outer, resting, expected):
    assert resting.is_contiguous
    logs = train_simulated(SimulatedMesh(outer, 3), resting)
    assert tuple("+".join(logs[verb]) for verb in ("install", "unshard", "reduce", "finalize")) == expected


def test_sharding_outside_an_unsharded_inner_axis_is_not_contiguous():
    assert not Resting((R, R), (P, P), (S, R)).is_contiguous


def test_simulation_refuses_a_move_that_no_collective_makes():
    mesh = SimulatedMesh(1, 2)
    with pytest.raises(ValueError, match="no collective goes from S to P"):
        mesh.move(mesh.replicate(torch.ones(2)), (R, S), (R, P))


def test_reference_equals_training_on_the_concatenated_batch():
    batches = models.float_batches(3, 1, 4)
    records = train_reference(models.TinyMLP, batches, Recipe(build_optimizer=sgd, loss_fn=models.square_loss))
    torch.manual_seed(0)
    model = models.TinyMLP()
    optimizer = sgd(model)
    for record, [ranks] in zip(records, batches, strict=True):
        inputs, targets = (torch.cat(parts) for parts in zip(*ranks, strict=True))
        loss = models.square_loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        assert record.loss == pytest.approx(loss.item())
        for name, param in model.named_parameters():
            torch.testing.assert_close(record.grads[name], param.grad)
            torch.testing.assert_close(record.weights[name], param)


def test_integer_training_is_exact_and_independent_of_the_order_of_sums():
    build = functools.partial(models.TinyMLP, integers=True)
    batches = models.integer_batches(5, 3, 4)
    recipe = Recipe(build_optimizer=lambda m: models.SignSGD(m.parameters()), loss_fn=models.dot_loss)
    forward = train_reference(build, batches, recipe)
    permuted = [[ranks[::-1] for ranks in step[::-1]] for step in batches]
    for ours, other in zip(forward, train_reference(build, permuted, recipe), strict=True):
        for name, grad in ours.grads.items():
            assert torch.equal(grad, other.grads[name])
            assert torch.equal(grad * 4, (grad * 4).round())
        assert all(torch.equal(w, w.round()) for w in ours.weights.values())
        assert any(grad.any() for grad in ours.grads.values())


def test_reference_accumulates_microbatches_by_sum():
    [[one]] = models.integer_batches(1, 1, 2)
    recipe = Recipe(build_optimizer=sgd, loss_fn=models.dot_loss)
    build = functools.partial(models.TinyMLP, integers=True)
    [single] = train_reference(build, [[one]], recipe)
    [double] = train_reference(build, [[one, one]], recipe)
    assert all(torch.equal(2 * grad, double.grads[name]) for name, grad in single.grads.items())


@pytest.mark.parametrize("reduces_each_microbatch", [True, False])
def test_reference_rounds_where_the_policy_says(reduces_each_microbatch):
    dtypes = DtypePolicy(compute=torch.bfloat16, main_grads=torch.float32, grad_comm=torch.bfloat16)
    recipe = Recipe(
        build_optimizer=sgd,
        loss_fn=models.square_loss,
        dtypes=dtypes,
        reduces_each_microbatch=reduces_each_microbatch,
    )
    batches = [[[(i.bfloat16(), t) for i, t in ranks] for ranks in step] for step in models.float_batches(2, 3, 2)]
    for record in train_reference(models.TinyMLP, batches, recipe):
        assert all(grad.dtype == torch.float32 for grad in record.grads.values())
        assert all(weight.dtype == torch.float32 for weight in record.weights.values())
        is_rounded = all(torch.equal(grad, grad.bfloat16().float()) for grad in record.grads.values())
        assert is_rounded is not reduces_each_microbatch


def test_reference_gives_zero_gradients_to_unused_and_none_to_frozen_parameters():
    def build():
        return models.freeze(models.TinyTransformer(has_unused=True, is_tied=True), "blocks.0.qkv")

    [record] = train_reference(
        build, models.token_batches(1, 1, 2), Recipe(build_optimizer=sgd, loss_fn=models.token_loss)
    )
    assert not record.grads["unused.weight"].any()
    assert "blocks.0.qkv.weight" not in record.grads and "blocks.0.qkv.weight" in record.weights
    assert "head.weight" not in record.grads


@pytest.mark.parametrize("recompute", ["reentrant", "non_reentrant"])
def test_recomputation_changes_no_number(recompute):
    recipe = Recipe(build_optimizer=sgd, loss_fn=models.token_loss)
    batches = models.token_batches(2, 1, 2)
    plain = train_reference(models.TinyTransformer, batches, recipe)
    again = train_reference(functools.partial(models.TinyTransformer, recompute=recompute), batches, recipe)
    assert_same_training(again, plain, is_exact=True)


def test_a_difference_names_its_step_and_parameter():
    recipe = Recipe(build_optimizer=sgd, loss_fn=models.square_loss)
    batches = models.float_batches(2, 1, 2, width=7, width_out=3)
    records = train_reference(models.OddModel, batches, recipe)
    other = train_reference(models.OddModel, batches, recipe)
    assert_same_training(records, other, is_exact=True)
    other[1].weights["blocks.1.cube"][2, 4, 6] += 1
    with pytest.raises(AssertionError, match=r"weights\['blocks.1.cube'\] of step 1"):
        assert_same_training(records, other)


def test_seconds_are_added_up_by_file():
    times = FileTimes(count=1, page=None, command="python -m pytest")
    for nodeid, phase, seconds in (("a.py::x", "setup", 1.0), ("a.py::x", "call", 2.0), ("b.py::y[1]", "call", 2.5)):
        times.pytest_runtest_logreport(
            pytest.TestReport(nodeid, ("", 0, ""), {}, "passed", None, phase, duration=seconds)
        )
    assert times.slowest() == [("a.py", 3.0)]
    assert "all 2 tests took 6 s" in times.page() and "| `a.py` | 1 | 3.0 |" in times.page()
