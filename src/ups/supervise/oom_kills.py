"""Did the kernel kill for lack of memory? Its counters are the only honest witness of that.

A SIGKILL alone proves nothing: a scheduler, a person or the supervisor sends them too.
"""

from __future__ import annotations

import contextlib
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

PROC = Path("/proc")
CGROUPS = Path("/sys/fs/cgroup")
_SAMPLE_SECONDS = 5.0
# The kernel counts when it chooses; a process with much memory may need seconds to be gone.
_DYING_SECONDS = 30.0


@dataclass(slots=True)
class OomKills:
    """Remembers the counters of the last half minute, so that a kill of last week does not explain one of today."""

    _samples: deque[tuple[float, dict[str, int]]] = field(default_factory=deque)

    def look(self, seconds: float, counters: dict[str, int] | None = None) -> None:
        """Take a sample now and then; `seconds` is the time on a clock that never jumps."""
        if self._samples and seconds - self._samples[-1][0] < _SAMPLE_SECONDS:
            return
        self._samples.append((seconds, oom_kill_counters() if counters is None else counters))
        while len(self._samples) > 1 and seconds - self._samples[1][0] >= _DYING_SECONDS:
            self._samples.popleft()

    def happened(self, counters: dict[str, int] | None = None) -> bool:
        """Whether the kernel has killed for lack of memory lately."""
        return bool(self._samples) and moved(self._samples[0][1], oom_kill_counters() if counters is None else counters)


def oom_kill_counters(proc: Path = PROC, cgroups: Path = CGROUPS) -> dict[str, int]:
    """Kills for lack of memory so far in the control groups of this process, who ever ran out of it.

    Only where there are none those of the whole machine: there the processes of others count, too.
    """
    found = {}
    for path in _counter_files(proc, cgroups):
        count = _counter(path, "oom_kill")
        if count is not None:
            found[str(path)] = count
    if not found:
        count = _counter(proc / "vmstat", "oom_kill")
        if count is not None:
            found["machine"] = count
    return found


def moved(before: dict[str, int], after: dict[str, int]) -> bool:
    """Whether any counter grew."""
    return any(count > before.get(name, count) for name, count in after.items())


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
