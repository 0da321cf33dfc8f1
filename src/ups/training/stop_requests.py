"""Requests from outside, as flags that the next agreement carries: stop (SIGTERM, SIGINT, time is up), save (SIGUSR2).

A handler only sets a number: saving inside a handler would run on one rank, in the middle of anything.
"""

from __future__ import annotations

import signal
import threading
import time
from types import FrameType, TracebackType
from typing import Any, Self

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
SAVE_SIGNAL = signal.SIGUSR2


class StopRequests:
    """Installs the handlers while it is entered (main thread only)."""

    def __init__(self, max_seconds: float | None = None) -> None:
        self._stop = 0
        self._save = False
        self._deadline = None if max_seconds is None else time.monotonic() + max_seconds
        self._before: dict[signal.Signals, Any] = {}

    @property
    def stop(self) -> int:
        """The signal to leave with: the one that came, SIGTERM when the time is up, 0 while nobody asked."""
        if not self._stop and self._deadline is not None and time.monotonic() >= self._deadline:
            return int(signal.SIGTERM)
        return self._stop

    def ask_to_stop(self, number: int, frame: FrameType | None = None) -> None:
        """Request to stop; a second, larger signal wins."""
        self._stop = max(self._stop, number)

    def ask_to_save(self, number: int = 0, frame: FrameType | None = None) -> None:
        """Request a checkpoint soon."""
        self._save = True

    def take_save(self) -> bool:
        """Whether a checkpoint is wanted; the request is then passed on and forgotten here."""
        wanted, self._save = self._save, False
        return wanted

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in STOP_SIGNALS:
                self._before[number] = signal.signal(number, self.ask_to_stop)
            self._before[SAVE_SIGNAL] = signal.signal(SAVE_SIGNAL, self.ask_to_save)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            # Once the ranks have agreed to leave, the launcher's second SIGTERM must not cut the teardown short.
            signal.signal(number, signal.SIG_IGN if self._stop else handler)
