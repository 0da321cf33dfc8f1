"""A completed run is left alone, and is trained longer when its last stage is given more."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

import ups
from ups.cli.main import run as command
from ups.config.recipe import dump_recipe
from ups.errors import ConfigError
from ups.record.checkpoints import latest_verified, read_progress

NOT_BETTER = "wave1d: this simulator is not better than the training mean: rollout "
STORED = Path(__file__).parents[2] / "integration" / "runs"


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ups.Recipe:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(STORED / "data", "data")
    return ups.load_recipe(
        STORED / "v1", run__name="small", stages__0__steps=4, engine__threads=1, tracking__log_interval_steps=1
    )


def times(run: ups.Run) -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in run.path.rglob("*") if path.is_file()}


def test_a_completed_run_is_said_to_be_so_and_not_scored_again(
    recipe: ups.Recipe, capsys: pytest.CaptureFixture[str]
) -> None:
    run = ups.fit(recipe, progress=False)
    before = times(run)
    assert command(["train", "runs/small"]) == 0
    first, second, last = capsys.readouterr().out.splitlines()
    assert first == "runs/small is completed: step 4, verified; its bundle is runs/small/bundle"
    assert second == "to train it longer: ups train runs/small --set stages.0.steps=MORE"
    assert last.startswith(f"WARNING: {NOT_BETTER}")
    changed = {name for name, time in times(run).items() if before.get(name) != time}
    assert {Path(name).name for name in changed} <= {"config.yaml", "env.json", ".supervisor.lock"}
    assert ups.fit(recipe).state == "completed"
    assert "stages__0__steps=MORE" in capsys.readouterr().out


def test_a_completed_run_whose_bundle_is_gone_or_damaged_gets_it_again(recipe: ups.Recipe) -> None:
    run = ups.fit(recipe, progress=False)
    with (run.path / "bundle" / "model.safetensors").open("r+b") as file:
        file.write(b"x")
    ups.fit(recipe, progress=False)
    run.simulator("cpu")


def test_a_completed_run_is_trained_longer_and_its_history_says_so(
    recipe: ups.Recipe, capsys: pytest.CaptureFixture[str]
) -> None:
    short = ups.fit(recipe, progress=False)
    losses = short.metrics()["loss"].tolist()
    longer = ups.fit(recipe, progress=False, stages__0__steps=7)
    assert (longer.state, longer.checkpoints[-1]) == ("completed", 7)
    assert longer.metrics()["loss"].tolist()[:4] == losses
    assert len(longer.metrics()) == 7
    (extension,) = longer.document["extensions"]
    assert {key: extension[key] for key in ("step", "field", "from", "to")} == {
        "step": 4, "field": "stages.0.steps", "from": 4, "to": 7,
    }  # fmt: skip
    info = json.loads((longer.path / "bundle" / "bundle.json").read_text())
    assert info["provenance"]["step"] == "7"
    assert command(["status", "small"]) == 0
    assert "extended at step 4: stages.0.steps 4 -> 7" in capsys.readouterr().out
    assert ups.fit(recipe, progress=False, stages__0__steps=7).checkpoints[-1] == 7  # completed again
    with pytest.raises(ConfigError, match=r"longer, and not shorter: stages\.0\.steps was 7 and is 5"):
        ups.fit(recipe, progress=False, stages__0__steps=5)
    again = ups.fit(recipe, progress=False, stages__0__steps=9)
    assert [one["to"] for one in again.document["extensions"]] == [7, 9]


def test_a_longer_run_that_is_interrupted_goes_on(recipe: ups.Recipe) -> None:
    whole = ups.fit(recipe, progress=False, run__dir="runs/whole")
    whole = ups.fit(recipe, progress=False, run__dir="runs/whole", stages__0__steps=9)
    ups.fit(recipe, progress=False)
    cut = ups.fit(recipe, progress=False, stages__0__steps=9, engine__max_seconds=1e-6)
    assert (cut.state, cut.checkpoints[-1] < 9) == ("preempted", True)
    done = ups.fit(recipe, progress=False, stages__0__steps=9)
    assert done.state == "completed"
    assert done.metrics()["loss"].tolist() == whole.metrics()["loss"].tolist()


def test_a_run_by_time_is_given_more_time(recipe: ups.Recipe) -> None:
    changes = {"stages__0__steps": None, "stages__0__budget_seconds": 0.5}
    first = ups.fit(recipe, progress=False, **changes)
    # A step that the machine delays may use much more than its budget.
    used = read_progress(latest_verified(first.path) or first.path)["progress"]["budget_used_seconds"]
    second = ups.fit(recipe, progress=False, **changes | {"stages__0__budget_seconds": used + 1.0})
    assert second.state == "completed"
    (extension,) = second.document["extensions"]
    assert second.checkpoints[-1] > extension["step"] > 0
    assert first.path == second.path


def test_a_run_that_is_not_finished_is_not_made_longer(recipe: ups.Recipe) -> None:
    ups.fit(recipe, progress=False, engine__max_seconds=1e-6)
    with pytest.raises(ConfigError, match="not completed") as caught:
        ups.fit(recipe, progress=False, stages__0__steps=9)
    assert "finish first" in caught.value.hint


@pytest.mark.processes
@pytest.mark.timeout(600)
def test_the_last_line_says_how_many_steps_were_done_and_that_the_model_is_not_better(
    recipe: ups.Recipe, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "recipe.yaml").write_text(dump_recipe(recipe))
    assert command(["train", "recipe.yaml"]) == 0
    last = capfd.readouterr().out.splitlines()[-1]
    assert last.startswith(f"wrote runs/small/bundle after 4 steps; WARNING: {NOT_BETTER}")
    assert command(["export", "bundle", "small", "--out", "elsewhere"]) == 0
    assert capfd.readouterr().out.splitlines()[-1] == last.replace("runs/small/bundle", "elsewhere")
    card = (tmp_path / "elsewhere" / "card.md").read_text()
    assert "Training took 4 steps." in card
    assert f"**Warning:** {NOT_BETTER}" in card


@pytest.mark.processes
@pytest.mark.timeout(600)
def test_train_reports_as_json(recipe: ups.Recipe, capfd: pytest.CaptureFixture[str]) -> None:
    ups.fit(recipe, progress=False, engine__max_seconds=1e-6)
    assert command(["train", "runs/small", "--json", "--set", "engine.max_seconds=null"]) == 0
    printed = capfd.readouterr()
    facts = json.loads(printed.out)
    assert (facts["state"], facts["exit_code"], facts["step"], facts["faults"]) == ("completed", 0, 4, [])
    assert facts["results"][0]["task"] == "wave1d"
    assert Path(facts["bundle"]).is_dir()
    assert "VERDICT state=completed" in printed.err
    assert [text.startswith(NOT_BETTER) for text in facts["warnings"]] == [True]
    assert command(["train", "runs/small", "--json"]) == 0
    again = json.loads(capfd.readouterr().out)
    assert (again["completed_before"], again["results"], again["bundle"]) == (True, None, facts["bundle"])
