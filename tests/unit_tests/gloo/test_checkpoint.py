"""State dicts and torch's distributed checkpoints: across ranks and strategies, strict, and without a collective."""

import copy
import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import state_dict as torch_state_dict
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor import Shard as TorchShard

from tests.unit_tests.harness.communication import no_collectives
from tests.unit_tests.harness.mistakes import Mistake, assert_each_raises
from tests.unit_tests.harness.models import OddShapes
from tests.unit_tests.harness.reference import DtypePolicy
from tests.unit_tests.harness.sharded import Sharding, shard

SAMPLES, WIDTH = 12, 7


class Assortment(nn.Module):
    """Tied, frozen, replicated, empty, zero-dimensional and odd parameters, buffers, and extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, WIDTH)
        self.block = OddShapes()
        self.frozen = nn.Linear(WIDTH, WIDTH)
        self.frozen.requires_grad_(False)
        self.whole = nn.Linear(WIDTH, WIDTH)
        self.empty = nn.Parameter(torch.empty(0, 4))
        self.gate = nn.Parameter(torch.tensor(0.5))
        self.head = nn.Linear(WIDTH, 5, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("shift", torch.randn(WIDTH))
        self.register_buffer("seen", torch.tensor(0))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens) + self.shift.to(self.gate.dtype)
        x = self.block(x) + self.gate * self.whole(self.frozen(x))
        return self.head(x).float()


@dataclasses.dataclass(frozen=True)
class Setup:
    """A world, and how the model is sharded in it."""

    world: int
    strategy: int
    outer: int | None = None
    dtype: torch.dtype = torch.float32


def build(seed: int, dtype: torch.dtype = torch.float32) -> nn.Module:
    from megatron_fsdp import fsdp_no_shard

    torch.manual_seed(seed)
    module = Assortment().to(dtype)
    fsdp_no_shard(module.whole)
    return module


def sharded(setup: Setup, seed: int = 0, **options: Any) -> nn.Module:
    sharding = Sharding(
        strategy=setup.strategy,
        outer=setup.outer,
        units=(OddShapes,),
        options={"sync_model_each_microbatch": True, **options},
    )
    return shard(build(seed, setup.dtype), sharding, DtypePolicy())


def optimizer_of(model: nn.Module, lr: float = 0.02) -> torch.optim.Optimizer:
    from megatron_fsdp import fully_shard_optimizer

    trained = [param for param in model.parameters() if param.requires_grad]
    groups = [{"params": trained[:3], "lr": 3 * lr}, {"params": trained[3:]}]
    return fully_shard_optimizer(torch.optim.AdamW(groups, lr=lr))


def batches(steps: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """This rank's samples of global batches that do not depend on the number of ranks."""
    generator = torch.Generator().manual_seed(5)
    mine = slice(dist.get_rank(), None, dist.get_world_size())
    for _ in range(steps):
        tokens, targets = (torch.randint(5, (SAMPLES,), generator=generator) for _ in range(2))
        yield tokens[mine], targets[mine]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, data: Any) -> list[float]:
    losses = []
    for tokens, targets in data:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(tokens), targets)
        loss.backward()
        optimizer.step()
        dist.all_reduce(loss := loss.detach())
        losses.append(loss.item() / dist.get_world_size())
    return losses


def full(values: dict[Any, Any]) -> dict[Any, Any]:
    """Whole plain tensors. **Collective.**"""
    return {
        key: value.full_tensor() if isinstance(value, DTensor) else copy.deepcopy(value)
        for key, value in values.items()
    }


def everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    state = optimizer.state_dict()
    flat = {(index, key): value for index, entry in state["state"].items() for key, value in entry.items()}
    return {"model": full(model.state_dict()), "optimizer": full(flat), "groups": copy.deepcopy(state["param_groups"])}


