"""All stages in a chain, to one bundle: members, a gate, a network for steady tasks, and a card that says what each
stage brought."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import Tensor

import ups
from tests.support.mixture import MODELS, mixture_recipe, write_mixture
from ups.config.recipe import resolve
from ups.errors import BundleError
from ups.library.recipe import stage_alone
from ups.models.flow import STUDENT, trained_flow
from ups.run.scoring import score
from ups.run.trained import load_trained
from ups.training.checkpoint import read_weights
from ups.training.engine import Engine

pytestmark = [pytest.mark.processes, pytest.mark.timeout(1200)]

OPTIM = {"learning_rate": 5e-3}
TIME = {"tasks": ["wave1d"]}
STAGES: list[dict[str, Any]] = [
    {"type": "operator", "steps": 12, "loss": "nrmse", "optim": OPTIM, **TIME},
    {"type": "corrector", "kind": "flow", "steps": 8, **TIME},
    {"type": "distill", "steps": 4, **TIME},
    {"type": "steady", "steps": 8, "optim": OPTIM, "tasks": ["darcy2d"]},
]


def recipe(folder: Path, tasks: list[dict[str, Any]], name: str, **sections: Any) -> Path:
    document = mixture_recipe(folder / name, tasks, model=MODELS["multiscale"], stages=STAGES)
    document |= {"networks": {"steady": MODELS["multiscale"]}, "evaluate": {"max_trajectories": 2}} | sections
    path = folder / f"{name}.yaml"
    path.write_text(json.dumps(document))
    return path


def test_a_run_that_breaks_off_in_every_stage_ends_with_the_same_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ups.library.train.leave_bundle", lambda *_: None)
    short = [stage | {"steps": 4} for stage in STAGES]
    tasks = write_mixture(tmp_path)[::2]
    given = {"stages": short, "checkpoint": {"interval_steps": 2}, "evaluate": {"max_trajectories": 1}}
    whole = ups.fit(str(recipe(tmp_path, tasks, "whole", **given)), progress=False)
    broken = recipe(tmp_path, tasks, "broken", **given)
    update, left = Engine._update, {6, 8, 11, 16}  # in the second step of the flow, at its end, and so on

    def breaks(engine: Engine, finite: Tensor, number: int) -> None:
        if number in left:
            left.remove(number)
            raise RuntimeError("broke off")
        update(engine, finite, number)

    monkeypatch.setattr(Engine, "_update", breaks)
    for _ in range(4):
        with pytest.raises(RuntimeError, match="broke off"):
            ups.fit(str(broken), progress=False)
    again = ups.fit(str(broken), progress=False)
    assert not left
    first, second = (read_weights(run.path / "checkpoints/step_00000016") for run in (whole, again))
    assert first.keys() == second.keys()
    assert "stepper.networks.flow.scale" in first
    assert [name for name in first if not bool((first[name] == second[name]).all())] == []


def test_the_whole_chain_ends_in_one_bundle_that_says_what_each_stage_brought(tmp_path: Path) -> None:
    path = recipe(tmp_path, write_mixture(tmp_path)[::2], "stack")
    run = ups.fit(str(path), progress=False)
    simulator = ups.Simulator.load(run.path / "bundle", device="cpu")
    assert simulator.is_ensemble
    rows = {(row["stage"], row["task"], row["against"]) for row in load_trained(str(run.path)).stages}
    assert rows == {
        ("operator", "wave1d", "persistence"),
        ("corrector (flow)", "wave1d", "operator alone"),
        ("distill", "wave1d", "operator alone"),
        ("distill", "wave1d", "its teacher"),
        ("steady", "darcy2d", "training mean"),
    }
    for words in ("What each stage brought", "corrector (flow)"):
        assert words in simulator.card

    wave = np.sin(2 * np.pi * np.arange(16) / 16)[None]
    members = simulator.rollout(wave, 3, {"speed": 1.0}, task="wave1d", members=8)
    assert members["u"].shape == (8, 3, 16)
    with pytest.raises(BundleError, match="not trained on task 'darcy2d'"):
        simulator.rollout(static=np.ones((1, 8, 8)), task="darcy2d", members=2)

    trained = load_trained(str(run.path / "bundle"), recipe_data=True)
    assert trained_flow(trained.stepper) == STUDENT
    results = score(trained, max_trajectories=2)
    assert ["ensemble" in result for result in results] == [True, False]

    # One stage can be trained again alone: it takes all networks from the run.
    alone = stage_alone(resolve(path), run.path, "distill", [])
    again = load_trained(str(ups.fit(alone.recipe, progress=False).path))
    assert set(again.stepper.networks) == {"operator", "flow", "student", "steady"}

    # Fine-tuning continues with the stage that trained what predicts the task of the data, and with its network.
    for task, stage in (("wave1d", "operator"), ("darcy2d", "steady")):
        limits = {"stages__0__steps": 1, "stages__0__budget_seconds": None, "run__dir": str(tmp_path / f"tuned-{task}")}
        tuned = ups.finetune_recipe(run.path, tmp_path / f"{task}.zarr", **limits)
        assert [one.type for one in tuned.stages] == [stage]
        found = ups.fit(tuned, progress=False)
        taken = json.loads((found.path / "start" / "0.json").read_text())
        assert (taken["new"], found.state) == ([], "completed")
