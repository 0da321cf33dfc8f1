"""A start that fails claims nothing, a run that never took a step gives way, a run is removed unless it is alive."""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path

import pytest

import ups
from ups.cli.main import run
from ups.errors import ConfigError, RunHeldError, UpsError
from ups.run import in_process
from ups.run.directory import never_stepped, remove_records
from ups.run.many_runs import remove_run
from ups.supervise.run_file import RunFile, hold_run

STORED = Path(__file__).parents[2] / "integration" / "runs"


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ups.Recipe:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(STORED / "data", "data")
    return ups.load_recipe(STORED / "v1", run__name="small", stages__0__steps=2, engine__threads=1)


def test_a_first_start_that_fails_leaves_the_name_free(recipe: ups.Recipe) -> None:
    with pytest.raises(ConfigError, match="start_from"):
        ups.fit(recipe, progress=False, stages__0__start_from="runs/joind")
    assert not Path("runs/small").exists()
    assert ups.fit(recipe, progress=False).state == "completed"


def test_files_of_others_survive_a_first_start_that_fails(recipe: ups.Recipe) -> None:
    Path("runs/small").mkdir(parents=True)
    Path("runs/small/note.txt").write_text("mine")
    with pytest.raises(ConfigError, match="start_from"):
        ups.fit(recipe, progress=False, stages__0__start_from="runs/joind")
    assert os.listdir("runs/small") == ["note.txt"]


@pytest.mark.parametrize("content", ["host: example\n", None])
def test_a_config_yaml_of_somebody_else_is_neither_replaced_nor_removed(
    recipe: ups.Recipe, capsys: pytest.CaptureFixture[str], content: str | None
) -> None:
    Path("mine/logs").mkdir(parents=True)
    Path("mine/config.yaml").write_text(content or (STORED / "v1" / "config.yaml").read_text())
    with pytest.raises(ConfigError):
        ups.fit(recipe, progress=False, run__dir="mine", run__seed=9)
    assert run(["runs", "remove", "mine"]) == 3
    assert "no run 'mine'" in capsys.readouterr().err
    assert sorted(os.listdir("mine")) == ["config.yaml", "logs"]


def failing(*_args: object, **_named: object) -> None:
    raise OSError("no such device")


