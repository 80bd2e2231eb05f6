"""From the meta device to shards: initialised as ever, one unit at a time, with its tags, or refused by name."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron_fsdp.state.param_tags import PARAM_TAGS
from tests.unit_tests.harness.communication import no_collectives
from tests.unit_tests.harness.mistakes import Mistake, assert_each_raises
from tests.unit_tests.harness.models import (
    OddModel,
    OddShapes,
    TinyMLP,
    TinyTransformer,
    TransformerBlock,
    token_batches,
    token_loss,
)
from tests.unit_tests.harness.sharded import Sharding, flat_mesh, shard

META = {"init_model_with_meta_device": True}


def on_meta(kind, *args, **kwargs):
    with torch.device("meta"):
        return kind(*args, **kwargs)


def shard_meta(module, *units, strategy=3, is_poisoned=True):
    return shard(module, Sharding(strategy=strategy, units=units, is_poisoned=is_poisoned, options=META))


def full(model):
    """Whole tensors of the state dict. **Collective.**"""
    state = model.module.state_dict()
    return {key: value.full_tensor() if hasattr(value, "full_tensor") else value for key, value in state.items()}


class Attention(nn.MultiheadAttention):
    """Its reset changes what its child has drawn."""

    def __init__(self):
        super().__init__(8, 2)


class Rotary(nn.Module):
    """Buffers only; its reset knows their values."""

    def __init__(self):
        super().__init__()
        self.register_buffer("frequency", torch.empty(4))
        self.register_buffer("mask", torch.empty(3, dtype=torch.bool))
        self.reset_parameters()

    def reset_parameters(self):
        self.frequency = 1.0 / torch.arange(1, 5, device=self.frequency.device)
        self.mask.copy_(torch.tensor([True, False, True]))


class Replacing(nn.Module):
    """Its reset makes a new Parameter."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(5, 3))
        self.reset_parameters()

    def reset_parameters(self):
        self.weight = nn.Parameter(torch.randn(5, 3, device=self.weight.device))


class Underscored(nn.Module):
    """Spells its reset as torch's transformers do."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(4, 3))
        self.norm = nn.BatchNorm1d(3)
        self._reset_parameters()

    def _reset_parameters(self):
        nn.init.normal_(self.weight)


class Everything(nn.Module):
    """One of each, in an order in which constructors draw random numbers."""

    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList(kind() for kind in (TinyMLP, OddModel, Attention, Replacing, Underscored, Rotary))


def init_both_ways(seed):
    torch.manual_seed(seed)
    expected = dict(Everything().state_dict())
    torch.manual_seed(seed)
    return full(shard_meta(on_meta(Everything))), expected


def test_one_unit_on_one_rank_gets_the_values_of_ordinary_initialisation(ranks1):
    ((came, expected),) = ranks1.run(init_both_ways, 3)
    torch.testing.assert_close(came, expected, rtol=0, atol=0)


def init_on_ranks_with_different_seeds():
    torch.manual_seed(dist.get_rank())
    model = shard_meta(on_meta(OddModel), OddShapes)
    return full(model), any(param.is_meta for param in model.parameters())


def test_all_ranks_start_from_the_first_one_s_values(ranks3):
    results = ranks3.run(init_on_ranks_with_different_seeds)
    for weights, is_left_behind in results:
        assert not is_left_behind
        torch.testing.assert_close(weights, results[0][0], rtol=0, atol=0)
        assert torch.equal(weights["blocks.1.gain"], torch.ones(7))
        assert 0.05 < weights["blocks.0.cube"].std() < 0.15


def train_from_meta(strategy):
    model = shard_meta(on_meta(TinyTransformer, is_tied=True), TransformerBlock, strategy=strategy)
    tokens, targets = token_batches(1, 1, 1)[0][0][0]
    loss = token_loss(model(tokens), targets)
    loss.backward()
    model.finish_grad_sync()
    return loss.item(), all(param.grad.full_tensor().isfinite().all() for param in model.parameters())


@pytest.mark.parametrize("strategy", [1, 2, 3])
def test_a_model_from_meta_trains(ranks2, strategy):
    for loss, is_finite in ranks2.run(train_from_meta, strategy):
        assert 0 < loss < 10 and is_finite


# -- memory -----------------------------------------------------------------------------------------------------------


def full_bytes(module):
    """Bytes of all storages behind the module's parameters, as they are now."""
    storages = [param.untyped_storage() for param in module.parameters() if not param.is_meta]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def watch_memory():
    """Bytes of full parameters alive after each unit is initialised, beside each unit's own."""
    from megatron_fsdp.build import build_units

    module, alive, own = on_meta(TinyMLP, width=16, depth=5), [], []
    materialize = build_units.materialize

    def watched(plan, device):
        materialize(plan, device)
        alive.append(full_bytes(module))
        own.append(sum(param.unsharded.numel() * 4 for param in plan.params))

    with mock.patch.object(build_units, "materialize", watched):
        model = shard_meta(module, "tests.unit_tests.harness.models.MLPBlock", is_poisoned=False)
    left = [param.unsharded.untyped_storage().nbytes() for unit in model._schedule.units for param in unit.params]
    return alive, own, left


