"""Counts words and sentences of the documentation, for each part and page: `python tests/docs/words.py [--pages]`.

The parts are the sections of docs/README.md: a page belongs to the section that links it. Pages of decisions and all
others without a link there count as Evidence.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PARTS = ("Start", "Guides", "Reference", "Evidence")
FENCE = re.compile(r"^( *)```.*?^\1```", re.M | re.S)


def parts() -> dict[str, list[Path]]:
    """The pages of each part, in the order of the index."""
    index = (DOCS / "README.md").read_text()
    sections = dict(re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", index, re.M | re.S))
    pages = {part: _linked(sections.get(part, "")) for part in PARTS}
    known = {page for found in pages.values() for page in found} | {DOCS / "README.md"}
    pages["Start"].insert(0, DOCS / "README.md")
    pages["Evidence"] += sorted({page for page in DOCS.rglob("*.md") if "generated" not in page.parts} - known)
    return pages


def _linked(text: str) -> list[Path]:
    links = re.findall(r"\]\(([\w/-]+\.md)\)", text)
    return list(dict.fromkeys(DOCS / link for link in links))


def words(pages: Iterable[Path]) -> int:
    """As `wc -w`: tables and code count."""
    return sum(len(page.read_text().split()) for page in pages)


def sentences(text: str) -> list[str]:
    """Sentences of the prose: no code, table or heading; an item of a list ends its last sentence."""
    lines = FENCE.sub("\n", text).splitlines()
    prose = "\n".join("" if line.lstrip().startswith(("|", "#", "<!--", "!")) else line for line in lines)
    blocks = re.split(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.) )", prose)
    split = (re.split(r"(?<=[.!?])[*_)\"]*\s+(?=[A-Z`*\[(\"_]|\d+ )", " ".join(block.split())) for block in blocks)
    return [one for block in split for one in block if len(one.split()) > 1]


def mean_length(pages: Iterable[Path]) -> float:
    lengths = [len(one.split()) for page in pages for one in sentences(page.read_text())]
    return sum(lengths) / max(1, len(lengths))


def main() -> None:
    found = parts() | {"README.md": [ROOT / "README.md"]}
    for part, pages in found.items():
        print(f"{part:10} {words(pages):7,} words, {mean_length(pages):4.1f} a sentence, {len(pages)} pages")
        for page in sorted(pages, key=lambda one: -words([one])) if "--pages" in sys.argv else []:
            print(f"{words([page]):9,} {mean_length([page]):5.1f}  {page.relative_to(ROOT)}")
    docs = [page for part in PARTS for page in found[part]]
    print(f"{'all docs':10} {words(docs):7,} words, {mean_length(docs):4.1f} a sentence")


if __name__ == "__main__":
    main()
