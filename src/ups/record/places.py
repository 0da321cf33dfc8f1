"""Where runs and bundles lie, and which of them a name means. Whether what lies there is sound is not decided here."""

from __future__ import annotations

import os
from pathlib import Path

from ups.errors import ConfigError

RUNS = "runs"
CONFIG_NAME = "config.yaml"
BUNDLE_NAME = "bundle"
BUNDLE_FILE = "bundle.json"


def home_directory() -> Path | None:
    """Of the person; None where there is none: a container may run under a number that nobody has a name for."""
    home = os.path.expanduser("~")
    return Path(home) if os.path.isabs(home) else None


def meant_by(name: str, base: Path | None = None) -> tuple[Path, Path]:
    """What a person may mean by a name: a path, or a run under runs/."""
    base = base or Path()
    return base / name, base / RUNS / name


def is_bundle(path: Path) -> bool:
    """Whether a directory is a bundle; a run with a bundle inside is not."""
    return (path / BUNDLE_FILE).is_file()


def find_model(name: str) -> Path:
    """A run or bundle by path, or a run by its name under runs/."""
    for path in meant_by(name):
        if (path / CONFIG_NAME).is_file():
            return path
    raise ConfigError(
        f"there is no run or bundle '{name}'", hint="give a run directory such as runs/NAME, or a bundle directory"
    )


def find_bundle(name: str) -> Path:
    """A bundle by path, or the bundle of a run by path or name; the path itself where there is none."""
    given, named = meant_by(name)
    return next((path for path in (given, given / BUNDLE_NAME, named / BUNDLE_NAME) if is_bundle(path)), given)
