"""The soft limit on open files is raised as far as the hard limit allows, and children inherit it."""

from __future__ import annotations

import resource
import subprocess
import sys

import pytest

PROGRAM = """
import subprocess, sys
from ups.record.processes import raise_open_files
print(*raise_open_files(), flush=True)
subprocess.run([sys.executable, "-c", "import resource; print(*resource.getrlimit(resource.RLIMIT_NOFILE))"])
"""


@pytest.mark.processes
@pytest.mark.parametrize(("soft", "hard", "expected"), [(64, 512, 512), (64, 64, 64), (300, 300, 300)])
def test_the_limit_is_raised_for_this_process_and_its_children(soft: int, hard: int, expected: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard)),
        capture_output=True,
        text=True,
        check=True,
        timeout=30,
    )
    assert done.stdout.split("\n")[:2] == [f"{expected} {hard}"] * 2
