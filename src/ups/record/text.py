"""Durations, sizes, counts and paths as people read them: one spelling for commands, status, checks and data cards."""

from __future__ import annotations

import contextlib
import html
from collections.abc import Sequence
from pathlib import Path


def duration_text(seconds: float) -> str:
    """'45 s', '12 min', '3 h 05 min', '2 d 4 h'."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes} min"
    if minutes < 48 * 60:
        return f"{minutes // 60} h {minutes % 60:02d} min"
    return f"{minutes // 1440} d {minutes % 1440 // 60} h"


def size_text(num_bytes: float) -> str:
    """'12.3 GB', '450 MB', '12 kB', '7 bytes'."""
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(num_bytes) >= scale:
            return f"{num_bytes / scale:.3g} {unit}"
    return f"{num_bytes:.0f} bytes"


def counted(count: int, noun: str) -> str:
    """'1 frame', '2 frames'."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def path_text(path: Path) -> str:
    """The path as one would type it here: relative if it is below the current directory."""
    with contextlib.suppress(ValueError, OSError):
        return str(path.relative_to(Path.cwd()))
    return str(path)


def last_line(text: str) -> str:
    """What a program that failed has said last."""
    return (text.strip().splitlines() or ["no message"])[-1]


def printable(text: str, keep: str = "") -> str:
    """`text` with control characters escaped, but for those in `keep`."""
    return "".join(c if c.isprintable() or c in keep else c.encode("unicode_escape").decode() for c in text)


def html_table(title: str, head: Sequence[object], rows: Sequence[Sequence[object]]) -> str:
    """A table for notebooks: every text is escaped, and colors are left to the theme."""

    def row(tag: str, cells: Sequence[object]) -> str:
        inner = "".join(f"<{tag}>{html.escape(printable(str(cell)))}</{tag}>" for cell in cells)
        return f"<tr>{inner}</tr>"

    body = "".join(row("td", cells) for cells in rows)
    caption = html.escape(printable(title))
    return f"<table><caption>{caption}</caption><thead>{row('th', head)}</thead><tbody>{body}</tbody></table>"
