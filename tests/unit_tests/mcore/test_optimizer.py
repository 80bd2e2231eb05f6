"""The optimizer on hand-made sharded parameters against torch on whole ones; no engine involved."""

import types
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from tests.unit_tests.harness.rank_pool import RankPool

#: name -> (shape, rows on each of the two ranks, None for a replica on both)
PARAMS: dict[str, tuple[tuple[int, ...], tuple[int, int] | None]] = {
    "embedding.weight": ((6, 3), (5, 1)),
    "layer.weight": ((4, 3), (4, 0)),
    "layer.bias": ((4,), (1, 3)),
    "norm.weight": ((3,), (0, 3)),
    "replica.weight": ((2, 3), None),
}
STEPS = 3
LR, WEIGHT_DECAY, CLIP = 0.1, 0.05, 0.5


def full_value(name: str, step: int) -> torch.Tensor:
    """A weight (step 0) or the gradient of a step; some elements are exactly zero."""
    shape, _ = PARAMS[name]
    generator = torch.Generator().manual_seed(1000 * step + len(name))
    value = torch.randn(shape, generator=generator)
    if step:
        value.view(-1)[0] = 0.0
    return value


def distribute(full: torch.Tensor, rows: tuple[int, int] | None, mesh) -> DTensor:
    """`full` with `rows[r]` leading rows on rank r."""
    if rows is None:
        return DTensor.from_local(full.clone(), mesh, [Replicate()], run_check=False)
    local = full.split(list(rows))[dist.get_rank()].clone()
    return DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=full.shape, stride=full.stride())


class ShardedToy(torch.nn.Module):
    """Looks like a FullyShardedDataParallel whose gradients come from `full_value`."""

    def __init__(self):
        super().__init__()
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp_cp",))
        self.mesh = mesh
        self.ddp_config = types.SimpleNamespace(megatron_fsdp_use_decoupled_grad=False)
        self.dist_index = types.SimpleNamespace(get_dp_group=mesh.get_group, tp_dim=None)
        self.installs = 0
        for name, (_, rows) in PARAMS.items():
            owner, leaf = name.split(".")
            if not hasattr(self, owner):
                setattr(self, owner, torch.nn.Module())
            param = torch.nn.Parameter(distribute(full_value(name, 0), rows, mesh))
            param.is_embedding_or_output_parameter = owner == "embedding"
            setattr(getattr(self, owner), leaf, param)
        # A tied weight: the same parameter under a second name.
        self.output = torch.nn.Module()
        self.output.weight = self.embedding.weight

    def attach_grads(self, step: int, change: Callable[[torch.Tensor], torch.Tensor] = lambda grad: grad) -> None:
        for name, param in self.named_parameters():
            param.grad = distribute(change(full_value(name, step)), PARAMS[name][1], self.mesh)

    def zero_grad_buffer(self) -> None:
        for param in self.parameters():
            param.grad = None

    def install_optimized_model_weights(self) -> None:
        self.installs += 1

    def full_weights(self) -> dict[str, torch.Tensor]:
        """**Collective.**"""
        return {name: gather(param.detach()) for name, param in self.named_parameters()}


def gather(value: DTensor) -> torch.Tensor:
    """**Collective.** Whole rows in rank order, for any split."""
    if value.placements[0].is_replicate():
        return value.to_local().clone()
    pieces = [None, None]
    dist.all_gather_object(pieces, value.to_local())
    return torch.cat(pieces)


def build(**options):
    from megatron.core.optimizer import OptimizerConfig

    from megatron_fsdp.mcore.optimizer import get_megatron_optimizer

    defaults = {"lr": LR, "min_lr": 0.0, "weight_decay": WEIGHT_DECAY, "clip_grad": CLIP, "log_num_zeros_in_grad": True}
    model = ShardedToy()
    return model, get_megatron_optimizer(OptimizerConfig(**{**defaults, **options}), [model])


