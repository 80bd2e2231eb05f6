"""A group of three tensors, without a model, through unshard, reduce, finalize and install under every plan."""

import dataclasses
import zlib

import pytest
import torch
import torch.distributed as dist

from megatron_fsdp.machine.allocator import StoragePool
from megatron_fsdp.machine.collectives import Axis, GradScale
from megatron_fsdp.plan.layout import plan_layout
from megatron_fsdp.plan.strategy import REPLICATED, RESTING, plan_for
from megatron_fsdp.state.codec import WeightCodec
from megatron_fsdp.state.group_spec import GroupSpec
from megatron_fsdp.state.main_grad import GradState
from megatron_fsdp.state.param_group import ParamGroup
from tests.unit_tests.gloo.build.test_flat_buffer import axes
from tests.unit_tests.harness.communication import collectives_heard, no_collectives
from tests.unit_tests.harness.poison_pool import PoisonPool

SHAPES = [(5, 4), (3,), (1, 6)]
PLANS = [(inner, "no_shard") for inner in RESTING]


@dataclasses.dataclass(frozen=True)
class Dtypes:
    compute: torch.dtype = torch.float32
    main: torch.dtype = torch.float32
    grad: torch.dtype = torch.float32
    comm: torch.dtype = torch.float32


def integers(*seed):
    generator = torch.Generator().manual_seed(zlib.crc32(repr(seed).encode()))
    return [torch.randint(-3, 4, shape, generator=generator).float() for shape in SHAPES]


def make_group(inner, outer, dtypes=Dtypes(), *, requires_grad=True, pool=None):
    both = axes()
    params = tuple(
        torch.nn.Parameter(value.to(dtypes.compute), requires_grad=requires_grad) for value in integers("weights")
    )
    spec = GroupSpec(
        name="group",
        params=params,
        fqns=("a", "b", "c"),
        layout=plan_layout(SHAPES, both[0].size * both[1].size),
        plan=plan_for(inner, outer, inner_size=both[1].size, outer_size=both[0].size),
        axes=both,
        codec=WeightCodec(),
        main_dtype=dtypes.main,
        grad_dtype=dtypes.grad,
        comm_dtype=dtypes.comm,
        requires_grad=requires_grad,
        is_expert=False,
        is_replicated=False,
        device=torch.device("cpu"),
        atom_rows=(1,) * len(SHAPES),
    )
    group = ParamGroup(spec, pool or PoisonPool())
    group.load_initial(lambda full: full)
    return group


def microbatch(group, step, number):
    """One forward and backward, without the model: reads the weights and leaves gradients on the parameters."""
    group.unshard()
    weights = [param.detach().clone() for param in group.params]
    grads = integers("grad", step, number, dist.get_rank())
    for param, grad in zip(group.params, grads, strict=True):
        param.grad = grad.to(param.dtype)
    group.reshard()
    return weights


def train(inner, outer, dtypes, steps=3, microbatches=2, finalize_each=False):
    """Weights seen by every forward; the last forward comes after the last step."""
    group = make_group(inner, outer, dtypes)
    scale = GradScale(1 / dist.get_world_size(), average=False)
    seen = []
    for step in range(steps):
        group.main_grad.reset()
        for number in range(microbatches):
            seen.append(microbatch(group, step, number))
            staged = group.main_grad.collect()
            if staged is not None:
                group.main_grad.reduce(staged, scale)
            if finalize_each or number == microbatches - 1:
                group.main_grad.finalize(scale)
        for slot in range(len(SHAPES)):
            grad = group.main_grad.final.view(slot)
            group.main_weight_buffer.view(slot).sub_(grad.to(dtypes.main))
        group.install()
    group.unshard()
    return [*seen, [param.detach().clone() for param in group.params]]


def expected(world, steps=3, microbatches=2):
    weights = integers("weights")
    seen = []
    for step in range(steps):
        seen += [weights] * microbatches
        for number in range(microbatches):
            per_rank = [integers("grad", step, number, rank) for rank in range(world)]
            weights = [w - torch.stack(grads).sum(0) / world for w, *grads in zip(weights, *per_rank, strict=True)]
    return [*seen, weights]


