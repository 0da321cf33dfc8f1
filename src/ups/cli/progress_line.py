"""The live line of `ups train`: follows metrics.jsonl of a run from the outside, so it costs the ranks nothing.

On a terminal one line is rewritten in place; in a log there is one line for each row.
"""

from __future__ import annotations

import contextlib
import json
import sys
import threading
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TextIO

from ups.cli.output import shown


class ProgressLine:
    """Shows new rows of `path` while it is entered; `say` prints a line without tearing the live one."""

    def __init__(self, path: Path, stage_names: list[str], stream: TextIO | None = None) -> None:
        self._path = path
        self._stages = stage_names
        self._stream = stream or sys.stderr
        self._live = self._stream.isatty()
        self._offset = path.stat().st_size if path.exists() else 0
        self._rest = b""
        self._shown = ""
        self._lock = threading.Lock()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="ups-progress", daemon=True)

    def say(self, text: str) -> None:
        """Print a whole line to standard output, above the live line."""
        with self._lock:
            self._clear()
            sys.stdout.write(shown(text) + "\n")
            sys.stdout.flush()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end.set()
        self._thread.join(5)

    def _follow(self) -> None:
        while True:
            last = self._end.wait(0.25)
            # Nobody reads any more, or the terminal is gone: the run goes on.
            with contextlib.suppress(OSError, ValueError):
                for row in self._new_rows():
                    text = shown(describe(row, self._stages))
                    if text:
                        self._show(text)
                if last:
                    with self._lock:
                        if self._live and self._shown:
                            self._stream.write("\n")
                            self._stream.flush()
            if last:
                return

    def _new_rows(self) -> list[dict[str, Any]]:
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                data = self._rest + file.read()
                self._offset = file.tell()
        except OSError:
            return []
        *lines, self._rest = data.split(b"\n")
        rows = []
        for line in lines:
            try:
                row = json.loads(line)
            except ValueError:
                continue  # the half line of a killed writer
            if isinstance(row, dict):
                rows.append(row)
        return rows

    def _show(self, text: str) -> None:
        with self._lock:
            if self._live:
                self._clear()
                self._shown = text
                self._stream.write(text)
            else:
                self._stream.write(text + "\n")
            self._stream.flush()

    def _clear(self) -> None:
        if self._live and self._shown:
            self._stream.write("\r\x1b[K")
            self._shown = ""


def describe(row: dict[str, Any], stages: list[str]) -> str:
    """A row of metrics as a line for a person; '' for rows that are neither progress nor validation."""
    if "steps_per_second" not in row:
        scores = {k.removeprefix("valid/"): v for k, v in row.items() if k.startswith("valid/") and _is_number(v)}
        if not scores:
            return ""
        return f"valid step {row.get('step', '?')}  " + "  ".join(f"{k} {v:.3g}" for k, v in scores.items())
    number = int(row.get("stage", 0))
    name = stages[number] if number < len(stages) else str(number)
    done, total, rate = (
        int(row.get("stage_step", 0)),
        int(row.get("stage_steps", 0)),
        float(row["steps_per_second"] or 0),
    )
    parts = [f"stage {number + 1}/{len(stages)} {name}", f"step {done}/{total or '?'}"]
    if _is_number(row.get("loss")):
        parts.append(f"loss {row['loss']:.4g}")
    parts.append(f"{rate:.3g} steps/s")
    if rate > 0 and total:
        parts.append(f"left {duration((total - done) / rate)}")
    if row.get("skipped"):
        parts.append(f"skipped {row['skipped']}")
    return "  ".join(parts)


def duration(seconds: float) -> str:
    """'45 s', '12 min', '3 h 05 min', '2 d 4 h'."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes} min"
    if minutes < 48 * 60:
        return f"{minutes // 60} h {minutes % 60:02d} min"
    return f"{minutes // 1440} d {minutes % 1440 // 60} h"


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
