"""A run without training, for tests of trackers: a process that begins a run, writes rows, and ends as it is told.

    make_run(folder, [{"type": "tensorboard"}])
    lead(folder, steps=range(1, 11), ending="completed")

`lead` starts this file as a program, which does what a supervisor does around its ranks.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import yaml

from ups.config.recipe import resolve_data
from ups.record.files import write_file_atomically
from ups.record.identity import RunIdentity
from ups.record.run_dir import CONFIG_NAME, RunDir
from ups.supervise.run_file import note_gate
from ups.supervise.trackers import CLOSE_SECONDS

RUN_ID = "0123456789abcdef0123456789abcdef"
RECIPE_HASH = "5ec1be" * 10
DATA_HASH = "da7a" * 16
# ending -> state, cause and exit code of the verdict
ENDINGS = {
    "completed": ("completed", "", 0),
    "failed": ("failed", "killed(SIGKILL)", 6),
    "preempted": ("preempted", "asked(SIGTERM)", 143),
    "stopped": ("stopped", "asked(SIGINT)", 130),
}


def make_run(run_dir: Path, trackers: list[dict[str, Any]]) -> Path:
    """A prepared run directory whose recipe names these trackers."""
    document = {
        "version": 1,
        "run": {"name": run_dir.name},
        "data": {"tasks": [{"name": "wave", "path": "wave.zarr"}]},
        "stages": [{"type": "operator", "steps": 10}],
        "tracking": {"trackers": trackers},
    }
    run_dir.mkdir(parents=True, exist_ok=True)
    write_file_atomically(run_dir / CONFIG_NAME, resolve_data(document).text.encode())
    write_file_atomically(RunDir(run_dir).environment, b'{"git_commit": "c0ffee", "config_sha256": "feed"}')
    return run_dir


def lead_command(
    run_dir: Path, steps: range, ending: str, seconds: float = 0.0, close_seconds: float = CLOSE_SECONDS
) -> list[str]:
    """What to start for a run that logs these steps, `seconds` apart, and ends so: a key of ENDINGS, or 'killed'.

    close_seconds: how long it waits for its trackers at the end.
    """
    return [
        sys.executable,
        "-P",
        __file__,
        str(run_dir),
        str(steps.start),
        str(steps.stop),
        ending,
        str(seconds),
        str(close_seconds),
    ]


def lead(
    run_dir: Path, steps: range, ending: str, close_seconds: float = CLOSE_SECONDS
) -> subprocess.CompletedProcess[str]:
    """Lead a run to its end, in a process of its own."""
    return subprocess.run(
        lead_command(run_dir, steps, ending, close_seconds=close_seconds),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=500,
    )


def fail_gate(run_dir: Path) -> None:
    """What `ups run` notes about a completed training whose scores do not reach the bar."""
    condition = {"task": "wave", "condition": "trmse at most 1", "holds": False, "says": "is 3", "value": 3}
    note_gate(run_dir, [condition], "wave: trmse at most 1: is 3")


def row(step: int) -> dict[str, Any]:
    """The row of a step: numbers that a float32 holds exactly, one that is not a number, a text."""
    numbers = {
        "step": step,
        "stage": 0,
        "loss": 1 / 2**step,
        "valid/wave/one_step": step / 4,
        "grad_norm": float("nan"),
    }
    return {**numbers, "stage_name": "operator", "attempt": 0, "time": 1_800_000_000.0 + step}


def _main(run_dir: Path, first: int, stop: int, ending: str, seconds: float, close_seconds: float) -> None:
    import ups.supervise.trackers as end_of_trackers
    from ups.record.log import show_log, write_to_stderr
    from ups.supervise.run_file import RunFile, hold_run
    from ups.supervise.tracker_feed import check_trackers
    from ups.supervise.trackers import Trackers
    from ups.tracking.metrics_file import MetricsWriter

    end_of_trackers.CLOSE_SECONDS = close_seconds
    show_log(write_to_stderr)
    trackers = resolve_data(yaml.safe_load((run_dir / CONFIG_NAME).read_text())).recipe.tracking.trackers
    check_trackers(trackers)
    file = RunFile(run_dir)
    identity = RunIdentity(RUN_ID, recipes=(RECIPE_HASH,), data={"wave": DATA_HASH})
    with hold_run(run_dir), Trackers(run_dir, trackers) as tracked:
        file.begin(ranks=2, max_restarts=0, box_root=run_dir, identity=identity)
        file.document["attempts"].append({"number": len(file.document["attempts"]), "faults": []})
        writer = MetricsWriter(RunDir(run_dir).metrics)
        for step in range(first, stop):
            writer.log(row(step))
            tracked.look()
            time.sleep(seconds)
        writer.close()
        if ending == "killed":
            file.save()
            os.kill(os.getpid(), signal.SIGKILL)
        file.pronounce(*ENDINGS[ending], "")


if __name__ == "__main__":
    _main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], float(sys.argv[5]), float(sys.argv[6]))
