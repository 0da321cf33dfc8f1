"""Cost of a black-box record: `python benchmarks/engine/blackbox.py` (bar: 5 microseconds, median of seven rounds)."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

from ups.record.blackbox import BlackBox, Phase

BAR_MICROSECONDS = 5.0
RECORDS = 50_000


def main() -> int:
    """Time `record` and `issue` on a ring in shared memory."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    shared = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shared if shared.is_dir() else None) as folder:
        box = BlackBox.create(Path(folder) / "rank.ring", rank=0, world_size=1, attempt=0)
        record, issue = [], []
        for _ in range(7):
            begin = time.perf_counter()
            for step in range(RECORDS):
                box.record(Phase.FORWARD, step, 1, 0, step)
            middle = time.perf_counter()
            for step in range(RECORDS):
                box.issue("all_reduce(status, int64[3])", Phase.SYNC, step)
            end = time.perf_counter()
            record.append((middle - begin) / RECORDS * 1e6)
            issue.append((end - middle) / RECORDS * 1e6)
        box.close()
    result = {
        "record_microseconds": round(statistics.median(record), 3),
        "record_microseconds_worst_round": round(max(record), 3),
        "issue_microseconds": round(statistics.median(issue), 3),
        "bar_microseconds": BAR_MICROSECONDS,
    }
    print(json.dumps(result))
    return 0 if max(result["record_microseconds"], result["issue_microseconds"]) < BAR_MICROSECONDS else 1


if __name__ == "__main__":
    sys.exit(main())
