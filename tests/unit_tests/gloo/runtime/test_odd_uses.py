"""Models and loops that do odd things, sharded and whole, with the same gradients."""

import collections
import dataclasses
import functools
import random
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron_fsdp.runtime.programs import Key
from tests.unit_tests.harness.rank_pool import RankPool
from tests.unit_tests.harness.sharded import Sharding, full_grads, shard

WIDTH = 4


class Layer(nn.Module):
    """A unit."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shape (batch, 4), kept."""
        return torch.tanh(self.linear(x))


class AddingLayer(Layer):
    """Adds to a keyword argument in place and gives it back."""

    def forward(self, x: torch.Tensor, *, residual: torch.Tensor) -> torch.Tensor:
        """Shape (batch, 4), kept."""
        return residual.add_(super().forward(x))


class ViewLayer(Layer):
    """Gives a view, which others may change in place."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shape (1, batch, 4)."""
        return self.linear(x).view(1, -1, WIDTH)


class TableLayer(nn.Module):
    """Multiplies with its weight, or returns it."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x: torch.Tensor | None = None) -> torch.Tensor:
        """Shape (batch, 4), kept; or the table."""
        return self.table if x is None else x @ self.table.t()


class NamedPair(NamedTuple):
    """An output of `PairLayer`."""

    product: torch.Tensor
    rows: torch.Tensor


@dataclasses.dataclass(frozen=True)
class FrozenPair:
    """An output of `PairLayer`."""

    product: torch.Tensor
    rows: torch.Tensor


@dataclasses.dataclass
class BothPair(collections.OrderedDict):
    """An output of `PairLayer`: a dict and a dataclass in one, as the outputs of transformers' models are."""

    product: torch.Tensor | None = None
    rows: torch.Tensor | None = None

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setitem__(name, value)
        super().__setattr__(name, value)


class PairLayer(TableLayer):
    """Returns a product and a view of its weight, in `form`."""

    form: Callable[..., Any] = staticmethod(lambda product, rows: {"pair": (product, rows)})

    def forward(self, x: torch.Tensor) -> Any:
        """Shapes (batch, 4), kept, and (2, 4)."""
        return self.form(x @ self.table, self.table[:2])


UNITS = (Layer, AddingLayer, ViewLayer, TableLayer, PairLayer)


class Stack(nn.Module):
    """Four layers, of which some may be left out or come in another order."""

    def __init__(self, layer: type[nn.Module] = Layer) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(layer() for _ in range(4))

    def forward(self, x: torch.Tensor, order: tuple[int, ...] = (0, 1, 2, 3)) -> torch.Tensor:
        """Shape (batch, 4), kept."""
        x = self.first(x)
        for number in order:
            x = self.layers[number](x)
        return x


class AddingStack(Stack):
    """Layers that add to a keyword argument in place."""

    def __init__(self) -> None:
        super().__init__(AddingLayer)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shape (batch, 4), kept."""
        x = self.first(x)
        residual = x * 1.0
        for layer in self.layers:
            residual = layer(x, residual=residual)
        return residual


class ViewStack(Stack):
    """Changes what its layers return in place."""

    def __init__(self) -> None:
        super().__init__(ViewLayer)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shape (batch, 4), kept."""
        x = self.first(x)
        for layer in self.layers:
            y = layer(x)
            y += 1.0
            x = torch.tanh(y.view(-1, WIDTH))
        return x


class PairStack(Stack):
    """Uses a view of a layer's weight after that layer's forward."""

    def __init__(self, form: Callable[..., Any] | None = None) -> None:
        super().__init__(PairLayer)
        for layer in self.layers:
            layer.form = form or layer.form

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shape (batch, 4), kept."""
        x = self.first(x)
        for layer in self.layers:
            pair = layer(x)
            is_dict = isinstance(pair, dict) and not dataclasses.is_dataclass(pair)
            product, rows = pair["pair"] if is_dict else (pair.product, pair.rows)
            x = torch.tanh(product) + rows.sum(0)
        return x


class ReturningStack(Stack):
    """Uses the weight that a layer returns, a layer that it also calls."""

    def __init__(self) -> None:
        super().__init__()
        self.table = TableLayer()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shape (batch, 4), kept."""
        table = self.table()
        for layer in self.layers:
            x = layer(x) + x @ table
        return self.table(x)


class Inside(Stack):
    """Takes gradients inside its forward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shape (batch, 4), kept."""
        inner = x.detach().requires_grad_()
        self.layers[0](inner).square().sum().backward()
        return super().forward(x + inner.grad)


def plainly(model: nn.Module) -> None:
    """A micro-batch."""
    model(batch()).square().mean().backward()


def in_a_hook(model: nn.Module) -> None:
    """The model's forward and backward run inside the backward of something else."""
    given, x = torch.ones(1, requires_grad=True), batch()
    product = given * 2

    def hook(_: torch.Tensor) -> None:
        with torch.enable_grad():
            model(x).square().mean().backward()

    product.register_hook(hook)
    product.sum().backward()


def after_exceptions(model: nn.Module) -> None:
    """A layer called by hand raises, and is called again."""
    layers = (model.module if hasattr(model, "module") else model).layers
    for _ in range(2):
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            layers[0](torch.ones(2, WIDTH + 1))
    layers[0](layers[1](batch())).square().mean().backward()


