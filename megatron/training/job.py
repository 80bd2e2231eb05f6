"""Job: the checked configuration of a run, the plan that follows from it, and its tokenizer."""

from dataclasses import dataclass, fields

from megatron.training.checkpoint.load.args_from_checkpoint import with_saved_arguments
from megatron.training.config import Reading, RunConfig, RunPlan, check, plan_run
from megatron.training.errors import ConfigError
from megatron.training.files import missing_files
from megatron.training.tokenizer import Tokenizer, TokenizerRequest, build_tokenizer

_TOKENIZER_FLAGS = "--tokenizer-type --tokenizer-model --vocab-file --merge-file --vocab-size --padded-vocab-size"


@dataclass(frozen=True, kw_only=True)
class Job:
    """A configuration that was checked, and what follows from it."""

    config: RunConfig
    plan: RunPlan
    tokenizer: Tokenizer


def prepare(config: RunConfig, world_size: int) -> Job:
    """The job of `config` on `world_size` ranks. Raises ConfigError with every problem; reads the tokenizer's files."""
    return prepare_reading(Reading(config=config), world_size)


def prepare_reading(reading: Reading, world_size: int) -> Job:
    """The job of a configuration that was read. Raises ConfigError with every problem, of reading it and with it."""
    config, problems = reading.config, list(reading.problems)
    if config.checkpoint.use_checkpoint_args and config.checkpoint.load is not None:
        config = with_saved_arguments(config)
    try:
        check(config, world_size)
    except ConfigError as error:
        problems += (problem for problem in error.problems if not reading.concerns(problem))
    tokenizer = None
    # The rules have named options that a tokenizer lacks.
    if not Reading(config=config, problems=tuple(problems)).concerns(_TOKENIZER_FLAGS):
        try:
            options = {field.name: getattr(config.tokenizer, field.name) for field in fields(config.tokenizer)}
            size = config.dist.tensor_model_parallel_size
            tokenizer = build_tokenizer(TokenizerRequest(**options, tensor_model_parallel_size=size))
        except (ValueError, ImportError) as error:
            problems.append(str(error))
    problems += missing_files(config)
    if problems:
        raise ConfigError(problems)
    return Job(config=config, plan=plan_run(config, world_size, tokenizer.padded_vocab_size), tokenizer=tokenizer)
