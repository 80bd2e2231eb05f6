"""Flags: every field is one, spelled and meant as in Megatron-LM, or listed as different with its reason."""

import subprocess
import sys
from dataclasses import FrozenInstanceError, dataclass, fields
from importlib import resources
from pathlib import Path

import pytest

from megatron.training.config import ConfigError, RunConfig, format_problems, load_config
from megatron.training.config.flags import Flag, accepted_flags, all_flags, build_parser, megatron_lm_flags, sections
from megatron.training.config.spellings import ALIASES, DEVIATIONS, INSTEAD, OTHER_NAMES, OTHER_PLACES, OURS
from tests.unit_tests.harness.strategies import CHOICES, NO_STRATEGY

FLAGS = list(all_flags().values())


@dataclass(frozen=True)
class Upstream:
    flags: tuple[str, ...]
    dest: str
    kind: str
    default: str
    choices: tuple[str, ...]
    nargs: str

    @classmethod
    def parse(cls, line: str) -> "Upstream":
        flags, dest, kind, default, choices, nargs = (*line.split(" | "), "", "", "", "")[:6]
        names = tuple(flags.split())
        dest = dest or names[0].removeprefix("--").replace("-", "_")
        return cls(names, dest, kind, default, tuple(choices.split(",")) if choices else (), nargs)


def upstream_flags() -> list[Upstream]:
    text = resources.files("megatron.training.config").joinpath("megatron_lm_flags.txt").read_text()
    return [Upstream.parse(line) for line in text.splitlines() if line.startswith("--")]


UPSTREAM = {name: entry for entry in upstream_flags() for name in entry.flags}


def entries_of(flag: Flag) -> list[Upstream]:
    """Megatron-LM's entries that write this field with a value (constants of other flags left out)."""
    names = [name for name in (*flag.on, *flag.off) if name in UPSTREAM]
    return list({UPSTREAM[name].dest: UPSTREAM[name] for name in names}.values())


def differences(flag: Flag, entry: Upstream) -> list[str]:
    kinds = {bool: ("on", "off"), int: ("int",), float: ("float",)}.get(flag.base, ("str", "enum_type_handler"))
    default = "" if flag.default is None else str(flag.default)
    found = []
    if entry.kind not in kinds:
        found.append(f"type {entry.kind}")
    if entry.default != default:
        found.append(f"default {entry.default!r}, here {default!r}")
    if set(entry.choices) != set(map(str, flag.choices)):
        found.append(f"choices {entry.choices}")
    if bool(entry.nargs) != flag.is_list:
        found.append(f"nargs {entry.nargs}")
    return found


def test_the_packaged_list_holds_megatron_lms_flags() -> None:
    assert len({entry.flags for entry in upstream_flags()}) == 838
    assert "--use-megatron-fsdp" in megatron_lm_flags()


@pytest.mark.parametrize("flag", FLAGS, ids=lambda flag: flag.path)
def test_field_is_megatron_lms(flag: Flag) -> None:
    entries = entries_of(flag)
    if not entries:
        assert flag.path in OURS
        return
    (entry,) = entries
    keys = (flag.name, *flag.spelling.keys, *flag.spelling.inverse_keys)
    assert entry.dest in keys, "its YAML key should be accepted"
    turns_off = entry.kind == "off" or entry.dest in flag.spelling.inverse_keys
    assert set(entry.flags) <= set(flag.off if turns_off else flag.on)
    found = differences(flag, entry)
    assert bool(found) == (flag.path in DEVIATIONS), found


def test_every_deviation_and_alias_names_a_field() -> None:
    assert set(DEVIATIONS) | set(OURS) <= set(all_flags())
    assert all(name in {field.name for field in fields(cls)} for cls, name in ALIASES)
    assert set(OTHER_PLACES.values()) <= set(all_flags())
    assert not set(INSTEAD) & accepted_flags()


def test_constants_are_megatron_lms_switches() -> None:
    for flag in FLAGS:
        for name, value in flag.spelling.constants.items():
            assert UPSTREAM[name].kind == "on"
            assert flag.parse(value) == value


def test_every_flag_of_sharding_is_explained() -> None:
    text = (Path(__file__).parents[3] / "docs/configuration.md").read_text(encoding="utf-8")
    flags = [flag for flag in all_flags().values() if flag.section == "ddp"]
    assert [flag.on[0] for flag in flags if not any(spelling in text for spelling in flag.on)] == []


def test_deviations_are_documented() -> None:
    text = (Path(__file__).parents[3] / "docs/configuration.md").read_text(encoding="utf-8")
    assert [path for path in (*DEVIATIONS, *OURS) if f"`{path}`" not in text] == []


def test_every_field_has_a_sentence_of_help() -> None:
    assert [flag.path for flag in FLAGS if not flag.help.endswith(".")] == []


def test_field_names_are_unique_so_that_flat_yaml_keys_are() -> None:
    names = [flag.name for flag in FLAGS]
    assert len(names) == len(set(names))


def test_defaults_are_valid_values() -> None:
    for flag in FLAGS:
        if flag.default is not None:
            assert flag.parse(flag.default) == flag.default, flag.path


def test_config_is_frozen_and_hashable() -> None:
    config = RunConfig()
    assert hash(config) == hash(RunConfig())
    with pytest.raises(FrozenInstanceError):
        config.train.train_iters = 3


