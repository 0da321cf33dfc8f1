"""The import rules hold, and each of them fails when the import that it forbids is planted."""

import ast
import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MODULES = sorted(path.parent for path in (ROOT / "src" / "ups").glob("*/__init__.py"))


def lint_imports(checkout: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(Path(sys.executable).with_name("lint-imports")), "--no-cache", "--no-logo"],
        cwd=checkout,
        env={**os.environ, "PYTHONPATH": str(checkout / "src"), "COLUMNS": "200", "NO_COLOR": "1"},
        capture_output=True,
        text=True,
        timeout=50,
    )


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    shutil.copytree(ROOT / "src" / "ups", tmp_path / "src" / "ups", ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


def plant(checkout: Path, module: str, line: str) -> None:
    path = checkout / "src" / Path(*module.split(".")).with_suffix(".py")
    path.parent.mkdir(exist_ok=True)
    (path.parent / "__init__.py").touch()
    path.write_text((path.read_text() if path.exists() else "") + f"\n{line}\n")


def test_the_import_rules_hold() -> None:
    done = lint_imports(ROOT)
    assert done.returncode == 0, done.stdout + done.stderr


# The module may be one that does not exist yet: the rules wait for it.
@pytest.mark.parametrize(
    ("module", "line", "contract"),
    [
        ("ups.supervise.planted", "import torch", "when torch is what is broken"),
        ("ups.launch.planted", "def late():\n    import torch", "when torch is what is broken"),
        ("ups.tracking.planted", "import numpy as np", "when torch is what is broken"),
        ("ups.doctor.planted", "import torch", "neither them nor torch"),
        ("ups.doctor.planted", "from ups.doctor.probes import libraries", "neither them nor torch"),
        ("ups.record.planted", "import pydantic", "standard library alone"),
        ("ups.registry", "import pydantic", "standard library alone"),
        ("ups.registry", "from ups.record import atomic", "Modules from the top"),
        ("ups.data.planted", "from ups import models", "Modules from the top"),
        ("ups.data.planted", "from ups.solvers import tasks", "Modules from the top"),
        ("ups.solvers.planted", "from ups.data import open", "Modules from the top"),
        ("ups.formats.planted", "import ups.data.rank_source", "Modules from the top"),
        ("ups.models.planted", "from ups.distributed import runtime", "Modules from the top"),
        ("ups.models.planted", "from ups.formats import base", "know file formats"),
        ("ups.inference.planted", "import ups.training", "neither distributed nor training"),
        ("ups.inference.planted", "from ups import distributed", "neither distributed nor training"),
        ("ups.spec.planted", "import ups.data", "Modules from the top"),
        ("ups.supervise.planted", "import ups.training", "see only config"),
        ("ups.supervise.planted", "import ups.run.rank_main", "Modules from the top"),
        ("ups.run.planted", "import ups.doctor.examine", "Modules from the top"),
        ("ups.run.planted", "from ups.cli import output", "Modules from the top"),
        ("ups.doctor.planted", "from ups.library import run", "Modules from the top"),
        ("ups.library.planted", "from ups.cli import output", "Modules from the top"),
        ("ups.cli.planted", "from ups.testing import ranks", "Modules from the top"),
        ("ups.record.files", "import ups.record.manifest", "No import circle"),
        ("ups.shed.planted", "", "Modules from the top"),
    ],
)
def test_a_planted_forbidden_import_breaks_its_contract(checkout: Path, module: str, line: str, contract: str) -> None:
    plant(checkout, module, line)
    done = lint_imports(checkout)
    assert done.returncode == 1, done.stdout + done.stderr
    broken = [text for text in done.stdout.splitlines() if " BROKEN" in text]
    assert any(contract in text for text in broken), done.stdout


def test_an_allowed_import_is_not_taken_for_a_forbidden_one(checkout: Path) -> None:
    plant(checkout, "ups.launch.planted", "from ups import config, errors, record, tracking")
    plant(checkout, "ups.inference.planted", "import torch\nfrom ups import data, models, spec")
    done = lint_imports(checkout)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.name)
def test_importing_a_module_imports_nothing_from_outside(module: Path) -> None:
    """Also closes the one gap of the contracts: `ups.launch.**` does not cover `ups/launch/__init__.py`."""
    for node in ast.parse((module / "__init__.py").read_text()).body:
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) and node.level == 0 else []
        for name in names:
            assert name.split(".")[0] in {"ups", "__future__", *sys.stdlib_module_names}, (
                f"{module.name} imports {name}"
            )


def test_no_module_is_called_utils() -> None:
    assert [path for path in (ROOT / "src").rglob("*.py") if path.stem in {"utils", "util", "helpers", "misc"}] == []


def test_every_module_is_declared_once_in_the_layers() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = next(contract["layers"] for contract in contracts if contract["type"] == "layers")
    declared = [name.strip(" ()") for layer in layers for name in layer.split("|")]
    assert len(declared) == len(set(declared))
    assert {module.name for module in MODULES} <= set(declared)


def test_no_module_holds_more_than_a_fifth_of_the_code() -> None:
    lines = {
        module.name: sum(len(path.read_text().splitlines()) for path in module.rglob("*.py")) for module in MODULES
    }
    assert max(lines.values()) <= sum(lines.values()) / 5, lines


def imported_by(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""


def test_the_package_imports_neither_tests_nor_benchmarks_and_benchmarks_only_what_they_share_with_tests() -> None:
    for path in (ROOT / "src").rglob("*.py"):
        assert not [name for name in imported_by(path) if name.split(".")[0] in ("tests", "benchmarks")], path
    for path in (ROOT / "benchmarks").rglob("*.py"):
        outside = [name for name in imported_by(path) if name.split(".")[0] == "tests"]
        assert not [name for name in outside if name.split(".")[:2] != ["tests", "support"]], path


def test_unit_tests_lie_where_the_code_they_test_lies() -> None:
    folders = {
        path.parent.relative_to(ROOT / "tests" / "unit") for path in (ROOT / "tests" / "unit").rglob("test_*.py")
    }
    assert [str(folder) for folder in folders if not (ROOT / "src" / "ups" / folder).is_dir()] == []
