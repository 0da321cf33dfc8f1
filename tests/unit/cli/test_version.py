"""`ups --version` says what is here, what is missing and what it would add, without importing any of it."""

from __future__ import annotations

import json
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

import ups
from ups.cli.main import run
from ups.run import software

PROJECT = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]


def test_the_version_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--version"]) == 0
    assert capsys.readouterr().out == f"ups {ups.__version__}\n"
    run(["--version", "--json"])
    assert json.loads(capsys.readouterr().out) == {"ups": ups.__version__}


def test_verbose_lists_libraries_and_every_extra(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--version", "--verbose"]) == 0
    text = capsys.readouterr().out
    assert metadata.version("torch") in text
    for extra, packages in software.extras().items():
        assert extra in text
        assert packages["adds"] in text
    run(["--version", "--verbose", "--json"])
    assert json.loads(capsys.readouterr().out)["libraries"]["torch"] == metadata.version("torch")


def test_every_extra_of_the_project_says_what_it_adds() -> None:
    assert set(PROJECT["optional-dependencies"]) <= set(software.WHAT_IT_ADDS)


def test_a_missing_extra_is_named_with_its_packages(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = software.installed_version
    monkeypatch.setattr(software, "installed_version", lambda name: None if name == "exponax" else real(name))
    run(["--version", "--verbose"])
    text = capsys.readouterr().out
    assert "reference solvers that make training data (needs exponax)" in text
    assert "pip install '.[" in text


def test_without_package_metadata_it_still_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(software, "DISTRIBUTION", "no-such-distribution")
    assert software.extras() == {}


def test_extras_of_extras_are_followed() -> None:
    assert "imageio-ffmpeg" in software._packages_of(software.DISTRIBUTION, "report")
