"""One thread for work that runs in parallel with the loop, made once and kept: saves of checkpoints.

A thread for each save would be made in the middle of training, when the rank may have reached a limit on memory or on
threads. CPython's `Thread.start` then raises at best; a thread that dies before it reports back makes it wait forever.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

from ups.errors import CheckpointError, MachineError

# How often somebody who waits makes sure that the thread still lives.
_LOOK_SECONDS = 5.0


class BackgroundThread:
    """Runs one piece of work at a time. Made before training, closed after it; both by the loop's thread."""

    def __init__(self, name: str) -> None:
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._done = threading.Event()
        self._done.set()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:
            raise MachineError(
                f"cannot start the thread '{name}': {error}",
                hint="raise the limit on threads (ulimit -u) or on address space (ulimit -v) of the ranks",
            ) from error

    @property
    def busy(self) -> bool:
        """Whether the work that was handed over last is still running."""
        return not self._done.is_set()

    def hand_over(self, work: Callable[[], None]) -> None:
        """Start `work` in the thread; the work before it must have been waited for."""
        if self.busy:
            raise RuntimeError("the work before this one was not waited for")
        self._error = None
        self._done.clear()
        self._work.put(work)

    def wait(self) -> None:
        """Wait for the work that was handed over, and raise what it raised."""
        while not self._done.wait(_LOOK_SECONDS):
            if not self._thread.is_alive():
                raise CheckpointError(
                    f"the thread '{self._thread.name}' is gone", hint="see the traceback in this rank's log"
                )
        error, self._error = self._error, None
        if error is not None:
            raise error

    def close(self, wait_seconds: float = 0.0) -> None:
        """Let the thread end after what it is doing; waits for that no longer than it is told to."""
        self._work.put(None)
        if wait_seconds:
            self._thread.join(wait_seconds)

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            try:
                work()
            except BaseException as error:  # noqa: BLE001 - raised in the loop's thread by `wait`
                self._error = error
            finally:
                del work  # holds the state that was saved
                self._done.set()
