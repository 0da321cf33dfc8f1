"""Installed versions and extras for `ups --version`, and env.json of a run. Imports none of the packages.

env.json keeps variables by exact name only. Beginnings of names are not enough: next to NCCL_DEBUG and SLURM_JOB_ID
stand SLURM_JWT and UPS_PASSWORD. A variable with any other name never reaches a file of the run.
"""

from __future__ import annotations

import os
import platform
import re
import sys
import time
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import ups
from ups.record.files import MAX_RUN_BYTES, safe_read
from ups.record.processes import usable_cores
from ups.registry import OURS, REGISTRIES

DISTRIBUTION = OURS
# What each extra adds; an extra that is not listed here is shown with its packages only.
WHAT_IT_ADDS = {
    "generate": "reference solvers that make training data",
    "points": "data on points and meshes",
    "tensorboard": "TensorBoard, to look at the event files of the tracker of that name",
    "mlflow": "a small client for the tracker mlflow",
    "wandb": "the client of the tracker wandb",
    "lightning": "our stages in a pipeline of Lightning",
    "buckets": "S3, GCS and web servers as places of data and of copies of runs",
    "export": "steps as ONNX files, and rollouts through onnxruntime",
    "serve": "a server of simulators over HTTP",
    "hub": "bundles on the Hugging Face Hub",
    "sign": "signatures of bundles (OpenSSF Model Signing)",
    "report": "films as MP4 instead of GIF",
    "baselines": "the FNO reference implementation as a baseline",
    "docs": "the site of the documentation",
    "dev": "tests, linters and type checks",
}
_CORE = ("torch", "numpy", "pydantic", "pyyaml", "typer", "h5py", "zarr", "safetensors")
_REQUIREMENT = re.compile(r"\s*([A-Za-z0-9._-]+)\s*(?:\[([^\]]*)\])?")
_OF_EXTRA = re.compile(r"extra\s*==\s*['\"]([^'\"]+)['\"]")


def describe() -> dict[str, Any]:
    """Versions of ups, Python and the core libraries, and for each extra what it adds and what is missing."""
    system = f"{platform.system()} {platform.release()} {platform.machine()}"
    libraries: dict[str, str | None] = {"python": platform.python_version(), "system": system}
    libraries |= {name: installed_version(name) for name in _CORE}
    return {"ups": ups.__version__, "executable": sys.executable, "libraries": libraries, "extras": extras()}


def parts() -> list[dict[str, str]]:
    """Every part that can be named, with the package it comes from; parts of other packages are imported to see whether
    they can be, and carry the error if not."""
    rows = []
    for registry in REGISTRIES:
        for origin in registry.origins():
            row = {"kind": origin.kind, "name": origin.name}
            row |= {"distribution": origin.distribution, "version": origin.version}
            error = "" if origin.is_ours else registry.error(origin.name)
            rows.append(row | {"error": error} if error else row)
    return rows


