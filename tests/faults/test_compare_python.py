"""`ups doctor RECIPE --compare-python`: the same steps in another environment, and a planted difference in it."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.support.faults.doctor_data import write_data, write_recipe
from tests.support.faults.planted import planted

# A Python of another environment that has ups; these tests need one, and making one takes minutes.
VARIABLE = "UPS_TEST_OTHER_PYTHON"
OTHER = os.environ.get(VARIABLE, "")

pytestmark = [
    pytest.mark.processes,
    pytest.mark.long,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(not OTHER, reason=f"set {VARIABLE} to the Python of another environment with ups"),
]


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small recipe of two tasks."""
    folder = tmp_path_factory.mktemp("compare")
    write_data(folder)
    path = write_recipe(folder)
    document = yaml.safe_load(path.read_text())
    document["engine"] = {"device": "cpu"}
    path.write_text(json.dumps(document))
    return path


def compared(recipe: Path, python: str, folder: Path) -> tuple[int, dict[str, object]]:
    """Exit code and report of the command."""
    command = [sys.executable, "-m", "ups.cli.main", "doctor", str(recipe), "--ranks", "1", "--steps", "3"]
    command += ["--compare-python", python, "--json"]
    environment = {**os.environ, "TMPDIR": str(folder)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=1100, cwd=folder, env=environment)
    return done.returncode, json.loads(done.stdout)


def test_another_environment_gives_the_same_numbers(recipe: Path, tmp_path: Path) -> None:
    code, answer = compared(recipe, OTHER, tmp_path)
    assert (code, answer["ok"], answer["first_difference"]) == (0, True, None), answer
    assert len(answer["steps"]) == 3  # type: ignore[arg-type]
    assert answer["there"]["torch"]  # type: ignore[index]


def test_a_planted_difference_is_found_at_its_step(recipe: Path, tmp_path: Path) -> None:
    wrapped = tmp_path / "python"
    words = [f"{name}={value}" for name, value in planted("other_arithmetic").items()]
    wrapped.write_text(f'#!/bin/sh\nexec env {shlex.join(words)} {OTHER} "$@"\n')
    wrapped.chmod(0o755)
    code, answer = compared(recipe, str(wrapped), tmp_path)
    first = answer["first_difference"]
    assert code == 6, answer
    assert isinstance(first, dict)
    assert first["step"] == 2
    assert "stepper.networks.operator.decoder" in str(first.get("tensor") or first["quantity"])
