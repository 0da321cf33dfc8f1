"""The pages on how to add a part link files of the sample plugin, which another test runs; the site shows them."""

from __future__ import annotations

import re

import pytest

from tests.integration.environments import ROOT

PAGES = sorted(page for page in (ROOT / "docs" / "extend").glob("*.md") if page.stem not in ("README", "script"))
PLUGIN = ROOT / "tests" / "plugins" / "sample_plugin"


def test_there_is_a_page_for_each_kind_of_part_in_the_plugin() -> None:
    assert [page.stem for page in PAGES] == ["model", "reader", "stage", "task", "tracker"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_links_files_of_the_plugin_and_shows_its_entry_points(page) -> None:
    text = page.read_text()
    linked = re.findall(r"<!-- file: (\S+) -->\n\[`[\w.]+`\]\(../../(\S+)\)\n", text)
    assert linked
    assert linked == [(path, path) for path in re.findall(r"<!-- file: (\S+) -->", text) if (ROOT / path).is_file()]
    ((path, sections),) = re.findall(r"<!-- part of: (\S+) -->\n```toml\n(.*?)```\n", text, re.DOTALL)
    for section in sections.strip().split("\n\n"):
        assert section in (ROOT / path).read_text()


def test_every_file_of_the_plugin_is_on_a_page() -> None:
    text = "".join(page.read_text() for page in PAGES)
    files = [path for path in (PLUGIN / "src").rglob("*.py") if path.name != "__init__.py"]
    assert [str(path.relative_to(ROOT)) for path in files if str(path.relative_to(ROOT)) not in text] == []
