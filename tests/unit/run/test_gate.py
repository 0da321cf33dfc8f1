"""The gate: a condition holds, or it says why not; what cannot be judged never passes."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from ups.config.schema import SCORES, GateCondition, known_metrics
from ups.errors import ConfigError
from ups.run.gate import gate_words, judge, read_results


def summary(**values: Any) -> dict[str, Any]:
    return {"summary": values}


def result(task: str = "a", **changes: Any) -> dict[str, Any]:
    return {
        "task": task,
        "channels": ["u", "v_x", "v_y"],
        "conserved": ["u"],
        "predictors": {
            "model": {
                **summary(trmse=0.2, num_blown_up=0.0),
                "curves": {"drift": [[1e-6, 5.0, 5.0], [3e-6, 9.0, 9.0]]},
            },
            "persistence": summary(trmse=1.0, num_blown_up=0.0),
            "training mean": summary(trmse=0.5, num_blown_up=0.0),
        },
        "cost": {"step_milliseconds": 2.0},
    } | changes


def condition(**values: Any) -> GateCondition:
    return GateCondition.model_validate({"metric": "trmse", **values}, strict=True)


@pytest.mark.parametrize(
    ("values", "holds", "value"),
    [
        ({"at_most": 0.2}, True, 0.2),
        ({"at_most": 0.19}, False, 0.2),
        ({"at_least": 0.2}, True, 0.2),
        ({"at_least": 0.3}, False, 0.2),
        ({"at_most": 0.3, "relative_to": "persistence"}, True, 0.2),
        ({"at_most": 0.3, "relative_to": "training mean"}, False, 0.4),
        ({"at_most": 0.3, "relative_to": "best"}, False, 0.4),
        ({"at_least": 0.3, "relative_to": "best"}, False, 0.2),
        ({"metric": "num_blown_up", "at_most": 0.0}, True, 0.0),
        ({"metric": "step_milliseconds", "at_most": 1.0}, False, 2.0),
        ({"metric": "drift", "at_most": 1e-5}, True, 3e-6),
    ],
)
def test_a_limit_is_held_against_the_score(values: dict[str, Any], holds: bool, value: float) -> None:
    (judged,) = judge([condition(**values)], [result()])
    assert (judged.holds, judged.task) == (holds, "a")
    assert judged.value == pytest.approx(value)


@pytest.mark.parametrize("value", ["inf", "nan", "-inf", None, True, "much", [1.0]])
def test_what_is_no_finite_number_never_passes(value: Any) -> None:
    spoiled = result()
    spoiled["predictors"]["model"]["summary"]["trmse"] = value
    for limit in ({"at_most": 1e300}, {"at_least": -1e300}, {"at_most": 1e300, "relative_to": "best"}):
        assert not any(one.holds for one in judge([condition(**limit)], [spoiled]))


def test_a_reference_without_error_is_not_beaten_by_division() -> None:
    spoiled = result()
    spoiled["predictors"]["persistence"]["summary"]["trmse"] = 0.0
    (judged,) = judge([condition(at_most=1e9, relative_to="persistence")], [spoiled])
    assert not judged.holds
    assert math.isinf(judged.value)
    assert json.loads(json.dumps(judged.to_json(), allow_nan=False))["value"] == "inf"


def test_a_condition_for_all_leaves_out_tasks_without_such_a_score() -> None:
    steady = result("b", conserved=[])
    del steady["predictors"]["persistence"]
    both = [result(), steady]
    assert [one.task for one in judge([condition(metric="drift", at_most=1.0)], both)] == ["a"]
    assert [one.task for one in judge([condition(at_most=1.0, relative_to="persistence")], both)] == ["a"]
    (unscored,) = judge([condition(metric="drift", at_most=1.0)], [steady])
    assert (unscored.holds, unscored.says) == (False, "no task has such a score")


def test_a_condition_for_a_named_task_fails_without_such_a_score() -> None:
    named = condition(metric="drift", at_most=1.0, tasks=["b", "c"])
    judged = judge([named], [result(), result("b", conserved=[])])
    assert [(one.task, one.holds, one.says) for one in judged] == [
        ("b", False, "conserves nothing"),
        ("c", False, "was not scored"),
    ]
    assert gate_words(judged) == "b: drift at most 1: conserves nothing (and 1 more)"


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"results": 3}', '{"results": [{"task": "a"}]}'])
def test_scores_that_cannot_be_read_are_an_error(tmp_path: Path, content: str) -> None:
    (tmp_path / "scores.json").write_text(content)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_results(tmp_path / "scores.json")


def test_the_names_are_those_of_real_scores() -> None:
    import torch

    from ups.evaluation.accumulate import Accumulator
    from ups.evaluation.results import ONE_STEP

    score = Accumulator(2, ("u",))
    score.add([0], torch.rand(1, 2, 1, 8), torch.rand(1, 2, 1, 8), torch.rand(1, 1, 1, 8))
    real = {*score.summary(), *(f"one_step_{name}" for name in ONE_STEP)}
    assert set(SCORES) <= real
    assert real - {"num_samples"} <= set(known_metrics())
