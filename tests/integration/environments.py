"""Clean processes and small environments for tests of what a new user installs."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]


def start(*command: str | Path, cwd: Path, timeout: float = 540) -> subprocess.CompletedProcess[str]:
    """Run a command with nothing of this process's Python in its environment."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
    environment |= {"HOME": str(cwd), "PIP_CACHE_DIR": str(Path.home() / ".cache" / "pip"), "NO_COLOR": "1"}
    return subprocess.run(
        [str(part) for part in command], cwd=cwd, env=environment, capture_output=True, text=True, timeout=timeout
    )


def run(*command: str | Path, cwd: Path, timeout: float = 540) -> str:
    """Standard output of a command that must succeed."""
    done = start(*command, cwd=cwd, timeout=timeout)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def build_wheel(where: Path) -> Path:
    """The wheel of this checkout."""
    # The build backend is part of the dev extra: no isolated environment needs to be fetched for it.
    run(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", where, ROOT, cwd=where)
    (built,) = where.glob("*.whl")
    return built


def core_environment(folder: Path, wheel: Path, requirements: list[str]) -> Path:
    """The bin directory of an environment with the wheel and `requirements` with all that these need, and nothing else.

    The packages are links to those of the running environment, found by following the metadata from requirement to
    requirement: torch alone takes longer to install than the tests take. What nothing in that chain requires is not
    linked, so it cannot be imported, whatever else is installed around the tests.
    """
    run(sys.executable, "-m", "venv", "--without-pip", folder, cwd=folder.parent)
    (site,) = folder.glob("lib/python*/site-packages")
    for name in sorted(_closure(requirements)):
        for top in _top_level(importlib.metadata.distribution(name)):
            link = site / top.name
            if not link.exists():
                link.symlink_to(top)
    run(
        *(sys.executable, "-m", "pip", "--python", folder / "bin" / "python", "install", "-q", "--no-deps", wheel),
        cwd=folder.parent,
    )
    return folder / "bin"


def _closure(requirements: list[str]) -> set[str]:
    """Names of everything that is needed, here and on this machine, for `requirements`."""
    names: set[str] = set()
    waiting = [(requirement, "") for requirement in requirements]
    while waiting:
        text, extra = waiting.pop()
        requirement = Requirement(text)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": extra}):
            continue
        name = requirement.name.lower().replace("_", "-")
        if name in names and not requirement.extras:
            continue
        names.add(name)
        for inner in importlib.metadata.requires(name) or []:
            waiting += [(inner, chosen) for chosen in ("", *requirement.extras)]
    return names


def _top_level(distribution: importlib.metadata.Distribution) -> set[Path]:
    """Files and directories right below site-packages that belong to a distribution."""
    files = distribution.files
    assert files is not None, f"{distribution.name} does not say which files it has"
    site = Path(str(distribution.locate_file(""))).resolve()
    names = {file.parts[0] for file in files if file.parts[0] not in ("..", "__pycache__")}
    return {site / name for name in names if (site / name).exists()}
