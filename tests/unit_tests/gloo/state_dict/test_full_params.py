"""`full_params` and `full_state_dict`: exact whole weights, in and out, under every strategy."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from megatron_fsdp import fsdp_no_shard, fully_shard_optimizer
from tests.unit_tests.harness.communication import no_collectives
from tests.unit_tests.harness.models import TransformerBlock, freeze
from tests.unit_tests.harness.rank_pool import RankPool
from tests.unit_tests.harness.sharded import Sharding, assert_resting, full_weights, shard

LAYOUTS = [(0, None), (1, None), (2, None), (3, None)]
HYBRID = [(3, 0), (3, 1), (1, 0)]


class Odd(nn.Module):
    """Blocks as units; a tied, a frozen, a marked, a 0-D and a one-row parameter, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 4)
        self.blocks = nn.ModuleList(TransformerBlock(4, 1) for _ in range(2))
        self.head = nn.Linear(4, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.row = nn.Parameter(torch.full((1, 4), 0.25))
        self.register_buffer("shift", torch.arange(4.0))
        freeze(self, "blocks.1.norm1")
        fsdp_no_shard(self.blocks[0].proj)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Shape (batch, sequence) to (batch, sequence, 11)."""
        x = self.embedding(tokens) * self.scale + self.row + self.shift
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def tokens() -> torch.Tensor:
    return torch.arange(6).view(2, 3)


@torch.no_grad()
def output_of(model: nn.Module) -> torch.Tensor:
    return model(tokens())


def built(strategy: int, outer: int | None, dtype: torch.dtype = torch.float32) -> tuple[Any, Odd]:
    """The sharded model after one step, and an unsharded one with other weights."""
    torch.manual_seed(0)
    model = shard(Odd().to(dtype), Sharding(strategy=strategy, outer=outer, units=(TransformerBlock,)))
    optimizer = fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.125))
    model(tokens()).float().square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, Odd().to(dtype)


def check_reading(cases: list[tuple], dtype: torch.dtype) -> None:
    """Inside, everything is plain, whole and exactly the main weights; afterwards everything is as before."""
    for strategy, outer in cases:
        model, bare = built(strategy, outer, dtype)
        expected, output = full_weights(model), output_of(model)
        with model.full_params(writeback=False):
            shown = dict(model.named_parameters())
            assert list(shown) == ["module." + name for name, _ in bare.named_parameters()]
            assert model.module.head.weight is model.module.embedding.weight is shown["module.embedding.weight"]
            for name, param in model.module.named_parameters():
                assert type(param) is nn.Parameter and not isinstance(param, DTensor)
                frozen = name.startswith("blocks.1.norm1")
                assert param.dtype is (dtype if frozen else torch.float32) and param.requires_grad is not frozen
                assert torch.equal(param, expected[name]), name
            whole = copy.deepcopy(model.module.state_dict())
            torch.nn.init.zeros_(model.module.scale)
        assert_resting(model)
        assert torch.equal(output_of(model), output)
        bare.load_state_dict(whole)
        assert torch.equal(bare(tokens()), output)


def check_writing(cases: list[tuple], dtype: torch.dtype) -> None:
    """Written values count from the next forward on, and training goes on from them."""
    for strategy, outer in cases:
        model, bare = built(strategy, outer, dtype)
        pending = model(tokens())
        with model.full_params(), torch.no_grad():
            for number, param in enumerate(model.module.parameters()):
                param.copy_(torch.arange(param.numel()).view(param.shape) % 7 / 8 + number / 64)
            written = {name: param.clone() for name, param in model.module.named_parameters()}
        assert_resting(model)
        for name, weight in full_weights(model).items():
            assert torch.equal(weight, written[name]), name
        bare.load_state_dict({**bare.state_dict(), **written})
        assert torch.equal(model(tokens()), bare(tokens()))
        model(tokens()).float().sum().backward()
        with pytest.raises(RuntimeError, match="have changed since its forward"):
            pending.float().sum().backward()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_whole_parameters_are_the_main_weights(ranks3: RankPool, ranks4: RankPool, dtype: torch.dtype) -> None:
    ranks3.run(check_reading, LAYOUTS, dtype)
    ranks4.run(check_reading, HYBRID, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_written_is_installed(ranks3: RankPool, ranks4: RankPool, dtype: torch.dtype) -> None:
    ranks3.run(check_writing, LAYOUTS, dtype)
    ranks4.run(check_writing, HYBRID, dtype)


def check_failures(strategy: int) -> None:
    """After any exception inside, the weights are what they were and the model runs."""
    model, _ = built(strategy, None)
    expected, output = full_weights(model), output_of(model)

    def spoil(action: Any) -> None:
        with model.full_params(), torch.no_grad():
            model.module.row.zero_()
            action()

    def replace() -> None:
        model.module.row = nn.Parameter(torch.zeros(1, 4))

    def resize() -> None:
        model.module.row.data = torch.zeros(2, 4)

    actions = [
        (lambda: 1 / 0, ZeroDivisionError, "division"),
        (replace, ValueError, "row was replaced inside full_params.*copy_"),
        (resize, ValueError, r"row has become \(2, 4\) of torch.float32 .* expected \(1, 4\)"),
        (lambda: model.full_params().__enter__(), RuntimeError, r"full_params\(\) inside full_params"),
        (lambda: model.full_state_dict(), RuntimeError, r"full_state_dict\(\) inside full_params"),
        (lambda: model(tokens()), RuntimeError, "a forward inside full_params"),
        (lambda: model.module.blocks[0](torch.ones(1, 2, 4)), RuntimeError, "a forward inside full_params"),
        (lambda: model.install_optimized_model_weights(), RuntimeError, "inside full_params.*leave it first"),
        (lambda: model.load_state_dict(model.state_dict()), RuntimeError, "load_state_dict.* inside full_params"),
    ]
    for action, error, message in actions:
        with pytest.raises(error, match=message):
            spoil(action)
        assert_resting(model)
        assert all(torch.equal(weight, expected[name]) for name, weight in full_weights(model).items())
    assert torch.equal(output_of(model), output)


def test_an_exception_inside_writes_nothing(ranks2: RankPool) -> None:
    for strategy in (1, 3):
        ranks2.run(check_failures, strategy)


class Asking(TransformerBlock):
    """Asks for whole parameters in the middle of a forward or a backward."""

    where = ""
    model: list = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shape kept."""
        if self.where == "forward":
            with no_collectives():
                self.model[0].full_params().__enter__()
        if self.where == "backward":
            x.register_hook(lambda grad: self.model[0].full_state_dict())
        return super().forward(x)


def check_wrong_moments() -> None:
    """Refused while the model runs, allowed between a forward and its backward, and after one that raised."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 4), Asking(4, 1), nn.Linear(4, 4))
    model = shard(module, Sharding(strategy=3, units=(Asking, nn.Linear)))
    Asking.model = [model]
    for Asking.where in ("forward", "backward"):
        with pytest.raises(RuntimeError, match="inside the model's forward or backward"):
            model(torch.ones(1, 2, 4)).sum().backward()
        if Asking.where == "backward":
            assert isinstance(model.full_state_dict(), dict)  # to save what there is, before anything is forgotten
            with pytest.raises(RuntimeError, match="inside the model's forward or backward"):
                model(torch.ones(1, 2, 4)).sum().backward()
        model.zero_grad()
        assert_resting(model)
    Asking.where = ""
    loss = model(torch.ones(1, 2, 4)).sum()
    with model.full_params(writeback=False):
        pass
    assert isinstance(model.full_state_dict(), dict)
    loss.backward()
    model.finish_grad_sync()
    assert all(param.grad is not None for param in model.parameters())
    Asking.model = []


def test_whole_parameters_are_refused_while_the_model_runs(ranks2: RankPool) -> None:
    ranks2.run(check_wrong_moments)


class Allocations(torch.utils._python_dispatch.TorchDispatchMode):
    """Counts new storages of at least so many bytes."""

    def __init__(self, nbytes: int) -> None:
        super().__init__()
        self.nbytes = nbytes
        self.storages: dict[int, torch.UntypedStorage] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        before = {arg.untyped_storage()._cdata for arg in args if type(arg) is torch.Tensor}
        if type(result) is torch.Tensor and result.untyped_storage().nbytes() >= self.nbytes:
            storage = result.untyped_storage()
            if storage._cdata not in before:
                self.storages.setdefault(storage._cdata, storage)
        return result


def check_state_dict(cases: list[tuple], dtype: torch.dtype, wanted: torch.dtype | None) -> None:
    """The bare model's names and order, exact values, and one whole parameter at a time on one rank."""
    for strategy, outer in cases:
        model, bare = built(strategy, outer, dtype)
        expected, output = full_weights(model), output_of(model)
        state = model.full_state_dict(wanted)
        assert_resting(model)
        if dist.get_rank():
            assert state == {}
            continue
        assert list(state) == list(bare.state_dict()) and state._metadata == bare.state_dict()._metadata
        assert state["head.weight"] is state["embedding.weight"]
        for name, weight in expected.items():
            assert torch.equal(state[name], weight.to(wanted or weight.dtype)) and state[name].dtype is (
                wanted or weight.dtype
            )
        state["shift"].zero_()  # a copy
        bare.load_state_dict({**state, "shift": torch.arange(4.0, dtype=dtype)})
        assert torch.equal(bare(tokens()), output)


def test_the_first_rank_gets_the_whole_state_dict(ranks3: RankPool, ranks4: RankPool) -> None:
    for dtype, wanted in ((torch.float32, None), (torch.bfloat16, None), (torch.bfloat16, torch.bfloat16)):
        ranks3.run(check_state_dict, LAYOUTS, dtype, wanted)
        ranks4.run(check_state_dict, HYBRID, dtype, wanted)


def check_peak(outer: int | None) -> None:
    """Storages as large as one parameter are made only on the first rank, one for each."""
    module = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(3)))
    model = shard(module, Sharding(strategy=3, outer=outer, units=(nn.Linear,)))
    with Allocations(64 * 64 * 4) as seen:
        state = model.full_state_dict()
    assert len(seen.storages) == (3 if dist.get_rank() == 0 else 0)
    assert len(state) == (3 if dist.get_rank() == 0 else 0)


def test_no_rank_but_the_first_holds_a_whole_parameter(ranks2: RankPool, ranks4: RankPool) -> None:
    ranks2.run(check_peak, None)
    ranks4.run(check_peak, 1)
