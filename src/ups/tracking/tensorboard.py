"""The tracker `tensorboard`: event files in RUN/tensorboard. No package is needed to write them.

They are protocol buffers, encoded here, in TFRecord frames. Field numbers are those of event.proto, summary.proto and
tensor.proto of TensorFlow, which do not change. torch's SummaryWriter would import torch into the tracker process
(225 MB instead of 15 MB), and TensorBoard's own writer would make the extra necessary for writing.
"""

from __future__ import annotations

import itertools
import os
import socket
import struct
import time
from collections.abc import Mapping
from pathlib import Path

import google_crc32c

from ups.config.tracker import TensorBoardConfig
from ups.record.run_dir import RunDir
from ups.tracking.metrics_file import Row, all_rows, numbers_of
from ups.tracking.tracker import Ending, TrackedRun, Tracker

_COUNT = itertools.count()
_STRING_TYPE = 7  # DT_STRING
_TENSOR_CLASS = 2  # DATA_CLASS_TENSOR
_START = 1  # SessionLog.START


class TensorBoardTracker(Tracker):
    """Each process writes a file of its own: what an earlier one left may end in the middle of a record."""

    def __init__(self, config: TensorBoardConfig, run: TrackedRun) -> None:
        self._folder = RunDir(run.dir).tensorboard
        self._file = EventFile(self._folder)
        self._metrics = RunDir(run.dir).metrics
        self._step: int | None = None
        self._file.text("run/facts", _table(run.facts), 0)
        self.id, self.url = run.id, str(self._folder)

    def log(self, row: Row, number: int) -> None:
        step, wall_time = row.get("step"), row.get("time")
        if not isinstance(step, int) or not isinstance(wall_time, int | float):
            return
        if self._step is None:
            self._step = self._step_before(number)
        if step < self._step:
            self._file.restarted(step)
        self._step = step
        self._file.numbers(numbers_of(row), step, wall_time)

    def _step_before(self, number: int) -> int:
        """The step of the row that an earlier process has written last."""
        last = 0
        for row in itertools.islice(all_rows(self._metrics), number):
            last = row["step"] if row is not None and isinstance(row.get("step"), int) else last
        return last

    def flush(self) -> None:
        self._file.flush()

    def attach(self, path: Path, name: str) -> None:
        self._file.text(f"files/{name}", str(path), self._step or 0)

    def end(self, ending: Ending) -> None:
        self._file.text("run/ending", _table(ending.texts), self._step or 0)
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def _table(values: Mapping[str, str]) -> str:
    """Names and values as a Markdown table."""
    rows = [f"| {name} | {value.replace('|', '/')} |" for name, value in values.items()]
    return "\n".join(["| name | value |", "|---|---|", *rows])


class EventFile:
    """A new event file in a folder; TensorBoard puts all files of a folder together as one run."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{time.time_ns() // 10**9:010d}.{socket.gethostname()}.{os.getpid()}.{next(_COUNT)}"
        self._file = (folder / name).open("xb")
        self._write(time.time(), 0, _text(3, "brain.Event:2"))

    def numbers(self, values: Mapping[str, float], step: int, wall_time: float) -> None:
        """Numbers by name at a step. They are kept with the 24 bits of a float32."""
        encoded = b"".join(_block(1, _text(1, name) + _float(2, value)) for name, value in values.items())
        self._write(wall_time, step, _block(5, encoded))

    def text(self, name: str, text: str, step: int) -> None:
        """A text (Markdown) for the tab of texts."""
        tensor = _number(1, _STRING_TYPE) + _block(2, _block(2, _number(1, 1))) + _text(8, text)
        metadata = _block(1, _text(1, "text")) + _number(4, _TENSOR_CLASS)
        self._write(time.time(), step, _block(5, _block(1, _text(1, name) + _block(8, tensor) + _block(9, metadata))))

    def restarted(self, step: int) -> None:
        """Rows from this step on replace those that came before: the run went back to a checkpoint."""
        self._write(time.time(), step, _block(7, _number(1, _START)))

    def flush(self) -> None:
        """Onto the disk."""
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()

    def _write(self, wall_time: float, step: int, content: bytes) -> None:
        event = b"\x09" + struct.pack("<d", wall_time) + _number(2, step) + content
        length = struct.pack("<Q", len(event))
        self._file.write(length + _checksum(length) + event + _checksum(event))


def _checksum(data: bytes) -> bytes:
    """CRC-32C, turned and shifted as TFRecord wants it."""
    value = google_crc32c.value(data)
    return struct.pack("<I", ((value >> 15 | value << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def _variable(value: int) -> bytes:
    value &= 2**64 - 1
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*encoded, value])


def _number(field: int, value: int) -> bytes:
    return _variable(field << 3) + _variable(value)


def _float(field: int, value: float) -> bytes:
    try:
        packed = struct.pack("<f", value)
    except OverflowError:
        packed = struct.pack("<f", float("inf") if value > 0 else float("-inf"))
    return _variable(field << 3 | 5) + packed


def _block(field: int, content: bytes) -> bytes:
    return _variable(field << 3 | 2) + _variable(len(content)) + content


def _text(field: int, text: str) -> bytes:
    return _block(field, text.encode())
