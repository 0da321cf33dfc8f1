"""`ups launch skypilot` and `ups launch vast`: a dry run shows all and starts nothing, and limits must be given."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.unit.launch.test_job import machine
from ups.cli import main as front
from ups.launch.vast import MAX_CHARACTERS

LIMITS = ["--max-price", "0.5", "--max-hours", "2"]
SHARED = ["--install", "universal-simulator", "--mirror", "s3://bucket/waves", "--secret", "AWS_SECRET_ACCESS_KEY"]
OWN = {"skypilot": ["--gpus", "A100:1", "--spot"], "vast": ["--gpus", "RTX_4090:1", "--image", "pytorch/pytorch"]}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    for name in ("WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "VAST_API_KEY"):
        monkeypatch.setenv(name, f"canary-{name}")
    (tmp_path / "waves.yaml").write_text(machine().recipe)
    return tmp_path


@pytest.mark.parametrize("cloud", ["skypilot", "vast"])
def test_a_dry_run_shows_what_would_be_sent_and_starts_nothing(
    cloud: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["launch", cloud, "waves.yaml", *LIMITS, *SHARED, *OWN[cloud], "--dry-run"]
    assert front.run(words) == 0
    shown = capsys.readouterr().out
    assert "--set checkpoint.mirror=s3://bucket/waves" in shown
    assert "timeout --foreground" in shown
    assert "canary" not in shown
    assert front.run([*words, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    if cloud == "skypilot":
        assert document["task"]["resources"]["max_hourly_cost"] == 0.5
        assert document["task"]["secrets"] == {"AWS_SECRET_ACCESS_KEY": None, "WANDB_API_KEY": None}
        assert document["command"][:3] == ["sky", "jobs", "launch"]
    else:
        assert [call[1] for call in document["calls"]] == [
            *("show", "search", "create", "show", "logs", "copy", "show", "destroy")
        ]
        assert "max_hours" not in document["onstart"]
        assert "-ge" in document["watch"]
    assert [path.name for path in folder.iterdir()] == ["waves.yaml"]


def test_a_recipe_with_eleven_tasks_fits_into_the_start_script_of_vast(capsys: pytest.CaptureFixture[str]) -> None:
    recipe = Path(__file__).parents[3] / "recipes" / "pdebench_11.yaml"
    shared = [*SHARED, "--secret", "AWS_ACCESS_KEY_ID", "--env", "AWS_REGION=eu-central-1"]
    assert front.run(["launch", "vast", str(recipe), *LIMITS, *shared, *OWN["vast"], "--dry-run", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["onstart"]) <= MAX_CHARACTERS


@pytest.mark.parametrize("cloud", ["skypilot", "vast"])
@pytest.mark.parametrize("option", ["--max-price", "--max-hours"])
def test_without_a_limit_nothing_is_rented(cloud: str, option: str) -> None:
    at = LIMITS.index(option)
    limits = LIMITS[:at] + LIMITS[at + 2 :]
    assert front.run(["launch", cloud, "waves.yaml", *limits, *SHARED, *OWN[cloud]]) == 2


def test_a_machine_that_disappears_needs_a_mirror(capsys: pytest.CaptureFixture[str]) -> None:
    assert front.run(["launch", "vast", "waves.yaml", *LIMITS, "--install", "x", *OWN["vast"]]) == 2
    assert front.run(["launch", "skypilot", "waves.yaml", *LIMITS, "--install", "x", *OWN["skypilot"]]) == 3
    assert "--mirror s3://bucket/prefix" in capsys.readouterr().err
