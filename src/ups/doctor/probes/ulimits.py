"""What this process may use: memory, shared memory, processors. Read from the kernel, no torch.

Open files are in `ups.record.processes`, because the supervisor raises that limit too.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

PROC = Path("/proc")
CGROUPS = Path("/sys/fs/cgroup")


def memory_limit_bytes(proc: Path = PROC, cgroups: Path = CGROUPS) -> int:
    """The most memory that this host gives to our processes together: the machine's, or the control group's."""
    limits = [_meminfo(proc, "MemTotal")]
    for folder in _own_groups(proc, cgroups):
        with contextlib.suppress(OSError, ValueError):
            limits.append(int((folder / "memory.max").read_text()))
        with contextlib.suppress(OSError, ValueError):
            limits.append(int((folder / "memory.limit_in_bytes").read_text()))
    return min(limits)


def memory_available_bytes(proc: Path = PROC, cgroups: Path = CGROUPS) -> int:
    """What is left of it now, as far as the kernel shows."""
    left = [_meminfo(proc, "MemAvailable")]
    for folder in _own_groups(proc, cgroups):
        with contextlib.suppress(OSError, ValueError):
            limit, used = int((folder / "memory.max").read_text()), int((folder / "memory.current").read_text())
            left.append(limit - max(0, used - _reclaimable(folder)))
    return max(0, min(left))


def usable_processors(cgroups: Path = CGROUPS, proc: Path = PROC) -> float:
    """Processors that this process may keep busy: its affinity, or the quota of its control group."""
    count = float(len(os.sched_getaffinity(0)))
    for folder in _own_groups(proc, cgroups):
        with contextlib.suppress(OSError, ValueError):
            quota, period = (folder / "cpu.max").read_text().split()
            if quota != "max":
                count = min(count, int(quota) / int(period))
    return count


def free_bytes(path: Path) -> int:
    """Free space for us on the file system of `path`, or of the nearest directory above it that exists."""
    while not path.exists():
        path = path.parent
    found = os.statvfs(path)
    return found.f_bavail * found.f_frsize


def _meminfo(proc: Path, name: str) -> int:
    for line in (proc / "meminfo").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    return 2**62


def _own_groups(proc: Path, cgroups: Path) -> list[Path]:
    """The control groups of this process and those above them: each of them limits."""
    found: list[Path] = []
    with contextlib.suppress(OSError):
        for line in (proc / "self/cgroup").read_text().splitlines():
            _, controllers, group = line.split(":", 2)
            if controllers in ("", "memory"):
                root = cgroups if controllers == "" else cgroups / "memory"
                parts = [part for part in group.split("/") if part]
                found += [root.joinpath(*parts[:count]) for count in range(len(parts), -1, -1)]
    return found


def _reclaimable(folder: Path) -> int:
    with contextlib.suppress(OSError, ValueError):
        for line in (folder / "memory.stat").read_text().splitlines():
            if line.startswith("inactive_file "):
                return int(line.split()[1])
    return 0
