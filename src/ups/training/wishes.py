"""The wish to stop: SIGTERM, SIGINT or the end of the allowed time, as a flag that the next agreement carries.

A handler only sets a number: saving inside a handler would run on one rank, in the middle of anything.
"""

from __future__ import annotations

import signal
import threading
import time
from types import FrameType, TracebackType
from typing import Any, Self

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopWish:
    """Installs the handlers while it is entered (main thread only); `signal_number` is 0 while nobody asked."""

    def __init__(self, max_seconds: float | None = None) -> None:
        self._asked = 0
        self._deadline = None if max_seconds is None else time.monotonic() + max_seconds
        self._before: dict[signal.Signals, Any] = {}

    @property
    def signal_number(self) -> int:
        """The signal to leave with: the one that came, or SIGTERM when the time is up."""
        if not self._asked and self._deadline is not None and time.monotonic() >= self._deadline:
            return int(signal.SIGTERM)
        return self._asked

    def ask(self, number: int, frame: FrameType | None = None) -> None:
        """Wish to stop; a second, larger signal wins."""
        self._asked = max(self._asked, number)

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in STOP_SIGNALS:
                self._before[number] = signal.signal(number, self.ask)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            # Once the ranks have agreed to leave, the launcher's second SIGTERM must not cut the teardown short.
            signal.signal(number, signal.SIG_IGN if self._asked else handler)