def extras() -> dict[str, dict[str, Any]]:
    """For each extra of the installed package: what it adds, its packages, and those that are missing."""
    try:
        package = metadata.metadata(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        return {}
    names: list[str] = package.get_all("Provides-Extra") or []
    described: dict[str, dict[str, Any]] = {}
    for name in names:
        packages = _packages_of(DISTRIBUTION, name)
        missing = [needed for needed in packages if installed_version(needed) is None]
        adds = WHAT_IT_ADDS.get(name, ", ".join(packages))
        described[name] = {"adds": adds, "packages": packages, "missing": missing}
    return described


def _packages_of(distribution: str, extra: str, depth: int = 0) -> list[str]:
    """Names of the packages behind `distribution[extra]`, through extras of extras."""
    packages: list[str] = []
    try:
        requirements = metadata.requires(distribution) or []
    except metadata.PackageNotFoundError:
        return packages
    for requirement in requirements:
        name = _REQUIREMENT.match(requirement)
        marker = _OF_EXTRA.search(requirement)
        if name is None or marker is None or marker[1] != extra:
            continue
        if name[1].lower() != distribution:
            packages.append(name[1])
        for inner in (name[2] or "").split(",") if depth < 3 else ():
            if inner.strip():
                packages += _packages_of(name[1].lower(), inner.strip(), depth + 1)
    return list(dict.fromkeys(packages))


def installed_version(name: str) -> str | None:
    """The version of an installed distribution, without importing it."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


# By what reads them. None holds a secret by its meaning; values are cleaned all the same.
KEPT_VARIABLES = frozenset(
    {
        # threads and arithmetic
        *("OMP_NUM_THREADS", "OMP_PROC_BIND", "OMP_PLACES", "OMP_SCHEDULE", "OMP_DYNAMIC"),
        *("MKL_NUM_THREADS", "MKL_DYNAMIC", "MKL_CBWR", "OPENBLAS_NUM_THREADS", "KMP_AFFINITY", "KMP_BLOCKTIME"),
        *("NVIDIA_TF32_OVERRIDE", "CUBLAS_WORKSPACE_CONFIG", "PYTHONHASHSEED"),
        # devices and their memory
        *("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "CUDA_LAUNCH_BLOCKING", "CUDA_DEVICE_MAX_CONNECTIONS"),
        *("CUDA_MODULE_LOADING", "NVIDIA_VISIBLE_DEVICES", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"),
        *("PYTORCH_NO_CUDA_MEMORY_CACHING", "MALLOC_ARENA_MAX"),
        # torch
        *("TORCH_CPP_LOG_LEVEL", "TORCH_DISTRIBUTED_DEBUG", "TORCH_SHOW_CPP_STACKTRACES", "TORCH_LOGS"),
        *("TORCH_COMPILE_DISABLE", "TORCHDYNAMO_DISABLE", "TORCHINDUCTOR_CACHE_DIR"),
        *("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "TORCH_DIST_USE_NCCL2", "TORCH_NCCL_DUMP_ON_TIMEOUT"),
        *("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "TORCH_FR_BUFFER_SIZE", "TORCH_FR_DUMP_TEMP_FILE"),
        *("TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_BLOCKING_WAIT", "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC"),
        *("TORCH_NCCL_TRACE_BUFFER_SIZE", "TORCH_NCCL_AVOID_RECORD_STREAMS", "TORCH_NCCL_HIGH_PRIORITY"),
        # communication
        *("GLOO_SOCKET_IFNAME", "GLOO_DEVICE_TRANSPORT", "TP_SOCKET_IFNAME"),
        *("NCCL_DEBUG", "NCCL_DEBUG_SUBSYS", "NCCL_SOCKET_IFNAME", "NCCL_SOCKET_NTHREADS", "NCCL_NSOCKS_PERTHREAD"),
        *("NCCL_IB_DISABLE", "NCCL_IB_HCA", "NCCL_IB_GID_INDEX", "NCCL_IB_TIMEOUT", "NCCL_IB_RETRY_CNT"),
        *("NCCL_NET", "NCCL_NET_GDR_LEVEL", "NCCL_P2P_DISABLE", "NCCL_P2P_LEVEL", "NCCL_SHM_DISABLE"),
        *("NCCL_ALGO", "NCCL_PROTO", "NCCL_BUFFSIZE", "NCCL_NTHREADS", "NCCL_MIN_NCHANNELS", "NCCL_MAX_NCHANNELS"),
        *("NCCL_CROSS_NIC", "NCCL_COLLNET_ENABLE", "NCCL_NVLS_ENABLE", "NCCL_TIMEOUT", "NCCL_LAUNCH_MODE"),
        # where a scheduler put the run
        *("SLURM_JOB_ID", "SLURM_JOB_NAME", "SLURM_JOB_PARTITION", "SLURM_JOB_NODELIST", "SLURM_NODELIST"),
        *("SLURM_NNODES", "SLURM_NTASKS", "SLURM_NTASKS_PER_NODE", "SLURM_CPUS_PER_TASK", "SLURM_CPUS_ON_NODE"),
        *("SLURM_GPUS", "SLURM_GPUS_ON_NODE", "SLURM_GPUS_PER_NODE", "SLURM_MEM_PER_NODE", "SLURM_MEM_PER_CPU"),
        *("SLURM_NODEID", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_RESTART_COUNT", "SLURM_ARRAY_JOB_ID"),
        *("SLURM_ARRAY_TASK_ID", "SLURM_CLUSTER_NAME", "SLURM_TIMELIMIT"),
        # Python and ups
        *("PYTHONUNBUFFERED", "PYTHONOPTIMIZE", "PYTHONFAULTHANDLER", "PYTHONDEVMODE", "PYTHONMALLOC"),
        *("UPS_BLACKBOX_DIR",),
    }
)  # fmt: skip
_SECRET_NAME = re.compile(
    r"TOKEN|SECRET|PASS|PWD|CREDENTIAL|PRIVATE|SIGNATURE|COOKIE|AUTH|JWT|DSN|(^|_)KEY|API_?KEY|KEY$", re.IGNORECASE
)
# user:password@ of a URL, whatever the scheme. Up to the last @, because passwords with / or @ are common: too much is
# cut rather than too little.
_USER_INFORMATION = re.compile(r"(?<=//)\S*@|[^\s/@:]+:(?!//)[^\s@]*@")
# What follows a question mark in a URL may be a token; none of the kept variables needs it.
_QUERY = re.compile(r"\?\S+")
_MAX_CHARACTERS = 1000
_COMMIT = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")


def environment_record(environment: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Versions, hardware and the variables that change a run."""
    return {
        "time": time.time(),
        "host": platform.node(),
        "cpus": os.cpu_count(),
        "usable_cpus": usable_cores(),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "software": {k: v for k, v in describe().items() if k != "extras"},
        "git_commit": head_commit(Path.cwd()),
        "variables": kept_variables(environment),
    }


def head_commit(directory: Path) -> str | None:
    """The commit that HEAD names in the repository around a directory; None outside of one.

    Read as text: git itself runs programs that a repository names (core.fsmonitor, filters, hooks), and this one may
    have come out of an archive. For the same reason the files are not compared with the commit.
    """
    try:
        top = next(folder for folder in (directory, *directory.parents) if (folder / ".git").exists())
        own = top / ".git"
        if own.is_file():  # of a worktree or a submodule: the name of the directory
            own = top / _text(own).removeprefix("gitdir: ")
        shared = own / _text(own / "commondir") if (own / "commondir").is_file() else own
        head = _text(own / "HEAD")
        name = head.removeprefix("ref: ")
        if name != head:
            loose = shared / name
            packed = "" if loose.is_file() else _text(shared / "packed-refs", MAX_RUN_BYTES)
            lines = [line.removesuffix(f" {name}") for line in packed.split("\n") if line.endswith(f" {name}")]
            head = lines[0] if lines else _text(loose)
    except (OSError, ValueError, StopIteration):
        return None
    return head if _COMMIT.fullmatch(head) else None


def _text(path: Path, limit: int = 4096) -> str:
    return safe_read(path, limit).decode().strip()


def kept_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables of KEPT_VARIABLES that are set, without user information in URLs and values of secrets."""
    clean = cleaner(environment)
    return {name: clean(environment[name])[:_MAX_CHARACTERS] for name in sorted(KEPT_VARIABLES & environment.keys())}


def cleaner(environment: Mapping[str, str]) -> Callable[[str], str]:
    """Takes user information in URLs, and the values of secrets in these variables, out of a text."""
    secrets = {value for name, value in environment.items() if _SECRET_NAME.search(name) and len(value) >= 6}

    def cleaned(value: str) -> str:
        if any(secret in value for secret in secrets):
            return "(redacted)"
        return _QUERY.sub("", _USER_INFORMATION.sub("", value))

    return cleaned
