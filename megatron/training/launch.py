"""The entry point: from a command line to a run, or to everything that is wrong with the command line.

Importing this file loads neither torch nor megatron-core, so that --help and a mistyped flag are answered at once; the
only file of the training loop with imports inside functions.
"""

import importlib
import logging
import sys
import warnings
from collections.abc import Sequence

from megatron.training.config import RunConfig, read_config
from megatron.training.config.flags import all_flags
from megatron.training.config.notes import notes
from megatron.training.config.rule_book import value_of
from megatron.training.errors import ConfigError, RunError, format_problems
from megatron.training.ranks import Ranks

EXIT_FAILED = 1
EXIT_BAD_CONFIGURATION = 2
EXIT_INTERRUPTED = 130
"""128 and the number of SIGINT, as shells count."""

_EXPECTED_WARNINGS = (
    "Transformer Engine and Apex are not installed",
    "Apex is not installed",
    "full scope is deprecated",  # of CUDA graphs, which nobody asked for
)
"""Warnings of megatron-core at each import of a fallback, on every rank."""

_RENAMED_COLLECTIVES = r"`torch\.distributed\.\w+` is deprecated\. Please use `torch\.distributed\.\w+_single`"
"""Warnings of torch, on every rank, about collectives that megatron-core calls by their old names."""

logger = logging.getLogger(__name__)


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
        if reading.is_guess:
            raise ConfigError(reading.problems)
        from megatron.training.job import prepare_reading  # noqa: PLC0415  (loads torch)

        job = prepare_reading(reading, ranks.world_size)
    except ConfigError as error:
        # The ranks of one machine find the same problems; on another one a file may be missing.
        if ranks.is_first or ranks.local_rank == 0:
            sys.stderr.write(f"{'' if ranks.is_first else f'[rank {ranks.rank}] '}{format_problems(error)}\n")
        return EXIT_BAD_CONFIGURATION
    configure_logging(job.config.logger.logging_level, ranks)
    ignore_expected_warnings()
    if changed := differing_flags(reading.config, job.config):
        logger.info("taken from the checkpoint: %s", changed)
    for note in notes(job.config, job.plan.kernels):
        logger.info("%s", note)
    from megatron.training.pretrain import pretrain  # noqa: PLC0415  (loads megatron-core)

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
