"""`steps.json`: what `ups run` has done for a run: each step with its inputs, outputs, time and outcome. No torch.

run.json belongs to the supervisor, and there are steps before one exists; so this is a separate file next to it. It
is a memory and no proof: a step that it says is done is still held against what lies on the disk, and a file that is
missing or cannot be read only means that steps are done again.
"""

from __future__ import annotations

import hashlib
import json
import time
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from ups.record.files import read_object, write_file_atomically
from ups.record.run_dir import RunDir

STARTED, DONE, FAILED, INTERRUPTED = "started", "done", "failed", "interrupted"


class StepRecord(BaseModel):
    """One step as it was done last. inputs, outputs: hashes; says: one line about the result, or what went wrong."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    name: str
    outcome: str
    inputs: str
    started: float
    seconds: float = 0.0
    outputs: str = ""
    cause: str = ""
    says: str = ""


class StepsDocument(BaseModel):
    """The content of steps.json."""

    model_config = ConfigDict(strict=True)

    format: Literal[1] = 1
    steps: list[StepRecord]


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
        self._put(StepRecord(name=name, outcome=STARTED, inputs=inputs, started=time.time()))

    def end(self, name: str, outcome: str, **more: str) -> StepRecord:
        """Write down how the step that was begun has ended; more: `outputs`, `cause` and `says`."""
        begun = self._records[name]
        seconds = round(time.time() - begun.started, 3)
        record = begun.model_copy(update={"outcome": outcome, "seconds": seconds, **more})
        self._put(record)
        return record

    def _put(self, record: StepRecord) -> None:
        self._records[record.name] = record
        document = StepsDocument(steps=list(self._records.values()))
        write_file_atomically(self._path, (document.model_dump_json(indent=1) + "\n").encode())


def read_steps(run_dir: Path) -> list[StepRecord]:
    """What a steps.json says; nothing if there is none that this version reads."""
    try:
        return StepsDocument.model_validate(read_object(RunDir(run_dir).steps)).steps
    except ValidationError:
        return []
