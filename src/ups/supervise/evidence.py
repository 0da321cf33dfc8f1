"""What a person needs to believe the one line: where all ranks were, their memory, their last words.

Gathered while the ranks still live, and kept next to the failure records as `failures/attempt_N/evidence.json`.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ups.errors import UpsError
from ups.record.failure import memory_of_process
from ups.record.location import frames_of_dump
from ups.record.manifest import write_file_atomically
from ups.supervise.fault import Fault
from ups.supervise.rank_view import RankView, tail

_RECORDS = 12
_LOG_BYTES = 4000
# With many ranks on a host, those that say the most: the first cause and a sample of the others.
_MAX_LOGS = 16


def gather(views: Sequence[RankView]) -> dict[int, dict[str, Any]]:
    """Memory of the ranks that still live, by rank."""
    return {view.rank: memory_of_process(view.pid) for view in views if view.alive and view.pid}


def write(run_dir: Path, fault: Fault, views: Sequence[RankView], memory: dict[int, dict[str, Any]]) -> None:
    """Store the evidence of one fault; losing it must not lose the run."""
    document = {
        "fault": fault.document(),
        "ranks": [_of_rank(view, memory.get(view.rank, {}), view.rank == fault.rank) for view in views],
    }
    with contextlib.suppress(UpsError, OSError):
        path = run_dir / fault.evidence
        if run_dir.is_dir():  # one that was moved away is not made again for this
            path.parent.mkdir(parents=True, exist_ok=True)
        write_file_atomically(path, (json.dumps(document, indent=1) + "\n").encode())


def waits_for_peers(view: RankView) -> bool:
    """Whether the rank's last printed stack is inside a collective: it waits for others and holds up nobody."""
    innermost = frames_of_dump(tail(view.stem.with_name(f"{view.name}.stacks.txt")))[:3]
    if any(frame.function == "_engine_run_backward" for frame in innermost):
        return True
    # A checkpoint is written by torch/distributed/checkpoint, which is work and no waiting.
    called = next((frame.path for frame in innermost if "torch/distributed" in frame.path), "")
    return bool(called) and "torch/distributed/checkpoint" not in called


def _of_rank(view: RankView, memory: dict[str, Any], first: bool) -> dict[str, Any]:
    records = [] if view.reader is None else view.reader.tail(_RECORDS)
    document: dict[str, Any] = {
        "rank": view.rank,
        "pid": view.pid,
        "exit": view.exit,
        "memory": memory,
        "timeline": [
            {
                "time_monotonic_ns": r.time_ns,
                "step": r.step,
                "phase": r.phase.label,
                "stage": r.stage,
                "collective": r.collective,
                "operation": view.reader.operation(r.operation) if view.reader else "",
                "batch": r.batch,
                "mark": r.mark.name.lower(),
            }
            for r in records
        ],
    }
    if first or view.rank < _MAX_LOGS:
        document["log_tail"] = tail(view.run_dir / view.log, _LOG_BYTES)
    return document
