"""`ups launch kubernetes`: a manifest on standard output, of a recipe that the pods see."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from tests.unit.launch.test_job import machine
from ups.cli import main as front

OPTIONS = ["--image", "registry.example.org/ups:1.0", "--claim", "shared", "--hosts", "2"]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("WANDB_API_KEY", "canary")
    for name in ("work/waves.yaml", "elsewhere.yaml"):
        (tmp_path / name).write_text(machine().recipe)
    return tmp_path / "work"


def test_a_job_is_the_default_and_a_jobset_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert front.run(["launch", "kubernetes", "waves.yaml", *OPTIONS]) == 0
    shown = capsys.readouterr().out
    assert [one["kind"] for one in yaml.safe_load_all(shown)] == ["Service", "Job"]
    assert "canary" not in shown
    assert front.run(["launch", "kubernetes", "waves.yaml", *OPTIONS, "--jobset"]) == 0
    (jobset,) = yaml.safe_load_all(capsys.readouterr().out)
    assert (jobset["apiVersion"], jobset["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    assert front.run(["launch", "kubernetes", "waves.yaml", *OPTIONS, "--jobset", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == [jobset]


def test_what_the_pods_would_lack_is_said(caplog: pytest.LogCaptureFixture) -> None:
    words = ["launch", "kubernetes", "waves.yaml", *OPTIONS]
    assert front.run([*words, "--set", "data.tasks.0.path=/elsewhere/advection1d.zarr"]) == 0
    assert "/elsewhere/advection1d.zarr: the pods see only what is below /work" in caplog.text
    assert "the recipe refers to WANDB_API_KEY: --secret NAME" in caplog.text
    caplog.clear()
    assert front.run([*words, "--secret", "keys", "--set", "run.dir=/work/runs/waves"]) == 0
    assert caplog.text == ""


def test_the_recipe_is_named_as_the_pods_see_it(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert front.run(["launch", "kubernetes", str(folder / "waves.yaml"), *OPTIONS]) == 0
    assert "ups train waves.yaml --ranks 2" in " ".join(capsys.readouterr().out.split())
    assert front.run(["launch", "kubernetes", "../elsewhere.yaml", *OPTIONS]) == 3
    assert "which is all that the pods see" in capsys.readouterr().err
