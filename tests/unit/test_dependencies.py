"""Whatever the package imports is declared in pyproject.toml, and nothing is declared that nothing needs."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
# Import name -> distribution, where they differ.
DISTRIBUTIONS = {
    "yaml": "pyyaml",
    "neuralop": "neuraloperator",
    "google_crc32c": "google-crc32c",
    "huggingface_hub": "huggingface-hub",
    "prometheus_client": "prometheus-client",
    "model_signing": "model-signing",
    "mlflow": "mlflow-skinny",
    "skfem": "scikit-fem",
}
# Brought by a declared distribution: exponax computes with jax, typer with click, model-signing with cryptography,
# matplotlib writes with Pillow.
PARTS = {
    "jax": "exponax",
    "cryptography": "model-signing",
    "click": "typer",
    "pydantic_core": "pydantic",
    "typing_extensions": "pydantic",
    "imageio_ffmpeg": "imageio",
    "mpl_toolkits": "matplotlib",
    "PIL": "matplotlib",
    "onnx_ir": "onnxscript",
}
# Used without an import: programs, and a backend that xarray looks up by name.
NOT_IMPORTED = {"py-spy", "h5netcdf", "tensorboard"}


def declared(requirements: list[str]) -> set[str]:
    return {re.split(r"[\[<>=!~; ]", text, maxsplit=1)[0].lower() for text in requirements}


def imported() -> dict[str, str]:
    """Distribution -> a file of the package that imports it; tests' helpers may use what the tests have."""
    imports: dict[str, str] = {}
    for path in sorted((ROOT / "src").rglob("*.py")):
        if path.is_relative_to(ROOT / "src" / "ups" / "testing"):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) and node.level == 0 else []
            for name in (name.split(".")[0] for name in names):
                if name not in {"ups", "__future__", *sys.stdlib_module_names}:
                    imports[PARTS.get(name, DISTRIBUTIONS.get(name, name))] = str(path.relative_to(ROOT))
    return imports


def test_every_import_of_the_package_is_declared() -> None:
    extras = [text for name, texts in PROJECT["optional-dependencies"].items() if name != "dev" for text in texts]
    known = declared(PROJECT["dependencies"]) | declared(extras)
    assert {name: path for name, path in imported().items() if name.lower() not in known} == {}


def test_every_core_dependency_is_used() -> None:
    assert declared(PROJECT["dependencies"]) - set(imported()) - NOT_IMPORTED == set()


@pytest.mark.parametrize(
    ("name", "versions"), [("torch", ["2.10.0"]), ("lightning", ["2.5.0", "2.6.2", "2.6.3", "2.6.5"])], ids=str
)
def test_versions_with_known_vulnerabilities_are_not_installed(name: str, versions: list[str]) -> None:
    texts = [*PROJECT["dependencies"], *(text for extra in PROJECT["optional-dependencies"].values() for text in extra)]
    (requirement,) = [parsed for text in texts if (parsed := Requirement(text)).name == name]
    assert not [version for version in versions if requirement.specifier.contains(version)]
    locked = re.search(rf"^{name}==(.*)$", (ROOT / ".ci" / "constraints.txt").read_text(), re.MULTILINE)
    assert locked is not None
    assert requirement.specifier.contains(locked[1])


SOUND = {"name": "a", "version": "1", "vulns": []}
UNKNOWN = {"name": "b", "skip_reason": "not found"}
VULNERABLE = {"name": "c", "version": "1", "vulns": [{"id": "CVE-0000-0001"}]}


@pytest.mark.parametrize(
    ("packages", "code", "errors", "expected"),
    [
        ([SOUND], 0, "", 0),
        ([SOUND, VULNERABLE], 1, "", 1),
        ([UNKNOWN, VULNERABLE], 1, "", 1),
        ([SOUND, UNKNOWN], 0, "No known vulnerabilities found", 77),
        (None, 1, "requests.exceptions.ConnectionError: no route", 77),
        (None, 1, "requests.exceptions.ReadTimeout: no answer", 77),
        (None, 2, "usage: pip-audit [-h]", 2),
        (None, 0, "", 1),
    ],
)
def test_packages_that_could_not_be_judged_are_not_called_sound(
    tmp_path: Path, packages: list[dict[str, Any]] | None, code: int, errors: str, expected: int
) -> None:
    """The program stands in for pip-audit: what it writes, prints and returns was seen of the real one."""
    program = tmp_path / "pip-audit"
    report = "" if packages is None else json.dumps({"dependencies": packages, "fixes": []})
    write = f"open(sys.argv[-1], 'w').write({report!r})\n" if report else ""
    program.write_text(f"#!{sys.executable}\nimport sys\n{write}sys.stderr.write({errors!r})\nsys.exit({code})\n")
    program.chmod(0o755)
    done = subprocess.run([ROOT / ".ci" / "audit", program], capture_output=True, text=True)
    assert done.returncode == expected, done.stdout + done.stderr
