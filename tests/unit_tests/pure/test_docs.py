"""Documentation: files that pages name exist, links lead somewhere, and the glossary stays short."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
#: Folders that pages name files relative to.
BASES = (
    ROOT,
    ROOT / "megatron/core/distributed/fsdp/src",
    ROOT / "megatron/core/distributed/fsdp/src/megatron_fsdp",
    ROOT / "megatron/training",
    ROOT / "tests/unit_tests",
)
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
#: Notes of what was measured at the time; files that they name may be gone.
LAB_PAGES = sorted((ROOT / "docs/lab").glob("*.md"))
MAX_WORDS = 30


def missing_files(text: str) -> list[str]:
    """Python files between backticks in `text` that do not exist; those with a folder only, others may be a user's."""
    named = re.findall(r"`(?:python )?([\w/]+/\w+\.py)`", text)
    return [name for name in named if not any((base / name).exists() for base in BASES)]


def dead_links(text: str, folder: Path) -> list[str]:
    """Relative links in `text`, a page of `folder`, whose file or heading does not exist."""
    text, found = re.sub(r"```.*?```", "", text, flags=re.S), []
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"\w+:", target):
            continue
        path, _, anchor = target.partition("#")
        page = folder / path if path else None
        if page is not None and not page.exists():
            found.append(target)
        elif anchor and anchor not in headings(page.read_text(encoding="utf-8") if page is not None else text):
            found.append(target)
    return found


def headings(text: str) -> set[str]:
    """Anchors that GitHub gives the headings of a page."""
    titles = re.findall(r"^#+ (.+)$", re.sub(r"```.*?```", "", text, flags=re.S), flags=re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_a_page_names_exists(page):
    text = page.read_text(encoding="utf-8")
    assert missing_files(text) == []
    assert dead_links(text, page.parent) == []


@pytest.mark.parametrize("page", LAB_PAGES, ids=lambda page: page.name)
def test_links_of_lab_notes_lead_somewhere(page):
    assert dead_links(page.read_text(encoding="utf-8"), page.parent) == []


def test_what_is_missing_is_found(tmp_path):
    assert missing_files("see `plan/nothing.py` and `plan/program.py`, not `train.py`") == ["plan/nothing.py"]
    text = "# One `two`\n[a](#one-two) [b](#three) [c](none.md) [d](https://x.org/e)"
    assert dead_links(text, tmp_path) == ["#three", "none.md"]


def test_the_glossary_is_short():
    rows = re.findall(r"^\| (?!word|-)", (ROOT / "docs/glossary.md").read_text(encoding="utf-8"), flags=re.M)
    assert 10 < len(rows) <= MAX_WORDS
