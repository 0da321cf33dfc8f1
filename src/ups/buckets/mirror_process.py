"""The process that copies a run into a bucket: `python -m ups.buckets.mirror_process RUN URL KEEP SECONDS`.

Started by the supervisor (`ups.supervise.bucket_mirror`), on the other end of standard input. The word `finish` there
lets it copy what is left, for at most SECONDS; the end of standard input without that word means that the supervisor is
gone, and ends it at once: no process then holds the run, and the next one may be starting. After the word it means the
same, but the run is over and what is left may be little: it gets ALONE_SECONDS more.

RUN/mirror.json says what the bucket has of the run. Only this process writes it.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import sys
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

from pydantic import Field, StrictInt, StrictStr, TypeAdapter, ValidationError

from ups.buckets.client import open_bucket
from ups.buckets.run_copy import RunCopy
from ups.errors import ConfigError, UpsError
from ups.record.files import HeldDirectory, read_object, write_file_atomically
from ups.record.run_dir import RunDir

# Exit codes of the process that copies.
REFUSED = 3
LATE = 12


_Seconds = Annotated[float, Field(strict=True, allow_inf_nan=False)]


@dataclass(slots=True)
class MirrorNote:
    """url: where the copy is. step: of the newest checkpoint in the bucket. behind_since: since when the bucket lacks a
    checkpoint of the run (seconds since 1970), None if it has all. problem: why the last try failed, '' if it did not.
    updated: when this was written."""

    url: StrictStr
    step: StrictInt | None = None
    behind_since: _Seconds | None = None
    problem: StrictStr = ""
    updated: _Seconds = 0.0

    def save(self, run_dir: Path) -> None:
        """Write the note; raises OSError or a MachineError where that is not possible."""
        self.updated = time.time()
        write_file_atomically(RunDir(run_dir).mirror_note, (json.dumps(asdict(self), indent=1) + "\n").encode())

    def gap(self, committed: int | None) -> str:
        """How far the bucket is behind, in words; '' if it is not. committed: the newest step of the run."""
        if self.behind_since is None:
            return ""
        has = "no checkpoint" if self.step is None else f"step {self.step}"
        newest = "" if committed is None else f", the run has step {committed}"
        return f"has {has}{newest}, behind for {max(0.0, time.time() - self.behind_since):.0f} s"


_NOTES = TypeAdapter(MirrorNote)


def read_note(run_dir: Path) -> MirrorNote | None:
    """The note of a run, None if it has none that can be read."""
    with contextlib.suppress(ValidationError):
        return _NOTES.validate_python(read_object(RunDir(run_dir).mirror_note))
    return None


POLL_SECONDS = 0.5
MAX_WAIT_SECONDS = 15.0
ALONE_SECONDS = 10.0


def main(run_dir: Path, url: str, keep: int, seconds: float) -> int:
    """Copy until `finish` is said and everything is in the bucket; returns the exit code."""
    finish = threading.Event()
    threading.Thread(target=_listen, args=(finish, seconds), daemon=True).start()
    note = MirrorNote(url)
    copy = RunCopy(open_bucket(url), run_dir, keep)
    held = HeldDirectory(run_dir)
    wait = POLL_SECONDS
    while True:
        asked = finish.is_set()  # before looking: what was written before the word is seen
        try:
            held.check()
            _say(run_dir, note, copy)
            more = copy.update()
            if asked and not more:
                copy.send_record()
            note.problem, wait = "", POLL_SECONDS
            _say(run_dir, note, copy)
            if asked and not more:
                return 0
            if more:
                continue
        except ConfigError as error:
            note.problem = error.message
            _say(run_dir, note, copy)
            return REFUSED
        except UpsError as error:
            note.problem = error.message
            wait = min(wait * 2, MAX_WAIT_SECONDS)
            _say(run_dir, note, copy)
        if finish.is_set():
            time.sleep(wait)
        else:
            finish.wait(wait)


def _say(run_dir: Path, note: MirrorNote, copy: RunCopy) -> None:
    note.step = copy.newest
    if not copy.missing():
        note.behind_since = None
    elif note.behind_since is None:
        note.behind_since = time.time()
    with contextlib.suppress(OSError, UpsError):
        note.save(run_dir)


def _listen(finish: threading.Event, seconds: float) -> None:
    """Wait for the word; leave without asking the main thread, which may be waiting for a dead server."""
    if sys.stdin.readline().strip() != "finish":
        os._exit(1)
    finish.set()
    deadline = time.monotonic() + seconds
    # Nothing is said after the word: what can be read is the end.
    if select.select([sys.stdin], [], [], seconds)[0]:
        time.sleep(min(ALONE_SECONDS, max(0.0, deadline - time.monotonic())))
    os._exit(LATE)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), float(sys.argv[4])))
