"""Defaults, YAML and flags: which wins, what a file may say, and that everything reads back."""

import dataclasses
from pathlib import Path

import pytest

from megatron.training.config import ConfigError, RunConfig, from_yaml, load_config, to_yaml
from megatron.training.config.flags import Flag, all_flags, sections
from tests.unit_tests.harness.strategies import CHOICES, NO_STRATEGY

BRIDGE_RECIPE = """
dist:
  use_megatron_fsdp: True
ddp:
  use_megatron_fsdp: True
  data_parallel_sharding_strategy: "optim_grads_params"
  average_in_collective: False
checkpoint:
  ckpt_format: "fsdp_dtensor"
  save: "/tmp/fsdp_ckpts"
  load: null
"""


@pytest.fixture
def written(tmp_path: Path):
    def write(text: str) -> Path:
        path = tmp_path / "run.yaml"
        path.write_text(text, encoding="utf-8")
        return path

    return write


def problems_of(path: Path) -> str:
    with pytest.raises(ConfigError) as raised:
        from_yaml(path)
    return str(raised.value)


def other_value(flag: Flag) -> object:
    """A valid value that is not the default."""
    if flag.choices:
        value = next(choice for choice in flag.choices if choice != flag.default)
    else:
        value = {bool: not flag.default, int: 7, float: 0.375, str: "some: text, 5", Path: Path("/tmp/a b")}[flag.base]
    return (value, value) if flag.is_list else value


def everything_changed() -> RunConfig:
    changed = {name: {} for name in sections()}
    for flag in all_flags().values():
        changed[flag.section][flag.name] = other_value(flag)
    return RunConfig(**{name: cls(**changed[name]) for name, cls in sections().items()})


def test_defaults_read_back(written) -> None:
    assert from_yaml(written(to_yaml(RunConfig()))) == RunConfig() == load_config([])


def test_every_field_reads_back(written) -> None:
    config = everything_changed()
    for section in sections():
        for field in dataclasses.fields(getattr(config, section)):
            value = getattr(getattr(config, section), field.name)
            assert value != field.default, f"{section}.{field.name} is not changed, so this test would not see it"
    path = written(to_yaml(config))
    assert from_yaml(path) == config
    assert load_config(["--yaml-cfg", str(path)]) == config


def test_every_field_is_set_by_its_flag_as_by_its_key(written) -> None:
    argv = []
    for flag in all_flags().values():
        value = other_value(flag)
        if flag.base is bool:
            argv.append(flag.on[0] if value else flag.off[0])
        else:
            argv += [flag.on[0], *map(str, value if flag.is_list else [value])]
    assert load_config(argv) == everything_changed()


def test_flags_override_yaml_and_yaml_overrides_defaults(written) -> None:
    path = written("train: {train_iters: 10, micro_batch_size: 2}\nbf16: true\n")
    config = load_config(["--train-iters", "20", "--yaml-cfg", str(path), "--no-bf16"])
    assert (config.train.train_iters, config.train.micro_batch_size) == (20, 2)
    assert not config.precision.bf16
    assert config.rng.seed == 1234


def test_bridge_recipe(written) -> None:
    config = from_yaml(written(BRIDGE_RECIPE))
    assert config.ddp.use_megatron_fsdp
    assert config.ddp.data_parallel_sharding_strategy == "optim_grads_params"
    assert config.ddp.average_in_collective is False
    assert config.checkpoint.ckpt_format == "fsdp_dtensor"
    assert config.checkpoint.save == Path("/tmp/fsdp_ckpts")
    assert config.checkpoint.load is None


def test_dist_alone_turns_megatron_fsdp_on(written) -> None:
    assert from_yaml(written("dist: {use_megatron_fsdp: true}")).ddp.use_megatron_fsdp


