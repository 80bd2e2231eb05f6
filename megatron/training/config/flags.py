"""Dataclass fields to flags: every field of `RunConfig` as one `Flag`, and the argument parser that all flags make.

The only file that knows argparse. Values are converted by one table of types, shared with YAML (`sources.py`).
"""

import argparse
import ast
import difflib
import inspect
import math
import sys
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import cache
from importlib import resources
from pathlib import Path

from megatron.training.config.schema import RunConfig
from megatron.training.config.schema_parallel import DtypeOrAuto, OuterShardingStrategy, ShardingStrategy
from megatron.training.config.spellings import ALIASES, INSTEAD, OTHER_NAMES, Spelling
from megatron.training.errors import ConfigError


def _number_or_name(names: tuple[str, ...]) -> Callable[[object], object]:
    def parse(value: object) -> object:
        text = str(value)
        return names[int(text)] if text.isdigit() and int(text) < len(names) else value

    return parse


_DTYPES = {"float32": "fp32", "float": "fp32", "bfloat16": "bf16", "float16": "fp16", "half": "fp16", "None": "auto"}


def _dtype_name(value: object) -> object:
    text = str(value).removeprefix("torch.")
    return _DTYPES.get(text, text)


def _whole(value: object) -> object:
    return value if isinstance(value, int) else int(str(value))


def _number(value: object) -> float:
    if math.isnan(number := float(str(value))):  # No comparison would refuse it later.
        raise ValueError("nan is no number")
    return number


def _path(value: object) -> Path:
    if not str(value):  # A shell's variable that is not set; Path makes the current folder of it.
        raise ValueError("no path is empty")
    return Path(str(value)).expanduser()


NORMALIZE: dict[object, Callable[[object], object]] = {
    ShardingStrategy: _number_or_name(typing.get_args(ShardingStrategy)),
    OuterShardingStrategy: _number_or_name(typing.get_args(OuterShardingStrategy)),
    DtypeOrAuto: _dtype_name,
    int: _whole,
    float: _number,
    str: str,
    Path: _path,
}
"""Per type: how a value from a command line or a YAML file becomes the field's. Raises ValueError if it cannot."""


@dataclass(frozen=True, kw_only=True)
class Flag:
    """One field of the configuration as users write it."""

    section: str
    name: str
    base: object
    """The type of one value: bool, int, float, str, Path or a Literal."""
    is_optional: bool
    is_list: bool
    default: object
    help: str
    spelling: Spelling

    @property
    def path(self) -> str:
        """`section.name`, as in YAML."""
        return f"{self.section}.{self.name}"

    @property
    def on(self) -> tuple[str, ...]:
        """Flags that take the value or, for a boolean, turn it on."""
        return (f"--{self._stem}", *self.spelling.also)

    @property
    def off(self) -> tuple[str, ...]:
        """Flags that turn a boolean off."""
        return (f"--no-{self._stem}", *self.spelling.off) if self.base is bool else ()

    @property
    def choices(self) -> tuple[object, ...]:
        """The allowed values; empty if any value of the type is."""
        return typing.get_args(self.base)

    @property
    def _stem(self) -> str:
        return self.spelling.stem or self.name.replace("_", "-")

    def parse(self, value: object) -> object:
        """`value`, from a command line or a YAML file, as the field's type; ValueError says what was expected."""
        if value is None and (self.is_optional or self.default is None):
            return None
        if self.is_list:
            items = value if isinstance(value, (list, tuple)) else [value]
            return tuple(self._parse_one(item) for item in items)
        return self._parse_one(value)

    @property
    def _expected(self) -> str:
        if not self.choices:
            return _TYPE_NAMES[self.base]
        is_numbered = self.base in (ShardingStrategy, OuterShardingStrategy)
        return "one of " + ", ".join(
            f"{name} ({number})" if is_numbered else str(name) for number, name in enumerate(self.choices)
        )

    def _parse_one(self, value: object) -> object:
        expected = self._expected
        if isinstance(value, (dict, list)) or (isinstance(value, bool) != (self.base is bool)):
            raise ValueError(f"expected {expected}, not {value!r}")
        if value is None and self.base is not DtypeOrAuto:
            raise ValueError(f"expected {expected}, not an empty value")
        try:
            value = NORMALIZE.get(self.base, lambda same: same)(value)
        except ValueError:
            raise ValueError(f"expected {expected}, not {value!r}") from None
        if self.choices and value not in self.choices:
            raise ValueError(f"expected {expected}, not {value!r}")
        return value


