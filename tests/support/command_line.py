"""`ups` without a process: the same command line, parsed and run here. For tests to which the process is not the point:
a process imports torch again, which takes longer than most commands."""

from __future__ import annotations

import contextlib
import io
import subprocess
from pathlib import Path

from ups.cli.main import run


def ups_here(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run `ups WORDS` in the folder; its exit code and output."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.chdir(folder), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = run(list(words))
    return subprocess.CompletedProcess(["ups", *words], code, out.getvalue(), err.getvalue())
