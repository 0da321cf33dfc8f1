"""RUN/tracking/NAME.json: how far one tracker of a run has come. Written by the process that feeds it, and no other.

It is what makes live tracking, a restart and `ups track sync` the same: whoever feeds a tracker goes on from its note.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

from ups.record.atomic import write_file_atomically
from ups.record.run_dir import RunDir
from ups.record.untrusted_files import is_number, is_whole, read_object

# Exit codes of the process that feeds a tracker.
BUSY = 11
LATE = 12


@dataclass(slots=True)
class TrackerNote:
    """run_id: of the run that this is about. id, url: of the run in the service. rows, offset: the lines and bytes of
    metrics.jsonl that the service has. state, ended: the last ending that it was told ('' and None: none since the run
    was started). attached: file -> SHA-256 of what it has of it. problem: why the last try failed, '' if it did not.
    """

    run_id: str = ""
    id: str = ""
    url: str = ""
    rows: int = 0
    offset: int = 0
    state: str = ""
    ended: float | None = None
    attached: dict[str, str] = field(default_factory=dict)
    problem: str = ""
    failures: int = 0
    updated: float = 0.0

    def save(self, run_dir: Path, name: str) -> None:
        """Write the note; raises OSError or a MachineError where that is not possible."""
        self.updated = time.time()
        path = note_path(run_dir, name)
        path.parent.mkdir(exist_ok=True)
        write_file_atomically(path, (json.dumps(asdict(self), indent=1) + "\n").encode())


def note_path(run_dir: Path, name: str) -> Path:
    return RunDir(run_dir).tracker_note(name)


def read_note(run_dir: Path, name: str, run_id: str = "") -> TrackerNote:
    """The note of a tracker; a new one if there is none, or one of another run (`run_id`)."""
    found = read_object(note_path(run_dir, name)) or {}
    texts = [found.get(key) for key in ("run_id", "id", "url", "state", "problem")]
    numbers = [found.get(key) for key in ("rows", "offset", "failures")]
    attached, ended, updated = found.get("attached"), found.get("ended"), found.get("updated")
    sound = (
        all(isinstance(text, str) for text in texts)
        and all(is_whole(number) and number >= 0 for number in numbers)  # type: ignore[operator]
        and isinstance(attached, dict)
        and all(isinstance(value, str) for value in attached.values())
        and (ended is None or is_number(ended))
        and is_number(updated)
        and found.keys() == TrackerNote.__dataclass_fields__.keys()
    )
    if not sound or (run_id and found["run_id"] != run_id):
        return TrackerNote(run_id)
    return TrackerNote(**found)


def notes_of(run_dir: Path) -> dict[str, TrackerNote]:
    """The notes of all trackers that a run has had, by name."""
    return {path.stem: read_note(run_dir, path.stem) for path in sorted(RunDir(run_dir).tracking.glob("*.json"))}