_TYPE_NAMES = {bool: "true or false", int: "a whole number", float: "a number", str: "text", Path: "a path"}


class _Type(typing.NamedTuple):
    base: object
    is_optional: bool = False
    is_list: bool = False


def _split_type(hint: object) -> _Type:
    """The parts of a field's annotation: the type of one value, whether it may be None, whether it is a list."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        (inner,) = (arg for arg in typing.get_args(hint) if arg is not types.NoneType)
        return _split_type(inner)._replace(is_optional=True)
    if typing.get_origin(hint) is tuple:
        return _Type(typing.get_args(hint)[0], is_list=True)
    return _Type(hint)


@cache
def help_texts(cls: type) -> Mapping[str, str]:
    """The string below each field of `cls`, by field name."""
    tree = ast.parse(inspect.getsource(sys.modules[cls.__module__]))
    (body,) = (node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == cls.__name__)
    texts = {}
    for node, below in zip(body, body[1:], strict=False):
        if isinstance(node, ast.AnnAssign) and isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
            texts[node.target.id] = " ".join(str(below.value.value).split())
    return texts


@cache
def sections() -> Mapping[str, type]:
    """Section name -> its dataclass, in the order of `RunConfig`."""
    hints = typing.get_type_hints(RunConfig)
    return {item.name: hints[item.name] for item in fields(RunConfig)}


@cache
def all_flags() -> Mapping[str, Flag]:
    """Every field of the configuration, by `section.name`."""
    flags = {}
    for section, cls in sections().items():
        hints, texts = typing.get_type_hints(cls), help_texts(cls)
        for item in fields(cls):
            parts = _split_type(hints[item.name])
            flag = Flag(
                section=section,
                name=item.name,
                **parts._asdict(),
                default=item.default,
                help=texts[item.name],
                spelling=ALIASES.get((cls, item.name), Spelling()),
            )
            flags[flag.path] = flag
    return flags


class _Switch(argparse.Action):
    """Stores whether the flag that was used is one of those that turn its field on."""

    # Any: argparse's own keywords pass through.
    def __init__(self, *, on: tuple[str, ...], **kwargs: typing.Any) -> None:
        super().__init__(nargs=0, **kwargs)
        self._on = on

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: object,
        option_string: str | None = None,
    ) -> None:
        setattr(namespace, self.dest, option_string in self._on)


class _Store(argparse.Action):
    """Stores a value, or collects the reason why it cannot be read, so that all mistakes are reported at once."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: object,
        option_string: str | None = None,
    ) -> None:
        items = values if isinstance(values, list) else [values]
        wrong = [item for item in items if isinstance(item, ValueError)]
        for item in wrong:
            namespace.problems.append(f"{option_string}: {item}")
        if not wrong:
            setattr(namespace, self.dest, values)


class _Parser(argparse.ArgumentParser):
    """Raises ConfigError where argparse would exit."""

    def error(self, message: str) -> typing.NoReturn:
        raise ConfigError([message])


def _shown_default(flag: Flag) -> str:
    if flag.default is None:
        return "auto" if "auto:" in flag.help else ""
    if isinstance(flag.default, bool):
        return "on" if flag.default else "off"
    return str(flag.default)


def _add(group: argparse._ArgumentGroup, flag: Flag) -> None:
    shown = _shown_default(flag)
    text = (flag.help + (f" [{shown}]" if shown else "")).replace("%", "%%")
    common = {"dest": flag.path, "default": argparse.SUPPRESS, "help": text}
    if flag.base is bool:
        group.add_argument(*flag.on, *flag.off, action=_Switch, on=flag.on, **common)
        return

    def parse(value: str) -> object:
        try:
            return flag._parse_one(value)
        except ValueError as error:
            return error

    metavar = "{" + ",".join(map(str, flag.choices)) + "}" if flag.choices else _METAVARS[flag.base]
    nargs = "+" if flag.is_list else None
    group.add_argument(*flag.on, type=parse, action=_Store, metavar=metavar, nargs=nargs, **common)
    for spelled, value in flag.spelling.constants.items():
        text = f"Same as {flag.on[0]} {value}."
        group.add_argument(spelled, action="store_const", const=value, **(common | {"help": text}))


_METAVARS = {int: "N", float: "X", str: "TEXT", Path: "PATH"}


