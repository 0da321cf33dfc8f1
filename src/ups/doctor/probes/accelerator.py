"""Check `accelerator`: driver, devices, NCCL, peer access, one product per device. Says so where there is none.

Written for CUDA and not yet run on it: see docs/first-gpu-run.md.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ups.doctor.probes.check import Assignment, CheckFailed, Report

_DRIVER = Path("/proc/driver/nvidia/version")


def check(assignment: Assignment, report: Report) -> None:
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
    found = (a.to(f"cuda:{index}").double() @ a.to(f"cuda:{index}").double()).cpu()
    if not torch.allclose(found, a.double() @ a.double(), rtol=1e-9):
        raise CheckFailed(
            f"GPU {index} multiplies wrongly",
            means="a broken device, or a driver that does not fit the CUDA of torch",
            hint="look at nvidia-smi -q (ECC, Xid in the system log), and leave the device out",
        )
