"""The page of all figures of speed says what was missed, what became slower, and what cannot be judged."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.all import Figure, Program, page

PROGRAM = Program("Loop", "engine/loop.py", (Figure("of a bare loop", "ratio", 0.9),))


def row(value: float | None, steal: float = 0.0, exit_code: int = 0) -> dict[str, Any]:
    found = {"values": {} if value is None else {"of a bare loop": value}, "steal": steal, "exit_code": exit_code}
    found |= {"commit": "abc"} | ({"failed": "no figure in the last line"} if value is None else {})
    return {
        "date": "2026-11-20",
        "machine": {"processor": "P", "cores": 2, "torch": "2"},
        "programs": {PROGRAM.command: found},
    }


@pytest.mark.parametrize(
    ("last", "cell"),
    [
        (row(0.95), "| 0.95 |"),
        (row(0.8), "| 0.8 (missed, slower) |"),
        (row(0.8, steal=0.2), "| 0.8 (not judged) |"),
        (row(None, exit_code=1), "| no figure in the last line |"),
        (row(0.95, exit_code=1), "(abc, exit code 1)"),
    ],
)
def test_a_figure_is_judged_beside_its_bar_and_earlier_rows(last: dict[str, Any], cell: str) -> None:
    text = page([row(1.0), last], [PROGRAM])
    assert cell in text
    assert "| >= 0.9 | 1 |" in text
