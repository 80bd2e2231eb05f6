"""Reference of data-parallel training: a plain loop in one process, rounding where a sharded engine rounds."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

LossFn = Callable[[Any, Any], torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class DtypePolicy:
    """In which dtype each stage works; the fields' names follow MixedPrecisionPolicy."""

    compute: torch.dtype | None = None
    """Dtype of the model's own parameters; None keeps what the constructor made."""

    main_params: torch.dtype | None = torch.float32
    """Dtype of the weights the optimizer updates; None lets it update the compute weights."""

    main_grads: torch.dtype | None = torch.float32
    """Dtype in which gradients accumulate over micro-batches; None means the parameter's."""

    grad_comm: torch.dtype | None = None
    """Dtype in which gradients are summed over ranks; None means the main gradients'."""


@dataclass(frozen=True)
class StepRecord:
    """One optimizer step, in full tensors."""

    losses: list[list[float]]
    """By micro-batch and rank."""

    grads: dict[str, torch.Tensor]
    """Reduced main gradients of the trainable parameters, before clipping; zeros where autograd gave none."""

    grad_norm: float

    weights: dict[str, torch.Tensor]
    """Main weights after the step, frozen ones included."""

    @property
    def loss(self) -> float:
        """Mean over micro-batches and ranks."""
        flat = [loss for microbatch in self.losses for loss in microbatch]
        return sum(flat) / len(flat)


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Options of training apart from the model and the data; shared by the reference and the engine under test."""

    build_optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    """Gets a module whose parameters are the main weights."""

    loss_fn: LossFn
    dtypes: DtypePolicy = DtypePolicy()

    reduces_each_microbatch: bool = True
    """False for the strategies that accumulate locally and reduce once; it decides where communication rounds."""

    reduced_once: tuple[str, ...] = ()
    """Ends of names of parameters that accumulate locally whatever the strategy is: those that are not sharded."""

    is_mean_over_ranks: bool = True
    """False sums over ranks, as calculate_per_token_loss does."""

    max_norm: float | None = None
    """Clips the gradient's 2-norm."""


def train_reference(
    build_model: Callable[[], nn.Module], batches: Sequence[Sequence[Sequence[tuple[Any, Any]]]], recipe: Recipe
) -> list[StepRecord]:
    """Trains on `batches[step][microbatch][rank]`; a gradient sums over micro-batches the mean over ranks."""
    torch.manual_seed(0)
    model = build_model()
    if recipe.dtypes.compute is not None:
        model.to(recipe.dtypes.compute)
    main = _main_weights(model, recipe.dtypes)
    _install(main, model)
    optimizer = recipe.build_optimizer(main)
    records = []
    for microbatches in batches:
        losses, grads = _reduced_grads(model, microbatches, recipe)
        for name, param in main.named_parameters():
            if param.requires_grad:
                param.grad = grads[name].to(param.dtype, copy=True)  # clipping is in place
        norm = grad_norm(grads)
        if recipe.max_norm is not None:
            torch.nn.utils.clip_grad_norm_(main.parameters(), recipe.max_norm)
        optimizer.step()
        _install(main, model)
        weights = {name: param.detach().clone() for name, param in main.named_parameters()}
        records.append(StepRecord(losses, grads, norm, weights))
    return records


def grad_norm(grads: dict[str, torch.Tensor]) -> float:
    """The 2-norm of all gradients together."""
    if not grads:
        return 0.0
    return torch.stack([grad.double().norm() for grad in grads.values()]).norm().item()


