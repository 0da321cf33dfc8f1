"""`ups.fit` trains inside this process and leaves what a supervised run leaves; its numbers are those of `train`."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ups
from ups.errors import ConfigError, RunHeldError, UpsError
from ups.record.run_dir import RunDir
from ups.run import in_process
from ups.supervise.run_file import hold_run
from ups.training.checkpoint import read_weights

STORED = Path(__file__).parents[2] / "integration" / "runs"
TIMES = ["steps_per_second", "windows_per_second", "flops_per_second", "peak_memory_mib", "time", "attempt"]


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ups.Recipe:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(STORED / "data", "data")  # statistics are kept next to the data
    return ups.load_recipe(
        STORED / "v1",
        run__name="small",
        stages__0__steps=8,
        engine__threads=1,
        checkpoint__interval_steps=3,
        tracking__log_interval_steps=1,
    )


def weights(run: ups.Run) -> dict[str, torch.Tensor]:
    return read_weights(RunDir(run.path).checkpoint(run.checkpoints[-1]))


def same(one: ups.Run, other: ups.Run) -> bool:
    a, b = weights(one), weights(other)
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def when_training(act: Callable[[], Any], rows: Path) -> threading.Thread:
    """Do something once a run has written its first rows of metrics."""

    def wait() -> None:
        deadline = time.monotonic() + 30
        while not (rows.is_file() and rows.read_bytes().count(b"\n") >= 2) and time.monotonic() < deadline:
            time.sleep(0.001)
        act()

    thread = threading.Thread(target=wait)
    thread.start()
    return thread


@pytest.mark.processes
@pytest.mark.timeout(600)
def test_fit_computes_what_train_computes_bit_by_bit(recipe: ups.Recipe, capfd: pytest.CaptureFixture[str]) -> None:
    fitted = ups.fit(recipe, progress=False, run__dir="runs/fitted")
    trained = ups.train(recipe, run__dir="runs/trained")
    assert (fitted.state, trained.state) == ("completed", "completed")
    assert fitted.verdict == trained.verdict
    ours, theirs = fitted.metrics().drop(columns=TIMES), trained.metrics().drop(columns=TIMES)
    assert ours.equals(theirs)
    assert len(ours) == 8
    assert ours["loss"].notna().all()
    assert fitted.checkpoints == trained.checkpoints
    assert same(fitted, trained)
    assert fitted.bundle is not None
    assert capfd.readouterr() == ("", ""), "nothing is printed without a request"


def test_a_fitted_run_is_a_run_like_any_other(recipe: ups.Recipe, capsys: pytest.CaptureFixture[str]) -> None:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR2)}
    run = ups.fit(recipe)
    said = capsys.readouterr()
    assert "step 8/8" in said.err
    assert "VERDICT state=completed" in said.out
    assert {number: signal.getsignal(number) for number in before} == before
    assert run.path == Path("runs/small").resolve()
    assert (run.exit_code, run.cause, run.faults) == (0, "", [])
    assert "No rank failed" in run.why()
    assert run.recipe == recipe
    document = run.document
    assert document["identity"]["commits"].keys() >= {"8"}
    assert document["attempts"][0]["outcome"] == "finished"
    assert run.simulator("cpu").tasks.keys() == {"wave1d"}
    again = ups.fit(run.path, progress=False)  # done already: proven again, nothing trained
    assert len(again.metrics()) == 8
    assert again.state == "completed"


def test_an_interrupt_saves_and_leaves_and_the_run_goes_on_as_if_nothing_had_been(recipe: ups.Recipe) -> None:
    whole = ups.fit(recipe, progress=False, run__dir="runs/whole", stages__0__steps=150)
    rows = Path("runs/cut/metrics.jsonl")
    thread = when_training(lambda: os.kill(os.getpid(), signal.SIGINT), rows)
    cut = ups.fit(recipe, progress=False, run__dir="runs/cut", stages__0__steps=150)
    thread.join()
    assert (cut.state, cut.exit_code, cut.cause) == ("stopped", 130, "asked(SIGINT)")
    assert cut.checkpoints[-1] == cut.metrics().index[-1] < 150
    assert "lost=0" in cut.verdict
    assert cut.bundle is None
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    on = ups.fit(cut.path, progress=False)
    assert on.state == "completed"
    assert [attempt["outcome"] for attempt in on.document["attempts"]] == ["left", "finished"]
    assert on.metrics()["loss"].tolist() == whole.metrics()["loss"].tolist()
    assert same(on, whole)


def test_a_second_interrupt_leaves_at_once(recipe: ups.Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_process, "_SAME_REQUEST_SECONDS", -1.0)
    thread = when_training(lambda: os.kill(os.getpid(), signal.SIGINT), Path("runs/small/metrics.jsonl"))
    with pytest.raises(KeyboardInterrupt):
        ups.fit(recipe, progress=False, stages__0__steps=150)
    thread.join()
    run = ups.Run("small")
    assert (run.state, run.exit_code) == ("stopped", 130)


def test_an_error_is_written_into_the_run_and_raised(recipe: ups.Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    from ups.training.engine import Engine

    def broken(self: Engine, finite: object, number: int) -> None:
        raise ZeroDivisionError("planted")

    monkeypatch.setattr(Engine, "_update", broken)
    with pytest.raises(ZeroDivisionError, match="planted"):
        ups.fit(recipe, progress=False)
    run = ups.Run("small")
    assert (run.state, run.cause, run.exit_code) == ("failed", "exception(ZeroDivisionError)", 6)
    fault = run.faults[0]
    assert (fault["rank"], fault["checkpoint"], fault["phase"]) == (0, None, "sync")
    assert "test_fit.py" in fault["at"]
    assert "planted" in run.why()
    assert "Traceback of rank 0" in run.why()
    monkeypatch.undo()


def test_a_run_that_cannot_be_proven_is_not_completed(recipe: ups.Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    stages = in_process.run_stages

    def damage(run_dir: Path, *rest: Any, **more: Any) -> tuple[int, int]:
        done = stages(run_dir, *rest, **more)
        (RunDir(run_dir).checkpoint(done[1]) / "progress.json").write_text("{}")
        return done

    monkeypatch.setattr(in_process, "run_stages", damage)
    with pytest.raises(UpsError):
        ups.fit(recipe, progress=False)
    run = ups.Run("small")
    assert (run.state, run.cause) == ("failed", "unproven(final_checkpoint)")
    assert run.bundle is None


def test_a_run_that_somebody_holds_is_not_touched(recipe: ups.Recipe) -> None:
    with hold_run(Path("runs/small").resolve()), pytest.raises(RunHeldError, match="another supervisor"):
        ups.fit(recipe, progress=False)
    assert not Path("runs/small/config.yaml").exists()


def test_another_recipe_is_refused_in_the_same_directory(recipe: ups.Recipe) -> None:
    run = ups.fit(recipe, progress=False, stages__0__steps=1)
    with pytest.raises(ConfigError, match=r"run\.seed"):
        ups.fit(recipe, progress=False, stages__0__steps=1, run__seed=9)
    assert run.state == "completed"


def test_half_a_line_of_metrics_is_passed_over_and_the_last_of_two_rows_counts(recipe: ups.Recipe) -> None:
    run = ups.fit(recipe, progress=False, stages__0__steps=2)
    with (run.path / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 2, "loss": 7.0}) + '\n{"step": 3, "lo')
    assert run.metrics()["loss"].loc[2] == 7.0
    assert run.metrics().index.tolist() == [1, 2]


@pytest.mark.processes
@pytest.mark.timeout(600)
def test_what_fit_began_train_goes_on_with(recipe: ups.Recipe) -> None:
    whole = ups.fit(recipe, progress=False, run__dir="runs/whole")
    cut = ups.fit(recipe, progress=False, run__dir="runs/cut", engine__max_seconds=1e-6)
    assert (cut.state, cut.exit_code) == ("preempted", 143)
    on = ups.train(recipe, 1, run__dir="runs/cut")
    assert on.state == "completed"
    assert same(on, whole)
    assert on.metrics()["loss"].tolist() == whole.metrics()["loss"].tolist()


@pytest.mark.processes
@pytest.mark.timeout(600)
def test_scores_and_comparison_from_python(recipe: ups.Recipe) -> None:
    one = ups.fit(recipe, progress=False)
    other = ups.fit(recipe, progress=False, run__name="other", run__seed=5)
    scores = ups.evaluate(one, max_trajectories=2)
    assert scores.table()["task"].unique().tolist() == ["wave1d"]
    assert "one step" in str(scores)
    assert scores.results[0]["protocol"]["num_trajectories"] == 2
    assert not (one.path / "report").exists()
    comparison = ups.compare(one, other)
    assert comparison.models == ["small", "other"]
    assert {"small", "other", "reference"} <= set(comparison.table().columns)
    assert [row[0] for row in comparison.recipe_changes["other"] if row[0] == "run.seed"] == ["run.seed"]
    with pytest.raises(ConfigError, match="two models or more"):
        ups.compare(one)
    with pytest.raises(ConfigError, match="no task 'x'"):
        ups.evaluate(one, tasks=["x"])
    with pytest.raises(ConfigError, match="not a held-out split"):
        ups.evaluate(one, "train")


@pytest.mark.processes
@pytest.mark.timeout(600)
def test_train_leaves_other_children_of_the_program_alone(recipe: ups.Recipe) -> None:
    with subprocess.Popen([sys.executable, "-c", "raise SystemExit(7)"]) as child:
        assert ups.train(recipe, stages__0__steps=1).state == "completed"
        assert child.wait() == 7