@pytest.mark.parametrize(
    ("text", "path", "value"),
    [
        ("ddp.x: 1", None, None),
        ("lr: 3e-4", "optimizer.lr", 3e-4),
        ("lr: 1", "optimizer.lr", 1.0),
        ("optimizer: sgd", "optimizer.optimizer", "sgd"),
        ("optimizer: {optimizer: sgd}", "optimizer.optimizer", "sgd"),
        ("data_parallel_sharding_strategy: 2", "ddp.data_parallel_sharding_strategy", "optim_grads"),
        ("ddp: {data_parallel_sharding_strategy: no_shard}", "ddp.data_parallel_sharding_strategy", "no_shard"),
        ("ddp: {megatron_fsdp_grad_comm_dtype: bfloat16}", "ddp.megatron_fsdp_grad_comm_dtype", "bf16"),
        ("ddp: {megatron_fsdp_main_params_dtype: null}", "ddp.megatron_fsdp_main_params_dtype", "auto"),
        ("ddp_average_in_collective: true", "ddp.average_in_collective", True),
        ("no_load_optim: true", "checkpoint.load_optim", False),
        ("no_persist_layer_norm: true", "model.persist_layer_norm", False),
        ("use_rotary_position_embeddings: true", "model.position_embedding_type", "rope"),
        ("use_rotary_position_embeddings: false", "model.position_embedding_type", "learned_absolute"),
        ("recompute_activations: true", "recompute.recompute_granularity", "selective"),
        ("layernorm_epsilon: 1e-6", "model.layernorm_epsilon", 1e-6),
        ("data_path: [0.3, a, 0.7, b]", "data.data_path", ("0.3", "a", "0.7", "b")),
        ("data: {data_path: a}", "data.data_path", ("a",)),
        ("model:", "model.num_layers", None),
        ("", "model.num_layers", None),
    ],
)
def test_yaml_sets_a_field(written, text: str, path: str | None, value: object) -> None:
    if path is None:
        assert "unknown key" in problems_of(written(text))
        return
    section, name = path.split(".")
    assert getattr(getattr(from_yaml(written(text)), section), name) == value


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "train:\n  train_iter: 5\n",
            "run.yaml:2:3: unknown key 'train.train_iter'; did you mean 'train.train_iters'?",
        ),
        ("model: {seq_length: 5}", "run.yaml:1:9: unknown key 'model.seq_length'; did you mean 'data.seq_length'?"),
        ("trian: {train_iters: 5}", "run.yaml:1:1: unknown key 'trian'"),
        (
            "grad_reduce_in_bf16: true",
            "unknown key 'grad_reduce_in_bf16', known to Megatron-LM, not supported here yet; use --megatron-fsdp-grad",
        ),
        ("lr: fast", "run.yaml:1:1: lr: expected a number, not 'fast'"),
        ("clip_grad: .nan", "run.yaml:1:1: clip_grad: expected a number, not nan"),
        ("num_layers: 1.5", "expected a whole number, not 1.5"),
        ("num_layers: true", "expected a whole number, not True"),
        ("bf16: 1", "bf16: expected true or false, not 1"),
        ("bf16:", "bf16: expected true or false, not None"),
        ("seed:", "seed: expected a whole number, not an empty value"),
        ("no_load_optim: 1", "expected true or false, not 1"),
        (
            f"data_parallel_sharding_strategy: {NO_STRATEGY}",
            f"expected one of {CHOICES}, not {NO_STRATEGY}",
        ),
        ("seed: {a: 1}", "expected a whole number, not {'a': 1}"),
        ("seed: 1\nrng:\n  seed: 2\n", "run.yaml:3:3: rng.seed is 2, but"),
        ("dist: {use_megatron_fsdp: true}\nddp: {use_megatron_fsdp: false}", "ddp.use_megatron_fsdp is False, but"),
        ("- a", "should hold sections or flags with values"),
        ("a: [", "is not YAML"),
    ],
)
def test_yaml_mistake_is_explained(written, text: str, message: str) -> None:
    assert message in problems_of(written(text))


def test_all_yaml_mistakes_are_reported_together(written) -> None:
    assert problems_of(written("train:\n  a: 1\n  seed: 1\nlr: x\n")).count("run.yaml:") == 3


def test_mistakes_of_flags_and_file_are_reported_together(written) -> None:
    with pytest.raises(ConfigError) as raised:
        load_config(["--yaml-cfg", str(written("lr: x")), "--seed", "y"])
    assert len(raised.value.problems) == 2


def test_an_empty_path_is_refused(written) -> None:
    """As a shell makes it of a variable that is not set; it would be the current folder."""
    assert "expected a path, not ''" in problems_of(written('save: ""'))


def test_text_is_no_path() -> None:
    with pytest.raises(ConfigError, match="takes the path of a YAML file, not its text"):
        from_yaml(to_yaml(RunConfig()))


def test_missing_yaml_is_explained(tmp_path: Path) -> None:
    assert "cannot read the YAML file" in problems_of(tmp_path / "none.yaml")
