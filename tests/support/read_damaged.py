"""A child that reads the files named on standard input as untrusted data would be read: one JSON line each.

python -m tests.support.read_damaged [--well]    files are of PDEBench, or of The Well; directories are stores
"""

from __future__ import annotations

import json
import resource
import sys
import time
from pathlib import Path

from ups.errors import UpsError
from ups.formats import hdf5
from ups.formats.base import Reader
from ups.formats.pdebench import PdebenchReader
from ups.formats.the_well import WellReader
from ups.formats.zarr_store import StoreReader, is_store


def peak_kib() -> int:
    """Peak resident size of this program. Not ru_maxrss, which begins with the size of the parent before exec."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("VmHWM")))


def read_everything(path: str, *, well: bool) -> str:
    """Every window of one frame, and the identity; what a UpsError is called, or 'read'."""
    try:
        reader: Reader
        if is_store(path) or Path(path).is_dir():
            reader = StoreReader(path)
        else:
            reader = WellReader(path) if well else PdebenchReader(path)
        for split, count in reader.splits.items():
            for trajectory in range(min(count, 20)):
                reader.read(split, trajectory, 0, reader.frames_in(split, trajectory))
        reader.identity()
        reader.close()
    except UpsError as error:
        return error.cause
    return "read"


def main() -> None:
    paths = sys.stdin.read().split("\n")
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    hdf5.TIMEOUT_SECONDS = 10.0
    # One guard for all of them; a reader of its own would start one each.
    well = "--well" in sys.argv
    form = "the_well" if well else "pdebench"
    hdf5.survey_files([p for p in paths if Path(p).is_file()], form)
    for path in paths:
        started = time.monotonic()
        try:
            outcome = read_everything(path, well=well)
        except Exception as error:  # noqa: BLE001 - the test counts what should never come
            outcome = f"{type(error).__name__}: {error}"[:200]
        peak = peak_kib() // 1024
        seconds = time.monotonic() - started
        print(json.dumps({"path": path, "outcome": outcome, "peak_mib": peak, "seconds": seconds}), flush=True)


if __name__ == "__main__":
    main()
