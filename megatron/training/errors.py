"""Exceptions whose message is all that a user is shown: what is wrong, where, and what to do."""

from collections.abc import Iterable


class ConfigError(ValueError):
    """The user's configuration cannot be run; `problems` are sentences, one per mistake."""

    def __init__(self, problems: Iterable[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(self.problems))


def format_problems(error: ConfigError) -> str:
    """The text to show to a user for all problems of `error`."""
    count = len(error.problems)
    head = f"The configuration has {count} problem{'s' if count > 1 else ''}:"
    return "\n".join([head, *(f"  - {problem}" for problem in error.problems)])


class CollectiveError(RuntimeError):
    """A function that one rank ran for all, or each rank for itself, failed; same message on every rank."""


class RunError(RuntimeError):
    """A run cannot begin or go on, for a reason that its message tells in full; no traceback is shown."""

    is_on_every_rank = False
    """All ranks raise it with the same message, so that one of them may speak."""


class CannotStartError(RunError, ValueError):
    """The data or the checkpoint is not what the run needs."""


class MissingCheckpointError(RunError):
    """`--load` has no checkpoint, and `--exit-on-missing-checkpoint` says that there must be one."""

    is_on_every_rank = True


class NotFiniteError(RunError):
    """A loss, a gradient or a gradient norm is NaN or infinite."""

    is_on_every_rank = True


class SaveError(RunError):
    """A checkpoint could not be written; what was there before is untouched, and so is the run."""

    is_on_every_rank = True
