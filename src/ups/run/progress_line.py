"""The one display of progress, a line on standard error; a follower that feeds it from the metrics of a run; tables.

On a terminal and in a notebook the line is rewritten in place and gone at the end. In a log there is a line for each
part that is done, and one every half a minute of a long part, each with the local time. Work that cannot count says
that it continues. Messages of the log and whole lines stand above it. The follower reads metrics.jsonl from outside, so
it costs the ranks nothing.
"""

from __future__ import annotations

import contextlib
import io
import math
import os
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self, TextIO

from ups.record.files import is_number, open_regular
from ups.record.log import log_shown_by, short_line
from ups.record.run_dir import RunDir
from ups.record.text import duration_text, printable
from ups.tracking.metrics_file import new_rows, rows_in

BAR_WIDTH = 20
LIVE_SECONDS = 0.1
LOG_SECONDS = 30.0
# How often it is looked whether the work has been silent for long.
PULSE_SECONDS = 1.0
_KEPT = "\n\t"


class ProgressLine:
    """Shows progress while it is entered. Every method may be called by any thread.

    quiet: shows none, and leaves messages to whoever shows them already.
    """

    def __init__(self, stream: TextIO | None = None, *, quiet: bool = False) -> None:
        self._stream = stream or sys.stderr or io.StringIO()  # a program without a console has no standard error
        self._terminal = self._stream.isatty()
        self._live = self._terminal or in_notebook(self._stream)
        self._quiet = quiet
        self._parts: dict[str, tuple[int, int]] = {}
        self._started: dict[str, list[tuple[float, int]]] = {}
        self._last = 0.0
        self._shown = ""
        # What is being done, since when, and the line that said so last.
        self._work: tuple[str, float] | None = None
        self._pulse = ""
        self._lock = threading.RLock()
        self._exit = contextlib.ExitStack()

    def __enter__(self) -> Self:
        self._last = 0.0 if self._live else time.monotonic()
        if not self._quiet:
            self._exit.enter_context(log_shown_by(lambda record: self._above(short_line(record))))
        return self

    def __exit__(self, *_: object) -> None:
        self._exit.close()
        with self._lock:
            self._write(self._erased())

    def count(self, what: str, done: int, total: int, unit: str = "%") -> None:
        """Part `what` of the work is so far; a unit of '%' shows a share of 100."""
        with self._lock:
            now = time.monotonic()
            self._parts[what] = (done, total)
            marks = self._started.setdefault(what, [])
            # What an earlier attempt did took no time now, and the first piece also pays for the start of the work.
            if not marks or (len(marks) == 1 and done > marks[0][1]):
                marks.append((now, done))
            since, before = marks[-1]
            complete = done >= total
            if now - self._last < (LIVE_SECONDS if self._live else LOG_SECONDS) and not complete:
                return
            text = f"{what} {100 * done // max(1, total)} %" if unit == "%" else f"{what} {done}/{total} {unit}"
            if self._live and len(self._parts) > 1 and unit != "%":
                text += f"  all {self._sum(0)}/{self._sum(1)}"
            if len(marks) > 1 and before < done < total and now - since > 2:
                text += f"  left {duration_text((now - since) / (done - before) * (total - done))}"
            self.show(text, bar(self._sum(0), self._sum(1)))

    def show(self, text: str, bar: str = "", *, in_log: bool = True) -> None:
        """Show a line in place of the one before; in a log under it. The bar only where the line is rewritten."""
        if self._quiet or not (self._live or in_log):
            return
        text = printable(text)
        with self._lock:
            self._last = time.monotonic()
            if not self._live:
                self._write(f"{self._stamp()}{text}\n")
                return
            erased, width = self._erased(), self._width()
            self._shown = (bar + text if len(bar + text) <= width else text)[:width]
            self._write(erased + self._shown)

    def working(self, text: str) -> None:
        """Show what is being done; while nothing else is shown, again with the time since."""
        if self._quiet:
            return
        with self._lock:
            first = self._work is None
            self.show(text)
            self._work, self._pulse = (text, time.monotonic()), self._shown
        if first:
            end = threading.Event()
            thread = threading.Thread(target=self._beat, args=(end,), name="ups-pulse", daemon=True)
            thread.start()
            self._exit.callback(thread.join, 5)
            self._exit.callback(end.set)

    def _beat(self, end: threading.Event) -> None:
        beat = time.monotonic()
        while not end.wait(PULSE_SECONDS):
            now = time.monotonic()
            with self._lock:
                assert self._work is not None
                text, started = self._work
                last = self._last
                # Where the line is rewritten, whoever has shown something else says more.
                due = self._shown == self._pulse if self._live else now - max(last, beat) >= LOG_SECONDS
                if due and not end.is_set():
                    self.show(f"{text}, {duration_text(now - started)} so far")
                    self._pulse, self._last, beat = self._shown, last, now  # a count need not wait for it

    def clear(self) -> None:
        """Make room for a whole line that other code prints."""
        with self._lock:
            self._write(self._erased())
            self._pulse = ""

    def note(self, text: str) -> None:
        """Print a whole line of progress to standard error, above the line that is rewritten."""
        self._above(self._stamp() + text)

    def _above(self, text: str) -> None:
        with self._lock:
            before, erased = self._shown, self._erased()
            self._shown = before
            self._write(f"{erased}{printable(text, keep=_KEPT)}\n{before}")

    def say(self, text: str) -> None:
        """Print a whole line to standard output, above the progress."""
        with self._lock:
            self._write(self._erased())
            sys.stdout.write(printable(text, keep=_KEPT) + "\n")
            sys.stdout.flush()

    def _stamp(self) -> str:
        """The time of a line in a log; '' on a terminal, where the line is about to vanish."""
        return "" if self._live else time.strftime("%Y-%m-%d %H:%M:%S  ")

    def _sum(self, which: int) -> int:
        return sum(part[which] for part in self._parts.values())

    def _width(self) -> int:
        columns = 0
        with contextlib.suppress(OSError, ValueError):
            columns = os.get_terminal_size(self._stream.fileno()).columns
        return max(20, columns - 1) if columns else 119  # a notebook, or a terminal that does not know

    def _erased(self) -> str:
        """What removes the line that is shown, if there is one."""
        length, self._shown = len(self._shown), ""
        # A notebook knows no "clear the line": what was there is written over.
        return ("\r\x1b[K" if self._terminal else "\r" + " " * length + "\r") if length else ""

    def _write(self, text: str) -> None:
        # A closed pipe or terminal must not stop the work.
        with contextlib.suppress(OSError, ValueError):
            if text:
                self._stream.write(text)
                self._stream.flush()


