"""Checks `machine`, `libraries` and `accelerator`: limits, what a run imports, double libraries, and devices.

Two builds of one C library in a process are the usual reason for a segmentation fault without a traceback. The checks
of CUDA have not yet run on a GPU: see docs/first-gpu-run.md.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ups.doctor.probes.check import Assignment
from ups.run.preflight import CheckFailed, Report, examine_machine

# In the order of a rank: torch first, because its libraries are the ones that others collide with.
IMPORTS = ("numpy", "torch", "torch.distributed", "h5py", "zarr", "safetensors.torch", "xarray")
OLDEST_TORCH = (2, 11)
# A second build of these corrupts memory; of the others it costs threads or speed.
DEADLY = ("libhdf5", "libnccl", "libcudart", "libstdc++")
HARMFUL = ("libgomp", "libiomp5", "libopenblas")
_NAME = re.compile(r"(lib[A-Za-z0-9_+]+?)(?:-[0-9a-f]{6,})?(?:[-.][0-9][0-9.]*)?\.so(?:[.0-9]*)$")


def check_machine(assignment: Assignment, report: Report) -> None:
    """What every run needs of this machine, whatever is installed."""
    examine_machine(assignment.recipe, assignment.ranks, assignment.run_dir, report)


def check_libraries(assignment: Assignment, report: Report) -> None:
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
    copies: dict[str, set[str]] = {}
    for file in files:
        match = _NAME.fullmatch(os.path.basename(file))
        if match is not None and match[1] in (*DEADLY, *HARMFUL):
            copies.setdefault(match[1], set()).add(os.path.realpath(file))
    return {name: sorted(paths) for name, paths in sorted(copies.items()) if len(paths) > 1}


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


_DRIVER = Path("/proc/driver/nvidia/version")


def check_accelerator(assignment: Assignment, report: Report) -> None:
    """Refuse a recipe that wants a device which is not there or does not compute."""
    import torch

    wanted = assignment.recipe.engine.device if assignment.recipe else "auto"
    driver = _DRIVER.read_text().splitlines()[0] if _DRIVER.exists() else ""
    if not torch.cuda.is_available():
        if wanted == "cuda":
            raise CheckFailed(
                f"no accelerator: torch {torch.__version__} finds no CUDA device (driver: {driver or 'none'})",
                means="engine.device is 'cuda', and a run is never silently moved to the CPU",
                hint="check nvidia-smi and that torch is a CUDA build, or use --set engine.device=cpu",
            )
        if driver:
            report.warnings.append(f"a driver is there ({driver}), but torch {torch.__version__} cannot use it")
        report.says = "no accelerator: the run uses the CPU and gloo"
        return
    if wanted == "cpu":
        report.says = f"{torch.cuda.device_count()} CUDA devices, not used: engine.device is 'cpu'"
        return
    check_devices(torch, assignment.ranks, driver, report)


def check_devices(torch: Any, ranks: int, driver: str, report: Report) -> None:
    """Enough devices, each computes, and NCCL is there; who reaches whom directly is reported."""
    count = torch.cuda.device_count()
    names = [torch.cuda.get_device_name(i) for i in range(count)]
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if torch.distributed.is_nccl_available() else ""
    report.facts |= {"driver": driver, "devices": names, "cuda": torch.version.cuda, "nccl": nccl}
    if count < ranks:
        raise CheckFailed(f"{ranks} ranks need as many GPUs, and {count} are visible", hint=f"use --ranks {count}")
    if ranks > 1 and not nccl:
        raise CheckFailed("this torch has no NCCL", hint="install a CUDA build of torch for Linux")
    for i in range(ranks):
        check_product(torch, i)
    blocked = [
        (a, b) for a in range(ranks) for b in range(ranks) if a != b and not torch.cuda.can_device_access_peer(a, b)
    ]
    report.facts["no_peer_access"] = blocked
    if blocked:
        report.warnings.append(f"{len(blocked)} pairs of GPUs have no peer access: NCCL goes through host memory")
    if len(set(names[:ranks])) > 1:
        report.warnings.append(f"the GPUs differ ({', '.join(sorted(set(names[:ranks])))}): the slowest sets the pace")
    report.says = f"{count} x {names[0]}, CUDA {torch.version.cuda}, NCCL {nccl or '-'}"


def check_product(torch: Any, index: int) -> None:
    """One matrix product on a device against the CPU."""
    a = torch.arange(256 * 256, dtype=torch.float32).reshape(256, 256) / 65536
    product = (a.to(f"cuda:{index}").double() @ a.to(f"cuda:{index}").double()).cpu()
    if not torch.allclose(product, a.double() @ a.double(), rtol=1e-9):
        raise CheckFailed(
            f"GPU {index} multiplies wrongly",
            means="a broken device, or a driver that does not fit the CUDA of torch",
            hint="look at nvidia-smi -q (ECC, Xid in the system log), and leave the device out",
        )
