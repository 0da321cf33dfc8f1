"""`run.json`: state, attempts, faults and verdict of a run, written by its supervisor only.

Every write is atomic, so a reader sees the old or the new state. With several hosts only the one of host 0 writes;
where the ranks of the others are is in `hosts/` (`status.py`). Also the locks that make sure of one supervisor for a
run and one `ups run` for its steps: taken before anything is written.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal, NotRequired

from pydantic import AfterValidator, ConfigDict, Field, TypeAdapter, ValidationError, with_config
from typing_extensions import TypedDict

from ups.errors import (
    ConfigError,
    GateError,
    MachineError,
    RunHeldError,
    UpsError,
    exit_code_of_cause,
    exit_code_of_signal,
)
from ups.record import processes
from ups.record.files import MAX_RUN_BYTES, parse_object, read_object, safe_read, try_lock, write_file_atomically
from ups.record.identity import RunIdentity
from ups.record.run_dir import RUNS, RunDir, meant_by
from ups.supervise.fault import Fault, Number, Whole, stored_overrides

MAX_NOTICES = 100
MAX_RANKS = 100_000
GATE_FAILED = "gate_failed"
_HINT = "look at it with `ups status`, or choose another run.name"
# Trained to the end, and that is proven; whether the scores are good enough is another question.
TRAINED = ("completed", GATE_FAILED)


def left(asked: int, step: int, commit: int | None) -> tuple[str, str, int, str]:
    """State, cause, exit code and detail of the verdict of a run that left at `step` because it was asked to.

    asked: the signal; 0: ranks that left by themselves were asked by another process, a scheduler that signals all.
    """
    state, number = ("stopped", signal.SIGINT) if asked == signal.SIGINT else ("preempted", signal.SIGTERM)
    cause = f"asked({signal.Signals(asked).name if asked else 'rank'})"
    detail = f"ckpt={'-' if commit is None else commit} lost={max(0, step - (commit or 0))}"
    return state, cause, exit_code_of_signal(number), detail


Time = Annotated[float, Field(strict=True, ge=0, le=1e11)]  # seconds since 1970: a date that calendars still have


def _with_keys(keys: Any) -> Any:
    """A JSON object that has these keys at least, each of its type; others stay unchanged."""
    adapter = TypeAdapter(keys)

    def check(value: dict[str, Any]) -> dict[str, Any]:
        adapter.validate_python(value, strict=True)
        return value

    return AfterValidator(check)


class _Attempt(TypedDict):
    number: Whole
    faults: NotRequired[list[StoredFault]]


class _Notice(TypedDict):
    line: str


_Extension = TypedDict("_Extension", {"time": Number, "step": Number, "field": str, "from": Number, "to": Number})


class _Tracker(TypedDict):
    name: str
    id: str
    url: str


class _Condition(TypedDict):
    task: str
    condition: str
    holds: bool
    says: str


class _Gate(TypedDict):
    conditions: NotRequired[list[_Condition]]


StoredFault = Annotated[dict[str, Any], AfterValidator(lambda fault: Fault.from_document(fault) and fault)]


@with_config(ConfigDict(strict=True, extra="allow"))
class RunDocument(TypedDict):
    """The content of run.json. What is not required is missing in files of older versions; unknown keys are kept."""

    format: Literal[1]
    name: str
    state: str
    cause: str
    verdict: str
    exit_code: Whole | None
    ranks: Annotated[int, Field(ge=0, le=MAX_RANKS)]
    started: Time
    ended: Time | None
    blackbox_dir: Annotated[str, Field(pattern=r"^[^\x00]*$")]
    checkpoint: Whole | None
    attempts: list[Annotated[dict[str, Any], _with_keys(_Attempt)]]
    notices: list[Annotated[dict[str, Any], _with_keys(_Notice)]]
    host: NotRequired[str]
    machine: NotRequired[str]
    hosts: NotRequired[list[str]]
    supervisor_pid: NotRequired[Annotated[int, Field(ge=0, lt=2**31)]]
    supervisor_started: NotRequired[Whole]
    max_restarts: NotRequired[Whole]
    overrides: NotRequired[dict[str, Any]]
    extensions: NotRequired[list[Annotated[dict[str, Any], _with_keys(_Extension)]]]
    trackers: NotRequired[list[Annotated[dict[str, Any], _with_keys(_Tracker)]]]
    mirror: NotRequired[dict[str, Any]]
    gate: NotRequired[Annotated[dict[str, Any], _with_keys(_Gate)]]
    identity: NotRequired[Any]
    updated: NotRequired[Any]


_DOCUMENTS = TypeAdapter(RunDocument)


class RunFile:
    """The writer. `document` is plain JSON; change it, then `save`."""

    def __init__(self, run_dir: Path) -> None:
        self.path = RunDir(run_dir).run_json
        self.document: RunDocument = {}  # type: ignore[typeddict-item]

    def begin(self, *, ranks: int, max_restarts: int, box_root: Path, identity: RunIdentity | None = None) -> None:
        """Start a new stretch of supervision; what earlier ones wrote down stays."""
        earlier: Mapping[str, Any] = _read_or_none(self.path) or {}
        if earlier.get("state") == "running":
            # Only a killed supervisor leaves this behind: a living one holds the lock of the run.
            for attempt in earlier.get("attempts", [])[-1:]:
                attempt.setdefault("outcome", "supervisor_died")
        own = processes.read_process(os.getpid())
        self.document = {
            "format": 1,
            "name": self.path.parent.name,
            "state": "running",
            "cause": "",
            "verdict": "",
            "exit_code": None,
            "host": os.uname().nodename,
            "supervisor_pid": os.getpid(),
            "supervisor_started": 0 if own is None else own.start_ticks,
            "ranks": ranks,
            "max_restarts": max_restarts,
            "started": earlier.get("started", time.time()),
            "ended": None,
            "blackbox_dir": str(box_root),
            "checkpoint": None,
            "overrides": stored_overrides(earlier.get("overrides", {})),
            "attempts": earlier.get("attempts", []),
            "notices": earlier.get("notices", []),
            "extensions": earlier.get("extensions", []),
            "trackers": earlier.get("trackers", []),
        }
        known = identity.to_json() if identity is not None else earlier.get("identity")
        if known is not None:
            self.document["identity"] = known
        self.save()

    def begin_attempt(self, box_root: Path, from_checkpoint: int | None = None) -> tuple[dict[str, Any], Path]:
        """Add an attempt, without a save; returns its entry and the directory of its rings."""
        number = len(self.document["attempts"])
        entry: dict[str, Any] = {"number": number, "started": time.time(), "from_checkpoint": from_checkpoint}
        entry |= {"overrides": dict(self.document["overrides"]), "faults": []}
        self.document["attempts"].append(entry)
        box_dir = box_root / f"attempt_{number}"
        self.document["blackbox_dir"] = str(box_dir)
        return entry, box_dir

    def save(self) -> str:
        """Write the state; a full disk must not end the run that is being watched. Returns what went wrong, or ''."""
        self.document["updated"] = time.time()
        self.document["notices"] = self.document["notices"][-MAX_NOTICES:]
        try:
            write_file_atomically(self.path, (json.dumps(self.document, indent=1) + "\n").encode())
        except UpsError as error:
            return error.message
        return ""

    def pronounce(
        self, state: str, cause: str, exit_code: int, detail: str, ended: float | None = None
    ) -> tuple[str, str]:
        """Write the end of the run down; returns the line of the verdict, and what went wrong with writing it or ''.

        ended: when; default now.
        """
        line = verdict_line(state, exit_code, self.document["attempts"], cause, detail)
        ended = time.time() if ended is None else ended
        self.document |= {"state": state, "cause": cause, "exit_code": exit_code, "verdict": line, "ended": ended}
        self.document["blackbox_dir"] = ""
        return line, self.save()


def verdict_line(state: str, exit_code: int, attempts: list[dict[str, Any]], cause: str = "", detail: str = "") -> str:
    """The one line about the end of a run."""
    faults = sum(len(attempt.get("faults", [])) for attempt in attempts)
    parts = [f"VERDICT state={state} exit={exit_code} attempts={len(attempts)} faults={faults}"]
    return " ".join(parts + ([f"cause={cause}"] if cause else []) + ([detail] if detail else []))


def read_run(run_dir: Path) -> RunDocument:
    """The state of a run; `died` if it says running but its supervisor is gone from this host."""
    try:
        document = _read(RunDir(run_dir).run_json)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{run_dir} has no readable run.json: {getattr(error, 'strerror', None) or error}",
            hint="give the directory of a run that was started",
        ) from error
    running = document["state"] == "running"
    if running and (_supervisor_is_gone(document) or ("hosts" in document and head_was_lost(run_dir))):
        code = exit_code_of_cause("supervisor_died")
        document |= {"state": "died", "cause": "supervisor_died", "exit_code": code}
        document["verdict"] = verdict_line("died", code, document["attempts"], "supervisor_died")
    return document


def run_identity(run_dir: Path) -> RunIdentity | None:
    """The identity of a run; None if it has none: it never started, or was started by a version without identities."""
    document = _read_or_none(RunDir(run_dir).run_json)
    return None if document is None else RunIdentity.from_json(document.get("identity"))


def was_started(run_dir: Path) -> bool:
    """Whether the directory has the record of a run that was started, by whatever version."""
    return _read_or_none(RunDir(run_dir).run_json) is not None


def note_extension(run_dir: Path, field: str, before: float, now: float, recipe: str) -> None:
    """Write down that a completed run is given a longer last stage; recipe: the hash of what it learns from then on.

    For who holds the run, before its config.yaml changes.
    """
    file = RunFile(run_dir)
    file.document = document = _read(file.path)
    document.setdefault("extensions", []).append(
        {"time": time.time(), "step": document["checkpoint"], "field": field, "from": before, "to": now}
    )
    identity = RunIdentity.from_json(document.get("identity"))
    if identity is not None:
        recipes = (*(known for known in identity.recipes if known != recipe), recipe)
        document["identity"] = replace(identity, recipes=recipes).to_json()
    if problem := file.save():
        raise MachineError(f"cannot write {file.path}: {problem}")


def update_run(run_dir: Path, **values: Any) -> None:
    """Write values into the record of a run; for who holds the run. Does not raise: the run has its verdict."""
    document = _read_or_none(RunDir(run_dir).run_json)
    if document is not None and any(document.get(name) != value for name, value in values.items()):
        file = RunFile(run_dir)
        file.document = document
        file.document.update(values)  # type: ignore[typeddict-item]
        file.save()


def note_gate(run_dir: Path, conditions: list[dict[str, Any]], failed: str) -> str:
    """Write down how the gate judged a run that is trained; returns the line of the verdict. For who holds the run.

    conditions: each with task, condition, holds, value and says; none if there is no gate any more. failed: what
    does not hold, '' if all do.
    """
    file = RunFile(run_dir)
    file.document = document = _read(file.path)
    if document["state"] not in TRAINED:
        raise ConfigError(f"{run_dir} is '{document['state']}': only a run that is trained can be judged")
    document.pop("gate", None)
    if conditions:
        document["gate"] = {"passed": not failed, "time": time.time(), "conditions": conditions}
    detail = f"step={document['checkpoint']} ckpt={document['checkpoint']} verified"
    if failed:
        words = failed.replace('"', "'")
        verdict = (GATE_FAILED, GateError.cause, GateError.exit_code, f'{detail} gate="{words}"')
    else:
        verdict = ("completed", "", 0, f"{detail} gate=passed" if conditions else detail)
    line, problem = file.pronounce(*verdict, ended=document["ended"])
    if problem:
        raise MachineError(f"cannot write {file.path}: {problem}")
    return line


def is_unreadable(run_dir: Path) -> bool:
    """Whether the directory has the record of a run, and it cannot be read."""
    return RunDir(run_dir).has_run_json and not was_started(run_dir)


def living_supervisor(run_dir: Path) -> int:
    """The process that supervises this run on this host, 0 if there is none."""
    document = _read_or_none(RunDir(run_dir).run_json)
    if document is None or document["state"] != "running" or document.get("host") != os.uname().nodename:
        return 0
    return 0 if _supervisor_is_gone(document) else int(document["supervisor_pid"])


def find_run(name: str, base: Path | None = None) -> Path:
    """The directory of a run given by path or by its name under runs/."""
    base = base or Path.cwd()
    for candidate in meant_by(name, base):
        if RunDir(candidate).has_run_json:
            return candidate.resolve()
        if RunDir(candidate).steps_lock.is_file():
            raise ConfigError(
                f"run '{name}' has not begun to train: `ups run` prepares it, or was interrupted while it did",
                hint="wait for it, or start the same `ups run` again",
            )
    known = ", ".join(path.name for path, _ in list_runs(base / RUNS)[:8])
    raise ConfigError(
        f"no run '{name}' here or under runs/", hint=f"known runs: {known}" if known else "list them with: ups runs"
    )


def run_or_newest(name: str | None) -> Path:
    """The run of that name; without one the run under runs/ that is running, else the newest."""
    if name is not None:
        return find_run(name)
    known = list_runs(Path(RUNS))
    if not known:
        raise ConfigError("there is no run under runs/", hint="start one with: ups train RECIPE")
    running = [path for path, document in known if document["state"] == "running"]
    return running[0] if running else known[0][0]


def survey_runs(directory: Path) -> tuple[list[tuple[Path, RunDocument]], list[tuple[Path, str]]]:
    """All runs in a directory with their state, the newest first; and those that cannot be read, with the reason."""
    readable, unreadable = [], []
    for path in sorted(directory.iterdir()) if directory.is_dir() else []:
        try:
            if path.is_dir() and RunDir(path).has_run_json:
                readable.append((path, read_run(path)))
        except UpsError as error:
            unreadable.append((path, error.message.removeprefix(f"{path} has no readable ")))
        except OSError as error:
            unreadable.append((path, error.strerror or str(error)))
    return sorted(readable, key=lambda item: item[1]["started"], reverse=True), unreadable


def list_runs(directory: Path) -> list[tuple[Path, RunDocument]]:
    """The runs in a directory that can be read, the newest first."""
    return survey_runs(directory)[0]


def faults_of(document: RunDocument) -> list[dict[str, Any]]:
    """All faults of a run in the order in which they happened."""
    faults = [fault for attempt in document["attempts"] for fault in attempt.get("faults", [])]
    return sorted(faults, key=lambda fault: (fault["attempt"], fault.get("time_wall", 0.0)))


def _supervisor_is_gone(document: RunDocument) -> bool:
    if document.get("machine", machine_mark()) != machine_mark():
        return False  # of several hosts another one, whatever its name is
    if document.get("host") != os.uname().nodename:
        return False
    process = processes.read_process(document.get("supervisor_pid", 0))
    # A number can be given to a new process; its start time distinguishes the two.
    return process is None or process.state == "Z" or process.start_ticks != document.get("supervisor_started")


def _read(path: Path) -> RunDocument:
    """A checked run.json. Raises OSError, or ValueError with what is wrong."""
    return parse_run(safe_read(path, MAX_RUN_BYTES))


def parse_run(content: bytes) -> RunDocument:
    """A checked run.json, of this or an earlier version. Raises ValueError with what is wrong."""
    try:
        return _DOCUMENTS.validate_python(parse_object(content))
    except ValidationError as error:
        problem = error.errors(include_url=False, include_input=False)[0]
        name = ".".join(str(part) for part in problem["loc"])
        raise ValueError(f"'{name}' is not what a supervisor writes: {problem['msg']}") from None


def _read_or_none(path: Path) -> RunDocument | None:
    try:
        return _read(path)
    except (OSError, ValueError):
        return None


def machine_mark() -> str:
    """What distinguishes this machine, and this container on it, from others that may have the same name."""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    return ""


def head_was_lost(run_dir: Path) -> bool:
    """Whether a host has left because the head was gone, after the head has last written its file."""
    with contextlib.suppress(OSError):
        written = RunDir(run_dir).run_json.stat().st_mtime_ns
        for path in RunDir(run_dir).host_notes():
            # Both times are the file server's: clocks of hosts do not count.
            if path.stat().st_mtime_ns > written and (read_object(path) or {}).get("left") == "head_lost":
                return True
    return False


@contextlib.contextmanager
def hold_run(run_dir: Path) -> Iterator[None]:
    """Hold the run for this process. Raises RunHeldError if another supervisor has it.

    Two marks: a lock on a file, which the kernel drops with its owner, and the living process that `run.json` names:
    the second one holds where the file was deleted or the file system has no locks.
    """
    who = "another supervisor already runs"
    with hold_lock(RunDir(run_dir).supervisor_lock, who):
        if living_supervisor(run_dir) not in (0, os.getpid()):
            raise RunHeldError(f"{who} {run_dir}", hint=_HINT)
        yield


def hold_steps(run_dir: Path) -> AbstractContextManager[None]:
    """Hold the steps of a run (`ups run`) for this process, before those of its supervisor and longer.

    Raises RunHeldError if another process has them.
    """
    return hold_lock(RunDir(run_dir).steps_lock, "another `ups run` is at work on")


def is_held(run_dir: Path) -> bool:
    """Whether a process of this host is at work on the run, between two steps of `ups run` included. Writes nothing."""
    for path in (RunDir(run_dir).steps_lock, RunDir(run_dir).supervisor_lock):
        try:
            with path.open() as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:
            continue  # there is no such file, or the file system has no locks
    return living_supervisor(run_dir) != 0


@contextlib.contextmanager
def hold_lock(path: Path, who: str, hint: str = _HINT) -> Iterator[None]:
    """Hold the directory of a lock file for this process; `who` begins the message of RunHeldError."""
    run_dir = path.parent
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        file = path.open("w")
    except OSError as error:
        raise MachineError(
            f"the run directory {run_dir} cannot be made or written: {error.strerror}",
            hint="choose another directory with --set run.dir=PATH",
        ) from error
    with file:
        free = True
        with contextlib.suppress(OSError):  # a file system without locks
            free = try_lock(file.fileno())
        # Its last holder may have just removed the run.
        if not free or not path.exists() or not os.path.samestat(os.stat(path), os.fstat(file.fileno())):
            raise RunHeldError(f"{who} {run_dir}", hint=hint)
        yield
