"""Experts that are spread over ranks train, on a mesh of their own, as in one process that has all of them."""

import dataclasses
import functools
import itertools
import math

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from tests.unit_tests.gloo.tools.test_using_fsdp import blocks
from tests.unit_tests.harness.mixture import Expert, Mixture, MixtureBlock, Topology, expert_mesh, renamed
from tests.unit_tests.harness.models import SignSGD, dot_loss, integer_batches
from tests.unit_tests.harness.rank_pool import REPO_ROOT, RankPool, results_agree
from tests.unit_tests.harness.reference import Recipe, StepRecord, assert_same_training, train_reference
from tests.unit_tests.harness.sharded import RankStep, Sharding, assembled, backward, build_sharded, pieces

WIDTH, STEPS = 4, 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """Model and options of training."""

    topology: Topology = Topology()
    strategy: int = 3
    outer: int | str = 0
    microbatches: int = 1
    is_mean: bool = True
    averages: bool = False
    skips: bool = False
    units: tuple[type, ...] = (MixtureBlock,)
    norm_type: float = 2.0

    @property
    def recipe(self) -> Recipe:
        """For both sides."""
        return Recipe(
            build_optimizer=lambda module: SignSGD(module.parameters()),
            loss_fn=dot_loss,
            is_mean_over_ranks=self.is_mean,
            reduces_each_microbatch=self.strategy in (2, 3),
        )


def train(case: Case) -> tuple[list[RankStep], list[float]]:
    """This rank's pieces under the names of the whole model, and the gradients' norm in each step."""
    place = case.topology.place()
    options = {**case.topology.options(), "average_in_collective": case.averages}
    if case.topology.outer > 1:
        options["outer_dp_sharding_strategy"] = case.outer
    sharding = Sharding(strategy=case.strategy, units=case.units, options=options)
    build = functools.partial(Mixture, place, skips=case.skips)
    model, optimizer = build_sharded(build, case.recipe, sharding)
    steps, norms = [], []
    for microbatches in integer_batches(STEPS, case.microbatches, dist.get_world_size(), width=WIDTH):
        optimizer.zero_grad()
        losses = []
        for number, ranks in enumerate(microbatches):
            model.is_last_microbatch = number == len(microbatches) - 1
            losses.append(backward(model, case.recipe, ranks[dist.get_rank()]))
        model.finish_grad_sync()
        grads = pieces(model, "grad")
        norms.append(float(model.clip_grad_norm_(1e-3, case.norm_type)))  # steps follow signs alone
        optimizer.step()
        steps.append(RankStep(losses, grads, pieces(model, "data")))
    return renamed(steps, place), norms


def train_all(cases: list[Case]) -> list:
    return [train(case) for case in cases]


@functools.cache
def reference(ranks: int, microbatches: int, is_mean: bool) -> list[StepRecord]:
    recipe = Case(is_mean=is_mean).recipe
    return train_reference(Mixture, integer_batches(STEPS, microbatches, ranks, width=WIDTH), recipe)


def check(pool: RankPool, cases: list[Case]) -> None:
    runs = pool.run(train_all, cases)
    for case, *by_rank in zip(cases, *runs, strict=True):
        expected = reference(pool.world_size, case.microbatches, case.is_mean)
        try:
            came = assembled([steps for steps, _ in by_rank], expected)
            assert_same_training(came, expected, is_exact=True)
            for number, record in enumerate(expected):
                flat = torch.cat([grad.flatten() for grad in record.grads.values()])
                norm = torch.linalg.vector_norm(flat, case.norm_type).item()
                (came_norm,) = {norms[number] for _, norms in by_rank}
                assert came_norm == pytest.approx(norm, rel=1e-5)
        except AssertionError as error:
            raise AssertionError(f"{case} on {pool.world_size} ranks: {error}") from error


UNIT_LISTS = [(MixtureBlock,), (), (MixtureBlock, Expert)]
HOW = [
    {"is_mean": True, "averages": False},
    {"is_mean": True, "averages": True},
    {"is_mean": False, "averages": False},
]


@pytest.mark.parametrize(("ranks", "ep"), [(2, 2), (4, 2), (4, 4)])
def test_every_strategy_trains_all_experts(rank_pools: dict[int, RankPool], ranks: int, ep: int) -> None:
    check(
        rank_pools[ranks],
        [
            Case(topology=Topology(ep=ep), strategy=strategy, microbatches=microbatches, **how)
            for strategy, microbatches, (number, how) in itertools.product(range(4), (1, 3), enumerate(HOW))
            if (number + strategy + microbatches + ep) % (2 if ranks == 2 else 4) == 0
        ],
    )


@pytest.mark.parametrize("spans_outer", [False, True], ids=["inside", "across"])
def test_hybrid_sharding_reduces_experts_over_their_own_outer_ranks(ranks4: RankPool, spans_outer: bool) -> None:
    topology = Topology(outer=2, spans_outer=spans_outer)
    rows = [(0, 0), (1, 0), (2, 0), (3, 0), (3, "optim")]
    check(
        ranks4,
        [
            Case(topology=topology, strategy=inner, outer=outer, microbatches=microbatches, **how)
            for number, (inner, outer) in enumerate(rows)
            for microbatches, how in ((1, HOW[number % 3]), (3, HOW[(number + 1) % 3]))
        ],
    )


