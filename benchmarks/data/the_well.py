"""Windows of The Well per second: our reader and that project's package, of the same local file.

    python benchmarks/data/the_well.py --package-python PYTHON [--seconds 2] [--rounds 5]

PYTHON is that of an environment with the package `the-well` (tests/unit/formats/test_the_well_package.py says how to
make one). Both read the same windows of 5 frames in the same random order, one process each, from a file in the page
cache, in interleaved blocks of the same run. Then our reader reads 10,000 windows, and its resident size is held
against that after the first 1,000. Bars: at least 2 times the package, or 1.2 times where most of the time is spent on
gzip, which both leave to zlib; less than 8 MiB more memory. The last line is one JSON object; exit code 1 below a bar.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from ups.formats.the_well import WellReader

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the checkout, for tests.support

from tests.support import the_well_files as files
from tests.support import the_well_program
from tests.support.pdebench_files import numbers

FRAMES, WINDOW, COUNT = 21, 5, 8
STORAGE: dict[str, dict[str, Any]] = {
    "contiguous": {},
    "chunked": {"chunks": "frame"},
    "gzip": {"chunks": "frame", "compression": "gzip"},
}
FASTER, MORE_MIB = {"contiguous": 2.0, "chunked": 2.0, "gzip": 1.2}, 8


def content(points: int) -> files.Content:
    """A scalar, a vector and a static field on a plane."""
    made = files.plain("speed", COUNT, FRAMES, points, points)
    made.fields[0]["speed_of_sound"] = files.Dataset(numbers(COUNT, points, points), time=False)
    made.fields[1] = {"velocity": files.Dataset(numbers(COUNT, FRAMES, points, points, 2, seed=2))}
    return made


class Package:
    """The package in its own process."""

    def __init__(self, python: str, folder: Path) -> None:
        command = [python, str(the_well_program.__file__)]
        self._child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._ask(f"open {folder} train {WINDOW}")

    def seconds(self, windows: list[int]) -> float:
        """How long it takes for these windows."""
        return self._ask("time " + " ".join(map(str, windows)))

    def _ask(self, line: str) -> float:
        if self._child.stdin is None or self._child.stdout is None:
            raise RuntimeError("no pipe")
        self._child.stdin.write(line + "\n")
        self._child.stdin.flush()
        return float(self._child.stdout.readline())

    def close(self) -> None:
        self._child.communicate(timeout=60)


def our_seconds(reader: WellReader, windows: list[int]) -> float:
    begin = time.perf_counter()
    per = FRAMES - WINDOW + 1
    for number in windows:
        reader.read("train", number // per, number % per, WINDOW)
    return time.perf_counter() - begin


def resident_mib() -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("VmRSS"))) / 1024


def compare(python: str, folder: Path, seconds: float, rounds: int) -> dict[str, float]:
    """Windows per second of both, medians of interleaved blocks."""
    reader, package = WellReader(folder), Package(python, folder)
    generator = np.random.default_rng(0)
    total = COUNT * (FRAMES - WINDOW + 1)
    first = generator.integers(total, size=20).tolist()
    theirs, ours = package.seconds(first), our_seconds(reader, first)  # also brings the file into the page cache
    sizes = [max(10, int(seconds * len(first) / taken)) for taken in (theirs, ours)]
    rates: tuple[list[float], list[float]] = ([], [])
    for _ in range(rounds):
        windows = generator.integers(total, size=max(sizes)).tolist()
        rates[0].append(sizes[0] / package.seconds(windows[: sizes[0]]))
        rates[1].append(sizes[1] / our_seconds(reader, windows[: sizes[1]]))
    package.close()
    reader.close()
    package_rate, our_rate = (statistics.median(found) for found in rates)
    return {"package": round(package_rate, 1), "ours": round(our_rate, 1), "times": round(our_rate / package_rate, 2)}


def growth_mib(folder: Path) -> float:
    """Resident size after 10,000 windows, beyond that after 1,000."""
    reader = WellReader(folder)
    windows = np.random.default_rng(1).integers(COUNT * (FRAMES - WINDOW + 1), size=10_000).tolist()
    our_seconds(reader, windows[:1000])
    before = resident_mib()
    our_seconds(reader, windows[1000:])
    return round(resident_mib() - before, 1)


def main() -> int:
    """Run, print, judge."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--package-python", required=True)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    found: dict[str, Any] = {}
    good = True
    with tempfile.TemporaryDirectory() as temporary:
        for points in (32, 128):
            for name, storage in STORAGE.items():
                folder = files.write_set(Path(temporary) / f"{name}{points}", {"train": [content(points)]}, **storage)
                row: dict[str, float] = compare(arguments.package_python, folder, arguments.seconds, arguments.rounds)
                if points == 32:
                    row["growth_mib"] = growth_mib(folder)
                    good = good and row["growth_mib"] < MORE_MIB
                good = good and row["times"] >= FASTER[name]
                found[f"{name} {points}x{points}"] = row
                print(f"{name} {points}x{points}", row, flush=True)
    print(json.dumps({"benchmark": "the_well", "windows_per_second": found, "passed": good}))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
