"""Models are compared on the same trajectories or not at all."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace

import pytest

from tests.support.memory_reader import MemoryReader
from ups.errors import ConfigError, DataError
from ups.evaluation.comparison import Scored, compare, read_scores, scored_from
from ups.evaluation.results import task_result, to_json
from ups.evaluation.rollout import RolloutPlan, references, score_task
from ups.spec.batch import RankInfo


def damped(factor: float):
    def predict(batch):
        return batch.static * factor + 0.5 if batch.task.steady else batch.state[:, -1].roll(1, -1) * factor

    return predict


def data(factor: float, start_frame: int = 0, num_trajectories: int = 5, steady: bool = False) -> dict:
    """What scores.json of a model with this factor holds."""
    reader = MemoryReader(num_trajectories, points=8, steady=steady)
    plan = RolloutPlan.whole(reader, 1, start_frame)
    predictors = {"model": damped(factor), **references(reader, plan)}
    scores = score_task(predictors, reader, RankInfo(0, 1), plan)
    steps = score_task(predictors, reader, RankInfo(0, 1), plan, kind="one_step")
    results = to_json([task_result(reader, plan, "test", scores, "model", steps)])
    return {"model": "m", "identity": {}, "config": f"factor: {factor}\n", "results": results}


def scored(label: str, factor: float, **options) -> Scored:
    return scored_from(json.loads(json.dumps(data(factor, **options))), label)


def test_the_better_model_is_best_and_its_difference_is_below_zero():
    tasks, notes = compare([scored("A", 0.9), scored("B", 0.99), scored("C", math.inf)])
    assert notes == []
    paired = tasks[0]
    for key in ("one_step_trmse", "trmse", "nrmse", "vrmse"):
        assert paired.best(key) == "B"
    difference = paired.differences["B"]
    assert difference["low"] <= difference["mean"] <= difference["high"] < 0
    assert difference["mean"] == pytest.approx(paired.summary("B")["trmse"] - paired.summary("A")["trmse"], rel=1e-9)
    assert paired.differences["C"]["mean"] == math.inf
    assert {name: len(curve) for name, curve in paired.curves().items()} == dict.fromkeys(
        ("A", "B", "C", "training mean", "persistence"), 5
    )


def test_a_model_next_to_itself_differs_by_nothing():
    tasks, _ = compare([scored("A", 0.9), scored("B", 0.9)])
    assert tasks[0].differences["B"] == {"mean": 0.0, "low": 0.0, "high": 0.0, "num_trajectories": 5.0}


def test_another_protocol_is_refused_and_named():
    with pytest.raises(ConfigError, match=r"'advection' by A and B.*start_frame 0 and 2; num_steps 5 and 3"):
        compare([scored("A", 0.9), scored("B", 0.9, start_frame=2)])


def test_other_data_and_another_number_of_trajectories_are_refused():
    one, other = scored("A", 0.9), scored("B", 0.9)
    changed = {"advection": {**other.results["advection"], "data_identity": "f" * 64}}
    with pytest.raises(ConfigError, match=r"data_identity [0-9a-f]{12}\.\.\. and ffffffffffff\.\.\."):
        compare([one, replace(other, results=changed)])
    with pytest.raises(ConfigError, match="num_trajectories 5 and 4"):
        compare([one, scored("B", 0.9, num_trajectories=4)])


def test_a_task_that_only_one_has_is_skipped_with_a_warning():
    a, steady = scored("A", 0.9), scored("A", 0.9, steady=True)
    both = replace(a, results={**a.results, **steady.results})
    tasks, notes = compare([both, scored("B", 0.99)])
    assert [task.task for task in tasks] == ["advection"]
    assert notes == ["only A has scores of poisson"]
    with pytest.raises(ConfigError, match="no task that two of them have: A: poisson; B: advection"):
        compare([steady, scored("B", 0.9)])


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"results": [{"task": 1}]}', '{"results": 3}', "\x00"])
def test_a_file_that_holds_no_scores_is_refused(tmp_path, text):
    (tmp_path / "scores.json").write_text(text)
    with pytest.raises(DataError, match="does not hold scores that can be compared"):
        read_scores(tmp_path / "scores.json", "A")


def test_scores_with_infinities_come_back_as_numbers(tmp_path):
    (tmp_path / "scores.json").write_text(json.dumps(data(math.inf), allow_nan=False))
    scored = read_scores(tmp_path / "scores.json", "A")
    assert scored.results["advection"]["predictors"]["model"]["summary"]["nrmse"] == math.inf
    assert scored.config_text == "factor: inf\n"


def test_the_page_is_one_file_with_every_model_and_the_changes():
    pytest.importorskip("matplotlib")
    from ups.evaluation.report import write_comparison

    tasks, notes = compare([scored("A <1>", 0.9), scored("B", 0.99)])
    page = write_comparison(tasks, notes, title="T", changes={"B": [("model.width", "96", "<128>")]})
    assert "A &lt;1&gt;" in page
    assert "&lt;128&gt;" in page
    assert "<1>" not in page
    assert "<svg" in page
    assert not re.findall(r"<(?:script|link|iframe|img)", page)


def test_the_command_compares_files_and_refuses_one_model(tmp_path, capsys):
    from ups.cli.main import run

    for name, factor in (("one", 0.9), ("two", 0.99)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "scores.json").write_text(json.dumps(data(factor), allow_nan=False))
    paths = [str(tmp_path / "one"), str(tmp_path / "two" / "scores.json")]
    assert run(["compare", *paths, "--out", str(tmp_path / "page")]) == 0
    printed = capsys.readouterr().out
    assert "advection: 5 trajectories, 5 steps" in printed
    assert "recipe of two against one:\n  factor: 0.9 -> 0.99" in printed
    assert (tmp_path / "page" / "index.html").is_file()
    assert run(["compare", *paths, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["models"] == ["one", "two"]
    assert document["tasks"][0]["differences"]["two"]["high"] < 0
    assert run(["compare", paths[0]]) == 3
    assert run(["compare", paths[0], paths[0]]) == 3
    assert run(["compare", paths[0], str(tmp_path / "nothing")]) == 3
