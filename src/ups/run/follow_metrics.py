"""The progress of a run: follows its metrics.jsonl from the outside, so it costs the ranks nothing.

A row of the loop replaces the one before (in a log it follows it); a row of validation stays.
"""

from __future__ import annotations

import contextlib
import json
import math
import threading
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeGuard

from ups.record.files import open_regular
from ups.record.run_dir import RunDir
from ups.record.text import duration_text
from ups.run.progress_line import ProgressLine, bar


class MetricsFollower:
    """Shows new rows of `path` on a progress line while it is entered."""

    def __init__(self, path: Path, stage_names: list[str], line: ProgressLine) -> None:
        self._path = path
        self._stages = stage_names
        self._line = line
        self._offset = path.stat().st_size if path.exists() else 0
        self._rest = b""
        self._lock = threading.Lock()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="ups-progress", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end.set()
        self._thread.join(5)

    def say(self, text: str) -> None:
        """Print a whole line to standard output, after the rows that were written before."""
        self._show_new()
        self._line.say(text)

    def _follow(self) -> None:
        while not self._end.wait(0.25):
            self._show_new()
        self._show_new()

    def _show_new(self) -> None:
        # Nobody reads anymore, or the terminal is gone: the run goes on.
        with self._lock, contextlib.suppress(OSError, ValueError):
            for row in self._new_rows():
                self._show(row)

    def _show(self, row: dict[str, Any]) -> None:
        text = describe(row, self._stages)
        if text and "steps_per_second" in row:
            done, total = row.get("stage_step"), row.get("stage_steps")
            self._line.show(text, bar(done, total) if _is_number(done) and _is_number(total) else "")
        elif text:
            self._line.note(text)

    def _new_rows(self) -> list[dict[str, Any]]:
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                data = self._rest + file.read()
                self._offset = file.tell()
        except OSError:
            return []
        *lines, self._rest = data.split(b"\n")
        return rows_of(lines)


def describe(row: dict[str, Any], stages: list[str]) -> str:
    """A row of metrics as a line for a person; '' for rows that are neither progress nor validation."""
    if "steps_per_second" not in row:
        scores = {k.removeprefix("valid/"): v for k, v in row.items() if k.startswith("valid/") and _is_number(v)}
        if not scores:
            return ""
        return f"valid step {row.get('step', '?')}  " + "  ".join(_validation(scores))
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
        parts.append(f"left {duration_text((total - done) / rate)}")
    if row.get("skipped"):
        parts.append(f"skipped {row['skipped']}")
    return "  ".join(parts)


def _validation(scores: dict[str, float]) -> list[str]:
    """For each task the model's error with the best reference next to it, and a word if it is not
    better than chance.
    """
    tasks = dict.fromkeys(name.rpartition("/")[0] for name in scores)
    parts = []
    for task in tasks:
        own = {name.rpartition("/")[2]: value for name, value in scores.items() if name.rpartition("/")[0] == task}
        better_on, trajectories = own.pop("better_on", None), own.pop("trajectories", None)
        crps = own.pop("crps", None)  # of an ensemble
        if "one_step" not in own or len(own) < 2:
            parts += [f"{task}/{name} {value:.3g}" if task else f"{name} {value:.3g}" for name, value in own.items()]
            continue
        ours = own.pop("one_step")
        best = min(own, key=lambda name: own[name])
        text = f"{task} one_step {ours:.3g} ({best.replace('_', ' ')} {own[best]:.3g}"
        if not ours < own[best]:
            text += ", not better"
        elif better_on is not None and trajectories is not None and not _beyond_chance(better_on, trajectories):
            text += f", not significantly better: on {better_on:.0f} of {trajectories:.0f} trajectories"
        parts.append(text + ")" + ("" if crps is None else f", crps {crps:.3g}"))
    return parts


def _beyond_chance(won: float, total: float) -> bool:
    """Sign test: whether so many wins of fair games happen in less than 2.5 % of all cases."""
    count = int(total)
    if not 0 < count <= 1_000:
        return won > total / 2
    return bool(40 * sum(math.comb(count, k) for k in range(int(won), count + 1)) < 2**count)


def read_rows(run_dir: Path) -> list[dict[str, Any]]:
    """All rows that a run has written; none if it has no metrics yet."""
    try:
        with open_regular(RunDir(run_dir).metrics) as file:  # a pipe would never answer
            return [] if file is None else rows_of(file)
    except OSError:
        return []


def rows_of(lines: Iterable[bytes]) -> list[dict[str, Any]]:
    """The rows among the lines of a metrics.jsonl; the half line of a killed writer is left out."""
    rows = []
    for line in lines:
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):  # the second: of a line of brackets, which is no row either
            continue
        if isinstance(row, dict):
            rows.append(row)
    return rows


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)
