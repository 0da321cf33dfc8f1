"""Questions of readers.yaml have their answers on the named pages, at most three links from the start page."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from tests.docs.words import DOCS

QUESTIONS = yaml.safe_load((Path(__file__).parent / "readers.yaml").read_text())
ROWS = [(reader, row) for reader, rows in QUESTIONS.items() for row in rows]


def clicks() -> dict[Path, int]:
    """How many links lead from the start page to each page, in the shortest way."""
    found, edge = {DOCS / "README.md": 0}, [DOCS / "README.md"]
    while edge:
        page = edge.pop(0)
        for link in re.findall(r"\]\(([\w./-]+\.md)(?:#[\w-]+)?\)", page.read_text()):
            target = (page.parent / link).resolve()
            if target.is_relative_to(DOCS) and target not in found:
                found[target] = found[page] + 1
                edge.append(target)
    return found


CLICKS = clicks()


def test_each_kind_of_reader_asks_five_questions() -> None:
    assert [len(rows) for rows in QUESTIONS.values()] == [5, 5, 5, 5]


@pytest.mark.parametrize(("reader", "row"), ROWS, ids=[row["question"] for _, row in ROWS])
def test_a_question_is_answered_within_three_clicks(reader: str, row: dict[str, str]) -> None:
    page = DOCS / row["page"]
    assert row["answer"] in " ".join(page.read_text().split()), f"{reader} finds no answer on {row['page']}"
    assert CLICKS[page] <= 3


def test_every_page_is_within_three_clicks() -> None:
    pages = {page for page in DOCS.rglob("*.md") if "generated" not in page.parts}
    assert {page for page in pages if CLICKS.get(page, 99) > 3} == set()
