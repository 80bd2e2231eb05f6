"""Docstrings and comments begin with a noun or a verb, not with an indirect question."""

import ast
import io
import re
import subprocess
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
QUESTION = re.compile(r"(What|Whether|How|Which|Who|Whose|Whom|Why|When|Where)\b")
#: A comment may begin with a condition: "When the run ends, ...".
CONDITIONS = ("When", "Where")


def python_files() -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.py"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return [path for name in listed.stdout.split() if (path := ROOT / name).exists()]


def openings(source: str) -> Iterator[tuple[int, str]]:
    """Line and beginning of every docstring, of modules, classes, functions and fields, and of every comment."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            for statement in node.body:
                if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
                    yield statement.lineno, str(statement.value.value).strip()
    commented = -1
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            text, row = token.string.lstrip("#: "), token.start[0]
            continues = commented == row - 1 and token.line.lstrip().startswith("#")
            commented = row if token.line.lstrip().startswith("#") else -1
            if not continues and not text.startswith(CONDITIONS):
                yield row, text


def questions(source: str) -> list[tuple[int, str]]:
    """Line and text of openings that are indirect questions."""
    return [(line, text.splitlines()[0]) for line, text in openings(source) if QUESTION.match(text)]


def test_no_docstring_or_comment_opens_with_an_indirect_question() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {text}"
        for path in python_files()
        for line, text in questions(path.read_text(encoding="utf-8"))
    ]
    assert found == []


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ('"""What this is."""', [1]),
        ('"""\nWhether it is.\n"""', [1]),
        ("class A:\n    '''How it works.'''\n    x: int\n    '''Which one.'''", [2, 4]),
        ('def f():\n    """Where it is."""', [2]),
        ("x = 1  # Why it is one.", [1]),
        ("# What follows\n# Which goes on\nx = 1\n# Whose is it", [1, 4]),
        ('"""The way."""\n# Where it fails, nothing is left.\nx = "What"  # whatever', []),
    ],
)
def test_a_question_is_found(source: str, lines: list[int]) -> None:
    assert [line for line, _ in questions(source)] == lines
