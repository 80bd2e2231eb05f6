"""Several backwards per optimizer step: what waits, what is reduced when, and what an interruption leaves behind."""

import pytest
import torch
import torch.distributed as dist

from tests.unit_tests.harness.communication import collectives_heard
from tests.unit_tests.harness.parity import TASKS, Case, compare
from tests.unit_tests.harness.rank_pool import RankPool
from tests.unit_tests.harness.sharded import (
    RankStep,
    Sharding,
    assert_resting,
    backward,
    build_sharded,
    finish_step,
    full_grads,
)
from tests.unit_tests.harness.strategies import STRATEGIES


def case(strategy: int, *, microbatches: int = 3, task: str = "integers", outer: int | None = None, **options) -> Case:
    units = (TASKS[task].unit,)
    sharding = Sharding(strategy=strategy, units=units, outer=outer, is_poisoned=strategy != 3, options=options)
    return Case(task=task, microbatches=microbatches, sharding=sharding)


def job(plan: str, cases: list[Case]) -> list[list[RankStep]]:
    """Trains every case with its micro-batches run by the function that `plan` names."""
    return [_trained(case, PLANS[plan]) for case in cases]


def _trained(case: Case, plan) -> list[RankStep]:
    model, optimizer = build_sharded(TASKS[case.task].build, case.recipe, case.sharding)
    steps = []
    for microbatches in case.batches(dist.get_world_size()):
        optimizer.zero_grad()
        mine = [ranks[dist.get_rank()] for ranks in microbatches]
        losses = plan(model, case.recipe, mine)
        steps.append(finish_step(model, optimizer, case.recipe, losses))
    return steps


def no_sync(model, recipe, batches) -> list[float]:
    """As schedules do it: all but the last inside `no_sync`."""
    with model.no_sync():
        assert not model.is_last_microbatch
        losses = [backward(model, recipe, batch) for batch in batches[:-1]]
    assert model.is_last_microbatch
    return [*losses, backward(model, recipe, batches[-1])]


def all_but_the_last_wait(model, recipe, batches) -> list[float]:
    """Nothing says which one is the last: every backward may be it."""
    return [backward(model, recipe, batch) for batch in batches]


def none_is_the_last(model, recipe, batches) -> list[float]:
    """The reduction waits for `finish_grad_sync`, with `start_grad_sync` on the way."""
    with model.no_sync():
        losses = [backward(model, recipe, batch) for batch in batches]
    model.start_grad_sync()
    return losses


def automatic(model, recipe, batches) -> list[float]:
    """Gradients are reduced and attached after every backward; they add up."""
    model.set_model_auto_sync(True)
    losses = []
    for batch in batches:
        losses.append(backward(model, recipe, batch))
        assert_resting(model)
        assert all(p.grad is not None for p in model.parameters() if p.requires_grad)
        assert model.microbatch_count == 0
    model.set_model_auto_sync(False)
    return losses


def automatic_at_times(model, recipe, batches) -> list[float]:
    """`sync()` around some backwards, and back to what was before."""
    with model.no_sync():
        losses = [backward(model, recipe, batches[0])]
        with model.sync():
            assert model.model_auto_sync
            losses.append(backward(model, recipe, batches[1]))
        assert not model.model_auto_sync
        return [*losses, *(backward(model, recipe, batch) for batch in batches[2:])]


def forwards_in_between(model, recipe, batches) -> list[float]:
    """Evaluation under no_grad, inference mode and plain eval before, between and after the backwards."""
    losses = []
    for batch in batches:
        evaluate(model, batch)
        losses.append(backward(model, recipe, batch))
    evaluate(model, batches[0])
    return losses


def evaluate(model, batch) -> None:
    """Twice under no_grad and once in inference mode; afterwards nothing is gathered."""
    with torch.no_grad():
        outputs = [model(batch[0]), model(batch[0])]
    assert_resting(model)
    with torch.inference_mode():
        outputs.append(model(batch[0]))
    assert_resting(model)
    assert all(torch.equal(outputs[0], output) for output in outputs)


def gathered_ahead(model, recipe, batches) -> list[float]:
    """Weights are asked for before they are needed, in every way, and sent back."""
    losses = []
    for number, batch in enumerate(batches):
        model.start_param_sync(force_sync=number == 1)
        if number == 2:
            model.synchronize_param_gather()
            assert_resting(model)
        losses.append(backward(model, recipe, batch))
    model.start_param_sync()
    return losses


def forward_before_backward(model, recipe, batches) -> list[float]:
    """All forwards, an evaluation, then all backwards, the last one first, as pipelines may."""
    losses = [recipe.loss_fn(model(inputs), target) for inputs, target in batches]
    evaluate(model, batches[0])
    with model.no_sync():
        for loss in reversed(losses[1:]):
            loss.backward()
    losses[0].backward()
    return [loss.item() for loss in losses]


def one_backward_for_all(model, recipe, batches) -> list[float]:
    """Several forwards of the whole model in one graph."""
    losses = [recipe.loss_fn(model(inputs), target) for inputs, target in batches]
    sum(losses).backward()
    return [loss.item() for loss in losses]


def attempts_that_fail(model, recipe, batches) -> list[float]:
    """Exceptions in the forward and in the backward of a unit, then everything again."""
    block = list(model.module.blocks)[1]
    for handle in (
        block.register_forward_hook(_fail),
        block.register_forward_pre_hook(_fail),
        block.register_full_backward_hook(_fail),
        list(model.module.blocks)[0].register_full_backward_hook(_fail),
    ):
        with pytest.raises(ZeroDivisionError):
            backward(model, recipe, batches[0])
        handle.remove()
        model.zero_grad_buffer()
    return no_sync(model, recipe, batches)