@cache
def build_parser() -> argparse.ArgumentParser:
    """The parser of all flags; its result holds only what was given, under `section.name`, and `yaml_cfg`."""
    parser = _Parser(
        usage="%(prog)s [--yaml-cfg PATH] [flags]",
        description="Pre-train a GPT. Defaults stand in [brackets]; a YAML file overrides them, a flag overrides both.",
        allow_abbrev=False,
    )
    parser.add_argument("--yaml-cfg", type=Path, metavar="PATH", help="Read this YAML file; flags override it.")
    groups = {}
    for section, cls in sections().items():
        title = inspect.getdoc(cls).splitlines()[0].rstrip(".")
        groups[section] = parser.add_argument_group(f"{section}: {title}")
    for flag in all_flags().values():
        _add(groups[flag.section], flag)
    return parser


@cache
def accepted_flags() -> frozenset[str]:
    """Every spelling that the command line knows."""
    spelled = ((*flag.on, *flag.off, *flag.spelling.constants) for flag in all_flags().values())
    return frozenset({"--help", "-h", "--yaml-cfg"}.union(*spelled))


@cache
def megatron_lm_flags() -> frozenset[str]:
    """Every spelling that Megatron-LM knows."""
    text = resources.files(__package__).joinpath("megatron_lm_flags.txt").read_text(encoding="utf-8")
    lines = (line for line in text.splitlines() if line.startswith("--"))
    return frozenset(flag for line in lines for flag in line.split(" | ")[0].split())


@cache
def _takes_value() -> Mapping[str, bool]:
    """True for each accepted spelling that is followed by a value."""
    known = dict.fromkeys(accepted_flags(), False)
    for flag in all_flags().values():
        known |= dict.fromkeys(flag.on, flag.base is not bool)
    return known | {"--yaml-cfg": True}


def explain_unknown(flag: str) -> str:
    """The sentence for a flag that does not exist here: why, and what to use."""
    spelled = flag.split("=")[0]
    reason = "unknown flag"
    if spelled in megatron_lm_flags():
        reason = "known to Megatron-LM, not supported here yet"
    if spelled in INSTEAD:
        return f"{spelled}: {reason}; {INSTEAD[spelled]}"
    known = accepted_flags() | OTHER_NAMES.keys()
    nearest = difflib.get_close_matches(spelled.replace("_", "-"), sorted(known), n=1, cutoff=0.75)
    if not nearest:
        return f"{spelled}: {reason}; --help lists the flags"
    meant = OTHER_NAMES.get(nearest[0], nearest[0])
    # A flag of Megatron-LM is no typing mistake: similar names are only worth a look.
    advice = f"did you mean {meant}?" if reason == "unknown flag" else f"see also {meant}"
    return f"{spelled}: {reason}; {advice}"


@dataclass(frozen=True, kw_only=True)
class GivenFlags:
    """The values and the mistakes of a command line."""

    values: Mapping[str, object]
    """Only what was given, by `section.name`, and `yaml_cfg`."""
    problems: tuple[str, ...]
    """Every unknown flag, and every value that is missing or wrong."""


def parse_flags(argv: list[str]) -> GivenFlags:
    """The given flags, and all that is wrong with them."""
    words, problems = _split_off_mistakes(argv)
    namespace = argparse.Namespace(problems=[])
    try:
        given, unknown = build_parser().parse_known_args(words, namespace)
    except ConfigError as error:
        return GivenFlags(values={}, problems=(*problems, *namespace.problems, *error.problems))
    strange = [explain_unknown(word) for word in unknown if word.startswith("--")]
    if unknown and not strange:
        strange = [f"unexpected argument {word!r}; flags start with --" for word in unknown]
    values = vars(given)
    return GivenFlags(problems=(*strange, *problems, *values.pop("problems")), values=values)


def _split_off_mistakes(argv: list[str]) -> tuple[list[str], list[str]]:
    """The words without those that would make argparse stop at once, and what is wrong with those."""
    words, problems = [], []
    for word, after in zip(argv, [*argv, None][1:], strict=True):
        name, has_value, _ = word.partition("=")
        takes_value = _takes_value().get(name)
        if takes_value is False and has_value:
            problems.append(f"{name}: takes no value")
        elif takes_value and not has_value and (after is None or _is_flag(after)):
            problems.append(f"{name}: expected a value")
        elif words and _takes_value().get(words[-1]) and is_number(word) and word.startswith("-"):
            words[-1] += f"={word}"  # argparse takes -1e-3 for a flag.
        else:
            words.append(word)
    return words, problems


def _is_flag(word: str) -> bool:
    return len(word) > 1 and word.startswith("-") and " " not in word and not is_number(word)


def is_number(word: str) -> bool:
    """True if `word` is written as a number."""
    try:
        float(word)
    except ValueError:
        return False
    return True
