"""Kills real committing processes and prints, as JSON, what each one left behind; started by test_manifest_kill.py.

A program of its own because it forks for every kill, which is only safe without the threads of a test runner. How a
child dies: at its n-th file-system call (audit event), at its n-th executed line of manifest.py and files.py (finer:
both sides of a call that Python does not audit, such as renameat2 and fsync), or at a moment in time while it commits
in a loop.
"""

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from tests.support.killed_child import in_child
from ups.errors import UpsError
from ups.record import files, manifest

WATCHED_EVENTS = ("open", "os.", "shutil.", "ctypes.")


def fill(directory: Path, version: str) -> Path:
    (directory / "shards").mkdir()
    for number in range(3):
        (directory / "shards" / f"{number}.bin").write_text(f"{version} {number}\n" * 500)
    (directory / "version").write_text(version)
    return directory


def commit(final: Path, version: str) -> None:
    manifest.commit_directory(fill(manifest.make_temporary(final), version), final)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def at_file_system_call(number: int) -> list[int]:
    """Die before the n-th watched call (0: only count them); returns the counter."""
    counter = [0]

    def hook(event: str, arguments: object) -> None:
        if event.startswith(WATCHED_EVENTS):
            counter[0] += 1
            if counter[0] == number:
                die()

    sys.addaudithook(hook)
    return counter


def at_line(number: int) -> list[int]:
    """Die before the n-th executed line of the two modules (0: only count them); returns the counter."""
    counter = [0]

    def trace(frame, event, argument):  # type: ignore[no-untyped-def]
        if frame.f_code.co_filename not in (manifest.__file__, files.__file__):
            return None
        if event == "line":
            counter[0] += 1
            if counter[0] == number:
                die()
        return trace

    sys.settrace(trace)
    return counter


def look(final: Path) -> str:
    """What a reader finds: `none`, the version in a directory that verifies, or a description of the mixture."""
    if not final.exists():
        return "none"
    try:
        manifest.verify(final)
    except UpsError as error:
        return f"BROKEN {error.message}"
    version = (final / "version").read_text()
    shards = {(final / "shards" / f"{number}.bin").read_text() == f"{version} {number}\n" * 500 for number in range(3)}
    return version if shards == {True} else f"MIXED {version}"


def report(final: Path, point: int, killed: bool) -> dict[str, object]:
    before = look(final)
    manifest.clean_temporaries(final.parent)
    after = look(final)
    left = sorted(path.name for path in final.parent.iterdir())
    commit(final, "next")
    return {"point": point, "killed": killed, "before": before, "after": after, "left": left, "next": look(final)}


def kill_at_points(
    where: Path, arm: Callable[[int], list[int]], replacing: bool, wanted: int
) -> list[dict[str, object]]:
    def run(name: str, number: int) -> tuple[bool, int, Path]:
        final = where / name / "final"
        final.parent.mkdir()
        if replacing:
            commit(final, "old")
        temporary = fill(manifest.make_temporary(final), "new")

        def work() -> int:
            counter = arm(number)
            manifest.commit_directory(temporary, final)
            sys.settrace(None)
            return counter[0]

        return *in_child(work), final

    _, total, final = run("count", 0)
    if look(final) != "new":
        raise SystemExit(f"the commit without a kill failed: {look(final)}")
    points = sorted({1 + round(index * (total - 1) / (wanted - 1)) for index in range(wanted)})
    results = []
    for point in points:
        killed, _, final = run(f"point_{point}", point)
        results.append(report(final, point, killed))
    return results


def kill_in_time(where: Path, replacing: bool, wanted: int) -> list[dict[str, object]]:
    results = []
    for index in range(wanted):
        final = where / f"time_{index}" / "final"
        final.parent.mkdir()
        if replacing:
            commit(final, "old")
        child = os.fork()
        if child == 0:
            while True:
                commit(final, "new")
                if not replacing:
                    manifest.remove_directory(final)
                else:
                    commit(final, "old")
        time.sleep(0.002 + 0.0013 * index)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        results.append(report(final, index, True))
    return results


def main(where: Path, kind: str, replacing: bool, exchange: bool, wanted: int) -> None:
    if not exchange:
        manifest.exchange = lambda first, second: False
    for version in ("first", "second"):  # whatever is imported on demand must not shift the points counted later
        commit(where / "warm-up" / "final", version)
    if kind == "time":
        results = kill_in_time(where, replacing, wanted)
    else:
        arm = {"call": at_file_system_call, "line": at_line}[kind]
        results = kill_at_points(where, arm, replacing, wanted)
    print(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3] == "replacing", sys.argv[4] == "exchange", int(sys.argv[5]))
