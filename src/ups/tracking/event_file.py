"""Event files as TensorBoard reads them, without TensorBoard: protocol buffers by hand, in TFRecord frames.

Only what a tracker needs: numbers, texts, pictures, and the mark of a restart. Field numbers are those of event.proto,
summary.proto and tensor.proto of TensorFlow, which do not change.
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

_COUNT = itertools.count()
_STRING_TYPE = 7  # DT_STRING
_TENSOR_CLASS = 2  # DATA_CLASS_TENSOR
_START = 1  # SessionLog.START


class EventFile:
    """A new event file in a folder; TensorBoard puts all files of a folder together as one run."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{time.time_ns() // 10**9:010d}.{socket.gethostname()}.{os.getpid()}.{next(_COUNT)}"
        self._file = (folder / name).open("xb")
        self._write(time.time(), 0, _text(3, "brain.Event:2"))

    def numbers(self, values: Mapping[str, float], step: int, wall_time: float) -> None:
        """Numbers by name at a step. They are kept with the 24 bits of a float32."""
        found = b"".join(_block(1, _text(1, name) + _float(2, value)) for name, value in values.items())
        self._write(wall_time, step, _block(5, found))

    def text(self, name: str, text: str, step: int) -> None:
        """A text (Markdown) for the tab of texts."""
        tensor = _number(1, _STRING_TYPE) + _block(2, _block(2, _number(1, 1))) + _text(8, text)
        metadata = _block(1, _text(1, "text")) + _number(4, _TENSOR_CLASS)
        self._write(time.time(), step, _block(5, _block(1, _text(1, name) + _block(8, tensor) + _block(9, metadata))))

    def picture(self, name: str, png: bytes, step: int) -> None:
        """A PNG file for the tab of images."""
        width, height = struct.unpack(">II", png[16:24])
        image = _number(1, height) + _number(2, width) + _number(3, 4) + _block(4, png)
        self._write(time.time(), step, _block(5, _block(1, _text(1, name) + _block(4, image))))

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
    found = bytearray()
    while value > 0x7F:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*found, value])


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