def test_never_more_than_one_unit_is_whole(ranks2):
    for alive, own, left in ranks2.run(watch_memory):
        assert len(alive) == 6 and alive == own
        assert not any(left)


# -- what must survive ------------------------------------------------------------------------------------------------


def follow_tags():
    from megatron_fsdp import fsdp_no_shard

    module = on_meta(nn.Sequential, nn.Linear(3, 3), nn.Linear(3, 3), Replacing())
    module[0].weight.requires_grad_(False)
    for tag in PARAM_TAGS:
        if tag not in ("allreduce", "_fsdp_no_shard"):
            setattr(module[0].weight, tag, f"value of {tag}")
            setattr(module[2].weight, tag, f"value of {tag}")
    fsdp_no_shard(module[1])
    model = shard_meta(module)
    tags = [tag for tag in PARAM_TAGS if tag not in ("allreduce", "_fsdp_no_shard")]
    weights = [model.module[0].weight, model.module[2].weight]
    kept = [[getattr(weight, tag, None) == f"value of {tag}" for tag in tags] for weight in weights]
    groups = model.param_and_grad_buffer.parameter_groups
    return kept, weights[0].requires_grad, [group.spec.is_replicated for group in groups], len(full(model))


def test_tags_and_frozenness_survive(ranks2):
    for kept, requires_grad, replicated, count in ranks2.run(follow_tags):
        assert all(map(all, kept)) and not requires_grad
        assert sorted(replicated) == [False, False, True] and count == 5


class TiedAcrossUnits(nn.Module):
    """The weight of a unit is tied to one outside; the unit has a bias of its own."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(5, 4)
        self.unit = nn.Linear(4, 5)
        self.unit.weight = self.embedding.weight

    def forward(self, tokens):
        return self.unit(self.embedding(tokens))


def init_tied():
    torch.manual_seed(5)
    expected = TiedAcrossUnits()
    torch.manual_seed(5)
    model = shard_meta(on_meta(TiedAcrossUnits), nn.Linear, is_poisoned=False)
    weights = full(model)
    is_shared = model.module.unit.weight is model.module.embedding.weight
    output = model(torch.arange(5)).detach()
    return weights, is_shared, output, expected.embedding.weight.detach()


def test_a_tied_parameter_is_initialised_by_its_first_owner_and_once(ranks1, ranks2):
    """And a module whose parameters belong to two units is reset for each without touching the other's."""
    for weights, is_shared, output, embedding in [*ranks1.run(init_tied), *ranks2.run(init_tied)]:
        assert is_shared and torch.equal(weights["embedding.weight"], embedding)
        assert torch.equal(weights["unit.weight"], embedding)
        assert weights["unit.bias"].abs().max() <= 0.5 and weights["unit.bias"].std() > 0
        torch.testing.assert_close(output, embedding @ embedding.T + weights["unit.bias"])


def shard_a_partly_real_model():
    module = nn.Sequential(nn.Linear(3, 3), on_meta(nn.Linear, 3, 3))
    module[0].bias = on_meta(nn.Linear, 3, 3).bias
    before = module[0].weight.detach().clone()
    weights = full(shard_meta(module))
    return torch.equal(weights["0.weight"], before), bool(weights["1.weight"].std() > 0)


def test_what_is_real_already_keeps_its_values(ranks2):
    assert ranks2.run(shard_a_partly_real_model) == [(True, True)] * 2


# -- mistakes ---------------------------------------------------------------------------------------------------------


class Helpless(nn.Module):
    """Cannot initialise what it owns."""

    def __init__(self, has_buffer=False):
        super().__init__()
        if has_buffer:
            self.register_buffer("scale", torch.ones(3))
        else:
            self.weight = nn.Parameter(torch.ones(3))


def shard_helpless(kind):
    flat_mesh()
    with no_collectives():
        if kind == "no reset":
            shard_meta(on_meta(lambda: nn.Sequential(nn.Linear(3, 3), Helpless(), nn.ModuleDict({"x": Helpless()}))))
        elif kind == "no reset of a buffer":
            shard_meta(on_meta(lambda: nn.Sequential(nn.Linear(3, 3), Helpless(has_buffer=True))))
        elif kind == "not asked for":
            shard(on_meta(nn.Linear, 3, 3), Sharding())
        elif kind == "buffer not asked for":
            shard(nn.Sequential(nn.Linear(3, 3), on_meta(Rotary)), Sharding())
        else:
            shard_meta(on_meta(nn.Linear, 3, 3), strategy=0)


MISTAKES = [
    ("no reset", r"needs a reset_parameters\(\) method .* missing on Helpless \(1\), Helpless \(2.x\)"),
    ("no reset of a buffer", r"missing on Helpless \(1\)"),
    ("not asked for", "weight is on the meta device; pass init_model_with_meta_device=True"),
    ("buffer not asked for", "1.frequency is on the meta device; pass init_model_with_meta_device=True"),
    ("nothing sharded", "zero_dp_strategy='no_shard' keeps the whole model on each"),
]


def test_mistakes_are_named_on_every_rank_before_anything_is_communicated(ranks2):
    assert_each_raises(ranks2, [Mistake(shard_helpless, (kind,), ValueError, message) for kind, message in MISTAKES])
