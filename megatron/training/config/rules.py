"""Rules between fields: every rule is asked, and all violations are reported at once.

A rule is a function with a name, a sentence and a message; it reads the configuration and the `Setting` it will run in.
"""

from megatron.training.config import rules_run, rules_support
from megatron.training.config.kernels import Machine, choose_kernels
from megatron.training.config.rule_book import RULES, Setting
from megatron.training.config.schema import RunConfig
from megatron.training.errors import ConfigError

__all__ = ["check", "rules_run", "rules_support", "violations"]


def violations(config: RunConfig, setting: Setting) -> list[str]:
    """Sentences, one for each violation of a rule by `config`."""
    found = []
    for check_one in RULES:
        result = check_one(config, setting)
        found += [result] if isinstance(result, str) else list(result or ())
    return found


def check(config: RunConfig, world_size: int, machine: Machine | None = None) -> None:
    """Raises one ConfigError with every violation of `config` on `world_size` ranks of `machine` (default: this one).

    Needs no process group and gives the same answer on every rank of a uniform cluster.
    """
    machine = machine or Machine.probe()
    setting = Setting(
        world_size=world_size,
        tensor_parallel_size=config.dist.tensor_model_parallel_size,
        machine=machine,
        kernels=choose_kernels(config, machine),
    )
    found = violations(config, setting)
    if found:
        raise ConfigError(found)