def test_experts_without_rows_take_part(ranks4: RankPool) -> None:
    check(ranks4, [Case(strategy=strategy, skips=True, units=units) for strategy in (1, 3) for units in UNIT_LISTS[:2]])


def test_experts_may_be_units_of_their_own_and_norms_of_any_kind(ranks4: RankPool) -> None:
    norms = [Case(norm_type=math.inf), Case(norm_type=1.0, strategy=0), Case(norm_type=math.inf, strategy=0)]
    check(ranks4, [*norms, *(Case(strategy=strategy, units=UNIT_LISTS[2]) for strategy in (1, 3))])


def build(topology: Topology, strategy: int) -> tuple:
    place = topology.place()
    recipe = Recipe(build_optimizer=lambda m: torch.optim.AdamW(m.parameters(), foreach=True), loss_fn=dot_loss)
    sharding = Sharding(strategy=strategy, units=(MixtureBlock,), options=topology.options())
    return *build_sharded(functools.partial(Mixture, place), recipe, sharding), place


def save_and_load(folder: str, strategy: int) -> bool:
    """Trained experts, saved under their global numbers and read into a model on other meshes."""
    states = []
    for seed, topology in enumerate((Topology(), Topology(ep=4, outer=1))):
        model, optimizer, place = build(topology, strategy if seed == 0 else 3)
        inputs, target = integer_batches(1, 1, dist.get_world_size(), width=WIDTH)[0][0][dist.get_rank()]
        for _ in range(1 + seed):  # AdamW's foreach takes parameters of two meshes
            dot_loss(model(inputs), target).backward()
            optimizer.step()
        whole = {place.global_name(name): value for name, value in model.module.state_dict().items()}
        if seed == 0:
            dcp.save({"model": whole}, checkpoint_id=folder)
        else:
            dcp.load({"model": whole}, checkpoint_id=folder)
            model.install_optimized_model_weights()
        tensors = {key: t.full_tensor() if hasattr(t, "full_tensor") else t for key, t in whole.items()}
        states.append(_everyones(tensors))
    return results_agree(states)


def _everyones(tensors: dict) -> dict:
    found: list = [None] * dist.get_world_size()
    dist.all_gather_object(found, tensors)
    merged: dict = {}
    for part in found:
        for key, tensor in part.items():
            assert torch.equal(merged.setdefault(key, tensor), tensor), f"{key} differs between ranks"
    return dict(sorted(merged.items()))


@pytest.mark.parametrize("strategy", [0, 3])
def test_experts_are_saved_under_global_numbers(ranks4: RankPool, tmp_path, strategy: int) -> None:
    assert ranks4.run(save_and_load, str(tmp_path / "checkpoint"), strategy) == [True] * 4


def save_and_load_by_the_page(path: str) -> bool:
    """As `save_and_load`, by the code in the documentation."""
    saving, loading = (block for block in blocks(REPO_ROOT / "docs/topologies.md") if "with_global_numbers(" in block)
    names: dict = {"path": path}
    states = []
    for seed, (topology, code) in enumerate(((Topology(), saving), (Topology(ep=4), loading))):
        model, _, place = build(topology, 3)
        for param in model.parameters() if seed == 0 else ():
            param.detach().to_local().add_(1)
        names |= {"model": model, "experts": expert_mesh(topology), "experts_per_rank": len(place.held)}
        exec(code, names)  # noqa: S102  (our own documentation)
        states.append(
            _everyones(
                {
                    place.global_name(name): value.full_tensor() if hasattr(value, "full_tensor") else value
                    for name, value in model.module.state_dict().items()
                }
            )
        )
    return results_agree(states)


def test_the_page_saves_and_loads_experts(ranks4: RankPool, tmp_path) -> None:
    assert ranks4.run(save_and_load_by_the_page, str(tmp_path / "checkpoint")) == [True] * 4


def save_local_names(folder: str, kind: str) -> None:
    model, optimizer, _ = build(Topology(), 3)
    if kind == "model":
        state = {"model": model.module.state_dict()}
    else:
        inputs, target = integer_batches(1, 1, dist.get_world_size(), width=WIDTH)[0][0][dist.get_rank()]
        dot_loss(model(inputs), target).backward()
        optimizer.step()
        state = {"optimizer": get_optimizer_state_dict(model.module, optimizer)}
    dcp.save(state, checkpoint_id=folder)


@pytest.mark.parametrize("kind", ["model", "optimizer"])
def test_saving_different_experts_under_one_name_is_an_error(ranks2: RankPool, tmp_path, kind: str) -> None:
    message = "is the name of other experts on other ranks"
    ranks2.run_expecting(CheckpointException, message, save_local_names, str(tmp_path / "checkpoint"), kind)