def train_sharded(options: dict) -> dict:
    model, optimizer = build(**options)
    records = []
    for step in range(1, STEPS + 1):
        optimizer.zero_grad()
        model.attach_grads(step, lambda grad: grad * optimizer.get_loss_scale())
        success, norm, zeros = optimizer.step()
        records.append((success, float(norm), int(zeros)))
    return {"records": records, "weights": model.full_weights(), "installs": model.installs}


def train_whole(options: dict) -> dict:
    """The same steps by torch alone."""
    params = {name: torch.nn.Parameter(full_value(name, 0)) for name in PARAMS}
    decoupled_lr = options.get("decoupled_lr")
    groups = []
    for name, param in params.items():
        lr = decoupled_lr if decoupled_lr and name.startswith("embedding") else LR
        groups.append({"params": [param], "lr": lr, "weight_decay": WEIGHT_DECAY if param.dim() > 1 else 0.0})
    if options.get("optimizer") == "sgd":
        optimizer = torch.optim.SGD(groups, momentum=0.9)
    elif options.get("decoupled_weight_decay", True):
        optimizer = torch.optim.AdamW(groups)
    else:
        optimizer = torch.optim.Adam(groups)
    records = []
    for step in range(1, STEPS + 1):
        for name, param in params.items():
            param.grad = full_value(name, step)
        zeros = sum(int((param.grad == 0).sum()) for param in params.values())
        norm = torch.nn.utils.clip_grad_norm_(params.values(), options.get("clip_grad", CLIP) or float("inf"))
        optimizer.step()
        records.append((True, float(norm), zeros))
    return {"records": records, "weights": {name: param.detach() for name, param in params.items()}}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"bf16": True, "params_dtype": torch.bfloat16},
        {"decoupled_weight_decay": False},
        {"optimizer": "sgd"},
        {"decoupled_lr": 0.01, "decoupled_min_lr": 0.0},
        {"loss_scale": 8.0, "bf16": True},
        {"fp16": True, "initial_loss_scale": 64.0},
    ],
    ids=lambda options: "-".join(options) or "adamw",
)
def test_steps_equal_torch_on_whole_tensors(mcore_ranks2: RankPool, options: dict) -> None:
    reference = train_whole(options)
    for result in mcore_ranks2.run(train_sharded, options):
        for (success, norm, zeros), (_, expected_norm, expected_zeros) in zip(result["records"], reference["records"]):
            assert success
            assert norm == pytest.approx(expected_norm, rel=1e-5)
            assert zeros == expected_zeros
        for name, weight in result["weights"].items():
            torch.testing.assert_close(weight, reference["weights"][name], rtol=1e-5, atol=1e-6)
        assert result["installs"] == STEPS


def norm_without_clipping() -> tuple:
    model, optimizer = build(clip_grad=0.0)
    model.attach_grads(1)
    norm = optimizer.get_grad_norm()
    before = {name: gather(param.grad) for name, param in model.named_parameters()}
    optimizer.step()
    after = {name: gather(param.grad) for name, param in model.named_parameters()}
    return float(norm), all(torch.equal(before[name], after[name]) for name in before)


def test_without_clipping_the_gradients_stay_as_they_are(mcore_ranks2: RankPool) -> None:
    expected = torch.cat([full_value(name, 1).flatten() for name in PARAMS]).norm()
    for norm, is_unchanged in mcore_ranks2.run(norm_without_clipping):
        assert norm == pytest.approx(float(expected), rel=1e-6)
        assert is_unchanged


