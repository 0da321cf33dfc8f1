"""The documentation stays short: docs/README.md has its parts, `python tests/docs/words.py` the figures."""

from __future__ import annotations

import pytest

from tests.docs.words import DOCS, PARTS, ROOT, mean_length, parts, sentences, words

FOUND = parts()
PAGES = [page for part in PARTS for page in FOUND[part]]


def test_every_page_is_in_one_part() -> None:
    assert len(PAGES) == len(set(PAGES))
    assert all(FOUND[part] for part in PARTS)


def test_the_readme_fits_on_few_screens() -> None:
    readme = ROOT / "README.md"
    assert words([readme]) <= 900
    assert len(readme.read_text().splitlines()) <= 100


def test_start_and_guides_are_short() -> None:
    assert words(FOUND["Start"] + FOUND["Guides"]) <= 15_000


def test_sentences_are_short() -> None:
    assert mean_length(PAGES) <= 22


def test_code_tables_and_headings_are_no_sentences() -> None:
    text = "# A title\n\nOne `a.b` here. Two\nlines of it!\n\n| a | b |\n\n- an item\n\n```\nno. Not this.\n```\n"
    assert sentences(text) == ["One `a.b` here.", "Two lines of it!", "- an item"]


@pytest.mark.long
def test_the_site_builds_without_warnings_and_asks_nobody(tmp_path) -> None:
    import re
    import subprocess
    import sys

    pytest.importorskip("furo")
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-d", str(tmp_path / "trees")]
    subprocess.run([*command, str(DOCS), str(tmp_path / "site")], check=True, timeout=280, capture_output=True)
    page = (tmp_path / "site" / "index.html").read_text()
    for part in PARTS:
        assert f'<span class="caption-text">{part}</span>' in page
    for page in (tmp_path / "site").rglob("*.html"):
        assert not re.findall(r'<(?:script|link|img)[^>]+(?:src|href)="(?:https?:)?//[^"]*"', page.read_text())
