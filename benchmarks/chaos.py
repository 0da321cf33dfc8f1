"""Chaos: a training run under random faults, `python benchmarks/chaos.py --minutes 20` (bar: 80 % effective time).

First the fault-free run, which gives rate and final bytes. Then the same run again, while ranks (rank 0 too) are
killed, stopped, crashed, made to raise, or the newest checkpoint is damaged, at random times with a mean of 60 s in
between. Effective time is the fault-free time over the time it took. The final weights must be the same bytes, and
every fault must stand in run.json under its right name.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.distributed.mixture import write_mixture  # noqa: E402
from tests.faults.strikes import damage_newest  # noqa: E402
from tests.faults.supervised import Result, Started, start  # noqa: E402
from tests.faults.test_engine import weights, write_recipe  # noqa: E402
from ups.errors import UpsError  # noqa: E402
from ups.record import process_tree  # noqa: E402
from ups.record.blackbox import BlackBoxReader, Phase, ring_path  # noqa: E402
from ups.supervise.checkpoints import committed_steps  # noqa: E402
from ups.supervise.run_file import read_run  # noqa: E402

RANKS = 2
# kind -> (signal, cause that must be told)
KINDS = {
    "kill": (signal.SIGKILL, "killed(SIGKILL)"),
    "stop": (signal.SIGSTOP, "stopped(SIGSTOP)"),
    "crash": (signal.SIGSEGV, "signal(SIGSEGV)"),
    "raise": (signal.SIGRTMIN + 3, "exception(FileNotFoundError)"),
    "damage": (signal.SIGKILL, "killed(SIGKILL)"),
}


def training(run: Started) -> bool:
    """Whether every rank of the current attempt is in its loop, with a new commit behind it."""
    try:
        document = read_run(run.run_dir)
        directory = Path(document["blackbox_dir"])
        for rank in range(RANKS):
            with BlackBoxReader(ring_path(directory, rank)) as reader:
                last = reader.latest()
            if (
                last is None
                or last.phase in (Phase.INIT, Phase.TEARDOWN)
                or not process_tree.is_alive(run.rank_pid(rank))
            ):
                return False
    except (UpsError, OSError, ValueError, KeyError):
        return False
    return document["state"] == "running"


def chaos(run: Started, dice: random.Random, mean_seconds: float) -> list[dict[str, Any]]:
    """Strike until the run ends; returns what was planted."""
    planted: list[dict[str, Any]] = []
    wait = dice.expovariate(1 / mean_seconds)
    due = time.monotonic() + wait
    while run.process.poll() is None:
        time.sleep(0.05)
        if time.monotonic() < due or not training(run):
            continue
        # A damaged checkpoint needs an older one to fall back to.
        kinds = [kind for kind in KINDS if kind != "damage" or len(committed_steps(run.run_dir)) > 1]
        kind, rank = dice.choice(kinds), dice.randrange(RANKS)
        attempt = len(read_run(run.run_dir)["attempts"]) - 1
        if any(entry["attempt"] == attempt for entry in planted):
            continue  # the last one has not ended its attempt yet
        number, cause = KINDS[kind]
        pid = run.rank_pid(rank)
        if not pid:
            continue
        if kind == "damage":
            damage_newest(run.run_dir)
        os.kill(pid, number)
        planted.append({"attempt": attempt, "kind": kind, "rank": rank, "cause": cause, "time": time.time()})
        print(f"  {time.strftime('%H:%M:%S')} attempt {attempt}: {kind} rank {rank}", flush=True)
        due = time.monotonic() + dice.expovariate(1 / mean_seconds)
    return planted


def judge(result: Result, planted: list[dict[str, Any]]) -> list[str]:
    """What was told wrongly; nothing if all is well."""
    told = {fault["attempt"]: fault for fault in result.faults}
    wrong = []
    for entry in planted:
        fault = told.pop(entry["attempt"], None)
        if fault is None:
            # A strike in the last moment can meet a rank that has just finished.
            wrong.append(f"not told: {entry}")
        elif (fault["rank"], fault["cause"]) != (entry["rank"], entry["cause"]):
            wrong.append(f"planted {entry}, told rank {fault['rank']} {fault['cause']}")
    return wrong + [f"told without being planted: {fault['cause']}" for fault in told.values()]


def main() -> int:
    """Fault-free run, chaotic run, verdict."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=20.0, help="length of the fault-free run")
    parser.add_argument("--mean-seconds", type=float, default=60.0, help="mean time between faults")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--interval", type=int, default=50, help="steps between checkpoints")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="ups-chaos-") as name:
        folder = Path(name)
        tasks = write_mixture(folder)
        options = {
            "ranks": RANKS,
            "restarts": 10,
            "deadlines": {"name_floor_seconds": 10.0, "kill_floor_seconds": 60.0},
        }
        rate = calibrate(folder, tasks, arguments.interval, options)
        steps = max(100, int(rate * 60 * arguments.minutes) // 10 * 10)
        recipe = write_recipe(folder, tasks, steps=steps, save_every=arguments.interval)
        print(f"seed {arguments.seed}: {rate:.1f} steps/s, {steps} steps", flush=True)
        free = start(folder / "free", recipe=recipe, **options).finish(arguments.minutes * 180 + 600)
        assert free.code == 0, free.output
        run = start(folder / "chaos", recipe=recipe, **options)
        try:
            planted = chaos(run, random.Random(arguments.seed), arguments.mean_seconds)
            result = run.finish(60)
        finally:
            run.process.kill()
        if result.code:
            print(result.output, flush=True)
        wrong = judge(result, planted)
        same = result.code == 0 and weights(result) == weights(free)
        summary = {
            "steps": steps,
            "faults": len(planted),
            "kinds": {kind: sum(entry["kind"] == kind for entry in planted) for kind in KINDS},
            "fault_free_seconds": round(free.seconds, 1),
            "chaos_seconds": round(result.seconds, 1),
            "effective_time": round(free.seconds / result.seconds, 4) if result.code == 0 else 0.0,
            "completed": result.code == 0,
            "same_bytes": same,
            "wrongly_told": wrong,
            "orphans": len(result.orphans),
            "seed": arguments.seed,
        }
    print(json.dumps(summary))
    return 0 if same and not wrong and summary["effective_time"] >= 0.8 and not summary["orphans"] else 1


def calibrate(folder: Path, tasks: list[dict[str, Any]], interval: int, options: dict[str, Any]) -> float:
    """Steps per second in the loop of a short fault-free run."""
    recipe = write_recipe(folder, tasks, steps=300, save_every=interval)
    run = start(folder / "calibrate", recipe=recipe, **options)
    result = run.finish(600)
    assert result.code == 0, result.output
    rows = [json.loads(line) for line in (folder / "calibrate/metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if "steps_per_second" in row]
    return float((rows[-1]["step"] - rows[50]["step"]) / (rows[-1]["time"] - rows[50]["time"]))


if __name__ == "__main__":
    sys.exit(main())
