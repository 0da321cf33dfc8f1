"""Reads the log that the client of Weights & Biases leaves: LevelDB's log format around its protocol buffers."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

_BLOCK = 32768


def records(path: Path) -> list[Any]:
    """Every record of a .wandb file."""
    from wandb.proto import wandb_internal_pb2

    data, offset, records, part = path.read_bytes(), 7, [], b""  # after its own header
    while offset + 7 <= len(data):
        left = _BLOCK - offset % _BLOCK
        if left < 7:
            offset += left
            continue
        length, kind = struct.unpack("<HB", data[offset + 4 : offset + 7])
        part += data[offset + 7 : offset + 7 + length]
        offset += 7 + length
        if kind in (1, 4):  # whole, or the last part
            record = wandb_internal_pb2.Record()
            record.ParseFromString(part)
            records.append(record)
            part = b""
    return records


def history(path: Path) -> list[dict[str, Any]]:
    """The rows in a log."""
    rows = [record.history for record in records(path) if record.WhichOneof("record_type") == "history"]
    return [{item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in row.item} for row in rows]


def config(path: Path) -> dict[str, Any]:
    """What the run was described with."""
    (run,) = [record.run for record in records(path) if record.WhichOneof("record_type") == "run"]
    return {item.key: json.loads(item.value_json) for item in run.config.update}


def exits(path: Path) -> list[int]:
    """The exit codes in a log; none while the run continues."""
    return [record.exit.exit_code for record in records(path) if record.WhichOneof("record_type") == "exit"]


def kinds(path: Path) -> list[str]:
    """What each record is."""
    return [str(record.WhichOneof("record_type")) for record in records(path)]