def assert_trained(by_rank, world, dtype=torch.float32):
    reference = expected(world)
    for seen in by_rank:
        assert len(seen) == len(reference)
        for ours, theirs in zip(seen, reference, strict=True):
            assert all(a.dtype == dtype and torch.equal(a.float(), b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("finalize_each", [False, True], ids=["reduce once", "reduce twice"])
@pytest.mark.parametrize(("inner", "outer"), PLANS)
def test_a_group_trains_like_a_mean_over_two_ranks(ranks2, inner, outer, finalize_each):
    assert_trained(ranks2.run(train, inner, outer, Dtypes(), 3, 2, finalize_each), 2)


@pytest.mark.parametrize(("inner", "outer"), [*PLANS, *((inner, "optim") for inner in list(RESTING)[1:])])
def test_a_group_trains_like_a_mean_over_two_axes(ranks4, inner, outer):
    assert_trained(ranks4.run(train, inner, outer, Dtypes()), 4)


@pytest.mark.parametrize(("inner", "outer"), PLANS)
def test_dtypes_meet_where_they_should(ranks2, inner, outer):
    """Small integers and halves are exact in bf16 too."""
    mixed = Dtypes(compute=torch.bfloat16, main=torch.float32, grad=torch.float32, comm=torch.bfloat16)
    assert_trained(ranks2.run(train, inner, outer, mixed), 2, torch.bfloat16)


def what_is_shared(inner, dtypes):
    group = make_group(inner, "no_shard", dtypes, pool=StoragePool())
    main, weight = group.main_weight_buffer, group.model_weight_buffer
    shares = main.data.untyped_storage().data_ptr() == weight.data.untyped_storage().data_ptr()
    return shares, group.persistent_nbytes + group.grad_nbytes, group.gathered_nbytes, group.layout.size


@pytest.mark.parametrize("inner", RESTING)
def test_equal_dtypes_share_one_storage_and_bytes_are_counted_once(ranks2, inner):
    plan = plan_for(inner)
    parts = [1 if pair.inner.value != "S" else 2 for pair in (plan.weight, plan.main_grad, plan.main_weight)]
    for shares, persistent, gathered, size in ranks2.run(what_is_shared, inner, Dtypes()):
        assert shares and persistent == 4 * size // parts[0] + 4 * size // parts[1]
        assert gathered == (4 * size if plan.gathers_weights else 0)
    mixed = Dtypes(compute=torch.bfloat16)
    for shares, persistent, _, size in ranks2.run(what_is_shared, inner, mixed):
        # Where the compute weight lies as the main weight does, gathers cast it on their way.
        nbytes = (0 if plan.weight == plan.main_weight != REPLICATED else 2, 4, 4)
        assert not shares and persistent == sum(n * size // part for n, part in zip(nbytes, parts, strict=True))


def watch_transitions(inner):
    """Communication of each transition, and the storage that is left between them."""
    group = make_group(inner, "no_shard", pool=StoragePool())
    with no_collectives():
        group.install()
        group.reshard()
    resting = [param.untyped_storage().nbytes() for param in group.params]
    with collectives_heard() as heard:
        group.unshard()
    with no_collectives():
        group.unshard()
        assert not group.needs_gather
    gathered = [param.untyped_storage().nbytes() for param in group.params]
    storages = [param.data_ptr() for param in group.params]
    group.reshard()
    group.unshard()
    return resting, heard, gathered, len(storages)


@pytest.mark.parametrize("inner", RESTING)
def test_only_what_the_plan_says_communicates_and_storage_goes_back(ranks2, inner):
    plan = plan_for(inner)
    for resting, heard, gathered, _ in ranks2.run(watch_transitions, inner):
        assert len(heard) == int(plan.gathers_weights or plan.gathers_after_install)
        assert all(gathered) and all(not size for size in resting) == plan.gathers_weights


def frozen_group(inner):
    group = make_group(inner, "no_shard", Dtypes(), requires_grad=False)
    group.unshard()
    weights = [param.detach().clone() for param in group.params]
    return group.main_grad is None, group.main_grad_buffer is None, weights


def test_a_frozen_group_has_no_gradient(ranks2):
    for has_none, has_no_buffer, weights in ranks2.run(frozen_group, "optim_grads_params"):
        assert has_none and has_no_buffer
        assert all(torch.equal(ours, whole) for ours, whole in zip(weights, integers("weights"), strict=True))


def lonely_gradients():
    """A rank whose parameters got no gradient takes part with zeros; states change as documented."""
    group = make_group("optim_grads_params", "no_shard")
    states = [group.main_grad.state]
    if dist.get_rank() == 0:
        for param, grad in zip(group.params[:2], integers("grad"), strict=False):
            param.grad = grad.clone()
    staged = group.main_grad.collect()
    group.main_grad.reduce(staged, GradScale(1.0, average=False))
    states.append(group.main_grad.state)
    group.main_grad.finalize(GradScale(1.0, average=False))
    group.main_grad.scale(2.0)
    states.append(group.main_grad.state)
    rows = [(group.main_grad.final.rows(s).first, group.main_grad.final.view(s).clone()) for s in range(len(SHAPES))]
    return states, rows, [param.grad for param in group.params]


def test_missing_gradients_count_as_zero(ranks2):
    grads = [*integers("grad")[:2], torch.zeros(SHAPES[2])]
    for states, rows, left in ranks2.run(lonely_gradients):
        assert states == [GradState.EMPTY, GradState.ACCUMULATING, GradState.FINAL]
        assert left == [None] * 3
        for whole, (first, mine) in zip(grads, rows, strict=True):
            assert torch.equal(mine, 2 * whole[first : first + len(mine)])


def axes_here():
    return [(axis.rank, axis.size) for axis in axes()], Axis.of(dist.group.WORLD).rank


def test_four_ranks_are_two_by_two(ranks4):
    assert [places for places, _ in ranks4.run(axes_here)] == [[(r // 2, 2), (r % 2, 2)] for r in range(4)]
