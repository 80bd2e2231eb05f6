"""State dicts: their names and shards, strict and lenient loading, snapshots, and torch's own helpers."""

import copy
import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import state_dict as torch_state_dict
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor import Shard as TorchShard

from tests.unit_tests.harness.checkpoints import (
    Setup,
    assert_same,
    batches,
    build,
    everything,
    full,
    optimizer_of,
    sharded,
    train,
)
from tests.unit_tests.harness.communication import no_collectives
from tests.unit_tests.harness.mistakes import Mistake, assert_each_raises
from tests.unit_tests.harness.sharded import Sharding, shard


def look_at_keys() -> dict[str, Any]:
    model = sharded(Setup(2, 3))
    mine, inner = model.state_dict(), model.module.state_dict()
    tied = [inner[key].to_local().data_ptr() for key in ("embedding.weight", "head.weight")]
    kept = model.state_dict(keep_vars=True)
    return {
        "names": [key.removeprefix("module.") for key in mine] == list(inner) == list(build(0).state_dict()),
        "prefix": all(key.startswith("module.") for key in mine),
        "tied": tied[0] == tied[1],
        "kinds": {key: type(value).__name__ for key, value in inner.items()},
        "live": all(kept["module." + name] is param for name, param in model.module.named_parameters()),
        "shares": mine["module.gate"].to_local().data_ptr() == model.module.gate.to_local().data_ptr(),
        "frozen": model.module.frozen.weight.requires_grad,
    }


def test_a_state_dict_has_the_model_s_names_and_live_shards(ranks2):
    for seen in ranks2.run(look_at_keys):
        assert seen["names"] and seen["prefix"] and seen["tied"] and seen["live"] and seen["shares"]
        assert not seen["frozen"]
        plain = {key for key, kind in seen["kinds"].items() if kind == "Tensor"}
        assert plain == {"shift", "seen"} and set(seen["kinds"].values()) == {"Tensor", "DTensor"}


def load_wrong(what: str, strict: bool = True) -> Any:
    model = sharded(Setup(2, 3))
    state = dict(build(1).state_dict())
    if what == "missing":
        del state["block.cube"], state["shift"]
    elif what == "unexpected":
        state["block.extra"] = torch.zeros(2)
    elif what == "misshapen":
        state["block.cube"] = torch.zeros(3, 5, 8)
    elif what == "a shard":
        state["block.cube"] = model.state_dict()["module.block.cube"].to_local()[:, :2]
    elif what == "assign":
        return model.module.load_state_dict(state, assign=True)
    elif what == "another cut":
        state["block.cube"] = distribute_tensor(state["block.cube"], model.dist_index.dp_mesh(), [TorchShard(1)])
    elif what == "strangers":
        return model.load_state_dict({f"encoder.{key}": value for key, value in state.items()}, strict=strict)
    elif what == "missing in the bare model":
        del state["block.cube"]
        return model.load_state_dict(state, strict=strict)
    return model.module.load_state_dict(state, strict=strict)


MISFITS = [
    ("missing", RuntimeError, r'Missing key\(s\) in state_dict: "shift", "block.cube"'),
    ("unexpected", RuntimeError, r'Unexpected key\(s\) in state_dict: "block.extra"'),
    ("misshapen", RuntimeError, r"size mismatch for block.cube: .*\[3, 5, 8\].*\[3, 5, 7\]"),
    ("a shard", RuntimeError, r"size mismatch for block.cube"),
    ("assign", ValueError, r"assign=True\) would detach sharded parameters.*use assign=False"),
    ("another cut", ValueError, r"block.cube of shape \(3, 5, 7\) has .*give full tensors"),
    ("strangers", RuntimeError, r'Missing key\(s\) in state_dict: "module\.'),
    ("missing in the bare model", RuntimeError, r'Missing key\(s\) in state_dict: "block.cube"'),
]


def test_a_state_dict_that_does_not_fit_is_an_error_on_every_rank(ranks2):
    assert_each_raises(ranks2, [Mistake(load_wrong, (what,), *error) for what, *error in MISFITS])


def load_leniently() -> tuple[list[str], list[str]]:
    missing = load_wrong("missing", strict=False)
    unexpected = load_wrong("unexpected", strict=False)
    return missing.missing_keys + unexpected.missing_keys, missing.unexpected_keys + unexpected.unexpected_keys


