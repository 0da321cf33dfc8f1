"""What can be known before ranks start, without torch: limits of the machine, and whether the data fits the recipe.

`ups train` refuses here what would fail in every attempt, in well under two seconds. `ups doctor` runs the same checks,
each in its own process (`ups.doctor.probes`).
"""

from __future__ import annotations

import contextlib
import os
import resource
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ups.config.schema import Recipe
from ups.errors import DataError, MachineError, UpsError
from ups.record.processes import kernel_number, raise_open_files, usable_cores
from ups.record.text import size_text

if TYPE_CHECKING:
    from ups.formats.base import Reader

PROC = Path("/proc")
CGROUPS = Path("/sys/fs/cgroup")
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - looked at, not written
# A ring of a rank (ups.record.blackbox) with space to spare, and what NCCL takes for its buffers between two GPUs.
RING_BYTES = 1 << 20
NCCL_BYTES = 64 << 20
LITTLE_DISK_BYTES = 256 << 20
# Of a rank without workers: libraries, logs, listening sockets, the event loops of gloo and NCCL.
BASE_FILES = 128


class CheckFailed(UpsError):
    """The check looked and found something wrong: what, what it means, what to try."""

    cause = "doctor"

    def __init__(self, message: str, *, means: str = "", hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.means = means


@dataclass
class Report:
    """What a check has to say when all is well."""

    name: str
    says: str = ""
    facts: dict[str, Any] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)


def check_machine(recipe: Recipe, ranks: int, run_dir: Path) -> list[str]:
    """Warnings about the machine. Raises MachineError for what no attempt could survive."""
    report = Report("preflight")
    with _raised_as(MachineError):
        examine_machine(recipe, ranks, run_dir, report)
    return report.warnings


@contextlib.contextmanager
def _raised_as(kind: type[UpsError]) -> Iterator[None]:
    try:
        yield
    except CheckFailed as error:
        message = f"{error.message}: {error.means}" if error.means else error.message
        raise kind(message, hint=error.hint) from error


def check_data(recipe: Recipe, readers: Sequence[Reader]) -> None:
    """Look into every task. Raises DataError for what no attempt could survive."""
    for stage in recipe.stages:
        named = zip(recipe.data.tasks, readers, strict=True)
        own = [reader for task, reader in named if stage.trains(task.name)]
        if stage.needs_linear_part and all(reader.task.steady for reader in own):
            raise DataError(
                "a stage fits what is linear in time, and all tasks are steady", hint="leave the stage 'linear' out"
            )
    for reader in readers:
        with _raised_as(DataError):
            check_fit(reader, recipe)
            check_windows(reader, "train", 0)
            reader.identity()  # of a store that was never committed there is none


def examine_machine(recipe: Recipe | None, ranks: int, run_dir: Path, report: Report) -> None:
    """Everything about this machine that can be known without loading a library."""
    processors, memory = usable_processors(), memory_limit_bytes()
    check_processors(recipe, ranks, report, processors)
    free = check_disk(run_dir, report)
    check_shared_memory(ranks, report)
    files = check_open_files(recipe, ranks, report)
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


def check_processors(recipe: Recipe | None, ranks: int, report: Report, processors: float) -> None:
    """Ranks and workers without a processor each run, but slowly."""
    workers = recipe.data.loader.workers if recipe else 0
    if ranks > processors:
        report.warnings.append(f"{ranks} ranks share {processors:g} processors: they will be slow")
    elif ranks * (1 + workers) > 2 * processors:
        report.warnings.append(f"{ranks} ranks with {workers} loader workers each share {processors:g} processors")


