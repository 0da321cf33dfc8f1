"""Which versions and extras are installed: for `ups --version` and for env.json of a run. Imports none of them."""

from __future__ import annotations

import platform
import re
import sys
from importlib import metadata
from typing import Any

import ups
from ups.registry import OURS, REGISTRIES

DISTRIBUTION = OURS
# What a person gains from each extra; an extra that is not listed here is shown with its packages alone.
WHAT_IT_ADDS = {
    "generate": "reference solvers that make training data",
    "tensorboard": "TensorBoard, to look at the event files of the tracker of that name",
    "mlflow": "a small client for the tracker mlflow",
    "wandb": "the client of the tracker wandb",
    "lightning": "our stages in a pipeline of Lightning",
    "buckets": "S3, GCS and web servers as places of data and of copies of runs",
    "report": "figures and films in reports",
    "baselines": "the FNO reference implementation as a baseline",
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
    found = []
    for registry in REGISTRIES:
        for origin in registry.origins():
            row = {"kind": origin.kind, "name": origin.name}
            row |= {"distribution": origin.distribution, "version": origin.version}
            error = "" if origin.is_ours else registry.error(origin.name)
            found.append(row | {"error": error} if error else row)
    return found


def extras() -> dict[str, dict[str, Any]]:
    """For each extra of the installed package: what it adds, its packages, and those that are missing."""
    try:
        package = metadata.metadata(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        return {}
    names: list[str] = package.get_all("Provides-Extra") or []
    found: dict[str, dict[str, Any]] = {}
    for name in names:
        packages = _packages_of(DISTRIBUTION, name)
        missing = [needed for needed in packages if installed_version(needed) is None]
        adds = WHAT_IT_ADDS.get(name, ", ".join(packages))
        found[name] = {"adds": adds, "packages": packages, "missing": missing}
    return found


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
