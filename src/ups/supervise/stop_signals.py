"""Signals that ask a supervisor to leave."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Iterator
from types import FrameType

from ups.supervise.attempt import StopRequest

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_SAME_REQUEST_SECONDS = 0.5


@contextlib.contextmanager
def listen() -> Iterator[StopRequest]:
    """Turn SIGTERM, SIGHUP and Ctrl-C into a request to save and leave; a second one means now.

    A signal that is ignored already stays so: that is what nohup asks for. Two at the same moment are one request:
    shells, `timeout` and a closing terminal signal the process and its group.
    """
    stop_request = StopRequest()
    first = [0.0]

    def hear(number: int, _frame: FrameType | None) -> None:
        now = time.monotonic()
        first[0] = first[0] or now
        stop_request.urgent = stop_request.urgent or (
            number != signal.SIGHUP and now - first[0] > _SAME_REQUEST_SECONDS
        )
        stop_request.number = number

    if threading.current_thread() is not threading.main_thread():
        yield stop_request
        return
    heard = [number for number in STOP_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    earlier = {number: signal.signal(number, hear) for number in heard}
    try:
        yield stop_request
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler)