def _fail(*_: object) -> None:
    raise ZeroDivisionError


def retained(model, recipe, batches) -> list[float]:
    """Two backwards through one graph, the gradients of which are halved."""
    losses = []
    for inputs, target in batches:
        loss = recipe.loss_fn(model(inputs), target)
        (loss / 2).backward(retain_graph=True)
        (loss / 2).backward()
        losses.append(loss.item())
    return losses


PLANS = {
    plan.__name__: plan
    for plan in (
        no_sync,
        all_but_the_last_wait,
        none_is_the_last,
        automatic,
        automatic_at_times,
        forwards_in_between,
        gathered_ahead,
        forward_before_backward,
        one_backward_for_all,
        attempts_that_fail,
        retained,
    )
}


@pytest.mark.parametrize("plan", PLANS)
def test_accumulation_is_exact(ranks2: RankPool, plan: str) -> None:
    cases = [case(strategy) for strategy in STRATEGIES]
    cases += [case(strategy, overlap_grad_reduce=False, overlap_param_gather=False) for strategy in (0, 1)]
    cases += [case(3, task="lending")]
    if plan in ("one_backward_for_all", "retained"):
        cases += [case(3, task="span_reentrant"), case(1, task="span_reentrant"), case(3, task="twice_non_reentrant")]
    for one, *by_rank in zip(cases, *ranks2.run(job, plan, cases), strict=True):
        compare(one, by_rank)


@pytest.mark.parametrize("plan", ["no_sync", "automatic", "automatic_at_times", "none_is_the_last"])
def test_accumulation_is_exact_on_two_axes(ranks4: RankPool, plan: str) -> None:
    cases = [case(1, outer=0), case(3, outer=0), case(3, outer=1)]
    for one, *by_rank in zip(cases, *ranks4.run(job, plan, cases), strict=True):
        compare(one, by_rank)


def job_presence() -> list[list]:
    """Of each strategy, which gradients are there, and how large, at every stage of a step."""
    return [_stages(strategy) for strategy in STRATEGIES]


def _stages(strategy: int) -> list:
    one = case(strategy, task="odd", microbatches=1)
    model, optimizer = build_sharded(TASKS["odd"].build, one.recipe, one.sharding)
    (ranks,), *_ = one.batches(dist.get_world_size())
    stages = [_presence(model)]
    backward(model, one.recipe, ranks[dist.get_rank()])
    stages.append(_presence(model))
    model.finish_grad_sync()
    stages.append(_presence(model))
    sizes = [param.grad.to_local().numel() for param in model.parameters()]
    optimizer.zero_grad()
    stages.append(_presence(model))
    return [*stages, sizes]


def _presence(model) -> bool | None:
    found = {param.grad is not None for param in model.parameters()}
    return found.pop() if len(found) == 1 else None


def test_gradients_are_absent_before_the_sync_and_there_on_every_rank_after_it(ranks3: RankPool) -> None:
    for strategy, *by_rank in zip(STRATEGIES, *ranks3.run(job_presence), strict=True):
        for before, after_backward, after_sync, after_zero, _ in by_rank:
            assert (before, after_backward, after_sync, after_zero) == (False, False, True, False), strategy
        if strategy:
            assert any(0 in sizes for *_, sizes in by_rank), "some rank was to own nothing of a parameter"


def job_collectives(cases: list[tuple[int, bool]]) -> list[list[list[str]]]:
    """The reductions of one backward and of the synchronization after it, by name."""
    found = []
    for strategy, is_last in cases:
        one = case(strategy, microbatches=1)
        model, _ = build_sharded(TASKS["integers"].build, one.recipe, one.sharding)
        model.is_last_microbatch = is_last
        (ranks,), *_ = one.batches(2)
        with collectives_heard() as during:
            backward(model, one.recipe, ranks[dist.get_rank()])
        with collectives_heard() as after:
            model.finish_grad_sync()
        found.append([[_short(name) for name in heard if "reduce" in name] for heard in (during, after)])
    return found


def _short(name: str) -> str:
    return "reduce_scatter" if "scatter" in name else "all_reduce"


def test_reductions_come_when_the_table_says(ranks2: RankPool) -> None:
    expected = {
        (0, False): [[], ["all_reduce"] * 4],
        (0, True): [["all_reduce"] * 4, []],
        (1, False): [[], ["reduce_scatter"] * 4],
        (1, True): [["reduce_scatter"] * 4, []],
        (2, False): [["reduce_scatter"] * 4, []],
        (3, True): [["reduce_scatter"] * 4, []],
    }
    assert ranks2.run(job_collectives, list(expected)) == [list(expected.values())] * 2


def job_zero_grad() -> list[list[dict[str, torch.Tensor]]]:
    """Of each strategy, gradients of one backward, and of another after the first was forgotten in torch's own way."""
    found = []
    for strategy in STRATEGIES:
        one = case(strategy, microbatches=2)
        model, _ = build_sharded(TASKS["integers"].build, one.recipe, one.sharding)
        found.append([])
        for ranks in one.batches(2)[0]:
            model.zero_grad()
            backward(model, one.recipe, ranks[dist.get_rank()])
            model.finish_grad_sync()
            found[-1].append(full_grads(model))
    return found


def test_the_modules_own_zero_grad_forgets_the_sum_too(ranks2: RankPool) -> None:
    one = case(0, microbatches=2)
    model = TASKS["integers"].build()
    for seen in ranks2.run(job_zero_grad)[0]:
        for grads, ranks in zip(seen, one.batches(2)[0], strict=True):
            model.zero_grad()
            for inputs, target in ranks:
                (one.recipe.loss_fn(model(inputs), target) / 2).backward()
            for name, param in model.named_parameters():
                assert torch.equal(grads[name], param.grad), name
