"""The copy of a run in a bucket, seen from its supervisor: a process (`ups.buckets.mirror_process`), started, looked at
and ended. The run never waits for it; at the end it gets a bounded time for what is left.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import subprocess
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Self

from ups.buckets.client import parse_bucket_url, s3_options
from ups.buckets.mirror_process import REFUSED, MirrorNote, read_note
from ups.config.schema import CheckpointConfig
from ups.errors import MissingExtraError
from ups.record.checkpoints import list_checkpoints
from ups.record.run_dir import RunDir
from ups.supervise.run_file import update_run
from ups.supervise.trackers import end_companion, start_companion

logger = logging.getLogger(__name__)

CLOSE_SECONDS = 120.0
BEHIND_SECONDS = 300.0  # a notice says that the bucket is behind for this long
_LOOK_SECONDS = 1.0
_START_AGAIN_SECONDS = 30.0


def check_mirror(url: str | None) -> None:
    """Raise, before anything starts, if the package for buckets is missing or the endpoint is refused."""
    if url is None:
        return
    if parse_bucket_url(url).scheme == "s3":
        s3_options(os.environ)
    if importlib.util.find_spec("obstore") is None:
        raise MissingExtraError.of("buckets", "obstore", "checkpoint.mirror")


class BucketMirror:
    """The process that copies a run; entered around it and what follows its verdict. Without a mirror: nothing."""

    def __init__(self, run_dir: Path, saved: CheckpointConfig, close_seconds: float = CLOSE_SECONDS) -> None:
        self._run_dir = run_dir
        self._url = saved.mirror
        self._keep = saved.keep
        self._close_seconds = close_seconds
        self._process: subprocess.Popen[bytes] | None = None
        self._started = self._looked = 0.0
        self._said: set[str] = set()
        self._shown = MirrorNote(saved.mirror or "")

    def __enter__(self) -> Self:
        with contextlib.suppress(OSError):
            RunDir(self._run_dir).mirror_note.unlink(missing_ok=True)  # of an earlier start
        if self._url is not None:
            self._start()
        return self

    def __exit__(self, *error: object) -> None:
        """Give the process a bounded time for what is left, and say so if that was not enough."""
        if self._url is None:
            return
        process = self._process
        if process is not None and process.poll() is None:
            try:
                with contextlib.suppress(OSError):
                    assert process.stdin is not None
                    process.stdin.write(b"finish\n")
                    process.stdin.flush()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(self._close_seconds + 5.0)
            finally:
                end_companion(process)  # also after an interrupt
        note = self.note()
        update_run(self._run_dir, mirror=asdict(note))
        if process is None or process.returncode != 0:
            why = note.problem or f"the bucket did not answer within {self._close_seconds:.0f} s"
            newest = f"step {note.step} as its newest checkpoint"
            has = "no checkpoint, as far as is known" if note.step is None else newest
            text = "the mirror is not complete: %s has %s (%s); start the same command again to complete it"
            logger.warning(text, note.url, has, why)

    def look(self) -> tuple[dict[str, Any], list[str]] | None:
        """Once a second: start the process again if it has died; returns the note for run.json, and the
        notices, each once. None between the seconds, and without a mirror."""
        now = time.monotonic()
        if self._url is None or now - self._looked < _LOOK_SECONDS:
            return None
        self._looked = now
        process = self._process
        dead = process is None or process.poll() is not None
        if dead and now - self._started > _START_AGAIN_SECONDS and (process is None or process.returncode != REFUSED):
            self._start()
        note = self.note()
        warnings = []
        if note.problem:
            warnings += self._once("problem", f"mirror {note.url}: {note.problem}; the run continues without it")
        else:
            self._said.discard("problem")
        if note.behind_since is not None and time.time() - note.behind_since > BEHIND_SECONDS:
            steps = [step for step, _ in list_checkpoints(self._run_dir)]
            warnings += self._once("behind", f"mirror {note.url} {note.gap(max(steps, default=None))}")
        elif note.behind_since is None:
            self._said.discard("behind")
        if replace(note, updated=self._shown.updated) != self._shown:
            self._shown = note  # not for its time only: run.json is not written every second
        return asdict(self._shown), warnings

    def note(self) -> MirrorNote:
        """What the bucket has, as far as it is known."""
        return read_note(self._run_dir) or MirrorNote(self._url or "")

    def _once(self, about: str, text: str) -> list[str]:
        if about in self._said:
            return []
        self._said.add(about)
        logger.warning("%s", text)
        return [text]

    def _start(self) -> None:
        self._started = time.monotonic()
        words = [str(self._run_dir), str(self._url), str(self._keep), str(self._close_seconds)]
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            self._process = start_companion("ups.buckets.mirror_process", *words, stdin=subprocess.PIPE)