def both(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """As the README's example writes it."""
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


def save(setup: Setup, folder: str) -> tuple[dict[str, Any], list[float], dict[str, Any]]:
    """What was saved after two steps, and two more steps without stopping."""
    model = sharded(setup)
    optimizer = optimizer_of(model)
    data = list(batches(4))
    train(model, optimizer, data[:2])
    model.module.seen.fill_(2)
    with no_collectives():
        state = both(model, optimizer)
    dcp.save(state, checkpoint_id=folder)
    saved = everything(model, optimizer)
    losses = train(model, optimizer, data[2:])
    return saved, losses, everything(model, optimizer)


def load(setup: Setup, folder: str) -> tuple[dict[str, Any], list[float], dict[str, Any]]:
    """What was loaded into another model, and the next two steps."""
    model = sharded(setup, seed=77)
    optimizer = optimizer_of(model, lr=0.5)
    with no_collectives():
        state = both(model, optimizer)
    dcp.load(state_dict=state, checkpoint_id=folder)
    with no_collectives():
        model.load_state_dict(state["model"], strict=False)
        optimizer.load_state_dict(state["optimizer"])
    loaded = everything(model, optimizer)
    losses = train(model, optimizer, list(batches(4))[2:])
    return loaded, losses, everything(model, optimizer)


def assert_same(came: Any, expected: Any, *, tolerance: float = 0.0, where: str = "") -> None:
    """Equal structures; tensors within `tolerance`, exactly by default."""
    if isinstance(expected, torch.Tensor):
        torch.testing.assert_close(came, expected, rtol=tolerance, atol=tolerance, msg=lambda text: f"{where}: {text}")
    elif isinstance(expected, dict):
        assert came.keys() == expected.keys(), where
        for key, value in expected.items():
            assert_same(came[key], value, tolerance=tolerance, where=f"{where}.{key}")
    elif isinstance(expected, (list, tuple)):
        assert len(came) == len(expected), where
        for index, value in enumerate(expected):
            assert_same(came[index], value, tolerance=tolerance, where=f"{where}[{index}]")
    else:
        assert came == pytest.approx(expected, rel=tolerance) if isinstance(expected, float) else came == expected, (
            where
        )


BF16 = torch.bfloat16


@pytest.mark.parametrize(
    ("saver", "loader"),
    [
        (Setup(2, 3), Setup(3, 3)),
        (Setup(3, 2), Setup(2, 0)),
        (Setup(4, 3, outer=1), Setup(1, 1)),
        (Setup(1, 3), Setup(4, 3, outer=0)),
        (Setup(3, 3), Setup(3, 3)),
        (Setup(2, 1, dtype=BF16), Setup(2, 1, dtype=BF16)),
        (Setup(2, 0), Setup(4, 3, outer=1)),
    ],
    ids=lambda setup: f"{setup.world} ranks strategy {setup.strategy} outer {setup.outer}",
)
def test_a_checkpoint_continues_anywhere_as_if_it_had_never_stopped(rank_pools, tmp_path, saver, loader):
    saved, losses, final = rank_pools[saver.world].run(save, saver, str(tmp_path))[0]
    # The same ranks do the same arithmetic; others sum in another order.
    tolerance = 0.0 if saver == loader else 1e-5
    for loaded, next_losses, end in rank_pools[loader.world].run(load, loader, str(tmp_path)):
        assert_same(loaded, saved, where="loaded")
        assert_same(next_losses, losses, tolerance=tolerance, where="losses")
        assert_same(end, final, tolerance=tolerance, where="end")


def save_early_and_late(folder: str) -> tuple[list[float], list[float]]:
    """Losses of a run, and of one resumed from its checkpoint before the first step."""
    setup = Setup(2, 3)
    model = sharded(setup)
    optimizer = optimizer_of(model)
    dcp.save(both(model, optimizer), checkpoint_id=folder)
    losses = train(model, optimizer, batches(3))
    resumed = sharded(setup, seed=9)
    optimizer = optimizer_of(resumed)
    train(resumed, optimizer, batches(1))
    state = both(resumed, optimizer)
    dcp.load(state, checkpoint_id=folder)
    resumed.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return losses, train(resumed, optimizer, batches(3))


def test_a_checkpoint_before_the_first_step_is_the_beginning(ranks2, tmp_path):
    for losses, resumed in ranks2.run(save_early_and_late, str(tmp_path)):
        assert losses == resumed


def save_in_the_background(folder: str) -> bool:
    model = sharded(Setup(2, 3))
    optimizer = optimizer_of(model)
    train(model, optimizer, batches(1))
    before = everything(model, optimizer)
    pending = dcp.async_save(both(model, optimizer), checkpoint_id=folder)
    pending.result()
    train(model, optimizer, batches(1))
    state = both(model, optimizer)
    dcp.load(state, checkpoint_id=folder)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    assert_same(everything(model, optimizer), before)
    return True


def test_a_checkpoint_may_be_written_in_the_background(ranks2, tmp_path):
    assert all(ranks2.run(save_in_the_background, str(tmp_path)))


# -- without a file ---------------------------------------------------------------------------------------------------


def load_full_tensors(setup: Setup) -> tuple[torch.Tensor, torch.Tensor]:
    """The output after loading a plain state dict, beside the plain model's."""
    plain, model = build(3, setup.dtype), sharded(setup, seed=0)
    tokens = torch.arange(5)
    model(tokens)  # leaves weights gathered where they rest whole
    with no_collectives():
        model.module.load_state_dict(plain.state_dict())
    return model(tokens), plain(tokens)


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@pytest.mark.parametrize(
    ("world", "strategy", "outer"), [(2, 0, None), (3, 1, None), (2, 2, None), (3, 3, None), (4, 3, 1)]
)
def test_loading_makes_compute_weights_current_at_once(rank_pools, world, strategy, outer, dtype):
    for came, expected in rank_pools[world].run(load_full_tensors, Setup(world, strategy, outer, dtype)):
        assert torch.equal(came, expected)


def load_a_file_before_sharding(path: str) -> bool:
    """An ordinary checkpoint, written by torch.save and loaded before sharding."""
    if dist.get_rank() == 0:
        torch.save(build(3).state_dict(), path)
    dist.barrier()
    module = build(0)
    module.load_state_dict(torch.load(path))
    model = shard(module, Sharding(units=(OddShapes,)))
    assert_same(full(model.module.state_dict()), dict(build(3).state_dict()))
    return True


def test_an_ordinary_checkpoint_loads_before_sharding(ranks2, tmp_path):
    assert all(ranks2.run(load_a_file_before_sharding, str(tmp_path / "model.pt")))


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
