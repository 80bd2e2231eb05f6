"""Mistakes after sharding are found in the first forwards, or in strict mode; legal uses are not taken for any."""

import copy
import functools
import logging
import os
import sys
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.unit_tests.harness.communication import no_collectives
from tests.unit_tests.harness.models import MLPBlock, TinyMLP
from tests.unit_tests.harness.rank_pool import RankPool
from tests.unit_tests.harness.sharded import Sharding, full_grads, full_weights, shard


def replace(root: TinyMLP) -> None:
    root.blocks[1].linear.weight = nn.Parameter(torch.zeros(6, 6))


def tie(root: TinyMLP) -> None:
    root.head.weight = root.blocks[0].linear.weight


def delete(root: TinyMLP) -> None:
    del root.head.bias


def register(root: TinyMLP) -> None:
    root.blocks[0].register_parameter("extra", nn.Parameter(torch.zeros(1)))


def replace_module(root: TinyMLP) -> None:
    root.head = nn.Linear(6, 6)


def drop_module(root: TinyMLP) -> None:
    root.head = nn.Identity()


def add_module(root: TinyMLP) -> None:
    root.blocks.append(MLPBlock(6, 6))


def set_data(root: TinyMLP) -> None:
    root.head.weight.data = torch.zeros(6, 6)


def resize(root: TinyMLP) -> None:
    root.blocks[2].linear.bias.data = torch.zeros(7)


def unfreeze(root: TinyMLP) -> None:
    root.head.bias.requires_grad_(False)


CHANGES: list[tuple[Callable[[TinyMLP], None], str]] = [
    (replace, r"blocks.1.linear.weight was replaced after sharding, and would not be trained; change values in place"),
    (tie, "head.weight was replaced after sharding"),
    (delete, "head.bias was removed after sharding"),
    (register, "parameter blocks.0.extra was added after sharding"),
    (replace_module, "head.weight was replaced after sharding"),
    (drop_module, "head.weight was removed after sharding"),
    (add_module, "parameter blocks.3.linear.weight was added after sharding"),
    (set_data, "head.weight.data was set after sharding, which changes nothing"),
    (resize, "blocks.2.linear.bias.data was set after sharding"),
    (unfreeze, "head.bias.requires_grad has become False after sharding"),
]


def check_changes(strategy: int) -> None:
    """Every change raises at the next forward, without communication; also right after a forward."""
    for change, message in CHANGES:
        model = shard(TinyMLP(), Sharding(strategy=strategy, units=(MLPBlock,)))
        model(torch.ones(1, 6)).sum().backward()
        model.finish_grad_sync()
        change(model.module)
        with no_collectives(), pytest.raises(RuntimeError, match=message):
            model(torch.ones(1, 6))


def test_changed_parameters_are_refused_at_the_next_forward(ranks2: RankPool) -> None:
    for strategy in (1, 3):
        ranks2.run(check_changes, strategy)


