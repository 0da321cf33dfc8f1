"""`ups runs clean` says what it would remove, and never removes what is needed."""

import json
from pathlib import Path

import pytest

from tests.unit.run.made_runs import made_run
from ups.cli.main import run
from ups.run.many_runs import candidates, promote
from ups.supervise.run_file import hold_run, hold_steps


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    for name, state in (("failed", "failed"), ("died", "died"), ("judged", "gate_failed"), ("alive", "running")):
        made_run(tmp_path, name, state, "gate" if state == "gate_failed" else "")
    made_run(tmp_path, "good", bundle=True)
    promote(str(made_run(tmp_path, "best", bundle=True)), "production")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken/run.json").write_text("{")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/thesis.txt").write_text("years of work")
    return tmp_path


def test_without_yes_nothing_is_removed(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = sorted(path.relative_to(runs) for path in runs.rglob("*"))
    assert run(["runs", "clean", str(runs)]) == 0
    shown = capsys.readouterr().out
    assert "remove with --yes" in shown
    assert "promoted: production" in shown
    assert sorted(path.relative_to(runs) for path in runs.rglob("*")) == before


@pytest.mark.parametrize(("words", "gone"), [([], set()), (["--completed"], {"good"})])
def test_promoted_running_and_unknown_runs_stay(
    runs: Path, words: list[str], gone: set[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["runs", "clean", str(runs), "--yes", "--json", *words]) == 0
    removed = {Path(path).name for path in json.loads(capsys.readouterr().out)["removed"]}
    assert removed == {"failed", "died", "judged"} | gone
    left = {path.name for path in runs.iterdir() if path.is_dir()}
    assert left == {"good", "best", "alive", "broken", "mine"} - gone


@pytest.mark.parametrize("hold", [hold_steps, hold_run])
def test_a_run_that_somebody_works_on_is_alive_whatever_its_state(tmp_path: Path, hold: object) -> None:
    path = made_run(tmp_path, "a", "failed")
    with hold(path):  # type: ignore[operator]
        (held,) = candidates(tmp_path)
    (free,) = candidates(tmp_path)
    assert (held.kept, free.kept) == ("running", "")


def test_a_run_that_was_started_since_the_list_was_made_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = made_run(tmp_path, "a", "failed")
    monkeypatch.setattr("ups.run.many_runs.is_held", lambda path: False)
    with hold_steps(path):
        assert run(["runs", "clean", str(tmp_path), "--yes"]) == 1
    assert "another `ups run` is at work on" in capsys.readouterr().out
    assert (path / "run.json").exists()
