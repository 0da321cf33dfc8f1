"""`ups doctor` takes a recipe file or a run directory, as its help says; and what a comparison says."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from ups.cli.doctor import doctor, show_comparison
from ups.config.recipe import resolve
from ups.doctor.examine import Examination
from ups.doctor.other_python import DATA_READ, Comparison

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


VERSIONS = {"torch": "2.13.0", "numpy": "2.4.6", "ups": "0.1.0", "ups_path": "/here/ups/__init__.py"}


@pytest.mark.parametrize(
    ("there", "first", "words"),
    [
        (
            {"numpy": "2.3.5"},
            {"quantity": "loss", "here": 0.5, "there": 0.25, "tensor": "a.weight"},
            [
                "loss is 0.5 here and 0.25 there; of the gradients, that of a.weight differs most",
                "give PY the numpy of here",
            ],
        ),
        (
            {"numpy": "2.3.5", "torch": "2.12.0"},
            {"quantity": "gradient norm", "here": 1.0, "there": 2.0},
            ["one after the other (numpy, torch)"],
        ),
        (
            {"ups_path": "/there/ups/__init__.py"},
            {"quantity": DATA_READ, "here": 4294967295, "there": 1},
            ["the data that was read has other bytes there", "from /there/ups/__init__.py there", "are the same"],
        ),
    ],
)
def test_what_to_change_depends_on_what_differs(
    there: dict[str, str], first: dict[str, Any], words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    comparison = Comparison(VERSIONS, VERSIONS | there, first={"stage": 0, "step": 2} | first)
    show_comparison(comparison, "PY")
    out = capsys.readouterr().out
    assert "differ first in step 2 of stage 0: " in out
    for one in words:
        assert one in out
