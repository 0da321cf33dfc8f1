"""The one display of progress: a line that says how far the work is, on standard error.

On a terminal and in a notebook the line is rewritten in place and gone at the end. In a log there is a line for each
part that is done, and one every half a minute of a long part, each with the local time. Work that cannot count says
that it goes on. Messages of the log and whole lines stand above it.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import sys
import threading
import time
from types import TracebackType
from typing import Self, TextIO

from ups.record.log import log_shown_by, short_line
from ups.record.text import duration_text, printable

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
            self._exit.enter_context(log_shown_by(self._message))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
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
        """Make room for a whole line that somebody else prints."""
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

    def _message(self, record: logging.LogRecord) -> None:
        self._above(short_line(record))

    def _stamp(self) -> str:
        """When a line was written, for who reads it later; nobody needs that of a line that is about to vanish."""
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
        # Nobody reads any more, or the terminal is gone: that is no reason to stop the work.
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
