"""The form of a rule and the setting that it judges."""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from megatron.training.config.flags import all_flags
from megatron.training.config.kernels import Kernels, Machine
from megatron.training.config.schema import RunConfig


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Ranks, machine and kernels that a configuration is to run on."""

    world_size: int
    """Number of ranks."""
    tensor_parallel_size: int
    """Of them, how many split each layer."""
    machine: Machine
    """The machine of each rank."""
    kernels: Kernels
    """The kernels that follow."""

    @property
    def data_parallel_size(self) -> int:
        """Ranks that see different samples."""
        return max(1, self.world_size // max(1, self.tensor_parallel_size))


Rule = Callable[[RunConfig, Setting], str | Iterator[str] | None]
RULES: list[Rule] = []
"""All rules, in the order of their definition."""


def rule(function: Rule) -> Rule:
    """Adds `function` to the rules; its docstring says what must hold."""
    RULES.append(function)
    return function


@functools.cache
def flag_of(path: str) -> str:
    """The flag of a field, for messages."""
    return all_flags()[path].on[0]


def value_of(config: RunConfig, path: str) -> object:
    """The value of the field `section.name`."""
    section, name = path.split(".")
    return getattr(getattr(config, section), name)


def is_given(config: RunConfig, path: str) -> bool:
    """True if the field has another value than its default."""
    return value_of(config, path) != all_flags()[path].default


def spelled(path: str, config: RunConfig) -> str:
    """The flag that gives a field its value, for messages: of a switch, the one that turns it on or off."""
    flag = all_flags()[path]
    return flag.off[0] if value_of(config, path) is False else flag.on[0]