def check_disk(run_dir: Path, report: Report) -> int:
    """Whether the run directory can be written and has space; a full-size checkpoint is a check of its own."""
    base = _existing(run_dir)
    elsewhere = "choose another place with --set run.dir=PATH"
    if not os.access(base, os.W_OK | os.X_OK):
        raise CheckFailed(f"{base} cannot be written, and the run would live in {run_dir}", hint=elsewhere)
    free, state = free_bytes(base), os.statvfs(base)
    if free < LITTLE_DISK_BYTES or (state.f_files and state.f_favail < 1000):
        raise CheckFailed(
            f"the disk of {base} has {size_text(free)} and {state.f_favail} files left, less than the "
            f"{size_text(LITTLE_DISK_BYTES)} and 1000 files that a run should find",
            means="checkpoints and logs of a run would not fit",
            hint=f"free some space, or {elsewhere}",
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


def open_files_needed(recipe: Recipe | None, ranks: int) -> int:
    """Estimate for one rank: its peers, its workers, the batches on the way, the files of the data."""
    needed = BASE_FILES + 4 * ranks
    if recipe is not None:
        loader = recipe.data.loader
        needed += loader.workers * (4 + loader.prefetch)
        for task in recipe.data.tasks:
            needed += 8 if isinstance(task.path, str) else 2 * len(task.path)
    return needed


def check_open_files(recipe: Recipe | None, ranks: int, report: Report) -> int:
    """Say if even the hard limit is too low; the soft one is raised here and, before ranks start, by a run itself."""
    needed, (before, _) = open_files_needed(recipe, ranks), resource.getrlimit(resource.RLIMIT_NOFILE)
    soft, hard = raise_open_files(needed)
    report.facts["open_files_limit"] = before
    if soft < needed:
        raise CheckFailed(
            f"a rank needs about {needed} open files, and the limit is {hard}",
            means="the run would end with 'Too many open files', perhaps hours after its start",
            hint=f"raise it (ulimit -Hn {2 * needed}, or LimitNOFILE of the service), or use fewer loader workers",
        )
    return needed


def check_fit(reader: Reader, recipe: Recipe) -> None:
    """What the recipe asks of the data: something to train on, and trajectories that are long enough."""
    from ups.data.open import check_conserved
    from ups.data.rank_source import WindowIndex

    check_conserved(recipe.model, reader)
    name = reader.task.name
    if reader.splits.get("train", 0) < 1:
        raise CheckFailed(f"task '{name}' has no trajectories to train on", hint="check its splits")
    for stage in recipe.stages:
        frames = stage.window_frames(recipe.data.context_frames)
        if not len(WindowIndex.of(reader, "train", frames)):
            raise CheckFailed(
                f"task '{name}' has no trajectory of {frames} frames to train on",
                hint="use fewer context frames and unroll steps, or put longer ones into split 'train'",
            )
    for split in ("valid", "test"):
        frames = recipe.data.context_frames + 1
        if reader.splits.get(split, 0) and not len(WindowIndex.of(reader, split, frames)):
            raise CheckFailed(
                f"no trajectory of split '{split}' of task '{name}' has {frames} frames: there is nothing to score",
                hint="put longer trajectories into it, or leave the split out",
            )


def check_windows(reader: Reader, split: str, trajectory: int) -> None:
    """First, middle and last frames of a trajectory: there, in the right shape, finite."""
    import numpy as np

    from ups.data.normalize import MASK_HINT, masked

    num_frames = reader.frames_in(split, trajectory)
    frames = min(2, num_frames)
    starts = [0] if reader.task.steady else sorted({0, num_frames // 2 - 1, num_frames - frames})
    for first in (s for s in starts if s >= 0):
        window = reader.read(split, trajectory, first, 0 if reader.task.steady else frames)
        for name in ("state", "static", "target", "parameters"):
            values = getattr(window, name)
            if not np.isfinite(values).all():
                obstacle = name == "state" and masked(values[None]).any()
                find = "find all of them with `ups data validate`, and leave those trajectories out"
                raise CheckFailed(
                    f"{reader.where(split, trajectory)}, frame {first}: {name} of task '{reader.task.name}' has "
                    "values that are not finite",
                    means="one such sample makes the loss NaN for all ranks",
                    hint=MASK_HINT if obstacle else find,
                )


def memory_limit_bytes(proc: Path = PROC, cgroups: Path = CGROUPS) -> int:
    """The most memory that this host gives to our processes together: the machine's, or the control group's."""
    limits = [(kernel_number(proc / "meminfo", "MemTotal:") or 2**52) * 1024]
    for folder in _own_groups(proc, cgroups):
        for name in ("memory.max", "memory.limit_in_bytes"):
            with contextlib.suppress(OSError, ValueError):
                limits.append(int((folder / name).read_text()))
    return min(limits)


def memory_available_bytes(proc: Path = PROC, cgroups: Path = CGROUPS) -> int:
    """What is left of it now, as far as the kernel shows."""
    left = [(kernel_number(proc / "meminfo", "MemAvailable:") or 2**52) * 1024]
    for folder in _own_groups(proc, cgroups):
        with contextlib.suppress(OSError, ValueError):
            limit, used = int((folder / "memory.max").read_text()), int((folder / "memory.current").read_text())
            left.append(limit - max(0, used - (kernel_number(folder / "memory.stat", "inactive_file") or 0)))
    return max(0, min(left))


def usable_processors(cgroups: Path = CGROUPS, proc: Path = PROC) -> float:
    """Processors that this process may keep busy: its affinity, or the quota of its control group."""
    count = float(usable_cores())
    for folder in _own_groups(proc, cgroups):
        with contextlib.suppress(OSError, ValueError):
            quota, period = (folder / "cpu.max").read_text().split()
            if quota != "max":
                count = min(count, int(quota) / int(period))
    return count


def free_bytes(path: Path) -> int:
    """Free space for us on the file system of `path`, or of the nearest directory above it that exists."""
    usage = os.statvfs(_existing(path))
    return usage.f_bavail * usage.f_frsize


def _existing(path: Path) -> Path:
    """`path`, or the nearest directory above it that exists."""
    while not path.exists():
        path = path.parent
    return path


def _own_groups(proc: Path, cgroups: Path) -> list[Path]:
    """The control groups of this process and those above them: each of them limits."""
    groups: list[Path] = []
    with contextlib.suppress(OSError):
        for line in (proc / "self/cgroup").read_text().splitlines():
            _, controllers, group = line.split(":", 2)
            if controllers in ("", "memory"):
                root = cgroups if controllers == "" else cgroups / "memory"
                parts = [part for part in group.split("/") if part]
                groups += [root.joinpath(*parts[:count]) for count in range(len(parts), -1, -1)]
    return groups