def assert_same_training(
    came: Sequence[StepRecord],
    expected: Sequence[StepRecord],
    *,
    is_exact: bool = False,
    rtol: float = 1e-5,
    atol: float = 1e-6,
) -> None:
    """Asserts equal losses, gradients and weights after each step; the first difference names step and parameter."""
    assert len(came) == len(expected), f"{len(came)} steps came, {len(expected)} were expected"
    tolerance = {"rtol": 0.0, "atol": 0.0} if is_exact else {"rtol": rtol, "atol": atol}
    for step, (ours, reference) in enumerate(zip(came, expected, strict=True)):
        torch.testing.assert_close(
            torch.tensor(ours.losses),
            torch.tensor(reference.losses),
            msg=lambda text, step=step: f"losses of step {step}: {text}",
            **tolerance,
        )
        for kind in ("grads", "weights"):
            mine, theirs = getattr(ours, kind), getattr(reference, kind)
            assert mine.keys() == theirs.keys(), f"{kind} of step {step}: names differ by {mine.keys() ^ theirs.keys()}"
            for name, tensor in theirs.items():
                torch.testing.assert_close(
                    mine[name],
                    tensor,
                    msg=lambda text, step=step, kind=kind, name=name: f"{kind}[{name!r}] of step {step}: {text}",
                    **tolerance,
                )


def _main_weights(model: nn.Module, dtypes: DtypePolicy) -> nn.Module:
    """A copy of the model whose parameters are plain tensors in the dtype of main weights."""
    main = copy.deepcopy(model)
    replaced: dict[nn.Parameter, nn.Parameter] = {}
    for module in main.modules():
        for name, param in module._parameters.items():
            if param is not None:
                if param not in replaced:
                    # A frozen weight has nothing to gain from a wider copy.
                    dtype = (dtypes.main_params if param.requires_grad else None) or param.dtype
                    plain = torch.empty(param.shape, dtype=dtype, device=param.device).copy_(param.detach())
                    replaced[param] = nn.Parameter(plain, requires_grad=param.requires_grad)
                module._parameters[name] = replaced[param]
    return main


@torch.no_grad()
def _install(main: nn.Module, model: nn.Module) -> None:
    for weight, updated in zip(model.parameters(), main.parameters(), strict=True):
        weight.copy_(updated)


def _reduced_grads(
    model: nn.Module, microbatches: Sequence[Sequence[tuple[Any, Any]]], recipe: Recipe
) -> tuple[list[list[float]], dict[str, torch.Tensor]]:
    """Losses by micro-batch and rank, and the main gradients."""
    trainable = {name: param for name, param in model.named_parameters() if param.requires_grad}
    rank_count = len(microbatches[0])
    reduces_each = recipe.reduces_each_microbatch and rank_count > 1
    main_dtypes = {name: recipe.dtypes.main_grads or param.dtype for name, param in trainable.items()}

    def zeros() -> dict[str, torch.Tensor]:
        return {name: torch.zeros_like(param, dtype=main_dtypes[name]) for name, param in trainable.items()}

    total = zeros()
    local = [zeros() for _ in range(rank_count)]
    losses = []
    for ranks in microbatches:
        losses.append([])
        fresh = []
        for rank, (inputs, target) in enumerate(ranks):
            model.zero_grad(set_to_none=True)
            loss = recipe.loss_fn(model(inputs), target)
            loss.backward()
            losses[-1].append(loss.item())
            fresh.append({name: p.grad if p.grad is not None else torch.zeros_like(p) for name, p in trainable.items()})
            for name, grad in fresh[-1].items():
                local[rank][name] += grad
        for name in total:
            if reduces_each and not name.endswith(recipe.reduced_once):
                total[name] += _reduce([grads[name] for grads in fresh], main_dtypes[name], recipe)  # rounds once
    for name, dtype in main_dtypes.items():
        if not reduces_each or name.endswith(recipe.reduced_once):
            total[name] = _reduce([grads[name] for grads in local], dtype, recipe).to(dtype)
    model.zero_grad(set_to_none=True)
    return losses, total


def _reduce(grads: Sequence[torch.Tensor], main_dtype: torch.dtype, recipe: Recipe) -> torch.Tensor:
    """Scaled before the sum, in the communication dtype, as a rank would: it cannot see the sum before it is sent."""
    # One rank sends nothing, so nothing is rounded.
    dtype = (recipe.dtypes.grad_comm if len(grads) > 1 else None) or main_dtype
    scale = 1.0 / len(grads) if recipe.is_mean_over_ranks else 1.0
    scaled = [grad.to(dtype) * scale for grad in grads]
    total = scaled[0].clone()
    for grad in scaled[1:]:
        total += grad
    return total
