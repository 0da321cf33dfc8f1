"""Chaos: a run under random faults, `python benchmarks/faults/chaos.py --minutes 20` (bar: 80 % effective time).

First the fault-free run, which gives rate and final bytes. Then the same run again, while ranks (rank 0 too) are
killed, stopped, crashed, made to raise, or the newest checkpoint is damaged, at random times with a mean of 60 s in
between. The final weights must be the same bytes, and every fault must stand in run.json under its right name.

Effective time is what the run would have taken without faults over what it took. The rate without faults is taken
from the same run, as the median over blocks of steps between faults: the speed of a shared machine drifts by more than
the bar within twenty minutes. The plain ratio of the two runs is printed next to it, and the same rule applied to the
fault-free run, where it must give about 1.

`--harsh` also makes the loss of a rank NaN and takes its memory away. A NaN step is skipped by all ranks and counted,
and is no fault; lack of memory halves the micro-batch. Both change the sums, so the final loss is compared, not bytes.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from ups.errors import UpsError
from ups.record import processes
from ups.record.blackbox import BlackBoxReader, Phase, ring_path
from ups.supervise.checkpoints import committed_steps
from ups.supervise.fault import MICRO_BATCH_SIZE
from ups.supervise.run_file import read_run

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the checkout, for tests.support

from tests.support.faults.damage import damage_newest
from tests.support.faults.small_run import rows, weights, write_recipe
from tests.support.faults.supervised import Result, Started, start
from tests.support.mixture import write_mixture

RANKS = 2
# kind -> (signal, cause that must be reported)
KINDS = {
    "kill": (signal.SIGKILL, "killed(SIGKILL)"),
    "stop": (signal.SIGSTOP, "stopped(SIGSTOP)"),
    "crash": (signal.SIGSEGV, "signal(SIGSEGV)"),
    "raise": (signal.SIGRTMIN + 3, "exception(FileNotFoundError)"),
    "damage": (signal.SIGKILL, "killed(SIGKILL)"),
}
# What --harsh adds. A NaN is no fault: its cause is empty.
HARSH = {"nan": (signal.SIGRTMIN + 4, ""), "memory": (signal.SIGRTMIN + 5, "out_of_memory")}
# Of windows: halved at each lack of memory, 1 being the last that can be.
BATCH_SIZE, HARSH_BATCH_SIZE = 4, 16
LAST_STEPS = 100


def training(run: Started) -> bool:
    """Whether every rank of the current attempt is in its loop, with a new commit behind it."""
    try:
        document = read_run(run.run_dir)
        directory = Path(document["blackbox_dir"])
        for rank in range(RANKS):
            with contextlib.closing(BlackBoxReader(ring_path(directory, rank))) as reader:
                last = reader.latest()
            if last is None or last.phase in (Phase.INIT, Phase.TEARDOWN) or not processes.is_alive(run.rank_pid(rank)):
                return False
    except (UpsError, OSError, ValueError, KeyError):
        return False
    return bool(document["state"] == "running")


def chaos(run: Started, dice: random.Random, mean_seconds: float, every_kind: dict[str, Any]) -> list[dict[str, Any]]:
    """Plant faults until the run ends; returns what was planted."""
    planted: list[dict[str, Any]] = []
    wait = dice.expovariate(1 / mean_seconds)
    due = time.monotonic() + wait
    while run.process.poll() is None:
        time.sleep(0.05)
        if time.monotonic() < due or not training(run):
            continue
        document = read_run(run.run_dir)
        kinds = set(every_kind)
        if len(list(committed_steps(run.run_dir))) < 2:
            kinds.discard("damage")  # needs an older one to fall back to
        if document["overrides"].get(MICRO_BATCH_SIZE) == 1:
            kinds.discard("memory")  # a single window that does not fit ends a run, rightly
        kind, rank = dice.choice(sorted(kinds)), dice.randrange(RANKS)
        attempt = len(document["attempts"]) - 1
        if any(entry["attempt"] == attempt and entry["cause"] for entry in planted):
            continue  # the last one has not ended its attempt yet
        number, cause = every_kind[kind]
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
    """What was reported wrongly; nothing if all is well."""
    reported = {fault["attempt"]: fault for fault in result.faults}
    wrong = []
    for entry in (entry for entry in planted if entry["cause"]):
        fault = reported.pop(entry["attempt"], None)
        if fault is None:
            # A fault in the last moment can hit a rank that has just finished.
            wrong.append(f"not reported: {entry}")
        elif (fault["rank"], fault["cause"]) != (entry["rank"], entry["cause"]):
            wrong.append(f"planted {entry}, reported rank {fault['rank']} {fault['cause']}")
    return wrong + [f"reported without being planted: {fault['cause']}" for fault in reported.values()]


def main() -> int:
    """Fault-free run, chaotic run, verdict."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--minutes",
        type=float,
        default=20.0,
        help="length of the fault-free run; the run under faults comes after it and lasts longer",
    )
    parser.add_argument("--mean-seconds", type=float, default=60.0, help="mean time between faults")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--interval", type=int, default=50, help="steps between checkpoints")
    parser.add_argument("--harsh", action="store_true", help="NaN and lack of memory, too; compares the final loss")
    arguments = parser.parse_args()
    kinds = {**KINDS, **(HARSH if arguments.harsh else {})}
    batch_size = HARSH_BATCH_SIZE if arguments.harsh else BATCH_SIZE
    with tempfile.TemporaryDirectory(prefix="ups-chaos-") as name:
        folder = Path(name)
        tasks = write_mixture(folder)
        options: dict[str, Any] = {
            "ranks": RANKS,
            "restarts": 10,
            "deadlines": {"name_floor_seconds": 10.0, "kill_floor_seconds": 60.0},
            "micro_batch_size": batch_size // RANKS,
        }
        rate = calibrate(folder, tasks, arguments.interval, batch_size, options)
        steps = max(100, int(rate * 60 * arguments.minutes) // 10 * 10)
        recipe = write_recipe(folder, tasks, steps=steps, save_every=arguments.interval, batch_size=batch_size)
        print(f"seed {arguments.seed}: {rate:.1f} steps/s, {steps} steps", flush=True)
        free = start(folder / "free", recipe=recipe, **options).finish(arguments.minutes * 180 + 600)
        assert free.code == 0, free.output
        run = start(folder / "chaos", recipe=recipe, **options)
        try:
            planted = chaos(run, random.Random(arguments.seed), arguments.mean_seconds, kinds)
            result = run.finish(60)
        finally:
            run.process.kill()
        if result.code:
            print(result.output, flush=True)
        wrong = judge(result, planted)
        same = result.code == 0 and weights(result) == weights(free)
        summary = {
            "steps": steps,
            "faults": sum(bool(entry["cause"]) for entry in planted),
            "kinds": {kind: sum(entry["kind"] == kind for entry in planted) for kind in kinds},
            "fault_free_seconds": round(free.seconds, 1),
            "chaos_seconds": round(result.seconds, 1),
            "effective_time": effective_time(result, arguments.interval) if result.code == 0 else 0.0,
            "effective_time_of_fault_free_run": effective_time(free, arguments.interval),
            "seconds_without_a_step": without_a_step(result),
            "ratio_of_the_two_runs": round(free.seconds / result.seconds, 4) if result.code == 0 else 0.0,
            "completed": result.code == 0,
            "same_bytes": same,
            "wrongly_told": wrong,
            "orphans": len(result.orphans),
            "seed": arguments.seed,
        }
        if arguments.harsh and result.code == 0:
            summary |= compare(free, result)
    print(json.dumps(summary))
    if arguments.harsh:  # a smaller micro-batch is slower by design: no bar on time
        right = summary.get("loss_difference", 1.0) <= 1e-3
    else:
        right = same and summary["effective_time"] >= 0.8
    return 0 if right and not wrong and not summary["orphans"] else 1


def effective_time(result: Result, interval: int) -> float:
    """Time that a run would have taken at its own rate between faults, with one start and one end, over its time.

    A block is as long as the steps between two saves, so each holds one save; a block cut by a fault is not counted.
    """
    found, attempts = rows(result), result.document["attempts"]
    blocks = [
        last["time"] - first["time"]
        for first, last in zip(found, found[interval:], strict=False)
        if first["step"] % interval == 0
        and first["attempt"] == last["attempt"]
        and last["step"] - first["step"] == interval
    ]
    start = attempts[0]["training"] - attempts[0]["started"]
    end = attempts[-1]["ended"] - found[-1]["time"]
    ideal: float = start + found[-1]["step"] * statistics.median(blocks) / interval + end
    return round(ideal / result.seconds, 4)


def without_a_step(result: Result) -> dict[str, float]:
    """Median and worst time from the last step before a fault to the first one after it."""
    found = rows(result)
    gaps = [
        after["time"] - before["time"]
        for before, after in itertools.pairwise(found)
        if after["attempt"] != before["attempt"]
    ]
    return {"median": round(statistics.median(gaps), 2), "worst": round(max(gaps), 2)} if gaps else {}


def compare(free: Result, result: Result) -> dict[str, Any]:
    """Relative difference of the loss over the last steps, on the same windows in both runs; skipped steps."""
    before, after = ({row["step"]: row for row in rows(one)} for one in (free, result))
    last = sorted(before.keys() & after.keys())[-LAST_STEPS:]
    one, other = (sum(of[step]["loss"] for step in last) for of in (before, after))
    return {
        "loss_fault_free": round(one / len(last), 8),
        "loss_difference": round(abs(other - one) / one, 8),
        "loss_difference_absolute": round(abs(other - one) / len(last), 10),
        "micro_batch_size": result.document["overrides"].get(MICRO_BATCH_SIZE, 0),
        # Steps that a later fault took back are repeated without the NaN.
        "skipped_steps_kept": rows(result)[-1]["skipped"],
    }


def calibrate(
    folder: Path, tasks: list[dict[str, Any]], interval: int, batch_size: int, options: dict[str, Any]
) -> float:
    """Steps per second in the loop of a short fault-free run."""
    recipe = write_recipe(folder, tasks, steps=300, save_every=interval, batch_size=batch_size)
    run = start(folder / "calibrate", recipe=recipe, **options)
    result = run.finish(600)
    assert result.code == 0, result.output
    found = rows(result)
    return float((found[-1]["step"] - found[50]["step"]) / (found[-1]["time"] - found[50]["time"]))


if __name__ == "__main__":
    sys.exit(main())
