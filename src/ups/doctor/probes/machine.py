"""Check `machine`: processors, memory, space on the disk of the run, shared memory, open files, clock. No torch."""

from __future__ import annotations

import os
import resource
import sys
import tempfile
import time
from pathlib import Path

from ups.doctor.probes.check import Assignment, CheckFailed, Report, begin_check, start
from ups.doctor.probes.ulimits import (
    free_bytes,
    memory_available_bytes,
    memory_limit_bytes,
    usable_processors,
)
from ups.record.processes import raise_open_files
from ups.record.text import size_text

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - looked at, not written
# A ring of a rank (ups.record.blackbox) with space to spare, and what NCCL takes for its buffers between two GPUs.
RING_BYTES = 1 << 20
NCCL_BYTES = 64 << 20
LITTLE_DISK_BYTES = 256 << 20
# Of a rank without workers: libraries, logs, listening sockets, the event loops of gloo and NCCL.
BASE_FILES = 128
CLOCK_SECONDS = 5.0
SECONDS_OF_2025 = 1_735_689_600


def main() -> None:
    """Look at the machine."""
    assignment = start(sys.argv[1:])
    with begin_check("machine") as report:
        check(assignment, report)


def check(assignment: Assignment, report: Report) -> None:
    """Everything that can be known without loading a library."""
    processors, memory = usable_processors(), memory_limit_bytes()
    check_processors(assignment, report, processors)
    free = check_disk(assignment.run_dir, report)
    check_shared_memory(assignment.ranks, report)
    files = check_open_files(assignment, report)
    check_clock(assignment.run_dir, report)
    report.facts |= {
        "python": sys.version.split()[0],
        "processors": processors,
        "memory_bytes": memory,
        "memory_available_bytes": memory_available_bytes(),
        "disk_free_bytes": free,
        "open_files_needed": files,
    }
    report.says = (
        f"Python {sys.version.split()[0]}, {processors:g} processors, {size_text(memory)} memory, "
        f"{size_text(free)} free for the run"
    )


def check_processors(assignment: Assignment, report: Report, processors: float) -> None:
    """Ranks and workers without a processor each run, but slowly."""
    workers = assignment.recipe.data.loader.workers if assignment.recipe else 0
    if assignment.ranks > processors:
        report.warnings.append(f"{assignment.ranks} ranks share {processors:g} processors: they will be slow")
    elif assignment.ranks * (1 + workers) > 2 * processors:
        report.warnings.append(
            f"{assignment.ranks} ranks with {workers} loader workers each share {processors:g} processors"
        )


def check_disk(run_dir: Path, report: Report) -> int:
    """Whether the run directory can be written and has space; a full-size checkpoint is a check of its own."""
    base = run_dir
    while not base.exists():
        base = base.parent
    if not os.access(base, os.W_OK | os.X_OK):
        raise CheckFailed(
            f"{base} cannot be written, and the run would live in {run_dir}",
            hint="choose another place with --set run.dir=PATH",
        )
    free, state = free_bytes(base), os.statvfs(base)
    if free < LITTLE_DISK_BYTES or (state.f_files and state.f_favail < 1000):
        raise CheckFailed(
            f"the disk of {base} has {size_text(free)} and {state.f_favail} files left, less than the "
            f"{size_text(LITTLE_DISK_BYTES)} and 1000 files that a run should find",
            means="checkpoints and logs of a run would not fit",
            hint="free some space, or choose another place with --set run.dir=PATH",
        )
    if free < 20 * LITTLE_DISK_BYTES:
        report.warnings.append(f"only {size_text(free)} are free on the disk of the run")
    return free


def check_shared_memory(ranks: int, report: Report, path: Path = SHARED_MEMORY) -> None:
    """Space for the rings of the ranks, and for NCCL where there are GPUs. Batches do not go through it."""
    if not path.is_dir():
        report.facts["shared_memory_bytes"] = 0
        return
    free = free_bytes(path)
    report.facts["shared_memory_bytes"] = free
    has_gpus = any(Path("/dev").glob("nvidia[0-9]*"))
    needed = ranks * (RING_BYTES + (NCCL_BYTES if has_gpus else 0))
    if free < needed:
        raise CheckFailed(
            f"{path} has {size_text(free)} left, and {ranks} ranks need {size_text(needed)}",
            means="writing into shared memory that is not there ends a process with a bus error (SIGBUS)",
            hint="start the container with more (docker run --shm-size=8g, or a larger emptyDir of medium Memory)",
        )


def open_files_needed(assignment: Assignment) -> int:
    """Estimate for one rank: its peers, its workers, the batches on the way, the files of the data."""
    needed = BASE_FILES + 4 * assignment.ranks
    if assignment.recipe is not None:
        loader = assignment.recipe.data.loader
        needed += loader.workers * (4 + loader.prefetch)
        for task in assignment.recipe.data.tasks:
            needed += 8 if isinstance(task.path, str) else 2 * len(task.path)
    return needed


def check_open_files(assignment: Assignment, report: Report) -> int:
    """Say if even the hard limit is too low; the soft one is raised here and, before ranks start, by a run itself."""
    needed, (before, _) = open_files_needed(assignment), resource.getrlimit(resource.RLIMIT_NOFILE)
    soft, hard = raise_open_files(needed)
    report.facts["open_files_limit"] = before
    if soft < needed:
        raise CheckFailed(
            f"a rank needs about {needed} open files, and the limit is {hard}",
            means="the run would end with 'Too many open files', perhaps hours after its start",
            hint=f"raise it (ulimit -Hn {2 * needed}, or LimitNOFILE of the service), or use fewer loader workers",
        )
    return needed


def check_clock(run_dir: Path, report: Report) -> None:
    """A clock that is years off breaks certificates; one that differs from the file server's confuses caches."""
    now = time.time()
    if now < SECONDS_OF_2025:
        raise CheckFailed(f"the clock says {time.ctime(now)}", hint="set the clock of this machine (NTP)")
    base = run_dir
    while not base.exists():
        base = base.parent
    with tempfile.NamedTemporaryFile(dir=base, prefix=".ups-doctor-") as file:
        skew = os.stat(file.name).st_mtime - time.time()
    report.facts["clock_skew_seconds"] = round(skew, 3)
    if abs(skew) > CLOCK_SECONDS:
        report.warnings.append(f"the file system of the run is {skew:+.0f} s away from the clock of this machine")


if __name__ == "__main__":
    main()
