"""`metrics.jsonl`, the local record of a run: written by the first rank, read by all that shows or sends rows."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ups.record.files import read_end, read_from

logger = logging.getLogger(__name__)

Row = Mapping[str, object]
_MAX_READ_BYTES = 16 * 2**20


class MetricsWriter:
    """One JSON object per line. Numbers that are not finite become null: a strict reader must not choke on NaN."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._reported = False
        self._file = path.open("ab", buffering=0)
        if (read_end(path, 1) or b"\n") != b"\n":
            # A killed writer left half a line; the next row must not be glued to it.
            self._file.write(b"\n")

    def log(self, row: Row) -> None:
        """Append one row in a single write: readers see whole lines. A full disk is reported once and survived."""
        clean = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}
        try:
            self._file.write((json.dumps(clean, allow_nan=False) + "\n").encode())
        except OSError as error:
            if not self._reported:
                logger.warning("the local record of metrics cannot be written: %s", error)
            self._reported = True

    def close(self) -> None:
        self._file.close()


def new_rows(path: Path, offset: int, limit: int = 100_000) -> tuple[list[dict[str, Any] | None], int]:
    """The whole lines from `offset` on, at most `limit`, and where the next read begins; None for the half line of a
    killed writer.

    Every line counts, so that a row keeps its number whatever happened before it. Reads a part of a long file.
    """
    content = read_from(path, offset, _MAX_READ_BYTES)
    lines = content[: content.rfind(b"\n") + 1].splitlines(keepends=True)[:limit]
    return [_row(line) for line in lines], offset + sum(map(len, lines))


def all_rows(path: Path) -> Iterator[dict[str, Any] | None]:
    """Every whole line of the file as `new_rows` gives it."""
    offset = 0
    while True:
        rows, offset = new_rows(path, offset)
        if not rows:
            return
        yield from rows


def rows_in(lines: Iterable[bytes]) -> list[dict[str, Any]]:
    """The rows among some lines; the half line of a killed writer is left out."""
    return [row for line in lines if (row := _row(line)) is not None]


def _row(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):  # the second: of a line of brackets, which is no row either
        return None
    return row if isinstance(row, dict) else None


def size_of(path: Path) -> int:
    """Its bytes, 0 if there is none."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def numbers_of(row: Row) -> dict[str, float]:
    """The metrics of a row: its finite numbers, without step and time, which say where they belong."""
    return {
        name: float(value)
        for name, value in row.items()
        if isinstance(value, int | float)
        and not isinstance(value, bool)
        and math.isfinite(value)
        and name not in ("step", "time")
    }
