"""`ups why` and `ups status` over 1,024 ranks: `python benchmarks/scale/thousand_ranks.py`.

Writes what a failed run on 128 hosts of 8 ranks leaves: black boxes, failure records and logs of all ranks, evidence
and a note of each host, `run.json` with three attempts. The writers are those of a real run; the ranks are simulated.
With `--hosts 1` one supervisor has seen all ranks, and all evidence is in one file. Then each command runs as a user
starts it. The last line is one JSON object; the exit code is 1 if a command takes more than 2 s of CPU or 500 MB.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from ups.record.blackbox import BlackBox, Phase, ring_path
from ups.record.failure import Recorder
from ups.record.rank_wrapper import write_json
from ups.record.run_dir import RunDir
from ups.supervise import evidence
from ups.supervise.fault import Fault
from ups.supervise.rank_view import RankView
from ups.supervise.run_file import RunFile
from ups.supervise.status import rows_of_rings

MOST_SECONDS, MOST_BYTES = 2.0, 500e6
ATTEMPTS, STEPS = 3, 300


def write_attempt(run_dir: Path, attempt: int, ranks: int, hosts: int) -> Fault:
    """One attempt in which a rank in the middle runs into an exception and all others lose their peers."""
    run, failed, each = RunDir(run_dir), ranks // 2, ranks // hosts
    here = failed // each  # the host of the rank that failed
    for rank in range(ranks) if not attempt else ():  # black boxes are of the last attempt alone
        box = BlackBox.create(ring_path(run.blackbox, rank), rank=rank, world_size=ranks, attempt=attempt)
        for step in range(STEPS):
            box.issue("all_reduce(status, int64[5])", Phase.DATA, step)
            box.record(Phase.FORWARD, step)
            box.issue("reduce(gradients)", Phase.BACKWARD, step)
            box.record(Phase.OPTIMIZER, step)
    for rank in range(ranks):
        recorder = Recorder(run.failure_stem(attempt, rank), rank, ranks, attempt)
        try:
            raise FileNotFoundError("/data/ns2d.zarr/c/17/0") if rank == failed else RuntimeError("connection reset")
        except (FileNotFoundError, RuntimeError) as error:
            recorder.record(error)
        write_json(run.failure_stem(attempt, rank).with_suffix(".exit.json"), {"code": 1, "time_monotonic_ns": 0})
        log = run.log(attempt, rank)
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text("step 299 of 100000\n" * 50)
    name = "evidence.json" if hosts == 1 else f"evidence.host_{here:05d}.json"
    fault = Fault(
        attempt, failed, ranks, f"{here}:gpu", STEPS - 1, "data", "exception(FileNotFoundError)",
        action="stop(same_fault_3_times)" if attempt == ATTEMPTS - 1 else f"restart {attempt + 1}/3",
        log=RunDir.log_name(attempt, failed), evidence=f"failures/attempt_{attempt}/{name}",
    )  # fmt: skip
    for host in range(hosts) if attempt == ATTEMPTS - 1 else (here,):
        seen = range(host * each, (host + 1) * each)
        views = [RankView(run_dir, run.blackbox, attempt, rank) for rank in seen]
        for view in views:
            view.refresh()
        mine = f"failures/attempt_{attempt}/" + ("evidence.json" if hosts == 1 else f"evidence.host_{host:05d}.json")
        shown = Fault.from_document(fault.document() | {"evidence": mine})
        evidence.write(run_dir, shown, views, {rank: {"resident": 2**31} for rank in seen})
        rows = [row.document() for row in rows_of_rings(run.blackbox, seen, live=False)]
        run.hosts.mkdir(exist_ok=True)
        write_json(run.host_note(host), {"host": f"{host}:gpu", "left": "", "ranks": rows})
    return fault


def write_run(run_dir: Path, ranks: int, hosts: int) -> None:
    """A run of three attempts that ended with the same fault each time."""
    file = RunFile(run_dir)
    run_dir.mkdir(parents=True)
    file.begin(ranks=ranks, max_restarts=3, box_root=run_dir)
    for attempt in range(ATTEMPTS):
        entry, _ = file.begin_attempt(run_dir)
        entry["faults"] = [write_attempt(run_dir, attempt, ranks, hosts).document()]
    file.document["blackbox_dir"] = ""
    file.pronounce("failed", "exception(FileNotFoundError)", 6, "")
    file.save()


def measured(*words: str) -> dict[str, float]:
    """Seconds of CPU and of the clock, and the most resident bytes, of one command."""
    began = time.monotonic()
    process = subprocess.Popen([sys.executable, "-m", "ups", *words], stdout=subprocess.PIPE)
    assert process.stdout is not None
    text = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    seconds = usage.ru_utime + usage.ru_stime
    found = {"cpu_seconds": seconds, "seconds": time.monotonic() - began, "bytes": usage.ru_maxrss * 1024.0}
    print(
        f"ups {words[0]:7} {found['cpu_seconds']:5.2f} s of CPU, {found['seconds']:5.2f} s, "
        f"{found['bytes'] / 1e6:4.0f} MB, {len(text):6} characters, exit code {os.waitstatus_to_exitcode(status)}"
    )
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=1024)
    parser.add_argument("--hosts", type=int, default=128)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        write_run(run_dir, arguments.ranks, arguments.hosts)
        found = {name: measured(name, str(run_dir)) for name in ("why", "status")}
    good = all(one["cpu_seconds"] <= MOST_SECONDS and one["bytes"] <= MOST_BYTES for one in found.values())
    print(json.dumps(found | {"kept": good}))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
