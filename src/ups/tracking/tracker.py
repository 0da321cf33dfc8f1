"""Where metrics go: the local record `metrics.jsonl`, always, and other trackers behind queues that never delay a step.

Only rank 0 opens a tracker. A tracker that hangs or fails costs rows on that tracker, never a training step; the local
record stays complete. Trackers for other services are parts of other packages (`build.py`). No torch here.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import queue
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

logger = logging.getLogger(__name__)

Row = Mapping[str, object]


class Tracker(Protocol):
    """Takes rows of metrics: plain numbers and texts by name, with `step` and `time`."""

    name: str

    def log(self, row: Row) -> None:
        """Take one row; may block or raise, the caller protects training from both."""

    def close(self) -> None:
        """Flush and let go."""


class JsonlTracker:
    """One JSON object per line. Numbers that are not finite become null: a strict reader must not choke on NaN."""

    name = "jsonl"

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("ab", buffering=0)
        if path.stat().st_size > 0:
            with path.open("rb") as file:
                file.seek(-1, os.SEEK_END)
                torn = file.read(1) != b"\n"
            if torn:
                # A killed writer left half a line; the next row must not be glued to it.
                self._file.write(b"\n")

    def log(self, row: Row) -> None:
        """Append one row in a single write, so that readers see whole lines."""
        clean = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}
        self._file.write((json.dumps(clean, allow_nan=False) + "\n").encode())

    def close(self) -> None:
        self._file.close()


class FanOut:
    """Writes the local record at once and hands each row to the others through a bounded queue each.

    A full queue drops the row and counts it, with a warning; a tracker that raises is left out from then on, with a
    warning.
    """

    def __init__(self, local: Tracker, others: Sequence[Tracker] = (), *, queue_rows: int = 1000) -> None:
        self._local = local
        self._reported = False
        self._lanes = [_Lane(tracker, queue_rows) for tracker in others]

    def log(self, row: Row) -> None:
        """Take one row; returns without waiting for any remote tracker. A full local disk is reported once and
        survived.
        """
        try:
            self._local.log(row)
        except OSError as error:
            if not self._reported:
                logger.warning("the local record of metrics cannot be written: %s", error)
            self._reported = True
        for lane in self._lanes:
            lane.put(row)

    @property
    def dropped(self) -> dict[str, int]:
        """Rows that did not reach each tracker."""
        return {lane.tracker.name: lane.dropped for lane in self._lanes}

    def close(self, timeout_seconds: float = 5.0) -> None:
        """Flush what can be flushed in time, over all trackers together; a hung one is left behind."""
        deadline = time.monotonic() + timeout_seconds
        for lane in self._lanes:
            lane.ask_to_close()
        for lane in self._lanes:
            lane.wait_closed(max(0.0, deadline - time.monotonic()))
        self._local.close()


class _Lane:
    """One tracker with its queue and thread."""

    def __init__(self, tracker: Tracker, rows: int) -> None:
        self.tracker = tracker
        self.dropped = 0
        self._queue: queue.Queue[Row | None] = queue.Queue(maxsize=rows)
        self._broken = self._closing = False
        self._thread = threading.Thread(target=self._run, name=f"ups-track-{tracker.name}", daemon=True)
        self._thread.start()

    def put(self, row: Row) -> None:
        try:
            if self._broken:
                raise queue.Full
            self._queue.put_nowait(dict(row))
        except queue.Full:
            if not self.dropped and not self._broken:
                logger.warning(
                    "tracker '%s' does not keep up: rows are dropped there, metrics.jsonl has all", self.tracker.name
                )
            self.dropped += 1

    def _run(self) -> None:
        """The thread of the lane: everything that a remote tracker does happens here, its end too."""
        while (row := self._queue.get()) is not None:
            try:
                self.tracker.log(row)
            except Exception as error:  # noqa: BLE001  whatever a remote tracker raises, training goes on
                self._broken = True
                self.dropped += 1
                logger.warning("tracker '%s' failed and is left out from now on: %s", self.tracker.name, error)
                break
            if self._closing and self._queue.empty():
                break
        with contextlib.suppress(Exception):
            self.tracker.close()

    def ask_to_close(self) -> None:
        self._closing = True
        # In a full queue there is no space for the end mark, and no need: the thread looks after its last row.
        with contextlib.suppress(queue.Full):
            self._queue.put_nowait(None)

    def wait_closed(self, timeout_seconds: float) -> None:
        self._thread.join(timeout_seconds)
        waiting = self._queue.qsize()
        if self._thread.is_alive():
            logger.warning(
                "tracker '%s' did not take its last rows in time: %d were still waiting", self.tracker.name, waiting
            )
        if self.dropped:
            logger.warning(
                "tracker '%s' missed %d rows; metrics.jsonl has all of them", self.tracker.name, self.dropped
            )
