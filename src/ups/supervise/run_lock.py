"""One supervisor for a run: taken before anything in the run directory is written, held until the bundle is there."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from ups.errors import MachineError, RunHeldError
from ups.supervise.run_file import living_supervisor

LOCK_NAME = ".supervisor.lock"


@contextlib.contextmanager
def hold_run(run_dir: Path) -> Iterator[None]:
    """Hold the run for this process. Raises RunHeldError if another supervisor has it.

    Two marks: a lock on a file, which the kernel drops with its owner, and the living process that `run.json` names:
    the second one holds where the file was deleted or the file system has no locks.
    """
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        file = (run_dir / LOCK_NAME).open("w")
    except OSError as error:
        raise MachineError(
            f"the run directory {run_dir} cannot be made or written: {error.strerror}",
            hint="choose another place with --set run.dir=PATH",
        ) from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise _taken(run_dir) from error
        except OSError:
            pass  # a file system without locks
        if not _in_place(run_dir / LOCK_NAME, file):  # its last holder has just removed the run
            raise _taken(run_dir)
        if living_supervisor(run_dir) not in (0, os.getpid()):
            raise _taken(run_dir)
        yield


def _in_place(path: Path, file: IO[str]) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(file.fileno()))
    except OSError:
        return False


def _taken(run_dir: Path) -> RunHeldError:
    return RunHeldError(
        f"another supervisor already runs {run_dir}", hint="look at it with `ups status`, or choose another run.name"
    )
