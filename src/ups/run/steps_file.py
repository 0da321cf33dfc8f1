"""`steps.json`: what `ups run` has done for a run: each step with its inputs, outputs, time and outcome. No torch.

run.json belongs to the supervisor, and there are steps before one exists; so this is a file of its own next to it. It
is a memory and no proof: a step that it says is done is still held against what lies on the disk, and a file that is
missing or cannot be read only means that steps are done again.
"""

from __future__ import annotations

import hashlib
import json
import time
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from ups.record.files import is_number, read_object, write_file_atomically
from ups.record.run_dir import RunDir

FORMAT_VERSION = 1
STARTED, DONE, FAILED, INTERRUPTED = "started", "done", "failed", "interrupted"


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step as it was done last. inputs, outputs: hashes; says: one line about the result, or what went wrong."""

    name: str
    outcome: str
    inputs: str
    started: float
    seconds: float = 0.0
    outputs: str = ""
    cause: str = ""
    says: str = ""


def digest(value: Any) -> str:
    """SHA-256 of plain values."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


class StepsFile:
    """The steps of a run, for who holds them (`ups.supervise.run_file.hold_steps`)."""

    def __init__(self, run_dir: Path) -> None:
        self._path = RunDir(run_dir).steps
        self._records = {record.name: record for record in read_steps(run_dir)}

    def last(self, name: str) -> StepRecord | None:
        """How a step was done last; None if it never was."""
        return self._records.get(name)

    def begin(self, name: str, inputs: str) -> None:
        """Write down that a step is being done: who is killed leaves that behind."""
        self._put(StepRecord(name, STARTED, inputs, time.time()))

    def end(self, name: str, outcome: str, *, outputs: str = "", cause: str = "", says: str = "") -> StepRecord:
        """Write down how the step that was begun has ended."""
        begun = self._records[name]
        seconds = round(time.time() - begun.started, 3)
        record = StepRecord(name, outcome, begun.inputs, begun.started, seconds, outputs, cause, says)
        self._put(record)
        return record

    def _put(self, record: StepRecord) -> None:
        self._records[record.name] = record
        document = {"format": FORMAT_VERSION, "steps": [asdict(one) for one in self._records.values()]}
        write_file_atomically(self._path, (json.dumps(document, indent=1) + "\n").encode())


def read_steps(run_dir: Path) -> list[StepRecord]:
    """What a steps.json says; nothing if there is none that this version reads."""
    document = read_object(RunDir(run_dir).steps) or {}
    listed = document.get("steps")
    if document.get("format") != FORMAT_VERSION or not isinstance(listed, list):
        return []
    return [StepRecord(**one) for one in listed if _is_record(one)]


def _is_record(one: object) -> bool:
    if not isinstance(one, dict) or one.keys() != {field.name for field in fields(StepRecord)}:
        return False
    numbers = {"started", "seconds"}
    return all(is_number(value) if name in numbers else isinstance(value, str) for name, value in one.items())
