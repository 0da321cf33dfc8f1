"""A metric that a script registers is in scores.json, report, comparison and gate: nothing else has to be edited."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import ups
from ups.cli.eval import show
from ups.config.schema import GateCondition
from ups.errors import ConfigError
from ups.registry import METRICS
from ups.run.gate import judge, read_results

STORED = Path(__file__).parents[2] / "integration" / "runs"


@pytest.fixture
def worst() -> Iterator[None]:
    @METRICS.register("worst")
    def worst(prediction: torch.Tensor, truth: torch.Tensor) -> torch.Tensor:
        return (prediction - truth).abs().flatten(start_dim=3).amax(dim=3)

    @METRICS.register("hits")
    def hits(prediction: torch.Tensor, truth: torch.Tensor) -> torch.Tensor:
        return ((prediction - truth).abs() < 0.1).double().flatten(start_dim=3).mean(dim=3)

    worst.heading = "worst point"  # type: ignore[attr-defined]
    hits.higher_is_better = True  # type: ignore[attr-defined]
    yield
    METRICS.unregister("worst")
    METRICS.unregister("hits")


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[ups.Run]:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(STORED / "data", "data")
    recipe = ups.load_recipe(STORED / "v1", stages__0__steps=2, engine__threads=1)
    return [ups.fit(recipe, progress=False, run__name=name, run__seed=seed) for seed, name in enumerate(("a", "b"))]


def test_an_added_metric_is_wherever_scores_are(
    worst: None, runs: list[ups.Run], capsys: pytest.CaptureFixture[str]
) -> None:
    scored = [ups.evaluate(run) for run in runs]
    for scores in scored:
        scores.write(page=True)
    table = scored[0].table().set_index("score")
    assert {"worst point", "hits"} <= set(table.index)
    stored: dict[str, Any] = json.loads((runs[0].path / "report" / "scores.json").read_text())["results"][0]
    summaries = {name: predictor["summary"] for name, predictor in stored["predictors"].items()}
    assert table.loc["worst point", "model"] == pytest.approx(summaries["model"]["worst"])
    others = {name: summary["hits"] for name, summary in summaries.items() if name != "model"}
    assert table.loc["hits", "reference"] == pytest.approx(max(others.values())), "more hits are better"
    page = (runs[0].path / "report" / "index.html").read_text()
    assert ">worst point</th>" in page
    assert ">hits</th>" in page
    _check_comparison(runs, capsys)
    value = summaries["model"]["worst"]
    for limit, holds in ((value * 1.01, True), (value * 0.99, False)):
        condition = GateCondition(metric="worst", at_most=limit)
        (judged,) = judge([condition], read_results(runs[0].path / "report" / "scores.json"))
        assert judged.holds == holds


def _check_comparison(runs: list[ups.Run], capsys: pytest.CaptureFixture[str]) -> None:
    """Scores that were kept are compared in a process that does not know the metric."""
    METRICS.unregister("worst")
    try:
        comparison = ups.compare(*runs)
        assert {"worst point", "hits"} <= set(comparison.table()["score"])
        show(comparison, "page", json=False)
        assert "worst point" in capsys.readouterr().out
        assert "worst point" in Path("page/index.html").read_text()
    finally:
        METRICS.register("worst")(lambda prediction, truth: None)


def test_a_gate_refuses_a_metric_that_nobody_has_registered() -> None:
    with pytest.raises(ValueError, match="there is no metric of this name"):
        GateCondition(metric="worst", at_most=1.0)
    with pytest.raises(ConfigError):
        METRICS.factory("worst")
