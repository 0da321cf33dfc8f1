"""What the stored scores of a bundle say about using it, whatever its age and whoever wrote it."""

from __future__ import annotations

from typing import Any

import pytest

from ups.inference.stored_scores import TOO_SHORT, bundle_warnings, not_better


def scores(model: Any, reference: Any, verdict: str | None = None, key: str = "trmse") -> dict[str, Any]:
    """Scores of one task, with the verdict of its headline or, as earlier versions wrote them, without."""
    result: dict[str, Any] = {"predictors": {"model": {key: model}, "training mean": {key: reference}}}
    heading = {"trmse": "rollout", "vrmse_median": "median VRMSE", "one_step_trmse": "one step"}[key]
    if verdict is not None:
        result["headline"] = [{"score": heading, "model": model, "reference": reference, "verdict": verdict}]
    return {"waves": result}


@pytest.mark.parametrize(
    ("stored", "words"),
    [
        (scores(0.5, 0.4, "not better than the training mean"), "not better than the training mean: rollout 0.5 (0.4)"),
        (scores(0.5, 0.4, "worse than persistence"), "worse than persistence: rollout 0.5 (0.4)"),
        (
            scores(0.39, 0.4, "not significantly better than persistence"),
            "not significantly better than persistence: rollout 0.39 (0.4)",
        ),
        (scores("inf", 0.4, "worse than persistence"), "worse than persistence: rollout inf (0.4)"),
        (
            scores(1.1, 1.0, "not better than the training mean", "vrmse_median"),
            "not better than the training mean: median VRMSE 1.1 (1)",
        ),
        (scores(0.5, 0.4), "not better than the best reference: rollout 0.5 (0.4)"),
        (scores(0.5, 0.5, key="one_step_trmse"), "not better than the best reference: one step 0.5 (0.5)"),
    ],
)
def test_a_task_that_is_not_better_than_a_baseline_says_on_which_scores(stored: dict[str, Any], words: str) -> None:
    assert not_better(stored, "waves") == f"this simulator is {words}"
    assert bundle_warnings(stored, {}) == [f"waves: this simulator is {words}"]


def test_scores_with_one_verdict_stand_together() -> None:
    both, other = scores(0.5, 0.4, "worse than persistence"), scores(0.3, 0.2, "not better than it", "one_step_trmse")
    result: dict[str, Any] = {"headline": both["waves"]["headline"] + other["waves"]["headline"], "predictors": {}}
    for name in ("model", "training mean"):
        result["predictors"][name] = both["waves"]["predictors"][name] | other["waves"]["predictors"][name]
    words = "this simulator is not better than it: one step 0.3 (0.2) and worse than persistence: rollout 0.5 (0.4)"
    assert not_better({"waves": result}, "waves") == words


@pytest.mark.parametrize(
    "stored",
    [
        scores(0.1, 0.4, "better than the training mean"),
        scores(0.1, 0.4),
        scores(0.1, 0.4, "not significantly better than persistence (too few trajectories to tell)"),
        scores(0.1, 0.4, "better than persistence, significance not known"),
        {},
        {"waves": None},
        {"waves": {"predictors": [1], "headline": {"score": "rollout"}}},
        {"waves": {"predictors": {"model": {"trmse": "?"}, "x": {"trmse": 1}}, "headline": [3, None, {}]}},
        {"waves": {"predictors": {"model": {"trmse": True}}, "headline": None}},
    ],
)
def test_a_better_task_and_what_cannot_be_known_say_nothing(stored: dict[str, Any]) -> None:
    assert not_better(stored, "waves") == ""
    assert bundle_warnings(stored, {}) == []


def test_only_the_task_in_question_is_judged_and_control_characters_are_escaped() -> None:
    stored = scores(0.5, 0.4, "worse than \x1b[2Jpersistence") | {"flow\x07": scores(0.5, 0.4)["waves"]}
    assert not_better(stored, "other") == ""
    assert all(text.isprintable() for text in bundle_warnings(stored, {TOO_SHORT: "cut\x07 short"}))
    assert len(bundle_warnings(stored, {TOO_SHORT: "cut short"})) == 3