class Containers(nn.Module):
    """Parts that can change places so that the same things follow one another."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.ParameterDict({"a": nn.Parameter(torch.ones(4)), "b": nn.Parameter(torch.zeros(4))})
        self.first = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, bias=False))
        self.second = nn.Sequential(nn.Linear(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x * self.table["a"]))


def swap(root: Containers) -> None:
    root.table["b"], root.table["a"] = root.table.pop("a"), root.table.pop("b")


def rename(root: Containers) -> None:
    root.table["a"], root.table["c"] = root.table.pop("a"), root.table.pop("b")


def move(root: Containers) -> None:
    moved = root.first[1]
    del root.first[1]
    root.second.insert(0, moved)


def fill(root: Containers) -> None:
    root.first[1].bias = nn.Parameter(torch.zeros(4))


MOVES: list[tuple[Callable[[Containers], None], str]] = [
    (swap, "table.a was replaced"),
    (rename, "table.b was removed"),
    (move, "first.1.weight was removed"),
    (fill, "parameter first.1.bias was added"),
]


def check_moves(shows_unsharded: bool) -> None:
    """Modules that change places raise at the next forward, also while the root shows its whole weights."""
    for change, message in MOVES:
        model = shard(Containers(), Sharding(units=(nn.Sequential,)))
        loss = model(torch.ones(1, 4)).sum()
        if not shows_unsharded:
            loss.backward()
        change(model.module)
        with no_collectives(), pytest.raises(RuntimeError, match=message):
            model(torch.ones(1, 4))


@pytest.mark.parametrize("shows_unsharded", [False, True])
def test_parts_that_have_changed_places_are_refused(ranks2: RankPool, shows_unsharded: bool) -> None:
    ranks2.run(check_moves, shows_unsharded)


def check_late_changes(is_strict: str) -> None:
    """A mistake after the first forwards: found in strict mode, and free without."""
    with mock.patch.dict(os.environ, MEGATRON_FSDP_STRICT=is_strict):
        model = shard(TinyMLP(), Sharding(units=(MLPBlock,)))
    from megatron_fsdp import fully_shard_optimizer

    fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=1.0))  # or else steps are watched for longer
    for _ in range(3):
        model(torch.ones(1, 6))
    entered: list[str] = []

    def note(frame: Any, event: str, _: Any) -> None:
        if event == "call" and "/diagnostics/" in frame.f_code.co_filename:
            entered.append(frame.f_code.co_name)

    sys.setprofile(note)
    try:
        model(torch.ones(1, 6)).sum().backward()
        model.finish_grad_sync()
    finally:
        sys.setprofile(None)
    assert bool(entered) is bool(int(is_strict))
    unfreeze(model.module)
    if entered:
        with no_collectives(), pytest.raises(RuntimeError, match="head.bias.requires_grad has become False"):
            model(torch.ones(1, 6))
    else:
        model(torch.ones(1, 6)).sum().backward()


def test_forwards_after_the_first_are_checked_in_strict_mode_only(ranks2: RankPool) -> None:
    for is_strict in ("0", "1"):
        ranks2.run(check_late_changes, is_strict)


class Uses:
    """A model in strict mode with its optimizer, and what its user may do between forwards."""

    def __init__(self, strategy: int, dtype: torch.dtype) -> None:
        from megatron_fsdp import fully_shard_optimizer

        torch.manual_seed(0)
        module = TinyMLP()
        module.head.weight = module.blocks[0].linear.weight  # tied
        with mock.patch.dict(os.environ, MEGATRON_FSDP_STRICT="1"):
            self.model = shard(module.to(dtype), Sharding(strategy=strategy, units=(MLPBlock,)))
        self.optimizer = fully_shard_optimizer(torch.optim.AdamW(self.model.parameters(), foreach=strategy % 2 == 0))
        self.inputs = torch.ones(1, 6, dtype=dtype)
        self.params = list(self.model.parameters())

    def step(self, **options: bool) -> None:
        self.model(self.inputs).sum().backward()
        self.optimizer.step(**options)
        self.optimizer.zero_grad()

    def install_later(self) -> None:
        self.step(install_optimized_model_weights=False)
        self.model.install_optimized_model_weights()

    def load(self) -> None:
        self.model.load_state_dict(self.model.state_dict())
        whole = {name: param.full_tensor() for name, param in self.model.module.named_parameters()}
        self.model.load_state_dict(whole, strict=False)  # of what is tied it names one

    def look_at_all(self) -> None:
        with self.model.full_params(writeback=False):
            pass

    def write_all(self) -> None:
        with self.model.full_params(), torch.no_grad():
            self.model.module.head.bias.add_(1.0)

    def average(self) -> None:
        kept = [param.detach().to_local().clone() for param in self.params]
        with torch.no_grad():
            for mean, param in zip(kept, self.params, strict=True):
                mean.lerp_(param.to_local(), 0.5)
                param.to_local().copy_(mean)
        self.model.install_optimized_model_weights()

    def evaluate(self) -> None:
        self.model.requires_grad_(False).eval()
        with torch.no_grad():
            self.model(self.inputs)
        self.model.requires_grad_(True).train()

    def recompute(self) -> None:
        checkpoint(self.model, self.inputs, use_reentrant=False).sum().backward()
        self.model.zero_grad()

    def save_state(self) -> None:
        self.optimizer.load_state_dict(self.optimizer.state_dict())

    def attach_parts(self) -> None:
        self.model.module.dropout = nn.Dropout()
        self.model.module.alias = self.model.module.head
        self.model.module.to("cpu")

    def scale_buffers(self) -> None:
        self.model.module.register_buffer("scale", torch.ones(1))
        self.model.module.scale.mul_(2.0)


LEGAL = [value for name, value in vars(Uses).items() if not name.startswith("_")]


def use_legally(strategy: int, dtype: torch.dtype) -> list[str]:
    """Log lines of strict mode while a model is used as it may be."""
    logged: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage())
    logger = logging.getLogger("megatron_fsdp.diagnostics")
    logger.addHandler(handler)
    try:
        uses = Uses(strategy, dtype)
        for use in LEGAL:
            use(uses)
            uses.model(uses.inputs)
    finally:
        logger.removeHandler(handler)
    return logged


def test_no_legal_use_is_taken_for_a_mistake(ranks2: RankPool) -> None:
    for strategy in range(4):
        for dtype in (torch.float32, torch.bfloat16):
            assert ranks2.run(use_legally, strategy, dtype) == [[], []]


def check_harmless() -> None:
    """Values may change in place, parts without parameters come and go, and evaluation may switch gradients off."""
    model = shard(TinyMLP(), Sharding(units=(MLPBlock,)))
    with torch.no_grad():
        model.module.head.bias.add_(1.0)
    model.module.dropout = nn.Dropout()
    model(torch.ones(1, 6))
    del model.module.dropout
    model.module.register_parameter("nothing", None)
    model.requires_grad_(False)
    with torch.no_grad():
        model(torch.ones(1, 6))
    model.requires_grad_(True)
    model(torch.ones(1, 6)).sum().backward()


def test_harmless_changes_are_none(ranks2: RankPool) -> None:
    ranks2.run(check_harmless)


def check_hooks_and_copies() -> None:
    """Hooks that would never run are refused where they are registered, copies that would not work where made."""
    torch.manual_seed(0)
    module = TinyMLP()
    from megatron_fsdp import fully_shard

    model, optimizer = fully_shard(module, torch.optim.SGD(module.parameters()), fsdp_unit_modules=[MLPBlock])
    weight = model.module.blocks[0].linear.weight
    with pytest.raises(NotImplementedError, match=r"register_hook.* of blocks.0.linear.weight .* before sharding"):
        weight.register_hook(print)
    with pytest.raises(NotImplementedError, match="register_post_accumulate_grad_hook.*would never run"):
        weight.register_post_accumulate_grad_hook(print)
    for thing in (model, model.module, model.module.blocks[0], optimizer):
        with pytest.raises(NotImplementedError, match="cannot be deep-copied"):
            copy.deepcopy(thing)
    assert torch.equal(copy.deepcopy(model.state_dict())["module.head.bias"].to_local(), module.head.bias.to_local())
    assert copy.deepcopy(optimizer.state_dict())["param_groups"]


def test_hooks_and_copies_that_cannot_work_are_refused(ranks2: RankPool) -> None:
    ranks2.run(check_hooks_and_copies)


class Tied(nn.Module):
    """Its forward reads the weight of a unit, in several ways of writing it."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.mid = nn.Linear(4, 4)
        self.way = way

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Shape (n,) to (n, 8)."""
        x = self.mid(self.embed(tokens))
        if self.way == "attribute":
            return F.linear(x, self.embed.weight)
        if self.way == "variable":
            weight = self.embed.weight
            return x @ weight.t()
        return F.embedding(tokens, self.embed.weight) @ torch.ones(4, 8) + F.linear(x, self.embed.weight)


WAYS = ("attribute", "variable", "function")


def check_stray_reads(strategy: int) -> None:
    """The error names the parameter and what to do; with root_params the gradients are those of plain torch."""
    for way in WAYS:
        torch.manual_seed(0)
        plain = Tied(way)
        sharding = Sharding(strategy=strategy, units=(nn.Linear, nn.Embedding))
        model = shard(copy.deepcopy(plain), sharding)
        with pytest.raises(RuntimeError, match="DTensor") as caught:
            model(torch.arange(3))
        (note,) = caught.value.__notes__
        assert (
            "outside it: model.embed.weight (unit embed). Pass root_params=[model.embed.weight] to fully_shard" in note
        )
        assert not any(group.plan.gathers_weights and group.is_unsharded for group in groups_of(model))
        module = copy.deepcopy(plain)
        model = shard(module, Sharding(**{**vars(sharding), "options": {"root_params": [module.embed.weight]}}))
        for each in (model, plain):
            each(torch.arange(3)).square().sum().backward()
        model.finish_grad_sync()
        for name, grad in full_grads(model).items():
            torch.testing.assert_close(grad, plain.get_parameter(name).grad)


def groups_of(model: Any) -> list[Any]:
    return model.param_and_grad_buffer.parameter_groups


def test_a_weight_read_outside_its_unit_is_named(ranks2: RankPool) -> None:
    for strategy in (1, 3):
        ranks2.run(check_stray_reads, strategy)


class ReadsALayer(nn.Module):
    """Its forward reads a weight of a layer in a list, or hands on those of all layers."""

    def __init__(self, reads_all: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.reads_all = reads_all

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shape (batch, 4), kept."""
        if self.reads_all:
            first, second = (layer.weight for layer in self.layers)
            return x @ first + x @ second
        weight = self.layers[1].weight
        return x @ weight


