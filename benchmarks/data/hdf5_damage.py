"""Damaged HDF5 files: what plain h5py does with them, and what our reader does.

    python benchmarks/data/hdf5_damage.py [--files 2100]

Copies of small files of seven PDEBench layouts are damaged (by tests/support/damaged_files.py, with fixed seeds)
and read completely in child processes: once with plain h5py, once with `PdebenchReader`. Counted: children that
died, children that stood still for 10 s, the largest resident size. The bar: none of the three for our reader, and no
allocation above 1 GiB. The last line is one JSON object; exit code 1 below the bar.
"""

from __future__ import annotations

import argparse
import json
import os
import selectors
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the checkout, for tests.support

from tests.support import damaged_files, pdebench_files
from tests.support.checkout import path_with

DEADLINE_SECONDS = 10.0
PLAIN = """
import json, resource, sys
import h5py
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
def visit(group, depth=0):
    for name in group:
        item = group[name]
        if isinstance(item, h5py.Group):
            if depth < 4:
                visit(item, depth + 1)
        else:
            item[()]
    dict(group.attrs)
for path in sys.stdin.read().split("\\n"):
    try:
        with h5py.File(path, "r") as file:
            visit(file)
        outcome = "read"
    except Exception as error:
        outcome = "refused"
    peak = int(open("/proc/self/status").read().split("VmHWM:")[1].split()[0]) // 1024
    print(json.dumps({"path": path, "outcome": outcome, "peak_mib": peak}), flush=True)
"""


def damaged(folder: Path, count: int) -> list[Path]:
    """The damaged files."""
    bases = folder / "bases"
    bases.mkdir()
    pdebench_files.single(bases / "a")
    pdebench_files.single(bases / "b", chunks=(2, 3, 8), compression="gzip", shuffle=True)
    pdebench_files.grouped(bases / "c", (6, 8, 4, 2), pdebench_files.CONFIG_DIFFREACT)
    pdebench_files.grouped(
        bases / "d", (6, 8, 4, 2), pdebench_files.CONFIG_DIFFREACT, chunks=(2, 4, 4, 2), compression="gzip"
    )
    pdebench_files.incompressible(bases / "e")
    pdebench_files.darcy(bases / "f")
    pdebench_files.compressible(bases / "g", 2, chunks=True)
    contents = [path.read_bytes() for path in sorted(bases.iterdir())]
    paths = [folder / f"{i}_Advection_periodic.h5" for i in range(count)]
    for i, path in enumerate(paths):
        path.write_bytes(damaged_files.mutate(contents[i % 7], contents[(i + 1 + i // 7) % 7], i))
    return paths


def read_all(command: list[str], paths: list[Path], patience: float) -> dict[str, Any]:
    """Feeds all files to children of that command; a child that dies or stands still is replaced."""
    counts: dict[str, int] = {}
    peak, done = 0, 0
    while done < len(paths):
        with tempfile.TemporaryFile() as names:
            names.write("\n".join(map(str, paths[done:])).encode())
            names.seek(0)
            child = subprocess.Popen(
                command,
                stdin=names,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={**os.environ, **path_with()},
            )
            outcome = ""
            for row in _rows(child, patience):
                done += 1
                peak = max(peak, row["peak_mib"])
                counts[row["outcome"]] = counts.get(row["outcome"], 0) + 1
            if done < len(paths):
                outcome = "stood still" if child.poll() is None else f"died ({child.wait()})"
                counts[outcome] = counts.get(outcome, 0) + 1
                done += 1
            child.kill()
            child.wait()
    return {"outcomes": counts, "peak_mib": peak}


def _rows(child: subprocess.Popen[bytes], patience: float) -> Any:
    if child.stdout is None:
        return
    rest = b""
    with selectors.DefaultSelector() as selector:
        selector.register(child.stdout, selectors.EVENT_READ)
        while selector.select(patience):
            data = os.read(child.stdout.fileno(), 1 << 16)
            if not data:
                child.wait()
                return
            *lines, rest = (rest + data).split(b"\n")
            yield from (json.loads(line) for line in lines)


def main() -> int:
    """Run, print, judge."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", type=int, default=2100)
    arguments = parser.parse_args()
    import h5py

    with tempfile.TemporaryDirectory() as temporary:
        paths = damaged(Path(temporary), arguments.files)
        plain = read_all([sys.executable, "-c", PLAIN], paths, DEADLINE_SECONDS)
        print("plain h5py", plain, flush=True)
        # Our child surveys all files first, through one guard, and answers afterwards.
        ours = read_all([sys.executable, "-m", "tests.support.read_damaged"], paths, 600.0)
        print("our reader", ours, flush=True)
    good = set(ours["outcomes"]) <= {"read", "data"} and ours["peak_mib"] < 1024
    result = {"benchmark": "hdf5_damage", "files": arguments.files, "hdf5": h5py.version.hdf5_version}
    print(json.dumps({**result, "plain_h5py": plain, "our_reader": ours, "passed": good}))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