def test_a_run_that_never_took_a_step_is_replaced_by_another_recipe(
    recipe: ups.Recipe, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(in_process, "run_stages", failing)
        with pytest.raises(OSError, match="device"):
            ups.fit(recipe, progress=False)
    assert never_stepped(Path("runs/small"))
    assert ups.Run("small").cause == "exception(OSError)"
    done = ups.fit(recipe, progress=False, run__seed=9)
    assert (done.state, done.recipe.run.seed, len(done.document["attempts"])) == ("completed", 9, 1)
    assert "never took a step" in caplog.text
    with pytest.raises(ConfigError, match="another recipe"):
        ups.fit(recipe, progress=False, run__seed=10)


def test_data_may_be_corrected_before_the_first_step_and_the_first_failure_stays_on_record(
    recipe: ups.Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(in_process, "run_stages", failing)
        with pytest.raises(OSError, match="device"):
            ups.fit(recipe, progress=False)
    path = Path("data/wave1d.zarr")
    card = json.loads((path / "zarr.json").read_text())
    card["attributes"]["note"] = "corrected"
    (path / "zarr.json").write_text(json.dumps(card))
    done = ups.fit(recipe, progress=False)
    assert (done.state, len(done.document["attempts"]), len(done.faults)) == ("completed", 2, 1)


@pytest.mark.parametrize("trace", ["checkpoint", "row", "step", "unknown", "unreadable"])
def test_a_run_that_may_have_learned_something_is_not_replaced(tmp_path: Path, trace: str) -> None:
    file = RunFile(tmp_path)
    file.begin(ranks=1, max_restarts=0, box_root=tmp_path)
    file.document["attempts"].append({"number": 0, "faults": [], "last_step": 1})
    file.save()
    assert never_stepped(tmp_path)
    if trace == "checkpoint":
        (tmp_path / "checkpoints" / "step_00000001").mkdir(parents=True)
    elif trace == "row":
        (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    elif trace == "unreadable":
        (tmp_path / "run.json").write_text("{")
    else:
        file.document["attempts"][0] = {"number": 0, "faults": []} | ({"last_step": 2} if trace == "step" else {})
        file.save()
    assert not never_stepped(tmp_path)


def test_a_removed_run_is_gone_and_its_name_free(recipe: ups.Recipe, capsys: pytest.CaptureFixture[str]) -> None:
    ups.fit(recipe, progress=False)
    Path("small").mkdir()  # such as `ups init small` makes it
    assert run(["runs", "remove", "small/"]) == 3
    assert "small/ is a directory without a run -> a run is named without the slash" in capsys.readouterr().err
    assert run(["runs", "remove", "small"]) == 0
    assert "removed" in capsys.readouterr().out
    assert not Path("runs/small").exists()
    assert run(["status", "small"]) == 3
    assert ups.fit(recipe, progress=False, run__seed=9).state == "completed"


def test_removing_a_run_leaves_files_of_others(recipe: ups.Recipe, capsys: pytest.CaptureFixture[str]) -> None:
    Path("logs").mkdir()
    Path("logs/mine.txt").write_text("mine")
    done = ups.fit(recipe, progress=False, run__dir=".")
    done.report()
    assert run(["runs", "remove", "."]) == 0
    assert "data" in capsys.readouterr().err
    assert sorted(os.listdir()) == ["data", "logs"]
    assert os.listdir("logs") == ["mine.txt"]


def test_a_run_that_is_alive_is_not_removed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = RunFile(tmp_path)
    file.begin(ranks=1, max_restarts=0, box_root=tmp_path)
    (tmp_path / "metrics.jsonl").write_text("")
    assert run(["runs", "remove", str(tmp_path)]) == 11
    assert "run_held" in capsys.readouterr().err
    file.document["host"] = "elsewhere"
    file.save()
    with pytest.raises(RunHeldError, match="elsewhere"):
        remove_run(str(tmp_path))
    file.document.update(state="completed", ended=time.time())
    file.save()
    with hold_run(tmp_path), pytest.raises(RunHeldError):
        remove_run(str(tmp_path))
    assert (tmp_path / "metrics.jsonl").exists()
    remove_run(str(tmp_path))
    assert not tmp_path.exists()


def test_who_waited_for_a_lock_that_was_removed_does_not_hold_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import fcntl

    real = fcntl.flock

    def late(file: object, how: int) -> None:
        (tmp_path / ".supervisor.lock").unlink()
        real(file, how)  # type: ignore[call-overload]

    monkeypatch.setattr(fcntl, "flock", late)
    with pytest.raises(UpsError, match="another supervisor"), hold_run(tmp_path):
        pass


def test_what_is_not_of_a_run_is_never_removed(tmp_path: Path) -> None:
    foreign = tmp_path / "foreign"
    (foreign / "checkpoints/step_100").mkdir(parents=True)
    for name in ("run.json", "config.yaml", "env.json", "statistics.json", "checkpoints/step_100/w.bin"):
        (foreign / name).write_text("{}")
    before = sorted(foreign.rglob("*"))
    with pytest.raises(ConfigError, match="not made by ups train"):
        remove_run(str(foreign))
    assert sorted(foreign.rglob("*")) == before


def test_only_names_that_a_run_gives_are_removed_and_links_are_not_followed(tmp_path: Path) -> None:
    other = tmp_path / "other/checkpoints"
    (other / "step_00000001").mkdir(parents=True)
    run_dir = tmp_path / "run"
    (run_dir / "logs/attempt_0").mkdir(parents=True)
    (run_dir / "logs/attempt_at_paper.txt").write_text("mine")
    (run_dir / "run_table.json").write_text("{}")
    (run_dir / "checkpoints").symlink_to(other)
    remove_records(run_dir)
    assert (other / "step_00000001").is_dir()
    assert sorted(p.name for p in run_dir.rglob("*")) == ["attempt_at_paper.txt", "logs", "run_table.json"]