def clip_what_is_not_finite(value: float) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The norm, and whole gradients clipped by it, where rank 1 alone has `value` in one of its rows."""
    model, optimizer = build()
    model.attach_grads(1)
    if dist.get_rank() == 1:
        model.norm.weight.grad.to_local()[0] = value
    norm = optimizer.clip_grad_norm(CLIP)
    return norm, {name: gather(param.grad) for name, param in model.named_parameters()}


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_norms_that_are_not_finite_clip_as_in_torch(mcore_ranks2: RankPool, value: float) -> None:
    params = {name: torch.nn.Parameter(full_value(name, 0)) for name in PARAMS}
    for name, param in params.items():
        param.grad = full_value(name, 1)
    params["norm.weight"].grad[0] = value
    expected = torch.nn.utils.clip_grad_norm_(params.values(), CLIP)
    for norm, grads in mcore_ranks2.run(clip_what_is_not_finite, value):
        torch.testing.assert_close(norm, expected, rtol=0, atol=0, equal_nan=True)
        for name, grad in grads.items():
            torch.testing.assert_close(grad, params[name].grad, rtol=0, atol=0, equal_nan=True)


def overflow_on_one_rank() -> dict:
    model, optimizer = build(fp16=True, initial_loss_scale=1024.0, hysteresis=1)
    before = model.full_weights()
    model.attach_grads(1)
    if dist.get_rank() == 1:
        model.norm.weight.grad.to_local()[0] = float("inf")  # rows that rank 0 does not have
    outcome = optimizer.step()
    after = model.full_weights()
    return {
        "outcome": outcome,
        "is_unchanged": all(torch.equal(before[name], after[name]) for name in before),
        "scale": optimizer.get_loss_scale().item(),
        "installs": model.installs,
    }


def test_an_overflow_on_one_rank_skips_the_step_on_all(mcore_ranks2: RankPool) -> None:
    for result in mcore_ranks2.run(overflow_on_one_rank):
        assert result == {"outcome": (False, None, None), "is_unchanged": True, "scale": 512.0, "installs": 0}


def groups_and_schedule() -> dict:
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    model, optimizer = build(decoupled_lr=0.5, min_lr=None)
    names = {param: name for name, param in model.named_parameters()}
    built = {
        names[param]: (group["lr"], group["weight_decay"])
        for group in optimizer.param_groups
        for param in group["params"]
    }
    OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=LR,
        min_lr=0.0,
        lr_warmup_steps=0,
        lr_decay_steps=10,
        lr_decay_style="linear",
        start_wd=WEIGHT_DECAY,
        end_wd=WEIGHT_DECAY,
        wd_incr_steps=10,
        wd_incr_style="constant",
    ).step(5)
    scheduled = {names[param]: group["lr"] for group in optimizer.param_groups for param in group["params"]}
    return {"built": built, "scheduled": scheduled}


def test_groups_hold_without_a_scheduler_and_obey_one(mcore_ranks2: RankPool) -> None:
    for result in mcore_ranks2.run(groups_and_schedule):
        assert result["built"] == {
            "embedding.weight": (0.5, WEIGHT_DECAY),
            "layer.weight": (LR, WEIGHT_DECAY),
            "layer.bias": (LR, 0.0),
            "norm.weight": (LR, 0.0),
            "replica.weight": (LR, WEIGHT_DECAY),
        }
        assert result["scheduled"]["embedding.weight"] == pytest.approx(0.25)
        assert result["scheduled"]["layer.bias"] == pytest.approx(LR / 2)


def resume(options: dict, by_name: bool) -> float:
    """The largest weight difference between training on and training on from a saved state."""

    def steps(model: ShardedToy, optimizer, first: int, last: int) -> None:
        for step in range(first, last + 1):
            optimizer.zero_grad()
            model.attach_grads(step)
            optimizer.step()

    model, optimizer = build(**options)
    steps(model, optimizer, 1, 2)
    optimizer.param_groups[0]["lr"] = LR / 3
    saved = optimizer.fqn_state_dict() if by_name else optimizer.state_dict()
    saved = copy_tensors(saved)
    weights = {name: param.to_local().clone() for name, param in model.named_parameters()}
    steps(model, optimizer, 3, 4)

    other, fresh = build(**options)
    with torch.no_grad():
        for name, param in other.named_parameters():
            param.to_local().copy_(weights[name])
    (fresh.load_fqn_state_dict if by_name else fresh.load_state_dict)(saved)
    steps(other, fresh, 3, 4)
    expected, came = model.full_weights(), other.full_weights()
    return max(float((came[name] - expected[name]).abs().max()) for name in expected)


def copy_tensors(tree):
    if isinstance(tree, dict):
        return {key: copy_tensors(value) for key, value in tree.items()}
    return tree.detach().clone() if isinstance(tree, torch.Tensor) else tree


@pytest.mark.parametrize("by_name", [True, False], ids=["by_name", "by_index"])
@pytest.mark.parametrize(
    "options", [{}, {"optimizer": "sgd"}, {"fp16": True, "initial_loss_scale": 1.0}], ids=["adamw", "sgd", "fp16"]
)
def test_a_loaded_state_continues_exactly(mcore_ranks2: RankPool, options: dict, by_name: bool) -> None:
    assert mcore_ranks2.run(resume, options, by_name) == [0.0, 0.0]


def state_by_name() -> dict:
    model, optimizer = build()
    state = optimizer.fqn_state_dict()
    entry = state["state"]["layer.weight"]
    return {
        "parts": sorted(state),
        "fqns": sorted(state["state"]),
        "entry": {key: type(value).__name__ for key, value in entry.items()},
        "meta": sorted(state["param_to_group_meta"]["layer.weight"]),
        "is_unchanged": all(torch.equal(weight, full_value(name, 0)) for name, weight in model.full_weights().items()),
        "steps": float(entry["step"]),
    }


def test_state_by_name_exists_before_the_first_step(mcore_ranks2: RankPool) -> None:
    for result in mcore_ranks2.run(state_by_name):
        assert result["parts"] == ["param_to_group_meta", "state"]
        assert result["fqns"] == sorted(PARAMS)
        assert result["entry"] == {"step": "Tensor", "exp_avg": "DTensor", "exp_avg_sq": "DTensor"}
        assert {"lr", "betas", "eps", "weight_decay", "wd_mult", "max_lr", "min_lr", "is_expert_parallel"} <= set(
            result["meta"]
        )
        assert "fused" not in result["meta"]
        assert result["is_unchanged"] and result["steps"] == 0.0


def load_broken(how: str) -> None:
    _, optimizer = build()
    state = copy_tensors(optimizer.fqn_state_dict())
    if how == "missing parameter":
        del state["state"]["layer.bias"]
    elif how == "missing tensor":
        del state["state"]["layer.bias"]["exp_avg"]
    else:
        state["param_to_group_meta"]["layer.bias"]["lr"] = 7.0
    optimizer.load_fqn_state_dict(state)


@pytest.mark.parametrize(
    ("how", "match"),
    [
        ("missing parameter", "'layer.bias'.*another model"),
        ("missing tensor", "'layer.bias'.*exp_avg"),
        ("differing options", r"different \['lr'\]"),
    ],
)
def test_a_foreign_state_is_refused(mcore_ranks2: RankPool, how: str, match: str) -> None:
    mcore_ranks2.run_expecting(ValueError, match, load_broken, how)


def refuse(options: dict, chunks: int = 1) -> None:
    from megatron.core.optimizer import OptimizerConfig

    from megatron_fsdp.mcore.optimizer import get_megatron_optimizer

    config = OptimizerConfig(lr=LR)
    for name, value in options.items():
        setattr(config, name, value)
    get_megatron_optimizer(config, [ShardedToy()] * chunks)


@pytest.mark.parametrize(
    ("options", "chunks"),
    [
        ({"use_precision_aware_optimizer": True}, 1),
        ({"optimizer_cpu_offload": True}, 1),
        ({"overlap_param_gather_with_optimizer_step": True}, 1),
        ({"optimizer": "muon"}, 1),
        ({}, 2),
    ],
)
def test_what_would_be_ignored_is_refused(mcore_ranks2: RankPool, options: dict, chunks: int) -> None:
    mcore_ranks2.run_expecting(NotImplementedError, "optimizer|supported|chunk", refuse, options, chunks)


def test_a_missing_learning_rate_is_named(mcore_ranks2: RankPool) -> None:
    mcore_ranks2.run_expecting(ValueError, "OptimizerConfig.lr is None", refuse, {"lr": None})
