"""Code and documents are written in US spelling. Stored files of earlier versions are not touched."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
BRITISH = re.compile(
    r"colour|neighbour|behaviour|favour|honour|centre|licence|catalogue|judgement|artefact|travell|labelled|"
    r"(normal|optim|recogn|summar|initial|synchron|vector|serial|organ|minim|maxim|general|util)is(e|ing|ation)|learnt|spelt",
    re.IGNORECASE,
)
# Names of random draws (they decide the data), the former name of a recipe field, and a text in stored data.
ALLOWED = re.compile(r'"centre"|"neighbour_mixing"|with its centre in \[0\.3, 0\.7\]\^2')


def test_spelling_is_that_of_the_us() -> None:
    files = [path for folder in ("src", "tests", "benchmarks", "examples") for path in (ROOT / folder).rglob("*.py")]
    files += [*(ROOT / "docs").rglob("*.md"), *ROOT.glob("*.md"), *(ROOT / "recipes").glob("*.yaml")]
    misspelled = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in files
        if path != Path(__file__) and "integration/runs" not in str(path) and "inference/bundles/" not in str(path)
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if BRITISH.search(ALLOWED.sub("", line))
    ]
    assert not misspelled, "\n".join(misspelled)
