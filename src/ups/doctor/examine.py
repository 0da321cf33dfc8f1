"""Runs the checks of `ups doctor`, each in its own processes, and judges what they leave.

A check ends in a verdict of its own, in a crash, or at its deadline; each of these is a verdict with a name, the first
cause first. The doctor stops at the first failure. No torch here: when torch is what is broken, this process still says
so.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ups.doctor.checks import CHECK_PROGRAMS, Check, CheckProgram
from ups.record import processes
from ups.record.causes import cause_of_exit, causes_first, is_cascade_text, signal_name
from ups.record.failure import location_of_dump
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
    return processes.module_command("ups.doctor.probes", program.module, str(work_dir), python=examination.python)


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


# How this process ends what is left.
_ENDINGS = (-signal.SIGKILL, -signal.SIGTERM)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a check found. `log` is where its output is, kept only if it failed."""

    check: str
    ok: bool
    says: str
    means: str = ""
    advice: str = ""
    rank: int | None = None
    at: str = ""
    seconds: float = 0.0
    exit_code: int = 0
    log: str = ""
    warnings: tuple[str, ...] = ()
    facts: dict[str, Any] = field(default_factory=dict)
    # Of a failed check: a stable name, as of `ups why`.
    cause: str = ""

    def to_json(self) -> dict[str, Any]:
        """One object of `ups doctor --json`."""
        found: dict[str, Any] = {"rung": self.check, "ok": self.ok, "says": self.says, "seconds": self.seconds}
        if not self.ok:
            found |= {"means": self.means, "try": self.advice, "rank": self.rank, "at": self.at, "log": self.log}
            found["cause"] = self.cause
        return found | {"warnings": list(self.warnings), "facts": self.facts}


def judge(program: CheckProgram, left: Processes, seconds: float) -> Iterator[Verdict]:
    """The verdicts of the checks of a program, ending with the first that failed."""
    said = [line for rank, text in left.out.items() for line in _lines(text, rank)]
    passed = {line["rung"]: line for line in said if line.get("ok") is True}
    for check in program.checks:
        line = passed.get(check.name)
        if line is None:
            yield _failure(check, program, left, said, seconds)
            return
        yield Verdict(
            check.name,
            ok=True,
            says=str(line.get("says", "")),
            seconds=float(line.get("seconds", 0.0)),
            warnings=tuple(map(str, line.get("warnings", ()))),
            facts=dict(line.get("facts", {})),
        )
    if left.timed_out or any(exit_["code"] for exit_ in left.exits.values()):
        # Everything was proved, and then a process did not leave as it should.
        yield _failure(program.checks[-1], program, left, said, seconds)


@dataclass(frozen=True, slots=True)
class _Event:
    """Something that went wrong on a rank: a verdict of its own, or its death by a signal."""

    rank: int | None  # None: found by all ranks together
    time_ns: int
    # Only says that another rank is gone: a consequence, whatever its time.
    cascade: bool
    says: str = ""
    means: str = ""
    advice: str = ""
    signal: int = 0
    cause: str = ""


def _events(left: Processes, said: list[dict[str, Any]]) -> list[_Event]:
    """Everything that went wrong, causes before consequences, then by time."""
    events = []
    for line in said:
        if line.get("ok") is False:
            says, means, advice = (str(line.get(key) or "") for key in ("says", "means", "try"))
            lost = bool(line.get("cascade"))
            cause = str(line.get("cause") or "")
            events.append(_Event(line["rank"], int(line["time_ns"]), lost, says, means, advice, cause=cause))
    for rank, ended in left.exits.items():
        code = int(ended["code"])
        if code < 0 and not (code in _ENDINGS and ended.get("ended_by_us")):
            lost = code == -signal.SIGABRT and is_cascade_text(left.err.get(rank, ""))
            events.append(_Event(rank, int(ended["time_monotonic_ns"]), lost, signal=-code))
    return causes_first(events)