def note_of_a_stray_read(reads_all: bool) -> str:
    model = shard(ReadsALayer(reads_all), Sharding(units=(nn.Linear,)))
    with pytest.raises(RuntimeError, match="DTensor") as caught:
        model(torch.ones(1, 4))
    return caught.value.__notes__[0]


def test_a_stray_read_is_spelled_as_python_and_advised_on_if_it_is_certain(ranks2: RankPool) -> None:
    for note in ranks2.run(note_of_a_stray_read, False):
        assert (
            "outside it: model.layers[1].weight (unit layers.1). Pass root_params=[model.layers[1].weight] to" in note
        )
    for note in ranks2.run(note_of_a_stray_read, True):
        one_of = "one of model.layers[0].weight (unit layers.0), model.layers[1].weight (unit layers.1)."
        assert note.endswith(one_of) and "root_params" not in note


class Attending(nn.Module):
    """Attention whose output projection is a Linear that nobody calls."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.last = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shape (batch, sequence, 4), kept."""
        x = self.first(x)
        return self.last(self.attention(x, x, x, need_weights=False)[0])


def check_attention(units: tuple) -> None:
    """Gradients and weights of plain torch after a step."""
    torch.manual_seed(0)
    plain = Attending()
    model = shard(copy.deepcopy(plain), Sharding(units=units))
    for each in (model, plain):
        each(torch.ones(2, 3, 4) / 3).square().sum().backward()
    model.finish_grad_sync()
    for name, grad in full_grads(model).items():
        torch.testing.assert_close(grad, plain.get_parameter(name).grad)
    labels = {param.fqn: unit.label for unit in model._schedule.units for param in unit.params}
    owner = "attention" if nn.MultiheadAttention in units else "(root)"
    assert labels["attention.out_proj.weight"] == labels["attention.in_proj_weight"] == owner
    assert full_weights(model).keys() == dict(plain.named_parameters()).keys()


def test_a_linear_that_is_never_called_joins_its_parents_unit(ranks2: RankPool) -> None:
    for units in (("torch.nn.Linear",), (nn.Linear, nn.MultiheadAttention)):
        ranks2.run(functools.partial(check_attention), units)
