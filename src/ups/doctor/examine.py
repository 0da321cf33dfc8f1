"""Runs the checks of `ups doctor`, each in its own processes, and judges what they leave.

A check ends in a verdict of its own, in a crash, or at its deadline; each of these is a verdict with a name, the first
cause first. The doctor stops at the first failure. No torch here: when torch is what is broken, this process still says
so.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ups.doctor.checks import CHECK_PROGRAMS, Check, CheckProgram
from ups.record import processes
from ups.record.causes import cause_of_exit, causes_first, is_cascade_text, signal_name
from ups.record.failure import location_of_dump
from ups.record.run_dir import CONFIG_NAME, RunDir
from ups.supervise.attempt import Launcher
from ups.supervise.options import Options
from ups.supervise.rank_view import tail

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
    # All together; what is running then is a check that hangs.
    seconds: float = float("inf")


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
    box_dir = folder / "box"
    box_dir.mkdir(parents=True)
    ranks = examination.ranks if program.ranks else 1
    words = (program.module, str(work_dir))
    environment = {} if "OMP_NUM_THREADS" in os.environ else {"OMP_NUM_THREADS": "1"}
    environment |= {"PYTHONFAULTHANDLER": "1", "PYTHONUNBUFFERED": "1", "UPS_PROBE_SECONDS": str(program.seconds)}
    environment |= examination.environment
    options = Options(
        run_dir=folder,
        ranks=ranks,
        command=tuple(processes.module_command("ups.doctor.probes", *words)),
        environment=environment,
    )
    launcher = Launcher(options, 0, box_dir, {})
    try:
        timed_out = _wait(launcher, box_dir, program.seconds)
        before = _exits(box_dir)
    finally:
        launcher.end()
    # What died later was killed by us.
    exits = {rank: {**e, "ended_by_us": rank not in before} for rank, e in _exits(box_dir).items()}
    log_of = RunDir(folder).log
    out, err = ({n: tail(log_of(0, n, name), _MAX_LOG_BYTES) for n in range(ranks)} for name in ("out", "err"))
    log = log_of(0, 0).parent
    return Processes(out, err, exits, timed_out, log, " ".join(launcher.not_started.values()))


def _wait(launcher: Launcher, box_dir: Path, seconds: float) -> bool:
    """Until all processes have left, or a while after the first has failed; whether the deadline came before that."""
    deadline, settled = time.monotonic() + seconds, float("inf")
    while not launcher.ended() and not launcher.not_started and time.monotonic() < settled:
        if time.monotonic() > deadline:
            return True
        if settled == float("inf") and any(e["code"] for e in _exits(box_dir).values()):
            settled = time.monotonic() + _SETTLE_SECONDS
        time.sleep(_POLL_SECONDS)
    return False


def _exits(box_dir: Path) -> dict[int, dict[str, Any]]:
    exits = {}
    for path in box_dir.glob("rank_*.exit.json"):
        with contextlib.suppress(OSError, ValueError, KeyError):
            document = json.loads(path.read_text())
            exits[int(document["rank"])] = document
    return exits


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
        document: dict[str, Any] = {"rung": self.check, "ok": self.ok, "says": self.says, "seconds": self.seconds}
        if not self.ok:
            document |= {"means": self.means, "try": self.advice, "rank": self.rank, "at": self.at, "log": self.log}
            document["cause"] = self.cause
        return document | {"warnings": list(self.warnings), "facts": self.facts}


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
    """Something that went wrong on a rank: a line in which it says so, or its death by a signal."""

    rank: int | None  # None: found by all ranks together
    time_ns: int
    # Only says that another rank is gone: a consequence, whatever its time.
    cascade: bool
    line: dict[str, Any] = field(default_factory=dict)
    signal: int = 0


def _events(left: Processes, said: list[dict[str, Any]]) -> list[_Event]:
    """Everything that went wrong, causes before consequences, then by time."""
    events = [
        _Event(line["rank"], int(line["time_ns"]), bool(line.get("cascade")), line)
        for line in said
        if line.get("ok") is False
    ]
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
    events = _events(left, said)
    facts: dict[str, Any] = {}
    for event in events:
        facts = {**dict(event.line.get("facts") or {}), **facts}
    failed = Verdict(
        check.name,
        ok=False,
        says="",
        means=check.means,
        advice=check.advice,
        rank=events[0].rank if events and program.ranks else None,
        seconds=round(seconds, 3),
        exit_code=check.exit_code,
        log=str(left.log),
        facts=facts,
    )
    if events and not events[0].signal:
        line = {name: str(events[0].line.get(name) or "") for name in ("says", "means", "try", "cause")}
        means, advice = line["means"] or check.means, line["try"] or check.advice
        return replace(failed, says=line["says"], means=means, advice=advice, cause=line["cause"])
    if events:
        return _killed(failed, events[0], left)
    if left.timed_out:
        locations = {rank: location_of_dump(text) for rank, text in left.err.items()}
        shown = ", ".join(f"rank {rank} at {frame.short()}" for rank, frame in sorted(locations.items()) if frame)
        says = f"not done after {program.seconds:.0f} s ({shown or 'no stack'})"
        return replace(failed, says=says, means=f"{check.means}; it hangs", cause="stalled")
    codes = {rank: ended["code"] for rank, ended in left.exits.items()}
    tail = (left.not_started or left.err.get(0, "")).strip().splitlines()
    last = tail[-1][:300] if tail else "no output"
    return replace(failed, says=f"it left without a verdict (exit codes {codes or 'unknown'}): {last}", cause="exit")


def _killed(failed: Verdict, event: _Event, left: Processes) -> Verdict:
    location = location_of_dump(left.err.get(event.rank or 0, ""))
    at = location.short() if location else ""
    who = "its process" if failed.rank is None else f"rank {failed.rank}"
    return replace(
        failed,
        says=f"{who} was ended by {signal_name(event.signal)}" + (f" at {at}" if at else " (no stack)"),
        means=f"{failed.means}; a signal is a crash in native code or a kill, not an error of Python",
        advice=f"{failed.advice}; the stack, if there is one, is in the log",
        at=at,
        cause=cause_of_exit(-event.signal),
    )


def _lines(text: str, rank: int) -> Iterator[dict[str, Any]]:
    for line in text.splitlines():
        with contextlib.suppress(ValueError):
            document = json.loads(line)
            if isinstance(document, dict) and isinstance(document.get("rung"), str):
                yield {"rank": rank, "time_ns": 0, **document}


def examine(examination: Examination, on_verdict: Callable[[Verdict], None] | None = None) -> list[Verdict]:
    """Run checks until one fails; verdicts in order, the failed one last. Leaves no process and no scratch file behind.

    The output of a failed check stays in the directory that its verdict names.
    """
    work_dir = Path(tempfile.mkdtemp(prefix="ups-doctor-"))
    verdicts: list[Verdict] = []
    end = time.monotonic() + examination.seconds
    try:
        write_assignment(examination, work_dir)
        for program in CHECK_PROGRAMS:
            wanted = program.module in (examination.only or [program.module])
            if not wanted or (program.recipe and examination.recipe_text is None):
                continue
            limited = replace(program, seconds=min(program.seconds, max(1.0, end - time.monotonic())))
            for verdict in run_checks(limited, examination, work_dir):
                verdicts.append(verdict)
                if on_verdict is not None:
                    on_verdict(verdict)
                if not verdict.ok:
                    return verdicts
        return verdicts
    finally:
        shutil.rmtree(scratch_dir(examination.run_dir, work_dir), ignore_errors=True)
        if not verdicts or verdicts[-1].ok:
            shutil.rmtree(work_dir, ignore_errors=True)


def write_assignment(examination: Examination, work_dir: Path) -> None:
    """What the checks read."""
    recipe = ""
    if examination.recipe_text is not None:
        recipe = str(work_dir / CONFIG_NAME)
        Path(recipe).write_text(examination.recipe_text)
    document = {"recipe": recipe, "run_dir": str(examination.run_dir), "ranks": examination.ranks}
    (work_dir / "assignment.json").write_text(json.dumps(document))


def run_checks(program: CheckProgram, examination: Examination, work_dir: Path) -> Iterator[Verdict]:
    """The verdicts of one check program, ending with the first that failed."""
    started = time.monotonic()
    left = run_program(program, examination, work_dir)
    yield from judge(program, left, time.monotonic() - started)


def scratch_dir(run_dir: Path, work_dir: Path) -> Path:
    """Where the check `checkpoint` writes: on the disk of the run, in the nearest directory that is already there."""
    base = next(path for path in (run_dir.absolute(), *run_dir.absolute().parents) if path.is_dir())
    return base / f".doctor-{work_dir.name}"