def in_notebook(stream: TextIO) -> bool:
    """Whether what is written to `stream` is shown in a notebook, which rewrites a line like a terminal."""
    return type(stream).__module__.startswith("ipykernel")


def bar(done: float, total: float) -> str:
    """How much is done, as `[######....] `; '' where that is not known."""
    if not (0 <= done <= total and total):
        return ""
    filled = int(BAR_WIDTH * done / total)
    return f"[{'#' * filled}{'.' * (BAR_WIDTH - filled)}] "


class MetricsFollower:
    """Shows new rows of `path` on a progress line while it is entered."""

    def __init__(self, path: Path, stage_names: list[str], line: ProgressLine) -> None:
        self._path = path
        self._stages = stage_names
        self._line = line
        self._offset = path.stat().st_size if path.exists() else 0
        self._lock = threading.Lock()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="ups-progress", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
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
        # A closed pipe or terminal must not stop the run.
        with self._lock, contextlib.suppress(OSError, ValueError):
            rows, self._offset = new_rows(self._path, self._offset)
            for row in rows:
                self._show(row or {})

    def _show(self, row: dict[str, Any]) -> None:
        text = describe(row, self._stages)
        if text and "steps_per_second" in row:
            known = is_number(row.get("stage_step")) and is_number(row.get("stage_steps"))
            self._line.show(text, bar(row["stage_step"], row["stage_steps"]) if known else "")
        elif text:
            self._line.note(text)


def describe(row: dict[str, Any], stages: list[str]) -> str:
    """A row of metrics as a line of text; '' for rows that are neither progress nor validation."""
    if "steps_per_second" not in row:
        scores = {k.removeprefix("valid/"): v for k, v in row.items() if k.startswith("valid/") and is_number(v)}
        if not scores:
            return ""
        return f"valid step {row.get('step', '?')}  " + "  ".join(_validation(scores))
    number, done, total = (int(row.get(name, 0)) for name in ("stage", "stage_step", "stage_steps"))
    name = stages[number] if number < len(stages) else str(number)
    rate = float(row["steps_per_second"] or 0)
    parts = [f"stage {number + 1}/{len(stages)} {name}", f"step {done}/{total or '?'}"]
    if is_number(row.get("loss")):
        parts.append(f"loss {row['loss']:.4g}")
    parts.append(f"{rate:.3g} steps/s")
    if is_number(row.get("flops_of_peak")):
        parts.append(f"{row['flops_per_second'] / 1e12:.3g} TFLOP/s ({100 * row['flops_of_peak']:.0f} % of the peak)")
    elif is_number(row.get("flops_per_second")):
        parts.append(f"{row['flops_per_second'] / 1e9:.3g} GFLOP/s")
    if rate > 0 and total:
        parts.append(f"left {duration_text((total - done) / rate)}")
    if row.get("skipped"):
        parts.append(f"skipped {row['skipped']}")
    return "  ".join(parts)


def _validation(scores: dict[str, float]) -> list[str]:
    """For each task the model's error, the best reference, and a word if it is not better than chance."""
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
            few = f"; fewer than {_FEWEST} cannot be significant" if trajectories < _FEWEST else ", not significant"
            text += f", better on {better_on:.0f} of {trajectories:.0f} trajectories{few}"
        parts.append(text + ")" + ("" if crps is None else f", crps {crps:.3g}"))
    return parts


# With fewer trajectories even a win on all of them is within chance (`_beyond_chance`).
_FEWEST = 6


def _beyond_chance(won: float, total: float) -> bool:
    """Sign test: whether fair games give this many wins in less than 2.5 % of all cases."""
    count = int(total)
    if not 0 < count <= 1_000:
        return won > total / 2
    return bool(40 * sum(math.comb(count, k) for k in range(int(won), count + 1)) < 2**count)


def read_rows(run_dir: Path) -> list[dict[str, Any]]:
    """All rows that a run has written; none if it has no metrics yet."""
    try:
        with open_regular(RunDir(run_dir).metrics) as file:  # a pipe would never answer
            return [] if file is None else rows_in(file)
    except OSError:
        return []


def plain(text: str, *_styles: str) -> str:
    """Text without terminal styles."""
    return text


def table(rows: Sequence[Sequence[str]], *, indent: int = 2, gap: int = 2) -> str:
    """Rows as aligned columns; the last column runs free. A cell stays on its line, whatever it holds."""
    rows = [[printable(cell) for cell in row] for row in rows]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]) - 1)] if rows else []
    lines = []
    for row in rows:
        cells = [cell.ljust(width + gap) for cell, width in zip(row[:-1], widths, strict=True)]
        lines.append((" " * indent + "".join(cells) + row[-1]).rstrip())
    return "\n".join(lines)
