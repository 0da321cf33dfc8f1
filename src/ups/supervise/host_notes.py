"""Where the hosts of a run leave notes in its directory, whether they say that the head is gone, and what a host is."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from ups.record.run_dir import RunDir
from ups.record.untrusted_files import read_object

MAX_BYTES = 2**22


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
            if path.stat().st_mtime_ns > written and (read_object(path, MAX_BYTES) or {}).get("left") == "head_lost":
                return True
    return False
