"""Seconds per test file: what `--seconds-per-file` prints at the end of a run, and writes to docs/lab/test_times.md."""

import collections
import os
import platform
from importlib.metadata import version
from pathlib import Path

import pytest


class FileTimes:
    """Pytest plugin that adds up the seconds of each file's tests, fixtures included.

    A pool of ranks is made in the setup of the first test that uses it, so that the first file in which one is used
    counts the seconds of its start.
    """

    def __init__(self, count: int, page: Path | None, command: str) -> None:
        self._count = count
        self._page = page
        self._command = command
        self._seconds: collections.defaultdict[str, float] = collections.defaultdict(float)
        self._tests: dict[str, set[str]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Adds one phase of one test."""
        file = report.nodeid.partition("::")[0]
        self._seconds[file] += report.duration
        self._tests.setdefault(file, set()).add(report.nodeid)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Prints the slowest files and writes the page."""
        terminalreporter.section(f"slowest {self._count} of {len(self._seconds)} files")
        for file, seconds in self.slowest():
            terminalreporter.write_line(f"{seconds:7.1f} s {len(self._tests[file]):5} tests  {file}")
        if self._page is not None:
            self._page.write_text(self.page(), encoding="utf-8")

    def slowest(self) -> list[tuple[str, float]]:
        """Files and their seconds, slowest first."""
        return sorted(self._seconds.items(), key=lambda item: -item[1])[: self._count]

    def page(self) -> str:
        """The table as Markdown."""
        machine = f"{os.cpu_count()} CPU cores, torch {version('torch')}, Python {platform.python_version()}"
        total, tests = sum(self._seconds.values()), sum(len(names) for names in self._tests.values())
        rows = [f"| `{file}` | {len(self._tests[file])} | {seconds:.1f} |" for file, seconds in self.slowest()]
        lines = [
            "# Test times",
            "",
            f"The {len(rows)} slowest of {len(self._seconds)} test files; all {tests} tests took {total:.0f} s on "
            f"{machine}. Written by",
            "",
            "```bash",
            self._command,
            "```",
            "",
            "| file | tests | seconds |",
            "|---|---|---|",
            *rows,
        ]
        return "\n".join(lines) + "\n"
