"""Whatever the package imports is declared in pyproject.toml, and nothing is declared that nothing needs."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
# Import name -> distribution, where they differ.
DISTRIBUTIONS = {
    "yaml": "pyyaml",
    "neuralop": "neuraloperator",
    "google_crc32c": "google-crc32c",
    "mlflow": "mlflow-skinny",
}
# Brought by a declared distribution of which they are a part: exponax computes with jax, typer with click.
PARTS = {
    "jax": "exponax",
    "click": "typer",
    "pydantic_core": "pydantic",
    "imageio_ffmpeg": "imageio",
    "mpl_toolkits": "matplotlib",
}
# Used without an import: programs, and a backend that xarray looks up by name.
NOT_IMPORTED = {"py-spy", "h5netcdf", "tensorboard"}


def declared(requirements: list[str]) -> set[str]:
    return {re.split(r"[\[<>=!~; ]", text, maxsplit=1)[0].lower() for text in requirements}


def imported() -> dict[str, str]:
    """Distribution -> a file of the package that imports it; tests' helpers may use what the tests have."""
    found: dict[str, str] = {}
    for path in sorted((ROOT / "src").rglob("*.py")):
        if path.is_relative_to(ROOT / "src" / "ups" / "testing"):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) and node.level == 0 else []
            for name in (name.split(".")[0] for name in names):
                if name not in {"ups", "__future__", *sys.stdlib_module_names}:
                    found[PARTS.get(name, DISTRIBUTIONS.get(name, name))] = str(path.relative_to(ROOT))
    return found


def test_every_import_of_the_package_is_declared() -> None:
    extras = [text for name, texts in PROJECT["optional-dependencies"].items() if name != "dev" for text in texts]
    known = declared(PROJECT["dependencies"]) | declared(extras)
    assert {name: path for name, path in imported().items() if name.lower() not in known} == {}


def test_every_core_dependency_is_used() -> None:
    assert declared(PROJECT["dependencies"]) - set(imported()) - NOT_IMPORTED == set()
