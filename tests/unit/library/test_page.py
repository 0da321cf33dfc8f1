"""The snippets of docs/library.md run, one after the other, and every public name is on the page."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

import ups

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "library.md").read_text()


def test_the_snippets_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(ROOT / "tests" / "integration" / "runs" / "data", "data")
    snippets = re.findall(r"^```python\n(.*?)^```$", PAGE, flags=re.MULTILINE | re.DOTALL)
    assert len(snippets) == 4
    names: dict[str, object] = {}
    for snippet in snippets:
        exec(compile(snippet, "docs/library.md", "exec"), names)
    assert names["later"].sizes["time"] == 5  # type: ignore[attr-defined]


def test_every_function_of_the_library_is_on_the_page() -> None:
    returned = {"Comparison", "Dataset", "Scores", "__version__"}
    for name in set(ups.__all__) - returned:
        assert f"`ups.{name}" in PAGE, name
