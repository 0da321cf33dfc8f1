"""Scores on a grid that is not uniform are those of the domain, not of its points; what has no meaning is left out."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from ups.config.model import FnoConfig, MultiscaleConfig
from ups.data.inspect import card_lines, make_card
from ups.data.open import check_conserved
from ups.data.validate import validate_paths
from ups.errors import ConfigError, DataError
from ups.evaluation import metrics
from ups.evaluation.figures import examples
from ups.evaluation.report import _details, _spectra
from ups.evaluation.results import task_result
from ups.evaluation.rollout import RolloutPlan, references, score_task
from ups.formats.base import Subsampling
from ups.formats.store_writer import StoreWriter
from ups.formats.zarr_store import StoreReader
from ups.models.stepper import persistence
from ups.spec.batch import RankInfo
from ups.spec.grid import point_weights
from ups.spec.task import AxisSpec, FieldSpec, TaskSpec

TASK = TaskSpec("layer", (FieldSpec("u"),), (AxisSpec("x", ("wall", "open")),), dt=0.1, conserved=("u",))
X = np.linspace(0, 1, 81) ** 2  # many points at the wall


def fields(x: np.ndarray) -> np.ndarray:
    """(T, 1, X) with an integral that stays: a wave with a whole number of periods."""
    times = np.arange(4)[:, None]
    return (1 + np.sin(2 * np.pi * (x + 0.15 * times)))[:, None].astype(np.float32)


def written(path: Path, x: np.ndarray) -> StoreReader:
    with StoreWriter(path, TASK, (x,), 4) as writer:
        for split, sign in (("train", 1.0), ("test", 0.9)):
            writer.append(split, state=sign * fields(x))
    return StoreReader(path)


@pytest.mark.parametrize("name", ["trmse", "nrmse", "vrmse", "rmse", "crmse", "drift"])
def test_scores_do_not_depend_on_where_the_points_stand(tmp_path: Path, name: str) -> None:
    even = np.linspace(0, 1, 801)
    scores = {}
    for label, x in (("uneven", X), ("even", even)):
        reader = written(tmp_path / f"{label}.zarr", x)
        plan = RolloutPlan.whole(reader, 1)

        def wrong(batch: torch.Tensor, x: np.ndarray = x) -> torch.Tensor:
            return batch.state[:, -1] + torch.from_numpy(0.3 * np.exp(-5 * x)).float()

        scores[label] = score_task({"model": wrong}, reader, RankInfo(0, 1), plan)["model"].summary()[name]
    assert scores["uneven"] == pytest.approx(scores["even"], rel=0.01)


def test_the_correlation_is_weighted() -> None:
    weights = torch.from_numpy(point_weights(TASK.axes, (X,)))
    p, y = (torch.from_numpy(fields(X))[None].double() + s * torch.from_numpy(X) for s in (0.0, 0.5))
    w = (weights / weights.sum()).numpy()
    for t in range(4):
        a, b = p[0, t, 0].numpy(), y[0, t, 0].numpy()
        a, b = a - (w * a).sum(), b - (w * b).sum()
        expected = (w * a * b).sum() / np.sqrt((w * a * a).sum() * (w * b * b).sum())
        assert float(metrics.correlation(p, y, weights)[0, t]) == pytest.approx(expected)


def test_there_are_no_spectra_and_the_page_does_without(tmp_path: Path) -> None:
    reader = written(tmp_path / "a.zarr", X)
    plan = RolloutPlan.whole(reader, 1)
    predictors = references(reader, plan)
    scores = score_task(predictors, reader, RankInfo(0, 1), plan)
    steps = score_task(predictors, reader, RankInfo(0, 1), plan, kind="one_step")
    result = task_result(reader, plan, "test", scores, "persistence", steps)
    assert result["spectrum_steps"] == []
    assert not any(key.startswith("frmse") for key in result["predictors"]["persistence"]["summary"])
    assert _spectra(result) == []
    assert [key for _, key in _details(result)] == ["crmse", "brmse", "max_error"]


def test_validation_measures_the_integral(tmp_path: Path) -> None:
    written(tmp_path / "a.zarr", X)
    assert validate_paths(tmp_path / "a.zarr", drift_tolerance=5e-3).counts == {}


def test_what_would_be_wrong_is_refused(tmp_path: Path) -> None:
    reader = written(tmp_path / "a.zarr", X)
    with pytest.raises(ConfigError, match="not equally spaced along x"):
        check_conserved(MultiscaleConfig(), reader)
    check_conserved(MultiscaleConfig(conserve=False), reader)
    check_conserved(FnoConfig(), reader)
    check_conserved(MultiscaleConfig(), written(tmp_path / "even.zarr", np.linspace(0, 1, 81)))
    with pytest.raises(DataError, match="would not keep integrals"):
        StoreReader(tmp_path / "a.zarr", Subsampling(space_stride=3, antialias=True))


def test_pictures_are_drawn_on_equal_distances(tmp_path: Path) -> None:
    reader = written(tmp_path / "a.zarr", X)
    (example,) = examples(persistence, reader, RolloutPlan.whole(reader, 1), [0])
    np.testing.assert_allclose(example.coordinates[0], np.linspace(0, 1, 81))
    assert example.truth is not None
    np.testing.assert_allclose(example.truth[0], 0.9 * fields(example.coordinates[0])[1], atol=3e-3)


def test_two_ends_come_back_from_a_store(tmp_path: Path) -> None:
    reader = written(tmp_path / "a.zarr", X)
    assert reader.task.axes[0].ends == ("wall", "open")
    assert reader.task == replace(TASK, axes=(AxisSpec("x", ("wall", "open")),))


def test_the_card_says_it(tmp_path: Path) -> None:
    lines = dict(card_lines(make_card(written(tmp_path / "a.zarr", X), ["a.zarr"])))
    assert lines["axis x"] == "81 points, 0 to 1, wall to open, not equally spaced"
