"""A score is next to its best reference, and is called better only if that is no accident."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from ups.evaluation.comparison import Scored, compare
from ups.evaluation.results import SCORES, headlines
from ups.run.scoring import score_lines

HARDNESS = np.random.default_rng(0).uniform(0.5, 1.5, 16)


def predictor(errors: np.ndarray, one_step: float, decayed: float = 0.0) -> dict[str, Any]:
    """Rollout errors of each trajectory; decayed: added to the nRMSE of the first, whose frames are nearly 0."""
    nrmse = errors + decayed * (np.arange(len(errors)) == 0)
    rows = {
        str(t): {"trmse": [e], "nrmse": [n], "vrmse": [n], "one_step_trmse": [one_step * h]}
        for t, (e, n, h) in enumerate(zip(errors, nrmse, HARDNESS, strict=False))
    }
    summary = {"one_step_trmse": one_step * HARDNESS[: len(errors)].mean(), "trmse": errors.mean()}
    summary |= {"nrmse": nrmse.mean(), "vrmse": nrmse.mean()}
    summary |= {"nrmse_median": float(np.median(nrmse)), "vrmse_median": float(np.median(nrmse))}
    summary |= {"num_blown_up": 0.0, "num_samples": float(len(errors))}
    return {"summary": summary, "rows": rows, "curves": {"trmse": [[errors.mean()]] * 3}}


def result(rollout: np.ndarray, one_step: float = 0.1, decayed: float = 0.0) -> dict[str, Any]:
    """A model next to a training mean with a rollout error of about 1 and a persistence of about 2."""
    hard = HARDNESS[: len(rollout)]
    return {
        "task": "burgers",
        "steady": False,
        "split": "test",
        "data_identity": "d",
        "space": [8],
        "dt": 0.1,
        "channels": ["u"],
        "protocol": {"context_frames": 1, "start_frame": 0, "num_steps": 3, "num_trajectories": len(rollout)},
        "differences": {},
        "in_train": {},
        "predictors": {
            "model": predictor(rollout, one_step, decayed),
            "training mean": predictor(hard, 0.9),
            "persistence": predictor(2 * hard, 0.7),
        },
    }


def verdicts(rollout: np.ndarray, **options: float) -> dict[str, tuple[str, str]]:
    return {line.score: (line.reference_name, line.verdict) for line in headlines(result(rollout, **options))}


def test_a_good_step_does_not_hide_a_rollout_that_the_training_mean_reaches_too():
    noise = np.random.default_rng(1).normal(0, 0.2, 16)
    words = verdicts(0.97 * HARDNESS + noise - noise.mean())
    assert words["one step"] == ("persistence", "better than persistence")
    assert words["rollout"] == ("training mean", "not significantly better than the training mean")
    text = score_lines([result(0.97 * HARDNESS + noise - noise.mean())])
    assert "7.0x" in text
    assert "not significantly better than the training mean" in text


@pytest.mark.parametrize(
    ("rollout", "words"),
    [
        (0.5 * HARDNESS, "better than the training mean"),
        (1.0 * HARDNESS, "not better than the training mean"),
        (1.5 * HARDNESS, "worse than the training mean"),
        (np.full(16, math.inf), "worse than the training mean"),
        (0.5 * HARDNESS[:5], "not significantly better than the training mean (too few trajectories to tell)"),
    ],
)
def test_the_word_says_what_the_paired_difference_shows(rollout, words):
    assert verdicts(rollout)["rollout"][1] == words


def test_scores_of_older_files_have_no_word_that_they_cannot_prove():
    old = result(0.5 * HARDNESS)
    for part in old["predictors"].values():
        for row in part["rows"].values():
            del row["one_step_trmse"]
    lines = {line.score: line.verdict for line in headlines(old)}
    assert lines["one step"] == "better than persistence, significance not known"
    assert lines["rollout"] == "better than the training mean"


def test_the_star_goes_to_the_better_model_and_not_to_decayed_frames():
    """A is better on every trajectory; one decayed frame makes its mean nRMSE a million times larger."""
    a, b = (
        Scored("A", {"burgers": result(0.3 * HARDNESS, decayed=1e6)}),
        Scored("B", {"burgers": result(0.5 * HARDNESS)}),
    )
    (compared,), _ = compare([a, b])
    assert compared.best("nrmse") == "B"
    assert {compared.winner(key)[0] for _, key in SCORES if key != "one_step_trmse"} == {"A"}
    assert compared.winner("one_step_trmse") == (None, "A is not significantly better than B")


def test_there_is_no_star_where_nothing_beats_the_reference():
    models = [Scored(n, {"burgers": result(f * HARDNESS)}) for n, f in (("A", 1.2), ("B", 1.1))]
    (compared,), _ = compare(models)
    assert compared.winner("trmse") == (None, "no model is significantly better than the training mean")
    assert compared.reference("trmse")[0] == "training mean"
    assert list(compared.curves()) == ["A", "B", "training mean", "persistence"]
