"""A model without noise becomes an ensemble, its bundle says so, and its stage can be trained alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

import ups
from tests.support.mixture import MODELS, mixture_recipe, write_mixture
from ups.config.recipe import resolve
from ups.errors import ConfigError
from ups.library.recipe import stage_alone
from ups.models.ensemble import has_members
from ups.run.scoring import score
from ups.run.trained import load_trained

pytestmark = [pytest.mark.processes, pytest.mark.timeout(600)]

OPERATOR = {"type": "operator", "steps": 30, "loss": "nrmse", "optim": {"learning_rate": 5e-3}}
CORRECTOR = {"type": "corrector", "kind": "ensemble", "steps": 20}


def recipe(folder: Path, tasks: list[dict[str, Any]], name: str, noise_size: int, *stages: dict[str, Any]) -> Path:
    model = MODELS["multiscale"] | {"noise_size": noise_size}
    document = mixture_recipe(folder / name, tasks, model=model, stages=list(stages))
    document["checkpoint"] = {"interval_steps": 5, "keep": 1}
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(document))
    return path


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return write_mixture(tmp_path_factory.mktemp("data"))[:2]


def test_stages_in_a_chain_end_in_a_bundle_that_is_an_ensemble(tmp_path: Path, tasks: list[dict[str, Any]]) -> None:
    path = recipe(tmp_path, tasks, "chain", 4, OPERATOR, CORRECTOR)
    run = ups.fit(str(path), progress=False)
    (validated,) = [row for row in run.rows() if any(name.endswith("/crps") for name in row)]
    assert validated["stage"] == 1
    simulator = ups.Simulator.load(run.path / "bundle", device="cpu")
    assert simulator.is_ensemble
    assert "It is an ensemble" in simulator.card
    results = score(load_trained(str(run.path)), max_trajectories=2)
    for result in results:
        found = result["ensemble"]
        assert found["members"] == 8
        assert found["num_trajectories"] == 2
        assert len(found["curves"]["crps"]) == result["protocol"]["num_steps"]
        assert sum(found["ranks"]) == pytest.approx(1.0)
        assert 0 < found["summary"]["crps"] <= found["summary"]["absolute_error"] * 1.2

    # The operator's last checkpoint stays although one is kept, so that what follows it can be trained again.
    alone = stage_alone(resolve(path), run.path, "corrector", ["run.seed=3"])
    assert alone.recipe.run.name == "chain-corrector"
    again = ups.fit(alone.recipe, progress=False)
    assert again.path == Path(f"{run.path}-corrector")
    assert json.loads((again.path / "start/0.json").read_text())["new"] == []
    assert has_members(load_trained(str(again.path)).stepper)
    with pytest.raises(ConfigError, match="no stage 'student'"):
        stage_alone(resolve(path), run.path, "student", [])


def test_a_model_without_noise_becomes_an_ensemble(tmp_path: Path, tasks: list[dict[str, Any]]) -> None:
    single = ups.fit(str(recipe(tmp_path, tasks, "single", 0, OPERATOR)), progress=False)
    assert not ups.Simulator.load(single.path / "bundle", device="cpu").is_ensemble
    stage = CORRECTOR | {"start_from": str(single.path)}
    run = ups.fit(str(recipe(tmp_path, tasks, "members", 4, stage)), progress=False)
    new = json.loads((run.path / "start/0.json").read_text())["new"]
    assert sorted(new) == ["condition.noise.sizes.table", "condition.noise.weight"]
    assert ups.Simulator.load(run.path / "bundle", device="cpu").is_ensemble