def calling_itself(model: nn.Module) -> None:
    """A forward by hand, of a layer that calls itself."""
    layer = (model.module if hasattr(model, "module") else model).layers[0]
    handle = layer.linear.register_forward_hook(_again(layer))
    layer(batch()).square().mean().backward()
    handle.remove()


def _again(layer: nn.Module) -> Callable[..., torch.Tensor | None]:
    calls = iter([True, False])
    return lambda module, args, output: layer(output) if next(calls, False) else None


#: By name: the model, what is done in each of three cycles, and options of the engine.
CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module], None], dict[str, Any]]] = {
    "keyword arguments changed in place": (AddingStack, plainly, {}),
    "output views changed in place": (ViewStack, plainly, {}),
    "a weight returned by a layer that is also called": (ReturningStack, plainly, {}),
    "views of weights in a nested output": (PairStack, plainly, {}),
    "views of weights in an ordered dict": (
        functools.partial(PairStack, lambda *pair: collections.OrderedDict(pair=pair)),
        plainly,
        {},
    ),
    "views of weights in a named tuple": (functools.partial(PairStack, NamedPair), plainly, {}),
    "views of weights in a frozen dataclass": (functools.partial(PairStack, FrozenPair), plainly, {}),
    "views of weights in a dict that is a dataclass": (functools.partial(PairStack, BothPair), plainly, {}),
    "backward inside forward": (Inside, plainly, {}),
    "backward inside forward, synchronized": (Inside, plainly, {"sync_model_each_microbatch": True}),
    "first run inside another backward": (Stack, in_a_hook, {}),
    "exceptions by hand": (Stack, after_exceptions, {}),
    "recursion by hand": (Stack, calling_itself, {}),
}


def batch() -> torch.Tensor:
    """Other numbers on each rank."""
    return torch.randn(2, WIDTH)


def job(name: str) -> list[tuple[dict, dict]]:
    """Gradients of three cycles, of the sharded model and of the whole one."""
    build, run, options = CASES[name]
    torch.manual_seed(0)
    whole = build()
    torch.manual_seed(0)
    model = shard(build(), Sharding(units=UNITS, options=options))
    found = []
    for cycle in range(3):
        for each in (whole, model):
            torch.manual_seed(1 + cycle + 10 * dist.get_rank())
            each.zero_grad()
            run(each)
        model.finish_grad_sync()
        assert not model.schedule.is_running
        assert not any(unit.is_gathered for unit in model.schedule.units)
        found.append((full_grads(model), averaged(whole)))
    return found


def averaged(module: nn.Module) -> dict[str, torch.Tensor]:
    """Gradients averaged over ranks."""
    grads = {}
    for name, param in module.named_parameters():
        grads[name] = torch.zeros_like(param) if param.grad is None else param.grad.clone()
        dist.all_reduce(grads[name])
        grads[name] /= dist.get_world_size()
    return grads


@pytest.mark.parametrize("name", CASES)
def test_odd_uses_give_the_gradients_of_the_whole_model(ranks2: RankPool, name: str) -> None:
    for cycles in ranks2.run(job, name, timeout_s=20):
        for came, expected in cycles:
            assert came.keys() == expected.keys()
            for key in came:
                torch.testing.assert_close(came[key], expected[key], msg=lambda text, key=key: f"{key}: {text}")


def job_left_out() -> None:
    """Each rank leaves out layers of its own in each step, others than in the first."""
    model = shard(Stack(), Sharding(units=UNITS))
    for step in range(4):
        own = (step + 1 + 2 * dist.get_rank()) % 4
        model(batch(), (own,) if step == 0 else tuple(sorted({own, (own + step) % 4}))).sum().backward()
        model.finish_grad_sync()
        model.zero_grad()


def test_layers_that_ranks_leave_out_by_themselves_are_in_the_order_of_registration(ranks2: RankPool) -> None:
    ranks2.run(job_left_out, timeout_s=20)


def job_orders() -> tuple[int, int]:
    """Operations of the forward after the first step, and the most after each of 40 in other orders."""
    model = shard(Stack(), Sharding(units=UNITS))
    chance, order, sizes = random.Random(0), list(range(4)), []
    for _ in range(40):
        model(batch(), tuple(order)).sum().backward()
        sizes.append(len(model.schedule.programs.get(Key(0, True, "")).ops))
        chance.shuffle(order)
    return sizes[0], max(sizes)


def test_programs_do_not_grow_beyond_twice_a_pass(ranks2: RankPool) -> None:
    for first, most in ranks2.run(job_orders, timeout_s=40):
        assert most <= 2.5 * first


def job_hidden_view() -> None:
    model = shard(PairStack(), Sharding(units=UNITS))
    model.module.layers[0].form = lambda product, rows: types.SimpleNamespace(product=product, rows=rows)
    model(batch())


def test_a_view_of_weights_in_an_object_of_an_unknown_class_is_refused(ranks2: RankPool) -> None:
    message = r"unit layers.0 returns a view of its weights inside SimpleNamespace; .* return a copy: \.clone\(\)"
    ranks2.run_expecting(RuntimeError, message, job_hidden_view)