@pytest.mark.parametrize(
    ("argv", "path", "value"),
    [
        ("--num-layers 3", "model.num_layers", 3),
        ("--lr=3e-4", "optimizer.lr", 3e-4),
        ("--lr -1e-3", "optimizer.lr", -1e-3),
        ("--bf16", "precision.bf16", True),
        ("--bf16 --no-bf16", "precision.bf16", False),
        ("--disable-bias-linear", "model.add_bias_linear", False),
        ("--no-bias-linear", "model.add_bias_linear", False),
        ("--no-masked-softmax-fusion", "model.masked_softmax_fusion", False),
        ("--no-rope-fusion", "model.apply_rope_fusion", False),
        ("--norm-epsilon 1e-6", "model.layernorm_epsilon", 1e-6),
        ("--use-rotary-position-embeddings", "model.position_embedding_type", "rope"),
        ("--recompute-activations", "recompute.recompute_granularity", "selective"),
        ("--no-load-optim", "checkpoint.load_optim", False),
        ("--disable-strict-fsdp-dtensor-load", "checkpoint.strict_fsdp_dtensor_load", False),
        ("--persistent-save-interval 5", "checkpoint.save_interval", 5),
        ("--save /tmp/x", "checkpoint.save", Path("/tmp/x")),
        ("--use-mcore-models", "model.use_mcore_models", True),
        ("--use-nccl-ub", "ddp.nccl_ub", True),
        ("--ddp-average-in-collective", "ddp.average_in_collective", True),
        ("--data-parallel-sharding-strategy 1", "ddp.data_parallel_sharding_strategy", "optim"),
        ("--outer-dp-sharding-strategy 1", "ddp.outer_dp_sharding_strategy", "optim"),
        ("--megatron-fsdp-grad-comm-dtype torch.bfloat16", "ddp.megatron_fsdp_grad_comm_dtype", "bf16"),
        ("--data-path 0.3 a 0.7 b", "data.data_path", ("0.3", "a", "0.7", "b")),
        ("--override-opt_param-scheduler", "scheduler.override_opt_param_scheduler", True),
    ],
)
def test_flag_sets_its_field(argv: str, path: str, value: object) -> None:
    section, name = path.split(".")
    assert getattr(getattr(load_config(argv.split()), section), name) == value


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("--num-layer 3", "--num-layer: unknown flag; did you mean --num-layers?"),
        ("--num_layers 3", "did you mean --num-layers?"),
        ("--tp-comm-overlap", "--tp-comm-overlap: known to Megatron-LM, not supported here yet"),
        ("--rampup-batch-size 1 2 3", "the global batch size is constant"),
        ("--grad-reduce-in-bf16", "use --megatron-fsdp-grad-comm-dtype bf16"),
        ("--xyzzy", "--xyzzy: unknown flag; --help lists the flags"),
        ("--lerning-rate 1", "--lerning-rate: unknown flag; did you mean --lr?"),
        ("--learning-rate 1", "did you mean --lr?"),
        ("--max_steps 1", "did you mean --train-iters?"),
        ("--batch-size 1", "use --micro-batch-size (of a rank) or --global-batch-size (of a step)"),
        ("--lr fast", "--lr: expected a number, not 'fast'"),
        ("--weight-decay nan", "--weight-decay: expected a number, not 'nan'"),
        ("--lr", "--lr: expected a value"),
        ("--lr --bf16", "--lr: expected a value"),
        ("--data-path --bf16", "--data-path: expected a value"),
        ("--bf16=1", "--bf16: takes no value"),
        ("--optimizer muon", "expected one of adam, sgd, not 'muon'"),
        (
            f"--data-parallel-sharding-strategy {NO_STRATEGY}",
            f"expected one of {CHOICES}, not '{NO_STRATEGY}'",
        ),
        ("train.yaml", "unexpected argument 'train.yaml'"),
    ],
)
def test_mistake_is_explained(argv: str, message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        load_config(argv.split())
    assert message in str(raised.value)


def test_unknown_flags_are_reported_together() -> None:
    with pytest.raises(ConfigError) as raised:
        load_config(["--num-layer", "3", "--hidden-sise=4"])
    assert len(raised.value.problems) == 2
    assert format_problems(raised.value).splitlines()[0] == "The configuration has 2 problems:"


def test_other_names_lead_to_flags_that_exist() -> None:
    assert accepted_flags().issuperset(OTHER_NAMES.values())
    assert accepted_flags().isdisjoint(OTHER_NAMES)


def test_all_mistakes_are_reported_together() -> None:
    with pytest.raises(ConfigError) as raised:
        load_config("--lr fast --seed --num-layer 3 --num-layers x --swiglu=yes --optimizer muon --bf16".split())
    flags = [problem.split(":")[0] for problem in raised.value.problems]
    assert sorted(flags) == ["--lr", "--num-layer", "--num-layers", "--optimizer", "--seed", "--swiglu"]


def test_help_shows_sections_and_defaults() -> None:
    text = " ".join(build_parser().format_help().split())
    assert all(f"{section}: " in text for section in sections())
    assert "Base of the rotary frequencies. [10000]" in text
    assert "--no-masked-softmax-fusion" in text


def test_help_needs_neither_torch_nor_megatron_core() -> None:
    code = (
        "import sys, megatron.training.config as c; c.flags.build_parser().format_help();"
        "sys.exit(any(name in sys.modules for name in ('torch', 'numpy', 'megatron.core')))"
    )
    assert subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": ":".join(sys.path)}).returncode == 0
