"""RUN/mirror.json: what the bucket has of a run. Written by the process that copies (`mirror_process.py`) alone."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from ups.record.files import is_number, is_whole, read_object, write_file_atomically
from ups.record.run_dir import RunDir

# Exit codes of the process that copies.
REFUSED = 3
LATE = 12


@dataclass(slots=True)
class MirrorNote:
    """url: where the copy is. step: of the newest checkpoint in the bucket. behind_since: since when the bucket lacks a
    checkpoint of the run (seconds since 1970), None if it has all. problem: why the last try failed, '' if it did not.
    updated: when this was written."""

    url: str
    step: int | None = None
    behind_since: float | None = None
    problem: str = ""
    updated: float = 0.0

    def save(self, run_dir: Path) -> None:
        """Write the note; raises OSError or a MachineError where that is not possible."""
        self.updated = time.time()
        write_file_atomically(RunDir(run_dir).mirror_note, (json.dumps(asdict(self), indent=1) + "\n").encode())

    def gap(self, committed: int | None) -> str:
        """How far the bucket is behind, for a person; '' if it is not. committed: the newest step of the run."""
        if self.behind_since is None:
            return ""
        has = "no checkpoint" if self.step is None else f"step {self.step}"
        newest = "" if committed is None else f", the run has step {committed}"
        return f"has {has}{newest}, behind for {max(0.0, time.time() - self.behind_since):.0f} s"


def read_note(run_dir: Path) -> MirrorNote | None:
    """The note of a run, None if it has none that can be read."""
    found = read_object(RunDir(run_dir).mirror_note)
    if (
        found is None
        or found.keys() != MirrorNote.__dataclass_fields__.keys()
        or not isinstance(found["url"], str)
        or not isinstance(found["problem"], str)
        or not (found["step"] is None or is_whole(found["step"]))
        or not (found["behind_since"] is None or is_number(found["behind_since"]))
        or not is_number(found["updated"])
    ):
        return None
    return MirrorNote(**found)