def test_without_strict_the_differences_are_returned(ranks2):
    for missing, unexpected in ranks2.run(load_leniently):
        assert (sorted(missing), unexpected) == (["block.cube", "shift"], ["block.extra"])


class Nested(nn.Module):
    """Has a child called `module`, whose names are its own behind `module.`."""

    def __init__(self, depth: int = 2) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3))
        self.register_buffer("shift", torch.randn(2))
        if depth:
            self.module = Nested(depth - 1)


def load_bare_and_own_names() -> None:
    plain = {"assortment": build(1), "nested": Nested(), "in a child": nn.ModuleDict({"module": Nested()})}
    models = {"assortment": sharded(Setup(2, 3))}
    for name, build_it in (("nested", Nested), ("in a child", lambda: nn.ModuleDict({"module": Nested()}))):
        models[name] = shard(build_it(), Sharding(strategy=3))
    for name, model in models.items():
        dist.broadcast_object_list(holder := [dict(plain[name].state_dict())], src=0)
        for number, prefix in enumerate(("", "module.")):
            state = {key: value + number for key, value in holder[0].items()}
            result = model.load_state_dict({prefix + key: value for key, value in state.items()})
            assert result == ([], []), (name, prefix)
            assert_same(full(model.module.state_dict()), state)
        first, *others = holder[0]
        lacks = {key: holder[0][key] for key in others} | {"strange": torch.zeros(1)}
        assert model.load_state_dict(lacks, strict=False) == ([first], ["strange"]), name


def test_a_whole_state_dict_loads_under_the_bare_model_s_names_and_the_sharded_one_s(ranks2):
    ranks2.run(load_bare_and_own_names)


def whole_of_a_state_dict_that_is_gone() -> tuple[torch.Tensor, torch.Tensor]:
    model = shard(nn.Sequential(nn.Linear(3, 3)), Sharding(strategy=3))
    return model.state_dict()["module.0.weight"].full_tensor(), next(iter(model.parameters())).full_tensor()


def test_a_tensor_of_a_state_dict_that_nobody_keeps_is_gathered(ranks2):
    for came, expected in ranks2.run(whole_of_a_state_dict_that_is_gone):
        assert torch.equal(came, expected)


class Stateful(nn.Linear):
    """Keeps something that torch DCP cannot store."""

    def get_extra_state(self) -> Any:
        return {"object": 1}

    def set_extra_state(self, state: Any) -> None:
        self.restored = state


def look_at_extra_state(preprocess: bool) -> tuple[bool, Any]:
    model = shard(
        nn.Sequential(Stateful(3, 3)), Sharding(strategy=3, options={"preproc_state_dict_for_dcp_ckpt": preprocess})
    )
    state = model.state_dict()
    has_chunks = hasattr(state["module.0.weight"], "__create_write_items__") and "__create_chunk_list__" in vars(
        state["module.0.weight"]
    )
    assert state["module.0.weight"].full_tensor().shape == (3, 3)
    missing = model.load_state_dict(state).missing_keys
    return has_chunks, [key for key in state if key.endswith("_extra_state")], missing


def test_preprocessing_takes_out_what_dcp_cannot_store_and_can_be_switched_off(ranks2):
    assert ranks2.run(look_at_extra_state, True) == [(True, [], [])] * 2
    assert ranks2.run(look_at_extra_state, False) == [(False, ["module.0._extra_state"], [])] * 2


def save_in_the_middle() -> bool:
    """A state dict taken inside forward and backward holds shards, and training goes on as without it."""
    results = []
    for asks in (False, True):
        model = sharded(Setup(2, 3))
        optimizer = optimizer_of(model)
        seen: list[bool] = []

        def ask(*_: Any, model: Any = model, seen: list = seen) -> None:
            state = model.state_dict()
            seen.append(all(isinstance(v, DTensor) for key, v in state.items() if key.endswith(("weight", "cube"))))

        if asks:
            model.module.block.register_forward_hook(ask)
            model.module.block.coprime.register_full_backward_hook(ask)
        results.append(train(model, optimizer, batches(2)))
        assert all(seen) and bool(seen) == asks
    return results[0] == results[1]


