"""What a rank is doing: one ring of fixed-size records per rank, in memory that outlives the process.

The rank's loop writes a record at the start of each phase; the supervisor, `ups status` and `ups why` read them while
the rank runs and after it died. Owns the file format, its writer and its reader; `ups.supervise` judges the records.

File layout (little endian): header | names of operations | records.
- The header is complete before the file gets its name, so a reader never meets a half-made ring.
- Each record carries its own number and a CRC-32: a record that is being overwritten, or that a SIGKILL cut in two,
  fails the check and is left out. The count of records in the header is only a hint where to look first.
- Times are CLOCK_MONOTONIC in nanoseconds, shared by all processes of a host, so records of its ranks can be ordered.

One writer, one thread: the loop. A heartbeat from a helper thread would beat on while the loop hangs.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import struct
import time
import zlib
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

from ups.errors import IntegrityError, MachineError
from ups.record.files import open_regular
from ups.record.run_dir import rank_name

MAGIC = b"UPSBBX01"
DEFAULT_CAPACITY = 2048
_MAX_CAPACITY = 2**20  # a reader may have to look at every record

_HEADER = struct.Struct("<8sIIIIIIIIQQ64sI")
_HEADER_SIZE = 192
_COUNT_OFFSET = 184
_COUNT = struct.Struct("<Q")
_NAME_SIZE = 96
_NUM_NAMES = 64
_RECORDS_OFFSET = _HEADER_SIZE + _NAME_SIZE * _NUM_NAMES
# number, time, batch, loss | step, total steps, collective, deadline | phase, mark, stage, operation, usual | crc
_BODY = struct.Struct("<QQQdIIIfBBHHH")
_CRC = struct.Struct("<I")
_RECORD_SIZE = 64
_USED = _BODY.size + _CRC.size
_MASK16 = 0xFFFF
_MASK32 = 0xFFFFFFFF
_MASK64 = 0xFFFFFFFFFFFFFFFF


class Phase(IntEnum):
    """What the loop is busy with; a rank is in exactly one phase."""

    INIT = 0
    DATA = 1
    FORWARD = 2
    BACKWARD = 3
    SYNC = 4
    OPTIMIZER = 5
    SAVE = 6
    EVALUATE = 7
    TEARDOWN = 8

    @property
    def label(self) -> str:
        """The name as it stands in records, in the one line and in docs."""
        return self.name.lower()


class Mark(IntEnum):
    """How the work of a rank ended; without a mark the rank is, or was, in the middle of it."""

    NONE = 0
    FINISHED = 1  # the last step of the run is done
    LEFT = 2  # saved and left because it was asked to (SIGTERM)


@dataclass(frozen=True, slots=True)
class Header:
    """Who wrote a ring."""

    rank: int
    world_size: int
    attempt: int
    pid: int
    host: str
    capacity: int


@dataclass(frozen=True, slots=True)
class Record:
    """One entry of the ring: from `time_ns` on, the rank was in `phase` of `step`."""

    number: int
    time_ns: int
    phase: Phase
    step: int
    stage: int
    collective: int
    batch: int
    operation: int
    deadline_seconds: float
    loss: float
    total_steps: int
    mark: Mark
    # What the rank measured itself where the time in the phase does not show it (a save in the background); 0: nothing.
    usual_seconds: int = 0


def ring_path(directory: Path, rank: int) -> Path:
    """Where the ring of a rank lies inside `directory`."""
    return directory / f"{rank_name(rank)}.ring"


class BlackBox:
    """The writer. `loss` and `total_steps` are remembered and go into every following record."""

    def __init__(self, view: mmap.mmap, capacity: int) -> None:
        self._view = view
        self._capacity = capacity
        self._number = 0
        self._operations: dict[str, int] = {}
        self.loss = math.nan
        self.total_steps = 0
        self.collective = 0

    @classmethod
    def create(
        cls, path: Path, *, rank: int, world_size: int, attempt: int, capacity: int = DEFAULT_CAPACITY
    ) -> BlackBox:
        """Make the ring at `path` and write its first record (phase init)."""
        size = _RECORDS_OFFSET + capacity * _RECORD_SIZE
        temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            try:
                # Reserve the pages now: writing into a hole on a full file system is SIGBUS in the middle of a step.
                os.ftruncate(descriptor, size)
                if hasattr(os, "posix_fallocate"):  # macOS lacks it
                    os.posix_fallocate(descriptor, 0, size)
                view = mmap.mmap(descriptor, size)
            finally:
                os.close(descriptor)
            view[: _HEADER.size] = _pack_header(rank, world_size, attempt, capacity)
            os.replace(temporary, path)
        except OSError as error:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise MachineError(
                f"cannot make the black box {path} ({size} bytes): {error.strerror or error}",
                hint="free some space there, or set UPS_BLACKBOX_DIR to a local directory that can be written",
            ) from error
        box = cls(view, capacity)
        box.record(Phase.INIT, 0)
        return box

    @classmethod
    def unread(cls) -> BlackBox:
        """A box in the memory of this process alone, for recording without a supervisor."""
        return cls(mmap.mmap(-1, _RECORDS_OFFSET + _RECORD_SIZE), 1)

    def record(
        self,
        phase: Phase,
        step: int,
        stage: int = 0,
        collective: int = 0,
        batch: int = 0,
        *,
        operation: int = 0,
        deadline_seconds: float = 0.0,
        usual_seconds: float = 0.0,
        mark: Mark = Mark.NONE,
    ) -> None:
        """Say that the rank now enters `phase` of `step`.

        `deadline_seconds` > 0 declares how long this phase may take at most (a save, an evaluation, a compilation);
        otherwise the supervisor learns from the run. `usual_seconds` is what the work took so far at the longest,
        where it continues after the phase and the supervisor cannot see it. `collective` 0 repeats the number of the
        last one issued.
        """
        number = self._number + 1
        body = _BODY.pack(
            number,
            time.monotonic_ns(),
            batch & _MASK64,
            self.loss,
            step & _MASK32,
            self.total_steps & _MASK32,
            (collective or self.collective) & _MASK32,
            deadline_seconds,
            phase,
            mark,
            stage & _MASK16,
            operation & _MASK16,
            _MASK16 if usual_seconds >= _MASK16 else math.ceil(usual_seconds) if usual_seconds > 0 else 0,
        )
        start = _RECORDS_OFFSET + (number - 1) % self._capacity * _RECORD_SIZE
        self._view[start : start + _USED] = body + _CRC.pack(zlib.crc32(body))
        self._number = number
        _COUNT.pack_into(self._view, _COUNT_OFFSET, number)

    def issue(self, operation: str, phase: Phase, step: int, stage: int = 0, **seconds: Any) -> None:
        """Count and record a collective that is about to be issued.

        `operation` names what all ranks must do alike, such as "all_reduce(status, int64[3])". The supervisor compares
        number and name between ranks: a rank that skipped a collective, or issues another one, is named. seconds:
        `deadline_seconds` and `usual_seconds` of `record`.
        """
        self.collective += 1
        self.record(phase, step, stage, operation=self.operation(operation), **seconds)

    def operation(self, name: str) -> int:
        """The number of an operation's name; 0 (no name) once the table of 63 names is full."""
        number = self._operations.get(name)
        if number is None:
            number = len(self._operations) + 1
            if number >= _NUM_NAMES:
                return 0
            text = name.encode()[: _NAME_SIZE - 6]
            start = _HEADER_SIZE + number * _NAME_SIZE
            entry = struct.pack("<H", len(text)) + text
            self._view[start : start + len(entry) + 4] = entry + _CRC.pack(zlib.crc32(entry))
            self._operations[name] = number
        return number

    @property
    def last(self) -> Record:
        """The record written last."""
        start = _RECORDS_OFFSET + (self._number - 1) % self._capacity * _RECORD_SIZE
        record = _parse(self._view[start : start + _USED])
        if record is None:
            raise IntegrityError("the last record of the black box is torn", hint="another process writes into it")
        return record

    def finish(self, step: int) -> None:
        """Mark that the last step of the run, `step`, is done; success is not believed without it."""
        self.record(Phase.TEARDOWN, step, mark=Mark.FINISHED)

    def leave(self, step: int) -> None:
        """Mark that the rank saved `step` and leaves because it was asked to."""
        self.record(Phase.TEARDOWN, step, mark=Mark.LEFT)

    def close(self) -> None:
        """Let go of the memory; the file stays."""
        self._view.close()


