"""Rows as aligned columns of text."""

from __future__ import annotations

from collections.abc import Sequence

from ups.record.text import printable


def table(rows: Sequence[Sequence[str]], *, indent: int = 2, gap: int = 2) -> str:
    """Rows as aligned columns; the last column runs free. A cell stays on its line, whatever it holds."""
    rows = [[printable(cell) for cell in row] for row in rows]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]) - 1)] if rows else []
    lines = []
    for row in rows:
        cells = [cell.ljust(width + gap) for cell, width in zip(row[:-1], widths, strict=True)]
        lines.append((" " * indent + "".join(cells) + row[-1]).rstrip())
    return "\n".join(lines)