def test_a_state_dict_in_the_middle_of_a_step_disturbs_nothing(ranks2):
    assert all(ranks2.run(save_in_the_middle))


def copies_and_clones() -> bool:
    """Snapshots of a state dict load back."""
    model = sharded(Setup(3, 3))
    before = full(model.state_dict())
    state = model.state_dict()
    snapshots = [{key: value.clone() for key, value in state.items()}, copy.deepcopy(dict(state)), full(state)]
    for snapshot in snapshots:
        train(model, optimizer_of(model), batches(1))
        with no_collectives():
            model.load_state_dict(snapshot)
        assert_same(full(model.state_dict()), before)
    return True


def test_snapshots_load_back(ranks3):
    assert all(ranks3.run(copies_and_clones))


# -- torch's helpers --------------------------------------------------------------------------------------------------


def use_torch_helpers(strategy: int) -> bool:
    setup = Setup(3, strategy)
    model = sharded(setup)
    optimizer = optimizer_of(model)
    train(model, optimizer, batches(1))
    before = everything(model, optimizer)
    whole = torch_state_dict.StateDictOptions(full_state_dict=True)
    assert_same(torch_state_dict.get_model_state_dict(model, options=whole), before["model"])
    gathered = torch_state_dict.get_optimizer_state_dict(model, optimizer, options=whole)["state"]
    moments = [value for (_, key), value in before["optimizer"].items() if key == "exp_avg"]
    assert_same([entry["exp_avg"] for entry in gathered.values()], moments)
    state = torch_state_dict.get_state_dict(model, optimizer)
    snapshot = copy.deepcopy(state)
    train(model, optimizer, batches(2))
    torch_state_dict.set_state_dict(model, optimizer, model_state_dict=snapshot[0], optim_state_dict=snapshot[1])
    assert_same(everything(model, optimizer)["model"], before["model"])
    assert_same(everything(model, optimizer)["optimizer"], before["optimizer"])
    return True


def ask_torch_for_state(is_automatic: bool) -> bool:
    """Asks before the first step, and then trains as a model that was not asked."""
    records = []
    for is_asked in (False, True):
        model = sharded(Setup(3, 3))
        optimizer = optimizer_of(model)
        model.set_model_auto_sync(is_automatic)
        if is_asked:
            state = torch_state_dict.get_optimizer_state_dict(model, optimizer)
            assert len(state["state"]) == sum(param.requires_grad for param in model.parameters())
            assert all(
                not entry["exp_avg"].to_local().any() and entry["step"] == 0 for entry in state["state"].values()
            )
        train(model, optimizer, batches(2))
        records.append(everything(model, optimizer))
    assert_same(records[0]["model"], records[1]["model"])
    assert_same(records[0]["optimizer"], records[1]["optimizer"])
    return True


@pytest.mark.parametrize("is_automatic", [False, True])
def test_torch_may_ask_for_optimizer_state_before_the_first_step(ranks2, is_automatic):
    assert all(ranks2.run(ask_torch_for_state, is_automatic))


@pytest.mark.parametrize("strategy", [0, 3])
def test_torch_s_own_helpers_read_and_write_our_state(ranks3, strategy):
    assert all(ranks3.run(use_torch_helpers, strategy))


def set_full_state_through_torch() -> None:
    model = sharded(Setup(3, 3))
    state = {f"module.{key}": value for key, value in build(1).state_dict().items()}
    torch_state_dict.set_model_state_dict(model, state, options=torch_state_dict.StateDictOptions(full_state_dict=True))
    assert_same(full(model.module.state_dict()), dict(build(1).state_dict()))


def test_helpers_that_assume_even_shards_are_refused(ranks3):
    """torch cuts the full tensors evenly, which our layouts do not."""
    ranks3.run_expecting(ValueError, "give full tensors, or load through", set_full_state_through_torch)


def test_the_matrix_covers_what_it_should():
    kinds = {name for name, _ in build(0).named_parameters()}
    assert {"empty", "gate", "frozen.weight", "whole.bias", "embedding.weight"} <= kinds
    assert len(list(itertools.chain(build(0).buffers()))) == 2
