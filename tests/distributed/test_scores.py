"""Scores do not depend on how many ranks computed them: a real model, real tasks, ranks joined over gloo."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.mixture import COUNTS, mixture_recipe, write_mixture
from ups.config.schema import Recipe
from ups.data.normalize import compute_statistics
from ups.data.open import open_task
from ups.distributed.agreement import from_all
from ups.distributed.runtime import Runtime
from ups.evaluation.accumulate import Accumulator
from ups.evaluation.rollout import RolloutPlan, references, score_task
from ups.models.build import build_model
from ups.testing.ranks import launch

pytestmark = [pytest.mark.processes, pytest.mark.timeout(600)]


def score(arguments: dict[str, Any]) -> dict[str, Any]:
    """Scores of an untrained model and its references on every task, each rank its share, then joined on all ranks."""
    import torch

    recipe = Recipe.model_validate(mixture_recipe(Path(arguments["folder"]), arguments["tasks"]))
    readers = [open_task(task) for task in recipe.data.tasks]
    statistics = {reader.task.name: compute_statistics(reader) for reader in readers}
    model = build_model(recipe.model, [r.task for r in readers], statistics, recipe.data.context_frames, seed=3)
    found: dict[str, Any] = {}
    with Runtime.start(recipe.engine) as runtime:
        for reader in readers:
            plan = RolloutPlan.whole(reader, recipe.data.context_frames)
            predictors = {"model": model.double().eval(), **references(reader, plan)}
            common = {"split": "train", "batch_size": arguments["batch_size"], "dtype": torch.float64}
            for kind in ("rollout", "one_step"):
                mine = score_task(predictors, reader, runtime.place, plan, kind=kind, **common)
                for name, accumulator in mine.items():
                    parts = from_all(accumulator, runtime.control_group)
                    found[f"{reader.task.name} {kind} {name}"] = _plain(parts[0].merge(parts[1:]))
    return found


def _plain(whole: Accumulator) -> dict[str, Any]:
    return {
        "summary": whole.summary(),
        "curves": {name: whole.curve(name).flatten().tolist() for name in whole.sums},
        "spectra": [whole.spectra(of).flatten().tolist() for of in ("prediction", "truth")],
        "rows": {str(t): row["nrmse"] for t, row in sorted(whole.rows.items())},
    }


def test_two_and_three_ranks_score_as_one_does(tmp_path: Path) -> None:
    arguments = {"folder": str(tmp_path), "tasks": write_mixture(tmp_path)}
    alone = launch(score, 1, arguments=arguments | {"batch_size": 4})[0]
    assert len(alone) == 16, "three tasks, two kinds, their predictors"
    for ranks in (2, 3):
        joined = launch(score, ranks, arguments=arguments | {"batch_size": 1})
        assert all(other == joined[0] for other in joined[1:]), "every rank holds the same scores"
        assert joined[0].keys() == alone.keys()
        for name, whole in alone.items():
            assert joined[0][name]["summary"]["num_samples"] == COUNTS["train"]
            _assert_equal(joined[0][name], whole, name)


def _assert_equal(found: Any, expected: Any, where: str) -> None:
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            _assert_equal(found[key], value, f"{where} {key}")
    elif isinstance(expected, list):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            _assert_equal(one, other, where)
    else:
        assert found == pytest.approx(expected, rel=1e-12, abs=1e-14), where
