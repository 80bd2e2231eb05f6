"""Standard output for log lines, above the live progress where there is a terminal."""

import sys
from typing import Protocol


class LiveDisplay(Protocol):
    """Something that redraws itself at the bottom of the terminal."""

    def print_above(self, text: str) -> None:
        """Writes a line that stays."""


class Console:
    """Writes lines on standard output."""

    def __init__(self) -> None:
        self.display: LiveDisplay | None = None
        """The display below the lines, while there is one."""

    def line(self, text: str) -> None:
        """Writes one line, at once."""
        if self.display is not None:
            self.display.print_above(text)
            return
        sys.stdout.write(text + "\n")
        sys.stdout.flush()
