"""Children that are killed: for programs that look at what a kill leaves."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable


def in_child(work: Callable[[], int]) -> tuple[bool, int]:
    """Run `work` in a forked child; returns whether it was killed, and the small number that it reports otherwise."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        os.write(writing, str(work()).encode())
        os._exit(0)
    os.close(writing)
    reported = os.read(reading, 100)
    os.close(reading)
    _, status = os.waitpid(child, 0)
    return os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL, int(reported or b"0")
