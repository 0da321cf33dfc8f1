"""Starts the processes of a check program, one or one per rank, ends all of them, and gives back what they left.

What it means is for `ups.doctor.judge`. No torch: when torch is what is broken, this process still says so.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ups.doctor.checks import CheckProgram
from ups.record import processes
from ups.supervise.attempt import Launcher
from ups.supervise.options import Options

_POLL_SECONDS = 0.05
# After the first rank has failed: time for the others to say what they saw, which decides nothing.
_SETTLE_SECONDS = 1.0
_MAX_LOG_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class Examination:
    """What is examined: a resolved recipe (its text, or None), a number of ranks, and where the run would live."""

    ranks: int
    run_dir: Path
    recipe_text: str | None = None
    environment: dict[str, str] = field(default_factory=dict)
    # Run only these programs; () is all of them.
    only: tuple[str, ...] = ()
    # What runs the checks: another one belongs to another environment, with its own torch.
    python: str = sys.executable


@dataclass(frozen=True, slots=True)
class Processes:
    """What the processes of a check program left: output and errors by rank, exits by rank, and how it ended."""

    out: dict[int, str]
    err: dict[int, str]
    exits: dict[int, dict[str, Any]]
    timed_out: bool
    log: Path
    not_started: str = ""


def run_program(program: CheckProgram, examination: Examination, work_dir: Path) -> Processes:
    """Run the processes of one check program to their end or its deadline; their logs are in a folder of its name."""
    folder = work_dir / program.module
    folder.mkdir()
    run = _run_ranks if program.ranks else _run_one
    return run(program, examination, work_dir, folder)


def _run_one(program: CheckProgram, examination: Examination, work_dir: Path, folder: Path) -> Processes:
    token = secrets.token_hex(16)
    out, err = folder / "out.log", folder / "err.log"
    with out.open("wb") as out_file, err.open("wb") as err_file:
        process = subprocess.Popen(
            _command(program, examination, work_dir),
            stdin=subprocess.DEVNULL,
            stdout=out_file,
            stderr=err_file,
            env={**os.environ, **_variables(program, examination), "UPS_DOCTOR_TOKEN": token},
            start_new_session=True,
            preexec_fn=processes.bound_to(os.getpid()),
        )
    exit_: dict[str, Any] = {}
    timed_out = False
    try:
        code = process.wait(program.seconds)
        exit_ = {"code": code, "time_monotonic_ns": time.monotonic_ns()}
    except subprocess.TimeoutExpired:
        timed_out = True
    finally:

        def members() -> list[processes.Process]:
            return processes.carriers("UPS_DOCTOR_TOKEN", token)

        processes.kill_until_gone(members, 10.0, not_reaped=frozenset({process.pid}))
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(5.0)
    exits = {0: exit_} if exit_ else {}
    return Processes({0: _read(out)}, {0: _read(err)}, exits, timed_out, folder)


def _run_ranks(program: CheckProgram, examination: Examination, work_dir: Path, folder: Path) -> Processes:
    box_dir = folder / "box"
    box_dir.mkdir()
    options = Options(
        run_dir=folder,
        ranks=examination.ranks,
        command=tuple(_command(program, examination, work_dir)),
        environment=_variables(program, examination),
    )
    launcher = Launcher(options, 0, box_dir, {})
    deadline, failed_since, timed_out = time.monotonic() + program.seconds, None, False
    before: dict[int, dict[str, Any]] = {}
    try:
        while not launcher.ended() and not launcher.not_started:
            now = time.monotonic()
            before = _exits(box_dir)
            if failed_since is None and any(e["code"] for e in before.values()):
                failed_since = now
            if failed_since is not None and now - failed_since > _SETTLE_SECONDS:
                break
            if now > deadline:
                timed_out = True
                break
            time.sleep(_POLL_SECONDS)
        before = _exits(box_dir)
    finally:
        launcher.end()
    # What died later was killed by us.
    exits = {rank: {**e, "ended_by_us": rank not in before} for rank, e in _exits(box_dir).items()}
    logs = folder / "logs" / "attempt_0"
    ranks = range(examination.ranks)
    out = {rank: _read(logs / f"rank_{rank:05d}.out") for rank in ranks}
    err = {rank: _read(logs / f"rank_{rank:05d}.err") for rank in ranks}
    return Processes(out, err, exits, timed_out, logs, " ".join(launcher.not_started.values()))


def _command(program: CheckProgram, examination: Examination, work_dir: Path) -> list[str]:
    module = f"ups.doctor.probes.{program.module}"
    return processes.module_command(module, str(work_dir), python=examination.python)


def _variables(program: CheckProgram, examination: Examination) -> dict[str, str]:
    threads = {} if "OMP_NUM_THREADS" in os.environ else {"OMP_NUM_THREADS": "1"}
    return {
        **threads,
        "PYTHONFAULTHANDLER": "1",
        "PYTHONUNBUFFERED": "1",
        "UPS_PROBE_SECONDS": str(program.seconds),
        **examination.environment,
    }


def _exits(box_dir: Path) -> dict[int, dict[str, Any]]:
    found = {}
    for path in box_dir.glob("rank_*.exit.json"):
        with contextlib.suppress(OSError, ValueError, KeyError):
            document = json.loads(path.read_text())
            found[int(document["rank"])] = document
    return found


def _read(path: Path) -> str:
    with contextlib.suppress(OSError):
        return path.read_bytes()[-_MAX_LOG_BYTES:].decode(errors="replace")
    return ""
