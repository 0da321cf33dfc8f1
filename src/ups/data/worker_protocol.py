"""What a rank and its worker processes say to each other. Both ends are this package, started by the same rank."""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass
from pathlib import Path

from ups.record.failure import Frame, worker_stem

FAULT_DIR = "UPS_FAULT_DIR"
REQUEST = struct.Struct("<q")  # a batch number
MAX_MESSAGE = 64 * 1024


@dataclass(frozen=True, slots=True)
class ArrayPlace:
    """Where an array lies in the memory file of its batch."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int


@dataclass(frozen=True, slots=True)
class BatchReply:
    """Accompanies the memory file of a batch."""

    number: int
    task: int
    step: int
    num_bytes: int
    places: tuple[ArrayPlace, ...]


@dataclass(frozen=True, slots=True)
class ErrorReply:
    """A batch that could not be read: `expected` if it was an error that ups raises on purpose, `at` where,
    `cause` its name."""

    number: int
    message: str
    hint: str
    traceback: str
    expected: bool
    at: Frame | None = None
    cause: str = "data"


def fault_file(rank: int, worker: int) -> Path | None:
    """Where a worker writes its stack if a person asked for a place of their own (UPS_FAULT_DIR), else None."""
    directory = os.environ.get(FAULT_DIR)
    return Path(directory) / f"worker_{rank}_{worker}.txt" if directory and Path(directory).is_dir() else None


def stack_file(rank: int, worker: int) -> Path | None:
    """Where a worker writes its stack when it crashes or is sent SIGUSR1; None outside a recorded run."""
    stem = worker_stem(worker)
    return fault_file(rank, worker) or (None if stem is None else stem.with_name(f"{stem.name}.crash.txt"))
