"""From SIGTERM to the exit: how long a run takes to save and leave, and what that time consists of.

    python benchmarks/engine/leaving.py [--busy 8] [--ranks 2] [--repeats 3]

Starts `ups train` of a small model on three tasks with one loader worker for each rank, waits until it trains, sends
SIGTERM, and reads from the black boxes and from /proc when each part was done. `--busy` processes compute beside it:
with 8 on two cores the run gets about a fifth of each. Last line: one JSON object. Exit code 1 if a run takes more than
20 s.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from ups.record import processes
from ups.record.blackbox import BlackBoxReader, Phase, ring_path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the checkout, for tests.support

from tests.support.faults.small_run import rank_is_at_step, write_recipe
from tests.support.mixture import write_mixture

BAR_SECONDS = 20.0
START_SECONDS = 300.0


def leave(folder: Path, recipe: Path, ranks: int) -> dict[str, float]:
    """Seconds of each part of one exit, in their order; they add up to `all`."""
    run_dir = folder / "run"
    command = [sys.executable, "-P", "-m", "ups", "train", str(recipe), "--ranks", str(ranks)]
    with subprocess.Popen(
        [*command, "--set", f"run.dir={run_dir}"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        deadline = time.monotonic() + START_SECONDS
        while not rank_is_at_step(run_dir, 20):
            if process.poll() is not None or time.monotonic() > deadline:
                process.kill()
                raise SystemExit(f"the run did not start: {process.communicate()[0]}")
            time.sleep(0.05)
        box_dir = Path(json.loads((run_dir / "run.json").read_text())["blackbox_dir"])
        pids = [json.loads((box_dir / f"rank_{rank:05d}.pid").read_text())["rank_pid"] for rank in range(ranks)]
        asked = time.monotonic()
        process.send_signal(signal.SIGTERM)
        while any(processes.is_alive(pid) for pid in pids):
            time.sleep(0.01)
        gone = time.monotonic()
        said = process.communicate()[0]
        ended = time.monotonic()
    if process.returncode != 128 + signal.SIGTERM or " lost=0" not in said:
        raise SystemExit(f"exit code {process.returncode}: {said}")
    saving, left = [], []
    for rank in range(ranks):
        with contextlib.closing(BlackBoxReader(ring_path(run_dir / "blackbox", rank))) as reader:
            records = reader.tail(64)
        saving.append(next(r.time_ns for r in reversed(records) if r.phase is Phase.SAVE) / 1e9)
        left.append(records[-1].time_ns / 1e9)
    times = [asked, max(saving), max(left), max(gone, *left), ended]
    names = ["until the ranks agree, at the end of a step", "last save and loader", "exit of the ranks", "verdict"]
    parts = {name: after - before for name, before, after in zip(names, times, times[1:], strict=False)}
    return {**parts, "all": ended - asked}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--busy", type=int, default=0)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    given = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    found: list[dict[str, float]] = []
    busy = [subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"]) for _ in range(given.busy)]
    try:
        with tempfile.TemporaryDirectory() as place:
            tasks = write_mixture(Path(place))
            for number in range(given.repeats):
                folder = Path(place) / str(number)
                folder.mkdir()
                found.append(leave(folder, write_recipe(folder, tasks, steps=100_000, save_every=1000), given.ranks))
    finally:
        for process in busy:
            process.kill()
            process.wait()
    print(f"| part | median s | worst s |  ({given.busy} busy processes, {os.cpu_count()} cores, {given.ranks} ranks)")
    for name in found[0]:
        values = [one[name] for one in found]
        print(f"| {name} | {statistics.median(values):.2f} | {max(values):.2f} |")
    worst = max(one["all"] for one in found)
    print(json.dumps({"busy": given.busy, "ranks": given.ranks, "worst_seconds": round(worst, 2), "runs": found}))
    return int(worst > BAR_SECONDS)


if __name__ == "__main__":
    sys.exit(main())