def _failure(
    check: Check, program: CheckProgram, left: Processes, said: list[dict[str, Any]], seconds: float
) -> Verdict:
    """The first thing that went wrong; what follows on other ranks is a consequence."""

    facts: dict[str, Any] = {}
    for line in sorted(said, key=lambda line: (bool(line.get("cascade")), int(line["time_ns"]))):
        facts = {**dict(line.get("facts") or {}), **facts} if line.get("ok") is False else facts

    def verdict(
        says: str, means: str = "", advice: str = "", rank: int | None = None, at: str = "", cause: str = ""
    ) -> Verdict:
        return Verdict(
            check.name,
            ok=False,
            says=says,
            means=means or check.means,
            advice=advice or check.advice,
            rank=rank if program.ranks else None,
            at=at,
            seconds=round(seconds, 3),
            exit_code=check.exit_code,
            log=str(left.log),
            facts=facts,
            cause=cause,
        )

    events = _events(left, said)
    if events and not events[0].signal:
        return verdict(events[0].says, events[0].means, events[0].advice, events[0].rank, cause=events[0].cause)
    if events:
        rank = events[0].rank
        place = location_of_dump(left.err.get(rank or 0, ""))
        at = place.short() if place else ""
        who = f"rank {rank}" if program.ranks else "its process"
        return verdict(
            f"{who} was ended by {signal_name(events[0].signal)}" + (f" at {at}" if at else " (no stack)"),
            f"{check.means}; a signal is a crash in native code or a kill, not an error of Python",
            f"{check.advice}; the stack, if there is one, is in the log",
            rank,
            at,
            cause_of_exit(-events[0].signal),
        )
    if left.timed_out:
        places = {rank: location_of_dump(text) for rank, text in left.err.items()}
        shown = ", ".join(f"rank {rank} at {place.short()}" for rank, place in sorted(places.items()) if place)
        says = f"not done after {program.seconds:.0f} s ({shown or 'no stack'})"
        return verdict(says, f"{check.means}; it hangs", cause="stalled")
    codes = {rank: ended["code"] for rank, ended in left.exits.items()}
    tail = (left.not_started or left.err.get(0, "")).strip().splitlines()
    last = tail[-1][:300] if tail else "no output"
    return verdict(f"it left without a verdict (exit codes {codes or 'unknown'}): {last}", cause="exit")


def _lines(text: str, rank: int) -> Iterator[dict[str, Any]]:
    for line in text.splitlines():
        with contextlib.suppress(ValueError):
            found = json.loads(line)
            if isinstance(found, dict) and isinstance(found.get("rung"), str):
                yield {"rank": rank, "time_ns": 0, **found}


def examine(examination: Examination, on_verdict: Callable[[Verdict], None] | None = None) -> list[Verdict]:
    """Run checks until one fails; verdicts in order, the failed one last. Leaves no process and no scratch file behind.

    The output of a failed check stays in the directory that its verdict names.
    """
    work_dir = Path(tempfile.mkdtemp(prefix="ups-doctor-"))
    missing = _first_missing(examination.run_dir)
    verdicts: list[Verdict] = []
    try:
        write_assignment(examination, work_dir)
        for program in CHECK_PROGRAMS:
            if (program.recipe and examination.recipe_text is None) or (
                examination.only and program.module not in examination.only
            ):
                continue
            for verdict in run_checks(program, examination, work_dir):
                verdicts.append(verdict)
                if on_verdict is not None:
                    on_verdict(verdict)
                if not verdict.ok:
                    return verdicts
        return verdicts
    finally:
        with contextlib.suppress(OSError):
            shutil.rmtree(examination.run_dir / f".doctor-{work_dir.name}")
        _remove_empty(examination.run_dir, missing)
        if not verdicts or verdicts[-1].ok:
            shutil.rmtree(work_dir, ignore_errors=True)


def write_assignment(examination: Examination, work_dir: Path) -> None:
    """What the checks read."""
    recipe = ""
    if examination.recipe_text is not None:
        recipe = str(work_dir / "config.yaml")
        Path(recipe).write_text(examination.recipe_text)
    document = {
        "recipe": recipe,
        "run_dir": str(examination.run_dir),
        "ranks": examination.ranks,
    }
    (work_dir / "assignment.json").write_text(json.dumps(document))


def run_checks(program: CheckProgram, examination: Examination, work_dir: Path) -> Iterator[Verdict]:
    """The verdicts of one check program, ending with the first that failed."""
    started = time.monotonic()
    left = run_program(program, examination, work_dir)
    yield from judge(program, left, time.monotonic() - started)


def _first_missing(path: Path) -> Path | None:
    """The outermost directory above and with `path` that does not exist yet."""
    missing = None
    while not path.exists():
        missing, path = path, path.parent
    return missing


def _remove_empty(path: Path, outermost: Path | None) -> None:
    """Remove the directories that the examination made, if nothing is in them."""
    while outermost is not None and path.is_relative_to(outermost):
        with contextlib.suppress(OSError):
            path.rmdir()
        path = path.parent
