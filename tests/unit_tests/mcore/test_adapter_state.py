"""State dicts, checkpoints, and what the adapter makes of its arguments."""

import copy
import dataclasses

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from tests.unit_tests.harness.rank_pool import RankPool
from tests.unit_tests.mcore.models import gpt_config, gpt_model, initialize_groups
from tests.unit_tests.mcore.training import Case, Record, build, build_optimizer, connect, train_step, whole_weights


def names_of_state(dtype: torch.dtype) -> tuple[list[str], list[str], bool]:
    model = build(Case(dtype=dtype))
    plain = gpt_model(gpt_config())
    state = model.state_dict_for_save_checkpoint()
    expected = [f"module.{name}" for name in plain.state_dict() if not name.endswith("_extra_state")]
    are_chunks_known = all(hasattr(value._local_tensor, "__create_chunk_list__") for value in state.values())
    return list(state), expected, are_chunks_known


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_names_do_not_show_the_wrappers(mcore_ranks2: RankPool, dtype: torch.dtype) -> None:
    for names, expected, are_chunks_known in mcore_ranks2.run(names_of_state, dtype):
        assert names == expected
        assert are_chunks_known


def load_and_compute(dtype: torch.dtype, source: str) -> tuple[bool, bool]:
    """True if main weights, and the model's output, are those of another model after loading it."""
    other, model = build(Case(dtype=dtype, seed=1)), build(Case(dtype=dtype, seed=2))
    batch = torch.arange(8)[None]
    with torch.no_grad():
        expected = other(batch, batch, None)
    if source == "sharded":
        state = other.state_dict()
    else:
        prefix = "module." if source == "full" else ""
        state = {prefix + name: weight for name, weight in whole_weights(other).items()}
    model.load_state_dict(state)
    with torch.no_grad():
        output = model(batch, batch, None)
    weights = whole_weights(model)
    return all(torch.equal(weights[name], weight) for name, weight in whole_weights(other).items()), torch.equal(
        output, expected
    )


