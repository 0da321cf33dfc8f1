"""What a new user gets from `pip install universal-simulator`, without any extra.

The wheel is installed into an environment with every core dependency but torch (`environments.core_environment`):
that proves at the same time that the commands tested here do not need torch. `.ci/run` installs the project with torch,
through pip's own resolution.
"""

import json
import re
import tomllib
import zipfile
from pathlib import Path

import pytest

from tests.integration.environments import ROOT, core_environment, run

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
SHIPPED = ROOT / "src" / "ups" / "shipped"
INSTALL_PAGE = ROOT / "docs" / "install.md"


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bin directory of an environment with the wheel and the core dependencies, torch excepted."""
    light = [requirement for requirement in PROJECT["dependencies"] if not requirement.startswith("torch")]
    assert len(light) == len(PROJECT["dependencies"]) - 1
    return core_environment(tmp_path_factory.mktemp("light") / "environment", wheel, light)


@pytest.mark.processes
@pytest.mark.timeout(1200)
def test_the_wheel_holds_the_package_its_license_and_nothing_else(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    sources = {path.relative_to(ROOT / "src").as_posix() for path in (ROOT / "src" / "ups").rglob("*.py")}
    sources |= {p.relative_to(ROOT / "src").as_posix() for p in SHIPPED.rglob("*") if p.is_file()}
    assert sources <= set(names)
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert {name.split("/")[0].split("-")[0] for name in names} == {"ups", "universal_simulator"}


@pytest.mark.processes
@pytest.mark.timeout(1200)
def test_the_command_works_without_any_extra(environment: Path, tmp_path: Path) -> None:
    assert not list(environment.parent.glob("lib/*/site-packages/torch")), "torch must be absent here"
    assert "config" in run(environment / "ups", "--help", cwd=tmp_path)
    version = run(environment / "ups", "--version", cwd=tmp_path)
    assert re.fullmatch(r"ups \d+\.\d+\.\d+\S*\n", version)
    run(environment / "ups", "config", "check", ROOT / "recipes" / "tiny.yaml", cwd=tmp_path)


@pytest.mark.processes
@pytest.mark.timeout(1200)
def test_the_version_tells_what_each_missing_extra_would_add(environment: Path, tmp_path: Path) -> None:
    reported = run(environment / "ups", "--version", "--verbose", cwd=tmp_path)
    document = json.loads(run(environment / "ups", "--version", "--verbose", "--json", cwd=tmp_path))
    assert document["libraries"]["torch"] is None
    assert set(document["extras"]) == set(PROJECT["optional-dependencies"])
    for name, extra in document["extras"].items():
        assert extra["missing"], f"{name} is not installed here"
        assert re.search(rf"{name} +missing +\S", reported), reported


@pytest.mark.processes
@pytest.mark.timeout(1200)
def test_the_installed_package_says_what_was_asked_of_it(wheel: Path) -> None:
    (name,) = [name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".dist-info/METADATA")]
    metadata = zipfile.ZipFile(wheel).read(name).decode()
    assert "Name: universal-simulator" in metadata
    assert "License-Expression: Apache-2.0" in metadata
    assert "Requires-Python: >=3.11" in metadata
    assert "Requires-Dist: torch>=2.11" in metadata


def test_the_page_lists_exactly_the_extras_that_exist() -> None:
    listed = re.findall(r"^\| `\[([a-z]+)\]` \|", INSTALL_PAGE.read_text(), flags=re.MULTILINE)
    assert sorted(listed) == sorted(PROJECT["optional-dependencies"])


def test_the_page_names_the_packages_of_each_extra() -> None:
    rows = dict(re.findall(r"^\| `\[([a-z]+)\]` \|(.*)$", INSTALL_PAGE.read_text(), flags=re.MULTILINE))
    for extra, requirements in PROJECT["optional-dependencies"].items():
        for requirement in requirements:
            package = re.split(r"[\[<>=!~ ]", requirement)[0].lower()
            assert package in rows[extra].lower(), f"docs/install.md: [{extra}] does not name {package}"


def test_every_dependency_and_tool_is_pinned_for_the_checks() -> None:
    pins = [line for line in (ROOT / ".ci" / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    assert all(re.fullmatch(r"[A-Za-z0-9_.-]+==[A-Za-z0-9.]+", pin) for pin in pins), "plain pins: no paths, no hosts"
    pinned = {re.sub(r"[-_.]+", "-", pin.split("==")[0]).lower() for pin in pins}
    tested = [PROJECT["dependencies"], *PROJECT["optional-dependencies"].values()]
    for requirement in (requirement for group in tested for requirement in group):
        assert re.split(r"[\[<>=!~ ]", requirement)[0].lower() in pinned, f"{requirement} is not in .ci/constraints.txt"
