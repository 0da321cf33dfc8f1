"""Documents name files and links that exist, and the index of the docs has every page."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import ups

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "benchmarks").rglob("*.md")],
    key=lambda path: str(path),
)
# A path of this repository in backticks or in a command; placeholders in capitals (NAME.py) are none.
NAMED = re.compile(r"(?<![\w./<>-])((?:[\w.-]+/)+[\w.-]+\.(?:py|md|sh|toml|yml))(?![\w/-])")
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[\w-]+)?\)")
FENCE = re.compile(r"^```.*?^```", re.M | re.S)
TOP = {"src", "ups", "tests", "docs", "benchmarks", "examples", ".ci", ".github"}


def named_files(text: str) -> set[str]:
    """Paths of this repository that a text names: from its root, from src/, or from src/ups/."""
    modules = {path.name for path in (ROOT / "src" / "ups").iterdir() if path.is_dir()}
    names = {match[1] for match in NAMED.finditer(FENCE.sub("", text))}
    return {name for name in names if name.split("/")[0] in TOP | modules and not re.search(r"[A-Z]{3,}\.", name)}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_file_that_a_page_names_exists(page: Path) -> None:
    roots = (ROOT, ROOT / "src", ROOT / "src" / "ups", page.parent)
    missing = [name for name in named_files(page.read_text()) if not any((top / name).exists() for top in roots)]
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_of_a_page_leads_somewhere(page: Path) -> None:
    links = [link for link in LINK.findall(FENCE.sub("", page.read_text())) if "://" not in link]
    assert [link for link in links if not (page.parent / link).exists()] == []


def test_a_wrong_path_is_noticed() -> None:
    assert named_files("see `src/ups/training/gone.py` and `supervise/gone.py`") == {
        "src/ups/training/gone.py",
        "supervise/gone.py",
    }


def test_the_index_has_every_page_of_the_docs() -> None:
    linked = set(LINK.findall((ROOT / "docs" / "README.md").read_text()))
    pages = {path.name for path in (ROOT / "docs").glob("*.md")} - {"README.md"}
    assert pages <= linked, pages - linked


def test_the_list_of_benchmarks_has_every_benchmark() -> None:
    text = (ROOT / "benchmarks" / "README.md").read_text()
    files = {str(path.relative_to(ROOT / "benchmarks")) for path in (ROOT / "benchmarks").rglob("*.py")}
    assert {name for name in files if name not in text} == set()


def test_the_walk_from_a_death_to_its_explanation_is_short() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    section = text.split("## From a death to `ups why`\n")[1].split("\n## ")[0]
    assert 0 < len(set(re.findall(r"`(src/ups/[\w/]+\.py)`", section))) <= 10


def test_the_citation_names_the_version() -> None:
    assert f"\nversion: {ups.__version__}\n" in (ROOT / "CITATION.cff").read_text()
