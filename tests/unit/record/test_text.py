"""Durations, sizes, counts and paths as people read them."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path

import pytest

from ups.record.text import counted, duration_text, html_table, path_text, size_text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(5, "5 s"), (89, "89 s"), (600, "10 min"), (3600 * 3 + 300, "3 h 05 min"), (86400 * 2 + 4 * 3600, "2 d 4 h")],
)
def test_durations_read_well(seconds: float, text: str) -> None:
    assert duration_text(seconds) == text


@pytest.mark.parametrize(("number", "text"), [(12, "12 bytes"), (4500, "4.5 kB"), (2.5e9, "2.5 GB"), (1.5e13, "15 TB")])
def test_sizes_read_well(number: float, text: str) -> None:
    assert size_text(number) == text


def test_counts_and_paths_read_as_people_write_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert (counted(1, "frame"), counted(0, "frame"), counted(2, "frame")) == ("1 frame", "0 frames", "2 frames")
    monkeypatch.chdir(tmp_path)
    assert path_text(tmp_path / "runs" / "a") == "runs/a"
    assert path_text(Path("/elsewhere/a")) == "/elsewhere/a"


class Tags(HTMLParser):
    """The tags and attributes of a text, and what stands between them."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, object]] = []
        self.texts: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.tags.append((tag, attrs))

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def test_a_table_for_notebooks_shows_any_text_as_it_is_and_leaves_colors_to_the_theme() -> None:
    hostile = "<script>alert(1)</script>&amp;\x1b[31m"
    shown = Tags(html_table(hostile, ["a", hostile], [[1, hostile], [None, "\"'"]]))
    assert {tag for tag, _ in shown.tags} == {"table", "caption", "thead", "tbody", "tr", "th", "td"}
    assert all(not attributes for _, attributes in shown.tags), "neither styles nor handlers"
    assert shown.texts.count("<script>alert(1)</script>&amp;\\x1b[31m") == 3
