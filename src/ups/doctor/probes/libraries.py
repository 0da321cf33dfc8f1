"""Checks `libraries` and `accelerator`: imports what a run imports, one by one, and looks for what is loaded twice.

Two builds of one C library in a process is the usual reason for a segmentation fault that has no traceback.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import re
import sys
from collections.abc import Iterable
from pathlib import Path

from ups.doctor.probes import accelerator
from ups.doctor.probes.check import CheckFailed, Report, begin_check, start

# In the order of a rank: torch first, because its libraries are the ones that others collide with.
IMPORTS = ("numpy", "torch", "torch.distributed", "h5py", "zarr", "safetensors.torch", "xarray")
OLDEST_TORCH = (2, 11)
# A second build of these corrupts memory; of the others it costs threads or speed.
DEADLY = ("libhdf5", "libnccl", "libcudart", "libstdc++")
HARMFUL = ("libgomp", "libiomp5", "libopenblas")
_NAME = re.compile(r"(lib[A-Za-z0-9_+]+?)(?:-[0-9a-f]{6,})?(?:[-.][0-9][0-9.]*)?\.so(?:[.0-9]*)$")


def main() -> None:
    """Import and look; then, with torch loaded, the accelerators."""
    assignment = start(sys.argv[1:])
    with begin_check("libraries") as report:
        check(report)
    with begin_check("accelerator") as report:
        accelerator.check(assignment, report)


def check(report: Report) -> None:
    """Import everything, then read the map of this process."""
    versions = {}
    for name in IMPORTS:
        # The last line of the log of a crash says which import it was.
        sys.stderr.write(f"import {name}\n")
        sys.stderr.flush()
        importlib.import_module(name)
        package = name.partition(".")[0]
        versions[package] = importlib.metadata.version(package)
    report.facts["versions"] = versions
    numbers = re.findall(r"\d+", versions["torch"])
    if tuple(int(n) for n in numbers[:2]) < OLDEST_TORCH:
        raise CheckFailed(f"torch {versions['torch']} is too old", hint="install torch 2.11 or newer")
    double = duplicates(mapped_files())
    report.facts["loaded_twice"] = double
    check_duplicates(double, report)
    report.says = ", ".join(f"{name} {version}" for name, version in versions.items())


def mapped_files(maps: Path = Path("/proc/self/maps")) -> set[str]:
    """Files that are mapped into this process."""
    return {line.split(maxsplit=5)[5] for line in maps.read_text().splitlines() if len(line.split(maxsplit=5)) == 6}


def duplicates(files: Iterable[str]) -> dict[str, list[str]]:
    """Libraries of DEADLY and HARMFUL of which more than one file is loaded: name -> files."""
    found: dict[str, set[str]] = {}
    for file in files:
        match = _NAME.fullmatch(os.path.basename(file))
        if match is not None and match[1] in (*DEADLY, *HARMFUL):
            found.setdefault(match[1], set()).add(os.path.realpath(file))
    return {name: sorted(paths) for name, paths in sorted(found.items()) if len(paths) > 1}


def check_duplicates(double: dict[str, list[str]], report: Report) -> None:
    """Refuse what crashes, warn of what only costs."""
    for name, paths in double.items():
        text = f"{name} is loaded {len(paths)} times: {', '.join(paths)}"
        if name in DEADLY:
            raise CheckFailed(
                text,
                means="two builds of one C library share symbols but not state: sooner or later a segmentation fault",
                hint="install both packages from one source (all from pip or all from conda) in a fresh environment",
            )
        report.warnings.append(text)


if __name__ == "__main__":
    main()
