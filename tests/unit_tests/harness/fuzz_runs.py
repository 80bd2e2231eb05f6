"""Trains a program on shards and whole, and compares the two."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from tests.unit_tests.harness import fuzz_models
from tests.unit_tests.harness.fuzz_programs import Plan, Program
from tests.unit_tests.harness.rank_pool import RankError, RankPool
from tests.unit_tests.harness.reference import Recipe, StepRecord, train_reference
from tests.unit_tests.harness.sharded import RankStep, assembled, backward, build_sharded, finish_step

#: An idle machine takes a tenth of a second for a program; one that hangs must not stop a test for long.
TIMEOUT_S = 30.0
#: Largest difference over the largest element, and over the largest gradient of all, which may have cancelled to a
#: small one: for sums in another order, and where something rounds to 8 bits.
TIGHT, LOSSY = (2e-4, 2e-6), (8e-2, 1e-2)
#: By how much of its largest element a gradient may be off for such sums (of terms that may have cancelled) and
#: roundings; what that does to later steps is measured.
TIGHT_NOISE, LOSSY_NOISE = 2.0**-20, 2.0**-8
#: Measurements of it, and how much farther than the farthest of them is still no fault.
NOISY_RUNS, NOISE_FACTOR = 5, 8.0


# ---- in a rank ----


def run_program(program: Program) -> list[RankStep]:
    """A pool job: this rank's part of every step."""
    model, optimizer = _build(program, program.plan)
    steps = []
    for number, microbatches in enumerate(program.batches()):
        if program.reload_plan is not None and number == program.reload_at:
            model, optimizer = _reloaded(program, model, optimizer)
        steps.append(_train_step(program, model, optimizer, microbatches))
    return steps


@contextlib.contextmanager
def _patched(plan: Plan) -> Iterator[None]:
    """Thresholds that small models would never reach, and other values on every rank but the first."""
    from megatron_fsdp.build import find_units
    from megatron_fsdp.plan import layout

    before = find_units.LARGE_LEFTOVER_NUMEL, layout.PADDING_SLACK
    find_units.LARGE_LEFTOVER_NUMEL, layout.PADDING_SLACK = plan.leftover, plan.slack
    fuzz_models.perturb(0.125 * dist.get_rank())
    try:
        yield
    finally:
        find_units.LARGE_LEFTOVER_NUMEL, layout.PADDING_SLACK = before
        fuzz_models.perturb(0.0)


def _build(program: Program, plan: Plan) -> tuple[Any, torch.optim.Optimizer]:
    def build() -> torch.nn.Module:
        with torch.device("meta") if plan.from_meta else contextlib.nullcontext():
            return program.build()

    with _patched(plan):
        return build_sharded(build, program.recipe, plan.sharding(program.accumulation))


def _reloaded(program: Program, model: Any, optimizer: torch.optim.Optimizer) -> tuple[Any, torch.optim.Optimizer]:
    """A fresh model and optimizer, sharded otherwise, with everything that the old ones know."""
    is_alike = program.reload_plan == program.plan
    weights = {name: _whole(value, is_alike) for name, value in model.module.state_dict().items()}
    state = optimizer.state_dict()
    state["state"] = {
        index: {name: _whole(value, is_alike) for name, value in entries.items()}
        for index, entries in state["state"].items()
    }
    fresh, fresh_optimizer = _build(program, program.reload_plan)
    fresh.module.load_state_dict(weights)
    fresh_optimizer.load_state_dict(state)
    return fresh, fresh_optimizer


def _whole(value: Any, keeps_shards: bool) -> Any:
    if isinstance(value, DTensor) and not keeps_shards:
        return value.full_tensor()
    return value.detach().clone() if isinstance(value, torch.Tensor) and not isinstance(value, DTensor) else value


def _train_step(program: Program, model: Any, optimizer: torch.optim.Optimizer, microbatches: Any) -> RankStep:
    optimizer.zero_grad()
    recipe, rank = program.recipe, dist.get_rank()
    foreseen = None
    if program.evaluates:
        with torch.no_grad():
            inputs, target = microbatches[0][rank]
            foreseen = recipe.loss_fn(model(inputs), target).item()
    losses = []
    for number, ranks in enumerate(microbatches):
        is_last = number == len(microbatches) - 1
        if program.accumulation == "no_sync" and not is_last:
            with model.no_sync():
                losses.append(backward(model, recipe, ranks[rank]))
        else:
            model.is_last_microbatch = is_last if program.accumulation == "flag" else program.accumulation != "never"
            losses.append(backward(model, recipe, ranks[rank]))
        if program.syncs_between:
            model.finish_grad_sync()
    assert foreseen in (None, losses[0]), f"without gradients the loss is {foreseen}, with them {losses[0]}"
    return finish_step(model, optimizer, recipe, losses)


# ---- in the test ----


