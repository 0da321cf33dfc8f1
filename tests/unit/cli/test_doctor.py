"""`ups doctor` takes a recipe file or a run directory, as its help says."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from ups.cli.doctor import doctor
from ups.config.recipe import resolve
from ups.doctor.examine import Examination

STORED = Path(__file__).parents[2] / "integration" / "runs"


@pytest.mark.parametrize("source", ["run", "run/config.yaml"])
def test_a_run_directory_is_examined_with_its_own_recipe(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(STORED / "v1", tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    seen: list[Examination] = []
    monkeypatch.setattr("ups.cli.doctor.examine", lambda run_checks, show: seen.append(run_checks) or [])
    doctor(source, ranks=2, set=["engine.threads=1"], json=False)
    assert seen[0].recipe_text == resolve("run/config.yaml", ["engine.threads=1"]).text
    expected = tmp_path / "run" if source == "run" else tmp_path / "runs" / "stored"
    assert seen[0].run_dir == expected
