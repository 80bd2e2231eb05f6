"""From a command line to a job that can run, or to everything that is wrong with it; no process group exists yet.

Imports neither torch nor megatron-core by itself, so that --help and a mistyped flag are answered at once.
"""

import importlib
import logging
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

from megatron.training.config import (
    ConfigError,
    Reading,
    RunConfig,
    RunPlan,
    check,
    format_problems,
    plan_run,
    read_config,
)
from megatron.training.config.flags import all_flags
from megatron.training.config.rule_book import value_of
from megatron.training.files import missing_files
from megatron.training.ranks import Ranks
from megatron.training.tokenizer import Tokenizer, TokenizerRequest, build_tokenizer

EXIT_FAILED = 1
EXIT_BAD_CONFIGURATION = 2
EXIT_INTERRUPTED = 130
"""128 and the number of SIGINT, as shells count."""

_EXPECTED_WARNINGS = (
    "Transformer Engine and Apex are not installed",
    "Apex is not installed",
    "full scope is deprecated",  # of CUDA graphs, which nobody asked for
)
"""What megatron-core says at each import of a fallback, on every rank."""

_RENAMED_COLLECTIVES = r"`torch\.distributed\.\w+` is deprecated\. Please use `torch\.distributed\.\w+_single`"
"""What torch says, on every rank, of collectives that megatron-core calls by their old names."""

_TOKENIZER_FLAGS = "--tokenizer-type --tokenizer-model --vocab-file --merge-file --vocab-size --padded-vocab-size"

logger = logging.getLogger(__name__)


class RunError(RuntimeError):
    """A run cannot begin or go on, for a reason that its message tells in full; no traceback is shown."""

    is_on_every_rank = False
    """All ranks raise it with the same message, so that one of them may speak."""


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
    if reading.is_guess:
        raise ConfigError(problems)
    if config.checkpoint.use_checkpoint_args and config.checkpoint.load is not None:
        config = importlib.import_module("megatron.training.checkpoint.load.args_from_checkpoint").with_saved_arguments(
            config
        )
    try:
        check(config, world_size)
    except ConfigError as error:
        problems += (problem for problem in error.problems if not reading.concerns(problem))
    tokenizer = None
    # What a tokenizer lacks is told once, by the rules.
    if not Reading(config=config, problems=tuple(problems)).concerns(_TOKENIZER_FLAGS):
        try:
            tokenizer = build_tokenizer(tokenizer_request(config))
        except (ValueError, ImportError) as error:
            problems.append(str(error))
    problems += missing_files(config)
    if problems:
        raise ConfigError(problems)
    return Job(config=config, plan=plan_run(config, world_size, tokenizer.padded_vocab_size), tokenizer=tokenizer)


def launch(task: str, argv: Sequence[str] | None = None) -> int:
    """Runs the task of the module named `task` (its `TASK`) as `argv` says; gives back the process's exit code."""
    ranks = Ranks.from_environment()
    try:
        return _launch(task, None if argv is None else list(argv), ranks)
    except KeyboardInterrupt:
        if ranks.is_first:
            sys.stderr.write("interrupted\n")
        return EXIT_INTERRUPTED


def _launch(task: str, argv: list[str] | None, ranks: Ranks) -> int:
    try:
        reading = read_config(argv)
        job = prepare_reading(reading, ranks.world_size)
    except ConfigError as error:
        # The ranks of one machine find the same problems; on another one a file may be missing.
        if ranks.is_first or ranks.local_rank == 0:
            sys.stderr.write(f"{'' if ranks.is_first else f'[rank {ranks.rank}] '}{format_problems(error)}\n")
        return EXIT_BAD_CONFIGURATION
    configure_logging(job.config.logger.logging_level, ranks)
    ignore_expected_warnings()
    if adopted := differing_flags(reading.config, job.config):
        logger.info("taken from the checkpoint: %s", adopted)
    pretrain = importlib.import_module("megatron.training.pretrain").pretrain
    try:
        pretrain(job, importlib.import_module(task).TASK, ranks)
    except RunError as error:
        logger.debug("the run failed", exc_info=True)
        if ranks.is_first:
            logger.error("%s", error)
        elif not error.is_on_every_rank:  # The reason may lie on one machine.
            logger.error("%s", str(error).splitlines()[0])
        return EXIT_FAILED
    return 0


def differing_flags(one: RunConfig, other: RunConfig) -> str:
    """The flags of `other` that `one` has otherwise."""
    flags = (
        (flag, value_of(other, path))
        for path, flag in all_flags().items()
        if value_of(one, path) != value_of(other, path)
    )
    return " ".join(
        f"{flag.on[0]} {value}" if flag.base is not bool else (flag.on if value else flag.off)[0]
        for flag, value in flags
    )


def ignore_expected_warnings() -> None:
    """Silences what megatron-core says at each import of a fallback, and torch of the names that it calls."""
    for message in _EXPECTED_WARNINGS:
        warnings.filterwarnings("ignore", message=message, module=r"megatron\.core\.")
    warnings.filterwarnings("ignore", message=_RENAMED_COLLECTIVES, category=FutureWarning)


def configure_logging(level: int | None, ranks: Ranks) -> None:
    """Messages to stderr; ranks other than the first speak up only with warnings, and say who they are.

    `level` None: ours from INFO on, megatron-core's from WARNING on. A record with the attribute `is_on_every_rank` is
    rank 0's alone to show.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(message)s" if ranks.is_first else f"[rank {ranks.rank}] %(message)s"))
    handler.addFilter(lambda record: ranks.is_first or not getattr(record, "is_on_every_rank", False))
    root = logging.getLogger()
    root.addHandler(handler)
    if level is None:
        logging.getLogger("megatron.core").setLevel(logging.WARNING)
    level = logging.INFO if level is None else level
    root.setLevel(level if ranks.is_first else max(level, logging.WARNING))


def tokenizer_request(config: RunConfig) -> TokenizerRequest:
    """What `config` says about the tokenizer."""
    tokenizer = config.tokenizer
    return TokenizerRequest(
        tokenizer_type=tokenizer.tokenizer_type,
        tokenizer_model=tokenizer.tokenizer_model,
        vocab_file=tokenizer.vocab_file,
        merge_file=tokenizer.merge_file,
        vocab_size=tokenizer.vocab_size,
        make_vocab_size_divisible_by=tokenizer.make_vocab_size_divisible_by,
        tensor_model_parallel_size=config.dist.tensor_model_parallel_size,
        padded_vocab_size=tokenizer.padded_vocab_size,
        tokenizer_special_tokens=tokenizer.tokenizer_special_tokens,
        tokenizer_hf_no_include_special_tokens=tokenizer.tokenizer_hf_no_include_special_tokens,
        tiktoken_pattern=tokenizer.tiktoken_pattern,
        tiktoken_num_special_tokens=tokenizer.tiktoken_num_special_tokens,
    )
