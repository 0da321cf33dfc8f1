"""Wall and CPU time of generating all nine tasks at the size of the benchmark.

Run with `python benchmarks/data/generate.py` on a machine that does nothing else. The data go to a temporary directory
unless `--out` names one (where what is there already is kept, so use a new one). The last line is one JSON object; the
exit code is 1 above the bar: 15 minutes on two processes.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import tempfile
import time
from pathlib import Path

from ups.solvers.request import BENCH_TRAJECTORIES, make_request
from ups.solvers.sweep import generate
from ups.solvers.tasks import TASKS

MAX_SECONDS = 900.0


def cpu_seconds() -> float:
    usage = [resource.getrusage(who) for who in (resource.RUSAGE_CHILDREN, resource.RUSAGE_SELF)]
    return sum(u.ru_utime + u.ru_stime for u in usage)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--tasks", nargs="+", default=list(TASKS))
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        out = arguments.out or Path(temporary)
        times: dict[str, dict[str, float]] = {}
        for name in arguments.tasks:
            wall, cpu = time.monotonic(), cpu_seconds()
            result = generate(
                [make_request(name, trajectories=BENCH_TRAJECTORIES)], out, num_processes=arguments.processes
            )
            times[name] = {"wall": round(time.monotonic() - wall, 1), "cpu": round(cpu_seconds() - cpu, 1)}
            kept = " (was there already)" if result[0].kept else ""
            print(f"{name:12s} {times[name]['wall']:8.1f} s wall {times[name]['cpu']:8.1f} s CPU{kept}", flush=True)
    total = {kind: round(sum(t[kind] for t in times.values()), 1) for kind in ("wall", "cpu")}
    passed = total["wall"] <= MAX_SECONDS
    print(json.dumps({"benchmark": "generate_data", "passed": passed, "total_seconds": total, "tasks": times}))
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
