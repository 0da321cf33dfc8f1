"""What a run is doing now: step, loss, rate, time left, each rank's phase. From rings and run.json, without torch.

Rings lie in the shared memory of their host, where no other host sees them. So in a run over several hosts each
supervisor leaves a summary in `hosts/00001.json` every few seconds, and a note when it left because the head was gone.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, StrictStr, TypeAdapter, ValidationError

from ups.buckets.mirror_process import MirrorNote
from ups.buckets.mirror_process import read_note as read_mirror_note
from ups.errors import UpsError
from ups.record import processes
from ups.record.blackbox import BlackBoxReader, Phase, Record, ring_path
from ups.record.failure import memory_of_process
from ups.record.files import read_object
from ups.record.rank_wrapper import write_json
from ups.record.run_dir import RunDir
from ups.record.text import counted, duration_text
from ups.supervise.checkpoints import last_commit
from ups.supervise.fault import Whole
from ups.supervise.options import HostInfo
from ups.supervise.run_file import RunDocument, faults_of
from ups.supervise.trackers import notes_of

# Records of a rank that are read, and of all ranks together: of many ranks fewer each.
_WINDOW, _WINDOW_OF_ALL = 512, 2**16
# JSON has no NaN: it is null there.
OrNaN = Annotated[float, Field(strict=True), BeforeValidator(lambda value: math.nan if value is None else value)]


@dataclass(frozen=True, slots=True)
class RankStatus:
    """One row of the table. `seconds` is the time in the current phase; `host` is '' for a rank of this host."""

    rank: Whole
    pid: Whole
    state: StrictStr
    step: Whole
    phase: StrictStr
    seconds: OrNaN
    collective: Whole
    resident_bytes: Whole
    loss: OrNaN
    total_steps: Whole
    steps_per_second: OrNaN
    host: StrictStr = ""

    def document(self) -> dict[str, Any]:
        """As JSON, where NaN and infinity do not exist."""
        values = {name: getattr(self, name) for name in self.__slots__ if name != "host" or self.host}
        return {key: None if isinstance(v, float) and not math.isfinite(v) else v for key, v in values.items()}


_ROWS = TypeAdapter(RankStatus)


def rank_statuses(run_dir: Path, document: RunDocument) -> list[RankStatus]:
    """One row per rank whose ring can be read."""
    live = document["state"] == "running" and document["blackbox_dir"]
    directory = Path(document["blackbox_dir"]) if live else RunDir(run_dir).blackbox
    return rows_of_rings(directory, range(int(document["ranks"])), live=bool(live))


def rows_of_rings(directory: Path, ranks: range, *, live: bool) -> list[RankStatus]:
    """One row for each of the ranks whose ring is in `directory` and can be read."""
    rows, window = [], max(16, min(_WINDOW, _WINDOW_OF_ALL // max(1, len(ranks))))
    for rank in ranks:
        with (
            contextlib.suppress(OSError, UpsError),
            contextlib.closing(BlackBoxReader(ring_path(directory, rank))) as reader,
        ):
            records = reader.since(0, window)
            if records:
                rows.append(_row(reader, records, live=live))
    return rows


def summary(run_dir: Path, document: RunDocument, rows: list[RankStatus]) -> dict[str, Any]:
    """The run as a whole: the slowest rank sets step and rate."""
    running = document["state"] == "running"
    slowest = min(rows, key=lambda row: row.step, default=None)
    mirror = read_mirror_note(run_dir)
    result: dict[str, Any] = {
        "name": document["name"],
        "state": document["state"],
        "cause": document["cause"],
        "attempt": len(document["attempts"]) - 1,  # counted from 0, as its directory is
        "attempts": len(document["attempts"]),
        "faults": len(faults_of(document)),
        "checkpoint": last_commit(run_dir),
        "extensions": document.get("extensions", []),
        "gate": document.get("gate"),
        "trackers": [
            {"name": name, "url": note.url, "rows": note.rows, "told": note.state, "problem": note.problem}
            for name, note in notes_of(run_dir).items()
        ],
        "mirror": None if mirror is None else asdict(mirror),
        "step": slowest.step if slowest else None,
        "total_steps": slowest.total_steps if slowest else None,
        "loss": slowest.document()["loss"] if slowest else None,
        "steps_per_second": slowest.document()["steps_per_second"] if slowest else None,
        "seconds_left": None,
        "elapsed_seconds": (document["ended"] or time.time()) - document["started"],
    }
    if slowest and slowest.steps_per_second > 0 and slowest.total_steps and running:
        result["seconds_left"] = max(0, slowest.total_steps - slowest.step) / slowest.steps_per_second
    return result


def tracker_lines(result: dict[str, Any]) -> list[str]:
    """One line of text per tracker."""
    lines = []
    for tracker in result["trackers"]:
        end = f", told {tracker['told']}" if tracker["told"] else ""
        problem = f", problem: {tracker['problem']}" if tracker["problem"] else ""
        lines.append(f"{tracker['name']}: {tracker['url'] or 'not reached yet'}, {tracker['rows']} rows{end}{problem}")
    return lines


def mirror_line(result: dict[str, Any]) -> str:
    """The mirror of a run in a line of text, '' without one."""
    if result["mirror"] is None:
        return ""
    note = MirrorNote(**result["mirror"])
    has = "has no checkpoint yet" if note.step is None else f"has checkpoint {note.step}"
    problem = f", problem: {note.problem}" if note.problem else ""
    return f"mirror: {note.url} {note.gap(result['checkpoint']) or has}{problem}"


def rows_of_table(rows: list[RankStatus]) -> list[list[str]]:
    """The table of ranks as text cells, a header first; those that are furthest behind come first."""
    several = any(row.host for row in rows)
    table = [["rank", *(["host"] if several else []), "pid", "state", "step", "phase", "for", "collective", "memory"]]
    for row in sorted(rows, key=lambda r: (r.step, r.rank)):
        memory = f"{row.resident_bytes / 2**20:.0f} MiB" if row.resident_bytes else "-"
        cells = [row.pid, row.state, row.step, row.phase, f"{row.seconds:.1f}s", row.collective, memory]
        table.append([str(cell) for cell in (row.rank, *([row.host or "-"] if several else []), *cells)])
    return table


def one_line(result: dict[str, Any]) -> str:
    """The summary as a line of text."""
    parts = [f"{result['name']}: {result['state']}"]
    if result["step"] is not None:
        total = f"/{result['total_steps']}" if result["total_steps"] else ""
        parts.append(f"step {result['step']}{total}")
    if result["loss"] is not None:
        parts.append(f"loss {result['loss']:.6g}")
    if result["steps_per_second"]:
        parts.append(f"{result['steps_per_second']:.3g} steps/s")
    if result["seconds_left"] is not None:
        parts.append(f"{duration_text(result['seconds_left'])} left")
    parts += [counted(result["attempts"], "attempt"), counted(result["faults"], "fault")]
    parts.append("no checkpoint yet" if result["checkpoint"] is None else f"checkpoint {result['checkpoint']}")
    if result["extensions"]:
        last = result["extensions"][-1]
        parts.append(f"extended at step {last['step']:.0f}: {last['field']} {last['from']:g} -> {last['to']:g}")
    if result["cause"]:
        parts.append(f"cause {result['cause']}")
    return ", ".join(parts)


def _row(reader: BlackBoxReader, records: list[Record], *, live: bool) -> RankStatus:
    header, last = reader.header, records[-1]
    process = processes.read_process(header.pid) if live and header.host == os.uname().nodename else None
    state = {"T": "stopped", "Z": "dead", "D": "disk"}.get(process.state, "alive") if process else "gone"
    memory = memory_of_process(header.pid).get("resident", 0) if process else 0
    seconds = (time.monotonic_ns() - last.time_ns) / 1e9 if process else 0.0
    return RankStatus(
        header.rank,
        header.pid,
        state,
        last.step,
        last.phase.label if not last.mark else last.mark.name.lower(),
        max(seconds, 0.0),
        last.collective,
        memory,
        last.loss,
        last.total_steps,
        _rate(records),
    )


def _rate(records: list[Record]) -> float:
    """Steps per second over the records of the loop at hand; NaN if they do not span a step.

    From the second step on: the first one waits for the loader, fills caches and compiles.
    """
    start = next((record for record in records if record.phase is not Phase.INIT), records[0])
    last = records[-1]
    first = next((record for record in records if record.step > start.step and record.phase is not Phase.INIT), last)
    seconds = (last.time_ns - first.time_ns) / 1e9
    return (last.step - first.step) / seconds if last.step > first.step and seconds > 0 else math.nan


_EVERY_SECONDS = 2.0


class HostFile:
    """The writer, for one supervisor. A full disk must not end what it watches."""

    def __init__(self, run_dir: Path, host_info: HostInfo, ranks: range) -> None:
        self._path = RunDir(run_dir).host_note(host_info.number)
        self._label, self._ranks = host_info.label, ranks
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
    rows = []
    for path in RunDir(run_dir).host_notes():
        note = read_object(path) or {}
        for row in note["ranks"] if isinstance(note.get("ranks"), list) else []:
            with contextlib.suppress(ValidationError, TypeError):
                rows.append(_ROWS.validate_python({**row, "host": note.get("host")}))
    return rows
