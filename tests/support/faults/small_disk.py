"""A small disk of its own for a folder, to fill it without harm to others; for tests."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def small_disk(folder: Path, size_bytes: int) -> Iterator[None]:
    """Make the folder, on a disk of that size. The test is skipped where mounting is not allowed."""
    import pytest

    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "ups-small-disk", str(folder)]
    if subprocess.run(command, capture_output=True).returncode:
        pytest.skip("no permission to mount a small disk; tests/distributed has a full disk by a limit on file size")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)
