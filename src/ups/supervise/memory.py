"""Did the kernel kill for lack of memory? Its counters are the only honest witness of that.

A SIGKILL alone proves nothing: a scheduler, a person or the supervisor sends them too.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

PROC = Path("/proc")
CGROUPS = Path("/sys/fs/cgroup")


def oom_kill_counters(proc: Path = PROC, cgroups: Path = CGROUPS) -> dict[str, int]:
    """Kills for lack of memory so far: on the whole machine, and in the control groups of this process."""
    found = {}
    count = _counter(proc / "vmstat", "oom_kill")
    if count is not None:
        found["machine"] = count
    for path in _counter_files(proc, cgroups):
        count = _counter(path, "oom_kill")
        if count is not None:
            found[str(path)] = count
    return found


def moved(before: dict[str, int], after: dict[str, int]) -> bool:
    """Whether any counter grew."""
    return any(count > before.get(name, 0) for name, count in after.items())


def _counter_files(proc: Path, cgroups: Path) -> list[Path]:
    files = []
    with contextlib.suppress(OSError):
        for line in (proc / "self/cgroup").read_text().splitlines():
            _, controllers, group = line.split(":", 2)
            relative = group.lstrip("/")
            if controllers == "":
                roots = [cgroups / relative, cgroups / "unified" / relative]
                files += [root / "memory.events" for root in roots]
            elif "memory" in controllers.split(","):
                files.append(cgroups / "memory" / relative / "memory.oom_control")
    return files


def _counter(path: Path, name: str) -> int | None:
    with contextlib.suppress(OSError, ValueError):
        for line in path.read_text().splitlines():
            key, _, value = line.partition(" ")
            if key == name:
                return int(value)
    return None
