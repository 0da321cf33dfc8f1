"""What the supervisor says about trackers, and what it refuses before a run is started."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.tracked_run import make_run
from ups.config.recipe import resolve_data
from ups.config.tracker import MlflowConfig, TensorBoardConfig, TrackerConfig, WandbConfig, by_name
from ups.errors import ConfigError, MachineError, MissingExtraError
from ups.supervise import trackers as module
from ups.supervise.tracker_feed import check_trackers
from ups.supervise.trackers import TrackerNote, Trackers, notes_of, read_note


def test_a_run_without_rows_is_a_warning_and_is_said_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_LOOK_SECONDS", 0.0)
    with Trackers(tmp_path, []) as trackers:
        assert trackers.look() == ([], [])
        monkeypatch.setattr(module, "ROWS_SECONDS", -1.0)
        looked = trackers.look()
        assert looked is not None
        assert looked[1] == ["no row of metrics after -1 s: is a step that slow?"]
        assert trackers.look() == ([], [])
    with Trackers(tmp_path, []) as trackers:
        (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
        assert trackers.look() == ([], [])


def test_two_trackers_of_a_type_have_two_names() -> None:
    trackers = by_name([MlflowConfig(), TensorBoardConfig(), MlflowConfig(experiment="other")])
    assert list(trackers) == ["mlflow", "tensorboard", "mlflow-1"]


def test_a_missing_package_or_secret_stops_a_run_before_it_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    class Absent(TensorBoardConfig):
        needs = ("wandb", "no_package_has_this_name")

    with pytest.raises(MissingExtraError, match="the tracker 'tensorboard' needs the package"):
        check_trackers([Absent()])
    monkeypatch.delenv("NOT_SET_HERE", raising=False)
    monkeypatch.setattr(WandbConfig, "needs", None)
    with pytest.raises(MachineError, match="NOT_SET_HERE"):
        check_trackers([WandbConfig(api_key="${env:NOT_SET_HERE}")])


@pytest.mark.parametrize(
    ("tracker", "message"),
    [
        ({"type": "wandb", "api_key": "0123456789"}, "api_key is a secret"),
        ({"type": "mlflow", "uri": "http://me:word@host"}, "must not hold a name or a password"),
        ({"type": "mlflow", "uri": "http://me:a/word@host"}, "must not hold a name or a password"),
        ({"type": "mlflow", "uri": "http://host/#token=word"}, "must not hold a name or a password"),
        ({"type": "mlflow", "uri": "http://host/x;token=word/y"}, "must not hold a name or a password"),
        ({"type": "wandb", "base_url": "https://host/?key=0123456789"}, "nor a query or a token"),
        ({"type": "wandb", "base_url": "https://host/hf_word0123456789"}, "nor a query or a token"),
        ({"type": "tensorbord"}, "tensorboard"),
    ],
)
def test_a_recipe_holds_no_secret(tmp_path: Path, tracker: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        make_run(tmp_path / "run", [tracker])
    assert "word" not in str(caught.value).replace("password", "")
    assert "0123456789" not in str(caught.value)


def test_a_note_of_another_run_or_a_damaged_one_is_none(tmp_path: Path) -> None:
    TrackerNote(run_id="a", rows=3).save(tmp_path, "mlflow")
    assert read_note(tmp_path, "mlflow", "a").rows == 3
    assert read_note(tmp_path, "mlflow", "b") == TrackerNote("b")
    for text in ("", "[]", '{"rows": -1}', "{" * 1000):
        (tmp_path / "tracking/mlflow.json").write_text(text)
        assert notes_of(tmp_path) == {"mlflow": TrackerNote()}


def test_trackers_are_settings_that_may_change(tmp_path: Path) -> None:
    """A run can be given a tracker later."""
    from ups.config.identity import recipe_identity
    from ups.config.recipe import resolve

    with_one = resolve(make_run(tmp_path / "one", [{"type": "tensorboard"}]) / "config.yaml").recipe
    without = resolve(make_run(tmp_path / "one", []) / "config.yaml").recipe
    assert recipe_identity(with_one) == recipe_identity(without)
    assert isinstance(with_one.tracking.trackers[0], TrackerConfig)
    assert resolve_data({**with_one.model_dump(mode="json")}).recipe == with_one
