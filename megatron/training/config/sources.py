"""Sources of a configuration: defaults, then a YAML file, then the command line; and back to YAML.

YAML is nested by section (`ddp: {data_parallel_sharding_strategy: optim}`); Megatron-LM's flat names are accepted at
the top.
"""

import difflib
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import yaml

from megatron.training.config.flags import (
    Flag,
    all_flags,
    explain_unknown,
    megatron_lm_flags,
    parse_flags,
    sections,
)
from megatron.training.config.schema import RunConfig
from megatron.training.config.spellings import OTHER_PLACES
from megatron.training.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Reading:
    """A configuration as far as it could be read."""

    config: RunConfig
    problems: tuple[str, ...] = ()
    """Mistakes in the sources; the fields that they concern have their defaults."""
    is_guess: bool = False
    """Whole parts of the configuration are not known, so that rules would say nothing about it."""

    def concerns(self, problem: str) -> bool:
        """True if `problem` may be a mere consequence of those in `problems`, because it names the same flags."""
        return not _flags_in(problem).isdisjoint(_flags_in(" ".join(self.problems)))


def _flags_in(problem: str) -> set[str]:
    return set(re.findall(r"--[a-z0-9][a-z0-9-]*", problem))


def read_config(argv: list[str] | None = None) -> Reading:
    """The configuration of the command line `argv` (default: this process's) and of the YAML file that it may name."""
    flags = parse_flags(sys.argv[1:] if argv is None else argv)
    given, problems = dict(flags.values), flags.problems
    path = given.pop("yaml_cfg", None)
    values, is_guess = {}, not flags.values and bool(problems)
    try:
        values = _read_yaml(path) if path else {}
    except ConfigError as error:
        problems, is_guess = (*problems, *error.problems), True
    # Flags with several words arrive as lists; the configuration is immutable.
    values |= {key: tuple(value) if isinstance(value, list) else value for key, value in given.items()}
    return Reading(config=_build(values), problems=problems, is_guess=is_guess)


def load_config(argv: list[str] | None = None) -> RunConfig:
    """The configuration of the command line `argv` (default: this process's), with the YAML file that it may name.

    Raises ConfigError with every unknown flag, missing or wrong value, of the command line and of the file.
    """
    reading = read_config(argv)
    if reading.problems:
        raise ConfigError(reading.problems)
    return reading.config


def from_yaml(path: Path | str) -> RunConfig:
    """The configuration that the YAML file at `path` describes over the defaults.

    Raises ConfigError with every mistake and its place.
    """
    if "\n" in str(path):
        raise ConfigError(["from_yaml takes the path of a YAML file, not its text"])
    return _build(_read_yaml(Path(path)))


def to_yaml(config: RunConfig) -> str:
    """All of `config` as text that `from_yaml` and `--yaml-cfg` read back from a file to the same value."""
    tree: dict[str, dict[str, object]] = {name: {} for name in sections()}
    for flag in all_flags().values():
        tree[flag.section][flag.name] = plain(getattr(getattr(config, flag.section), flag.name))
    return yaml.safe_dump(tree, sort_keys=False)


def plain(value: object) -> object:
    """The value of a field as YAML and other programs take it: text for a path, a list for a tuple."""
    if isinstance(value, Path):
        return str(value)
    return [plain(item) for item in value] if isinstance(value, tuple) else value


def _build(values: Mapping[str, object]) -> RunConfig:
    chosen = {name: {} for name in sections()}
    for path, value in values.items():
        section, name = path.split(".")
        chosen[section][name] = value
    return RunConfig(**{name: cls(**chosen[name]) for name, cls in sections().items()})


_UNSET = object()


@dataclass(frozen=True, kw_only=True)
class _Key:
    """The field that a YAML key sets, and the form of its value."""

    flag: Flag
    is_inverse: bool = False
    constant: object = None

    def value(self, given: object) -> object:
        """The field's value for what the file says; `_UNSET` if that is nothing. Raises ValueError."""
        if self.constant is None and not self.is_inverse:
            return self.flag.parse(given)
        if not isinstance(given, bool):
            raise ValueError(f"expected true or false, not {given!r}")
        if self.is_inverse:
            return not given
        return self.constant if given else _UNSET


@cache
def _keys() -> Mapping[str, _Key]:
    """Every accepted key: flat ones by themselves, nested ones as `section.key`."""
    keys: dict[str, _Key] = {}
    for flag in all_flags().values():
        spelled = dict.fromkeys((flag.name, *flag.spelling.keys), _Key(flag=flag))
        spelled |= dict.fromkeys(flag.spelling.inverse_keys, _Key(flag=flag, is_inverse=True))
        for name, value in flag.spelling.constants.items():
            spelled[name.lstrip("-").replace("-", "_")] = _Key(flag=flag, constant=value)
        for name, key in spelled.items():
            keys[name] = keys[f"{flag.section}.{name}"] = key
    return keys | {other: keys[ours] for other, ours in OTHER_PLACES.items()}


def _leaves(root: yaml.Node | None) -> Iterator[tuple[str, yaml.Node, yaml.Node]]:
    """(full key, key node, value node) of each setting in the file."""
    if root is None or not isinstance(root, yaml.MappingNode):
        return
    for key, value in root.value:
        name = str(key.value)
        # "optimizer" is a section and one of its fields: only a mapping is a section.
        if name in sections() and isinstance(value, yaml.MappingNode):
            yield from ((f"{name}.{inner.value}", inner, leaf) for inner, leaf in value.value)
        elif name in sections() and value.tag.endswith(":null"):
            continue
        else:
            yield name, key, value


def _read_yaml(path: Path) -> dict[str, object]:
    """The values that a file gives, by `section.name`."""
    try:
        text = path.read_text(encoding="utf-8")
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except OSError as error:
        raise ConfigError([f"cannot read the YAML file {path}: {error.strerror}"]) from None
    except yaml.YAMLError as error:
        raise ConfigError([f"{path} is not YAML: {error}"]) from None
    if root is not None and not isinstance(root, yaml.MappingNode):
        raise ConfigError([f"{path} should hold sections or flags with values, as in 'train: {{train_iters: 100}}'"])
    loader = yaml.SafeLoader("")
    values: dict[str, object] = {}
    places: dict[str, str] = {}
    problems = []
    for name, key_node, value_node in _leaves(root):
        place = f"{path}:{key_node.start_mark.line + 1}:{key_node.start_mark.column + 1}"
        key = _keys().get(name)
        if key is None:
            problems.append(f"{place}: {_unknown_key(name)}")
            continue
        try:
            value = key.value(loader.construct_object(value_node, deep=True))
        except (ValueError, yaml.YAMLError) as error:
            problems.append(f"{place}: {name}: {error}")
            continue
        if value is _UNSET:
            continue
        target = key.flag.path
        if values.get(target, value) != value:
            problems.append(f"{place}: {name} is {value!r}, but {places[target]} says {values[target]!r}")
        values[target], places[target] = value, place
    if problems:
        raise ConfigError(problems)
    return values


def _unknown_key(name: str) -> str:
    flag = "--" + name.replace("_", "-")
    if flag in megatron_lm_flags():
        return f"unknown key {name!r}, " + explain_unknown(flag).split(": ", 1)[1]
    same_name = [path for path in all_flags() if path.split(".")[1] == name.split(".")[-1]]
    nearest = same_name or difflib.get_close_matches(name.replace("-", "_"), _keys(), n=1, cutoff=0.6)
    return f"unknown key {name!r}" + (f"; did you mean {nearest[0]!r}?" if nearest else "; --help lists what there is")