class BlackBoxReader:
    """The reader of one ring, live or of a dead rank. Never blocks the writer and never returns a torn record."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            # The directory may be untrusted: a pipe would hang, a link would lead elsewhere.
            with open_regular(path) as file:
                if file is None:
                    raise IntegrityError(f"{path} is not a regular file", hint="use another copy")
                self._view = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except ValueError as error:
            raise IntegrityError(
                f"{path} is empty, not a black box", hint="the file was cut; use another copy"
            ) from error
        self.header = self._read_header()

    def _read_header(self) -> Header:
        head = self._view[: _HEADER.size]
        if len(head) < _HEADER.size or head[:8] != MAGIC or _CRC.unpack(head[-4:])[0] != zlib.crc32(head[:-4]):
            raise IntegrityError(f"{self.path} is not a black box of this version", hint="use the ups that wrote it")
        _, header_size, record_size, capacity, rank, world, attempt, pid, _, _, _, host, _ = _HEADER.unpack(head)
        sizes_fit = header_size == _RECORDS_OFFSET and record_size == _RECORD_SIZE and 0 < capacity <= _MAX_CAPACITY
        if not sizes_fit or len(self._view) < _RECORDS_OFFSET + capacity * _RECORD_SIZE:
            raise IntegrityError(f"{self.path} is cut short or has another layout", hint="use another copy")
        return Header(rank, world, attempt, pid, host.rstrip(b"\0").decode(errors="replace"), capacity)

    def _at(self, number: int) -> Record | None:
        """The record with this number, or None if it is gone, not there yet, or torn."""
        if number < 1:
            return None
        start = _RECORDS_OFFSET + (number - 1) % self.header.capacity * _RECORD_SIZE
        record = _parse(self._view[start : start + _USED])
        return record if record is not None and record.number == number else None

    def latest(self) -> Record | None:
        """The newest whole record."""
        count = _COUNT.unpack_from(self._view, _COUNT_OFFSET)[0]
        for number in (count + 1, count, count - 1):
            record = self._at(number)
            if record is not None:
                return self._at(number + 1) or record
        records = self.tail(self.header.capacity)
        return records[-1] if records else None

    def since(self, number: int, limit: int = 256) -> list[Record]:
        """Whole records after `number`, oldest first; at most the newest `limit`."""
        last = self.latest()
        if last is None:
            return []
        first = max(number + 1, last.number - min(limit, self.header.capacity) + 1, 1)
        return [record for n in range(first, last.number + 1) if (record := self._at(n)) is not None]

    def tail(self, limit: int) -> list[Record]:
        """The newest whole records, oldest first, found by looking at all of them (works without the hint)."""
        starts = range(_RECORDS_OFFSET, _RECORDS_OFFSET + self.header.capacity * _RECORD_SIZE, _RECORD_SIZE)
        records = [record for start in starts if (record := _parse(self._view[start : start + _USED])) is not None]
        return sorted(records, key=lambda record: record.number)[-limit:]

    def operation(self, number: int) -> str:
        """Name of an operation, '' if there is none."""
        if not 0 < number < _NUM_NAMES:
            return ""
        start = _HEADER_SIZE + number * _NAME_SIZE
        entry = self._view[start : start + _NAME_SIZE]
        end = 2 + min(struct.unpack("<H", entry[:2])[0], _NAME_SIZE - 6)
        whole = _CRC.unpack(entry[end : end + 4])[0] == zlib.crc32(entry[:end])
        return entry[2:end].decode(errors="replace") if whole else ""

    def close(self) -> None:
        """Let go of the memory."""
        self._view.close()


def _pack_header(rank: int, world_size: int, attempt: int, capacity: int) -> bytes:
    sizes = (_RECORDS_OFFSET, _RECORD_SIZE, capacity)
    times = (time.monotonic_ns(), time.time_ns())
    host = os.uname().nodename.encode()[:64]
    head = _HEADER.pack(MAGIC, *sizes, rank, world_size, attempt, os.getpid(), 0, *times, host, 0)
    return head[:-4] + _CRC.pack(zlib.crc32(head[:-4]))


_PHASES, _MARKS = frozenset(map(int, Phase)), frozenset(map(int, Mark))


def _parse(data: bytes) -> Record | None:
    body = data[: _BODY.size]
    if _CRC.unpack(data[_BODY.size :])[0] != zlib.crc32(body):
        return None
    number, time_ns, batch, loss, step, total, collective, deadline, phase, mark, stage, operation, usual = (
        _BODY.unpack(body)
    )
    if number == 0 or phase not in _PHASES or mark not in _MARKS:
        return None
    where = (Phase(phase), step, stage, collective, batch, operation)
    return Record(number, time_ns, *where, deadline, loss, total, Mark(mark), usual)
