"""The configuration of a training run: one declaration per knob, read from flags and YAML, checked by named rules.

`load_config` -> `check` -> `plan_run`. Importing this loads neither torch nor megatron-core, so that --help is quick;
`megatron.training.config.to_core` derives megatron-core's own configurations.
"""

from megatron.training.config.kernels import Kernels, Machine, choose_kernels
from megatron.training.config.plan import RunPlan, plan_run
from megatron.training.config.rules import check
from megatron.training.config.schema import RunConfig
from megatron.training.config.sources import Reading, from_yaml, load_config, read_config, to_yaml
from megatron.training.errors import ConfigError, format_problems

__all__ = [
    "ConfigError",
    "Kernels",
    "Machine",
    "Reading",
    "RunConfig",
    "RunPlan",
    "check",
    "choose_kernels",
    "format_problems",
    "from_yaml",
    "load_config",
    "plan_run",
    "read_config",
    "to_yaml",
]
