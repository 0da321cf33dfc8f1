"""One supervisor for a run, and one `ups run` for its steps: taken before anything in the run directory is written."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from ups.errors import MachineError, RunHeldError
from ups.record.run_dir import RunDir
from ups.supervise.run_file import living_supervisor


@contextlib.contextmanager
def hold_run(run_dir: Path) -> Iterator[None]:
    """Hold the run for this process. Raises RunHeldError if another supervisor has it.

    Two marks: a lock on a file, which the kernel drops with its owner, and the living process that `run.json` names:
    the second one holds where the file was deleted or the file system has no locks.
    """
    who = "another supervisor already runs"
    with _locked(RunDir(run_dir).supervisor_lock, who):
        if living_supervisor(run_dir) not in (0, os.getpid()):
            raise _taken(run_dir, who)
        yield


@contextlib.contextmanager
def hold_steps(run_dir: Path) -> Iterator[None]:
    """Hold the steps of a run (`ups run`) for this process, before those of its supervisor and longer.

    Raises RunHeldError if another process has them.
    """
    with _locked(RunDir(run_dir).steps_lock, "another `ups run` is at work on"):
        yield


@contextlib.contextmanager
def hold_bench(directory: Path) -> Iterator[None]:
    """Hold a directory of `ups bench` for this process: two of them would train the same rows by other costs."""
    hint = "wait for it, or choose another --out"
    with _locked(directory / ".bench.lock", "another `ups bench` is at work in", hint):
        yield


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


_HINT = "look at it with `ups status`, or choose another run.name"


@contextlib.contextmanager
def _locked(path: Path, who: str, hint: str = _HINT) -> Iterator[None]:
    run_dir = path.parent
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        file = path.open("w")
    except OSError as error:
        raise MachineError(
            f"the run directory {run_dir} cannot be made or written: {error.strerror}",
            hint="choose another place with --set run.dir=PATH",
        ) from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise _taken(run_dir, who, hint) from error
        except OSError:
            pass  # a file system without locks
        if not _in_place(path, file):  # its last holder has just removed the run
            raise _taken(run_dir, who, hint)
        yield


def _in_place(path: Path, file: IO[str]) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(file.fileno()))
    except OSError:
        return False


def _taken(run_dir: Path, who: str, hint: str = _HINT) -> RunHeldError:
    return RunHeldError(f"{who} {run_dir}", hint=hint)
