"""The fault matrix on the real engine: the loop, loader and checkpoints that users run, faults planted from outside."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.faults.test_matrix import check_every_fault_was_printed_once_and_handled_in_time, fault, reported
from tests.support.faults.small_disk import small_disk
from tests.support.faults.small_run import prepare_real, rank_is_at_step, rows, weights, write_recipe
from tests.support.faults.supervised import PROGRAMS, Result, run, start
from tests.support.mixture import write_mixture
from ups.record.manifest import read_manifest
from ups.supervise.trackers import notes_of
from ups.supervise.why import explain

pytestmark = [pytest.mark.processes, pytest.mark.timeout(1500)]

# A cell that draws prints it; set the variable to see the same again.
SEED = int(os.environ.get("UPS_TEST_SEED") or time.time_ns() % 1_000_000)


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    return write_recipe(folder, write_mixture(folder))


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory, recipe: Path) -> Result:
    result = run(tmp_path_factory.mktemp("clean") / "run", recipe=recipe)
    assert result.code == 0, result.output
    return result


def last_loss(result: Result) -> float:
    rows = [json.loads(line) for line in (result.run_dir / "metrics.jsonl").read_text().splitlines()]
    return float([row["loss"] for row in rows if "loss" in row][-1])


def check_that_restarts_went_on_where_the_lines_said(result: Result) -> None:
    """The checkpoint that the line of a fault names is the one that the next attempt really loaded."""
    attempts = result.document["attempts"]
    for number, record in enumerate(result.faults):
        first = next((row["step"] for row in rows(result) if row["attempt"] == number + 1), None)
        assert attempts[number + 1]["from_checkpoint"] == record["checkpoint"]
        assert first is None or first == (record["checkpoint"] or 0) + 1


def line_of(name: str, text: str) -> int:
    """Number of the line of a file of the rank programs that holds `text`."""
    return next(n for n, line in enumerate((PROGRAMS / name).read_text().splitlines(), 1) if text in line)


def test_a_clean_run_raises_no_alarm(clean: Result) -> None:
    assert clean.failed_lines == []
    assert clean.document["notices"] == []
    assert clean.orphans == []
    assert weights(clean)


@pytest.mark.long
def test_a_run_that_met_every_death_and_a_damaged_checkpoint_ends_with_the_same_bytes(
    tmp_path: Path, recipe: Path, clean: Result
) -> None:
    result = run(
        tmp_path / "run",
        fault("crash", 1, 0, "init", signal="SIGSEGV"),
        fault("exception", 1, 4, "forward"),
        fault("kill", 0, 8, "backward", signal="SIGKILL"),
        fault("crash", 1, 13, "optimizer", signal="SIGABRT"),
        fault("damage", 1, 14, "forward", newest=10, signal="SIGKILL"),
        fault("os_exit", 0, 15, "save"),
        fault("kill", 1, 18, "data", signal="SIGSTOP"),
        fault("exception", 0, 20, "evaluate"),
        restarts=4,
        recipe=recipe,
        timeout_seconds=1200,
    )
    assert result.code == 0, result.output
    assert reported(result) == [
        (1, "init", "signal(SIGSEGV)"),
        (1, "forward", "exception(FileNotFoundError)"),
        (0, "backward", "killed(SIGKILL)"),
        (1, "optimizer", "signal(SIGABRT)"),
        (1, "forward", "killed(SIGKILL)"),
        (0, "save", "early_exit(0)"),
        (1, "data", "stopped(SIGSTOP)"),
        (0, "evaluate", "exception(FileNotFoundError)"),
    ]
    assert all("faults_to_plant.py:" in result.faults[n]["at"] for n in (0, 1, 3, 7))
    check_every_fault_was_printed_once_and_handled_in_time(result)
    check_that_restarts_went_on_where_the_lines_said(result)
    assert weights(result) == weights(clean)


@pytest.mark.long
def test_m8_m12_what_ends_a_loader_is_named_by_the_line_of_the_worker(
    tmp_path: Path, recipe: Path, clean: Result
) -> None:
    result = run(
        tmp_path / "run",
        fault("worker_crash", 1, 0, "reader", blocks=8),
        fault("worker_exception", 0, 0, "reader", blocks=3),
        fault("kill_worker", 1, 11, "data"),
        fault("end_of_data", 1, 19, "data"),
        restarts=4,
        recipe=recipe,
        timeout_seconds=1200,
    )
    assert result.code == 0, result.output
    assert reported(result) == [
        (1, "data", "worker_killed(SIGSEGV)"),
        (0, "data", "data"),
        (1, "data", "worker_killed(SIGKILL)"),
        (1, "data", "data"),
    ]
    crash, raised, killed, ended = result.faults
    assert crash["at"].endswith(f"planted_reader.py:{line_of('planted_reader.py', 'string_at')}")
    assert raised["at"].endswith(f"planted_reader.py:{line_of('planted_reader.py', 'raise ValueError')}")
    assert "loader worker 0" in killed["message"]
    assert "the loader of rank 1 ended at step 19" in ended["message"]
    reported_by_why = explain(result.run_dir, result.document, number=0)
    assert "Crash in a loader worker of rank 1 (rank_00001.worker_00.crash.txt)" in reported_by_why
    assert "Segmentation fault" in reported_by_why
    record = json.loads((result.run_dir / "failures/attempt_1/rank_00000.worker_00.json").read_text())
    assert "planted in a reader" in record["message"]
    assert record["memory"]["resident"] > 0
    check_every_fault_was_printed_once_and_handled_in_time(result)
    assert weights(result) == weights(clean)


@pytest.mark.long
def test_m11_a_kill_inside_a_save_and_a_cut_file_never_lead_to_a_bad_load(
    tmp_path: Path, recipe: Path, clean: Result
) -> None:
    dice = random.Random(SEED)
    print(f"UPS_TEST_SEED={SEED}")
    final = max(clean.run_dir.glob("checkpoints/step_*"))
    size = max(file.size for name, file in read_manifest(final).files.items() if name.startswith("__1_"))
    result = run(
        tmp_path / "run",
        fault("die_in_save", 1, 10, "save", offset=dice.randrange(size)),
        fault("die_in_save", 0, 10, "save", call="fsync", count=dice.randint(1, 6)),
        fault("die_in_save", 0, 15, "save", call="rename", count=1),
        fault("damage", 1, 18, "forward", how="truncate", newest=15, signal="SIGKILL"),
        restarts=6,
        recipe=recipe,
        timeout_seconds=1200,
    )
    assert result.code == 0, result.output
    assert [record["cause"] for record in result.faults] == ["killed(SIGXFSZ)", *["killed(SIGKILL)"] * 3]
    check_that_restarts_went_on_where_the_lines_said(result)
    log = (result.run_dir / "logs/attempt_4/rank_00000.err").read_text()
    assert "is not used" in log
    assert "falling back to the older checkpoint" in log
    assert weights(result) == weights(clean)


@pytest.mark.parametrize("how", ["flip", pytest.param("truncate", marks=pytest.mark.long)])
def test_m11_a_damaged_checkpoint_is_named_on_the_terminal_in_run_json_and_by_why(
    tmp_path: Path, recipe: Path, how: str
) -> None:
    damage = fault("damage", 1, 14, "forward", how=how, newest=10, signal="SIGKILL")
    result = run(tmp_path / "run", damage, restarts=1, recipe=recipe)
    assert result.code == 0, result.output
    (notice,) = result.document["notices"]
    assert notice["line"].startswith("NOTICE checkpoint step=10 is damaged and is not used: ")
    assert result.output.count(notice["line"]) == 1
    assert notice["line"] in explain(result.run_dir, result.document)
    assert result.document["attempts"][1]["from_checkpoint"] == 5


@pytest.fixture
def cramped(tmp_path: Path, recipe: Path, clean: Result) -> Iterator[Path]:
    """A run directory whose checkpoints lie on a disk with space for two and a half of them."""
    bytes_of_one = read_manifest(max(clean.run_dir.glob("checkpoints/step_*"))).total_bytes
    prepare_real(tmp_path / "run", str(recipe))
    with small_disk(tmp_path / "run" / "checkpoints", int(2.6 * bytes_of_one) + 65536):
        yield tmp_path / "run"


def test_m11_a_full_disk_is_named_and_what_was_committed_is_used(cramped: Path, recipe: Path, clean: Result) -> None:
    result = run(cramped, restarts=2, recipe=recipe)
    assert result.code == 5, result.output
    # Every rank learns of the failed save and leaves with the same error; whoever was first is named.
    assert [(record["phase"], record["cause"]) for record in result.faults] == [("save", "disk_full")]
    assert "no space left on the disk" in result.faults[0]["message"]
    assert result.faults[0]["checkpoint"] == 10
    assert result.orphans == []
    subprocess.run(["mount", "-o", "remount,size=64m", str(cramped / "checkpoints")], check=True)
    again = run(cramped, recipe=recipe)
    assert again.code == 0, again.output
    assert again.document["attempts"][-1]["from_checkpoint"] == 10
    assert weights(again) == weights(clean)


@pytest.mark.long
def test_m16_m18_late_files_and_dead_trackers_cost_no_step(tmp_path: Path, recipe: Path, clean: Result) -> None:
    """Rank 1 sees every new directory of checkpoints seconds late; of three trackers one never gets an answer, one is
    refused, and one works.
    """
    pytest.importorskip("mlflow", reason="needs the client of MLflow (extra: mlflow)")
    document = yaml.safe_load(recipe.read_text())
    with socket.create_server(("127.0.0.1", 0)) as silent:
        uris = [f"http://127.0.0.1:{silent.getsockname()[1]}", "http://127.0.0.1:9"]
        trackers = [{"type": "mlflow", "uri": uri} for uri in uris]
        document["tracking"]["trackers"] = [*trackers, {"type": "tensorboard"}]
        (tmp_path / "tracked.yaml").write_text(yaml.safe_dump(document))
        result = run(
            tmp_path / "run",
            fault("kill", 0, 13, "forward", signal="SIGKILL"),
            restarts=1,
            recipe=tmp_path / "tracked.yaml",
            late_seconds=3,
        )
    assert result.code == 0, result.output
    assert reported(result) == [(0, "forward", "killed(SIGKILL)")]
    assert result.faults[0]["checkpoint"] == 5
    check_that_restarts_went_on_where_the_lines_said(result)
    assert {row["step"] for row in rows(result)} == set(range(1, 21))
    notes = notes_of(result.run_dir)
    assert {name: note.state for name, note in notes.items()} == {
        "mlflow": "",
        "mlflow-1": "",
        "tensorboard": "completed",
    }
    assert notes["tensorboard"].offset == (result.run_dir / "metrics.jsonl").stat().st_size
    assert weights(result) == weights(clean)


def test_m19_a_run_killed_anywhere_continues_bitwise(tmp_path: Path, recipe: Path, clean: Result) -> None:
    dice = random.Random(SEED)
    drawn = fault(
        "kill",
        dice.randrange(2),
        dice.randint(1, 19),
        dice.choice(["data", "forward", "backward", "optimizer"]),
        signal="SIGKILL",
    )
    print(f"UPS_TEST_SEED={SEED}: {drawn}")
    result = run(tmp_path / "run", drawn, restarts=1, recipe=recipe)
    assert result.code == 0, result.output
    check_that_restarts_went_on_where_the_lines_said(result)
    assert weights(result) == weights(clean)  # model, optimizer and average
    # Equal gradients at every step: the same windows in the same order, with the same draws.
    reported_by_clean = {row["step"]: (row["loss"], row["grad_norm"], row["learning_rate"]) for row in rows(clean)}
    for row in rows(result):
        assert (row["loss"], row["grad_norm"], row["learning_rate"]) == reported_by_clean[row["step"]]


def test_m9_a_loss_that_is_no_number_on_one_rank_is_a_skipped_step_and_no_fault(tmp_path: Path, recipe: Path) -> None:
    result = run(tmp_path / "run", fault("nan", 1, 7, "forward"), recipe=recipe)
    assert result.code == 0, result.output
    assert result.failed_lines == []
    assert "NOTICE rank=1/2 step=7 phase=forward: the loss of this rank was not finite" in result.output
    assert len(result.document["notices"]) == 1
    # A skipped step has no loss to report; from the next row on it is counted.
    assert [(row["step"], row["skipped"]) for row in rows(result)] == [
        (step, int(step > 7)) for step in range(1, 21) if step != 7
    ]


def test_lack_of_memory_halves_the_micro_batch_and_learns_the_same(tmp_path: Path, recipe: Path, clean: Result) -> None:
    memory = fault("out_of_memory", 1, 9, "forward", fits=1)
    result = run(tmp_path / "run", memory, restarts=2, micro_batch_size=2, recipe=recipe)
    assert result.code == 0, result.output
    assert reported(result) == [(1, "forward", "out_of_memory")]
    assert result.document["overrides"] == {"engine.micro_batch_size": 1}
    assert last_loss(result) == pytest.approx(last_loss(clean), abs=1e-4)


@pytest.mark.parametrize("to", ["supervisor", "rank"])
def test_sigterm_loses_no_step(tmp_path: Path, recipe: Path, to: str) -> None:
    long = write_recipe(tmp_path, yaml.safe_load(recipe.read_text())["data"]["tasks"], steps=100_000)
    started = start(tmp_path / "run", recipe=long)
    started.wait_for(lambda: rank_is_at_step(started.run_dir, 7))
    os.kill(started.process.pid if to == "supervisor" else started.rank_pid(1), signal.SIGTERM)
    result = started.finish(200)
    assert result.code == 143, result.output
    assert result.failed_lines == []
    assert "state=preempted" in result.verdict
    assert " lost=0" in result.verdict
    assert result.orphans == []
