"""`hosts/00001.json` in a run over several hosts: what the ranks of one host are doing, for readers on any host.

Rings lie in the shared memory of their host, where no other host sees them. So each supervisor leaves a
summary in the run directory every few seconds, and a word when it left because the head was gone.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import fields
from pathlib import Path
from typing import Any

from ups.record.rank_wrapper import write_json
from ups.record.run_dir import RunDir
from ups.record.untrusted_files import is_number, is_whole, read_object
from ups.supervise.host_notes import MAX_BYTES
from ups.supervise.host_place import HostPlace
from ups.supervise.status import RankStatus, rows_of_rings

_EVERY_SECONDS = 2.0
_TEXTS = ("state", "phase")
_FLOATS = ("seconds", "loss", "steps_per_second")


class HostFile:
    """The writer, for one supervisor. A full disk must not end what it watches."""

    def __init__(self, run_dir: Path, place: HostPlace, ranks: range) -> None:
        self._path = RunDir(run_dir).host_note(place.number)
        self._label, self._ranks = place.label, ranks
        self._next = 0.0

    def look(self, box_dir: Path) -> None:
        """Write what the ranks do, now and then."""
        now = time.monotonic()
        if now >= self._next:
            self._next = now + _EVERY_SECONDS
            self._write(ranks=[row.document() for row in rows_of_rings(box_dir, self._ranks, live=True)])

    def leave(self, cause: str) -> None:
        """Write why this supervisor left before the verdict."""
        self._write(ranks=[], left=cause)

    def _write(self, **what: Any) -> None:
        with contextlib.suppress(OSError, ValueError):
            self._path.parent.mkdir(exist_ok=True)
            write_json(self._path, {"host": self._label, "left": "", **what})


def rows_of_hosts(run_dir: Path) -> list[RankStatus]:
    """The rows that other hosts have left; what is not one is left out."""
    return [row for path in RunDir(run_dir).host_notes() for row in _rows(read_object(path, MAX_BYTES) or {})]


def _rows(document: dict[str, Any]) -> list[RankStatus]:
    host, rows = document.get("host"), document.get("ranks")
    if not isinstance(host, str) or not isinstance(rows, list):
        return []
    names = [field.name for field in fields(RankStatus) if field.name != "host"]
    found = []
    for row in rows:
        if not isinstance(row, dict):
            continue
        values: dict[str, Any] = {name: row.get(name) for name in names}
        values |= {name: float("nan") for name in _FLOATS if values[name] is None}
        sound = (
            all(isinstance(values[name], str) for name in _TEXTS)
            and all(is_number(values[name]) or values[name] != values[name] for name in _FLOATS)
            and all(is_whole(values[name]) for name in names if name not in (*_TEXTS, *_FLOATS))
        )
        if sound:
            found.append(RankStatus(**values, host=host))
    return found