def check_program(pool: RankPool, program: Program, timeout_s: float = TIMEOUT_S) -> None:
    """Raises AssertionError with the program and how to replay it, if it fails in any way."""
    expected = _in_one_process(program, program.recipe)
    try:
        came = assembled(pool.run(run_program, program, timeout_s=timeout_s), expected)
        tolerance = LOSSY if program.is_lossy else TIGHT
        try:
            _compare(came, expected, tolerance)
        except AssertionError:
            _compare(came, expected, tolerance, _noise(program, expected))
    except (RankError, AssertionError) as error:
        raise AssertionError(
            f"{error}\n{described(program)}\nreplay: python -m tests.unit_tests.harness.fuzzer "
            f"--seed {program.seed} --count 1 --ranks {program.ranks}"
        ) from error


def _in_one_process(program: Program, recipe: Recipe) -> list[StepRecord]:
    return train_reference(program.build, program.batches(), recipe)


def _noise(program: Program, expected: Sequence[StepRecord]) -> list[dict[str, float]]:
    """By step and tensor: how far training in one process goes astray if every gradient is a little off.

    Some programs explode: one rounding in the first step then decides the digits of the third. The first step's
    gradients owe nothing to any update, so that they get no allowance.
    """
    farthest = [dict.fromkeys((name for name, _ in _tensors(step)), 0.0) for step in expected]
    for number in range(NOISY_RUNS):
        recipe = dataclasses.replace(
            program.recipe, build_optimizer=_noisy(program, torch.Generator().manual_seed(number))
        )
        for far, noisy, step in zip(farthest, _in_one_process(program, recipe), expected, strict=True):
            for (name, one), (_, other) in zip(_tensors(noisy), _tensors(step), strict=True):
                if other.numel():
                    far[name] = max(far[name], (one - other).abs().max().item())
    return farthest


def _noisy(program: Program, generator: torch.Generator) -> Callable[[torch.nn.Module], torch.optim.Optimizer]:
    size = LOSSY_NOISE if program.is_lossy else TIGHT_NOISE

    def build(module: torch.nn.Module) -> torch.optim.Optimizer:
        def disturb(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            for param in (param for group in optimizer.param_groups for param in group["params"]):
                if param.grad is not None and param.numel():
                    sign = torch.randint(0, 2, param.shape, generator=generator) * 2 - 1
                    param.grad = (param.grad + size * param.grad.abs().max() * sign).to(param.grad.dtype)

        optimizer = program.recipe.build_optimizer(module)
        optimizer.register_step_pre_hook(disturb)
        return optimizer

    return build


def _tensors(step: StepRecord) -> list[tuple[str, torch.Tensor]]:
    """All that is compared, by name."""
    kinds = [
        (f"{kind}[{name!r}]", tensor) for kind in ("grads", "weights") for name, tensor in getattr(step, kind).items()
    ]
    return [("losses", torch.tensor(step.losses)), *kinds]


def _compare(
    came: Sequence[StepRecord],
    expected: Sequence[StepRecord],
    tolerance: tuple[float, float],
    noise: Sequence[dict[str, float]] | None = None,
) -> None:
    """Asserts that no tensor differs by more than `tolerance` and `noise` allow."""
    for step, (ours, theirs) in enumerate(zip(came, expected, strict=True)):
        for kind in ("grads", "weights"):
            mine, reference = getattr(ours, kind), getattr(theirs, kind)
            assert mine.keys() == reference.keys(), f"{kind} of step {step}: {mine.keys() ^ reference.keys()}"
        largest = max((grad.abs().max().item() for grad in theirs.grads.values() if grad.numel()), default=0.0)
        found = dict(_tensors(ours))
        for name, other in _tensors(theirs):
            one = found[name]
            assert one.dtype == other.dtype and one.shape == other.shape, (name, one.dtype, one.shape, other.dtype)
            if other.numel():
                difference, size = (one - other).abs().max().item(), other.abs().max().item()
                bound = tolerance[0] * size + tolerance[1] * largest
                if noise is not None:
                    bound += NOISE_FACTOR * noise[step][name]
                assert difference <= bound, f"{name} of step {step} differs by {difference:.3g}, at most {bound:.3g}"


def described(program: Program) -> str:
    """The program in a few lines, defaults left out."""
    lines = [f"program {program.seed} on {program.ranks} ranks: {_brief(program, leave_out=('seed', 'ranks', 'tree'))}"]
    lines += _tree_lines(program.tree, "  ")
    return "\n".join(lines)


def _brief(value: Any, leave_out: tuple[str, ...] = ()) -> str:
    parts = []
    for field in dataclasses.fields(value):
        item = getattr(value, field.name)
        if field.name not in leave_out and (field.default is dataclasses.MISSING or item != field.default):
            parts.append(f"{field.name}={_brief(item) if dataclasses.is_dataclass(item) else repr(item)}")
    return f"{type(value).__name__}({', '.join(parts)})"


def _tree_lines(part: Any, indent: str) -> list[str]:
    if isinstance(part, fuzz_models.Leaf):
        return [indent + _brief(part)]
    lines = [indent + _brief(part, leave_out=("children", "calls"))]
    for number, child in enumerate(part.children):
        lines += _tree_lines(child, f"{indent}  {number}: ")
    return lines + [f"{indent}  {_brief(call)}" for call in part.calls]
