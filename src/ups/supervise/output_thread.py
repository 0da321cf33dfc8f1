"""Prints lines for the supervisor without ever waiting for whoever reads them.

A terminal that was halted with Ctrl-S, a pager that nobody scrolls or a full disk behind a redirection must not stop
the supervision of the ranks: lines go through a short queue to a thread of its own, and are dropped when nobody takes
them.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Self

_LINES = 1000
_LAST_LINES_SECONDS = 5.0


class OutputThread:
    """`say` hands a line to `write` in the background, in order; on leaving, what is left gets a few seconds."""

    def __init__(self, write: Callable[[str], None]) -> None:
        self._write = write
        self._lines: queue.Queue[str | None] = queue.Queue(_LINES)
        self._thread = threading.Thread(target=self._write_lines, name="ups-output", daemon=True)

    def say(self, line: str) -> None:
        """Queue a line; run.json has it in any case."""
        with contextlib.suppress(queue.Full):
            self._lines.put_nowait(line)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(queue.Full):
            self._lines.put_nowait(None)
        self._thread.join(_LAST_LINES_SECONDS)

    def _write_lines(self) -> None:
        while (line := self._lines.get()) is not None:
            # A closed pipe, a terminal that is gone, a full disk: the run goes on without output.
            with contextlib.suppress(OSError, ValueError):
                self._write(line)