@pytest.mark.parametrize("source", ["sharded", "full", "bare names"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_load_is_current_at_once(mcore_ranks2: RankPool, dtype: torch.dtype, source: str) -> None:
    assert mcore_ranks2.run(load_and_compute, dtype, source) == [(True, True)] * 2


def whole_state_of(dtype: torch.dtype) -> bool:
    """The first rank's whole state dict loads into the bare model, and others have none."""
    model, plain = build(Case(dtype=dtype)), gpt_model(gpt_config())
    state, weights = model.full_state_dict(), whole_weights(model)
    if dist.get_rank():
        return state == {}
    plain.load_state_dict(state)
    return list(state) == list(plain.state_dict()) and all(torch.equal(state[name], weights[name]) for name in weights)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_whole_state_dict_has_the_bare_models_names(mcore_ranks2: RankPool, dtype: torch.dtype) -> None:
    assert mcore_ranks2.run(whole_state_of, dtype) == [True, True]


def load_wrong(how: str, strict: bool) -> tuple[list[str], list[str]]:
    # A gated model: the released adapter drops strictness for these.
    model = build(Case(dtype=torch.bfloat16, config={"gated_linear_unit": True}))
    state = model.state_dict()
    name = "module.decoder.layers.1.mlp.linear_fc1.weight"
    if how == "missing":
        del state[name]
    elif how == "unexpected":
        state["module.decoder.layers.2.mlp.linear_fc1.weight"] = state[name]
    else:
        state[name] = torch.zeros(3, 3)
    missing, unexpected = model.load_state_dict(state, strict=strict)
    return missing, unexpected


@pytest.mark.parametrize(
    ("how", "match"),
    [
        ("missing", r"missing \['decoder.layers.1.mlp.linear_fc1.weight'\]"),
        ("unexpected", r"unexpected \['decoder.layers.2.mlp.linear_fc1.weight'\]"),
        ("shape", "size mismatch"),
    ],
)
def test_a_strict_load_is_strict(mcore_ranks2: RankPool, how: str, match: str) -> None:
    mcore_ranks2.run_expecting(RuntimeError, match, load_wrong, how, True)


def test_a_lenient_load_says_what_it_left_out(mcore_ranks2: RankPool) -> None:
    assert mcore_ranks2.run(load_wrong, "missing", False) == [(["decoder.layers.1.mlp.linear_fc1.weight"], [])] * 2


def save_midway(case: Case, path: str) -> Record:
    """Trains two steps, saves, trains a third."""
    model = build(case)
    optimizer = build_optimizer(case, model)
    connect(model, optimizer)
    for step in range(2):
        train_step(case, model, optimizer, step)
    dcp.save({"model": model.state_dict(), "optimizer": optimizer.fqn_state_dict()}, checkpoint_id=path)
    return train_step(case, model, optimizer, 2)


def resume_midway(case: Case, path: str) -> Record:
    """Another model reads that and trains the third step."""
    model = build(dataclasses.replace(case, seed=99))
    optimizer = build_optimizer(case, model)
    connect(model, optimizer)
    state = {"model": model.state_dict(), "optimizer": optimizer.fqn_state_dict()}
    dcp.load(state, checkpoint_id=path)
    model.load_state_dict(state["model"])
    optimizer.load_fqn_state_dict(state["optimizer"])
    return train_step(case, model, optimizer, 2)


@pytest.mark.parametrize(
    ("saved", "resumed"),
    [
        (Case(), Case()),
        (Case(strategy=3, dtype=torch.bfloat16), Case(strategy=1, dtype=torch.bfloat16)),
        (Case(strategy=0, tied=True), Case(strategy=3, tied=True)),
        (Case(strategy=2, optimizer="sgd"), Case(strategy=0, optimizer="sgd")),
        (Case(dtype=torch.float16), Case(dtype=torch.float16)),
    ],
    ids=["z3", "bf16 z3 to z1", "tied z0 to z3", "sgd z2 to z0", "fp16"],
)
def test_a_checkpoint_resumes_under_any_strategy(mcore_ranks2: RankPool, tmp_path, saved: Case, resumed: Case) -> None:
    (expected, _) = mcore_ranks2.run(save_midway, saved, str(tmp_path))
    # Other strategies add up micro-batches in another order, which bf16 gradients show.
    tolerance = 0.0 if saved == resumed else 1e-5 if saved.dtype is torch.float32 else 1e-4
    for record in mcore_ranks2.run(resume_midway, resumed, str(tmp_path)):
        assert record.loss == pytest.approx(expected.loss, rel=1e-6)
        for name, weight in record.weights.items():
            torch.testing.assert_close(weight, expected.weights[name], rtol=tolerance, atol=tolerance)


def adapter_with(strategy: int | str, unit_modules: list | None, **options) -> dict:
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.process_groups_config import ProcessGroupCollection

    from megatron_fsdp.mcore import FullyShardedDataParallel

    initialize_groups()
    config = gpt_config()
    ddp_config = DistributedDataParallelConfig(data_parallel_sharding_strategy=strategy)
    before = copy.deepcopy(ddp_config)
    options = {
        **options,
        "pg_collection": ProcessGroupCollection.use_mpu_process_groups() if options.get("pg_collection") else None,
    }
    model = FullyShardedDataParallel(config, ddp_config, gpt_model(config), unit_modules, **options)
    return {
        "units": [unit.__name__ if isinstance(unit, type) else unit for unit in model.fsdp_unit_modules],
        "is_untouched": ddp_config == before,
        "shards": sum(param.to_local().numel() for param in model.parameters()),
        "total": sum(param.numel() for param in model.parameters()),
        "tp_size": model.tp_group.size(),
    }


def test_transformer_layers_are_the_units_unless_nothing_is_sharded(mcore_ranks2: RankPool) -> None:
    for strategy, units in (
        (0, []),
        (1, ["TransformerLayer"]),
        ("optim_grads", ["TransformerLayer"]),
        (3, ["TransformerLayer"]),
    ):
        for result in mcore_ranks2.run(adapter_with, strategy, None):
            assert result["units"] == units
            assert result["is_untouched"]
            assert (result["shards"] == result["total"]) == (strategy == 0)


def adapter_from_groups() -> dict:
    return adapter_with(
        3, ["megatron.core.transformer.transformer_layer.TransformerLayer"], pg_collection=True, disable_bucketing=True
    )


def test_units_come_as_paths_and_groups_as_a_collection(mcore_ranks2: RankPool) -> None:
    for result in mcore_ranks2.run(adapter_from_groups):
        assert result["units"] == ["megatron.core.transformer.transformer_layer.TransformerLayer"]
        assert result["tp_size"] == 1


def test_units_that_do_not_exist_are_named(mcore_ranks2: RankPool) -> None:
    mcore_ranks2.run_expecting(ImportError, "no_such_place.Layer", adapter_with, 3, ["no_such_place.Layer"])


def build_refused(config: dict, ddp: dict) -> None:
    initialize_groups()
    from megatron_fsdp.mcore import DistributedDataParallelConfig, FullyShardedDataParallel

    model_config = gpt_config()
    model = gpt_model(model_config)
    for name, value in config.items():
        setattr(model_config, name, value)
    FullyShardedDataParallel(model_config, DistributedDataParallelConfig(**ddp), model)


@pytest.mark.parametrize(
    ("config", "ddp", "match"),
    [
        ({"delay_wgrad_compute": True}, {}, "TransformerConfig.delay_wgrad_compute"),
        ({"cuda_graph_impl": "local"}, {}, "TransformerConfig.cuda_graph_impl='local'"),
        ({"fp8": "hybrid", "fp8_param": True}, {}, "TransformerConfig.fp8='hybrid' means nothing to local layers"),
        ({"overlap_moe_expert_parallel_comm": True}, {}, "TransformerConfig.overlap_moe"),
    ],
)
def test_combinations_that_would_be_wrong_are_refused(
    mcore_ranks2: RankPool, config: dict, ddp: dict, match: str
) -> None:
    mcore_ranks2.run_expecting(NotImplementedError, match, build_refused, config, ddp)


def rest_holds_shards_only() -> list[int]:
    """Bytes of weights and gradients alive on this rank between steps, over those of its shards."""
    case = Case(strategy=3)
    model = build(case)
    optimizer = build_optimizer(case, model)
    connect(model, optimizer)
    train_step(case, model, optimizer, 0)
    model.stop_communication()
    groups = model.param_and_grad_buffer.parameter_groups
    return [sum(param.untyped_storage().nbytes() for param in group.params) for group in groups]


def test_between_steps_no_weight_is_whole(mcore_ranks2: RankPool) -> None:
    for sizes in mcore_ranks2.run(rest_holds_shards_only):
        assert set(sizes) == {0}


def evaluate_between_steps() -> tuple[float, float, bool]:
    from tests.unit_tests.mcore.training import schedule

    case = Case()
    model = build(case)
    optimizer = build_optimizer(case, model)
    connect(model, optimizer)
    train_step(case, model, optimizer, 0)
    model.eval()
    with torch.no_grad():
        reports = schedule(case, model, 1, forward_only=True)
    model.train()
    model.stop_communication()
    assert dist.is_initialized()
    record = train_step(case, model, optimizer, 1)
    mean = sum(report["sum"] / report["count"] for report in reports) / len(reports)
    return mean, record.loss, all(torch.isfinite(weight).all() for weight in record.weights.values())


def test_an_evaluation_between_steps_sees_the_new_weights(mcore_ranks2: RankPool) -> None:
    (first, loss, is_finite), (second, _, _) = mcore_ranks2.run(evaluate_between_steps)
    assert (first + second) / 2 == pytest.approx(loss, rel=1e-6)
    assert is_finite


def save_spread_experts(folder: str, part: str) -> None:
    config = {"num_moe_experts": 4, "add_bias_linear": False, "moe_token_dispatcher_type": "alltoall"}
    case = Case(config=config, groups={"expert_model_parallel_size": 2})
    model = build(case)
    state = {"model": model.state_dict, "optimizer": lambda: build_optimizer(case, model).fqn_state_dict()}[part]()
    dcp.save({part: state}, checkpoint_id=folder)


def experts_under_stored_names(path: str) -> list[Record]:
    """A step of two models with spread experts, of which the second reads what the first had before."""
    from megatron_fsdp.mcore import StoredState

    config = {"num_moe_experts": 4, "add_bias_linear": False, "moe_token_dispatcher_type": "alltoall"}
    records = []
    for seed in (1, 2):
        case = Case(config=config, groups={"expert_model_parallel_size": 2}, seed=seed)
        model = build(case)
        optimizer = build_optimizer(case, model)
        connect(model, optimizer)
        stored = StoredState(model)
        state = {"model": stored.model(model.state_dict()), "optimizer": stored.optimizer(optimizer.fqn_state_dict())}
        if seed == 1:
            train_step(case, model, optimizer, 0)
            model.stop_communication()
            state["optimizer"] = stored.optimizer(optimizer.fqn_state_dict())
            dcp.save(state, checkpoint_id=path)
        else:
            dcp.load(state, checkpoint_id=path)
            model.load_state_dict(model.state_dict())
            own = optimizer.fqn_state_dict()
            optimizer.load_fqn_state_dict(stored.optimizer_from(state["optimizer"], own))
        records.append(train_step(case, model, optimizer, 1))
    return records


def test_spread_experts_and_their_optimizer_are_resumed(mcore_ranks2: RankPool, tmp_path) -> None:
    for first, second in mcore_ranks2.run(experts_under_stored_names, str(tmp_path / "saved")):
        assert (first.loss, first.norm) == (second.loss, second.norm)
        assert all(torch.equal(weight, second.weights[name]) for name, weight in first.weights.items())


@pytest.mark.parametrize("part", ["model", "optimizer"])
def test_a_checkpoint_never_confuses_experts(mcore_ranks2: RankPool, tmp_path, part: str) -> None:
    message = "local_experts.*is the name of other experts on other ranks"
    mcore_ranks2.run_expecting(CheckpointException, message, save_spread_experts, str(tmp_path / "saved"), part)
