"""`RUN/launch`: what launchers leave on the host that started a run elsewhere."""

from __future__ import annotations

import re
from pathlib import Path

from ups.errors import MachineError
from ups.record.atomic import machine_error, write_file_atomically
from ups.record.run_dir import RunDir

# What the folder holds; anything else in it is not ours.
NAMES = re.compile(r"job\.sh|slurm_\d+(_\d+)?\.out|skypilot\.yaml|vast\.sh|vast_\d+\.log")


def write_script(run_dir: Path, name: str, text: str) -> Path:
    """Write one of the files anew, never through a link to somebody's file; returns its path. Raises MachineError."""
    path = RunDir(run_dir).launch / name
    if path.parent.is_symlink():
        raise MachineError(f"{path.parent} is a link, and nothing is written through it", hint="remove it")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise machine_error(f"cannot write to {path.parent}", error) from error
    write_file_atomically(path, text.encode())
    return path
