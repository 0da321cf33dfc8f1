"""The fault matrix on the real engine: the loop, loader and checkpoints that users run, faults planted from outside."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.distributed.mixture import write_mixture
from tests.faults.supervised import Result, run, start
from tests.faults.test_matrix import (
    check_every_fault_was_printed_once_and_handled_in_time,
    fault,
    rank_is_at_step,
    told,
)
from ups.record.manifest import read_manifest

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    return write_recipe(folder, write_mixture(folder))


def write_recipe(
    folder: Path,
    tasks: list[dict[str, Any]],
    steps: int = 20,
    save_every: int = 5,
    evaluate_every: int | None = None,
) -> Path:
    document = {
        "version": 1,
        "run": {"name": "small"},
        "data": {"tasks": tasks, "block_size": 4, "loader": {"workers": 1}},
        "model": {"type": "latent_operator", "width": 16, "depth": 1, "num_heads": 2},
        "stages": [{"type": "operator", "steps": steps}],
        "engine": {"device": "cpu"},
        "checkpoint": {"interval_steps": save_every},
        "tracking": {"log_interval_steps": 1},
        "evaluate": {"max_trajectories": 1, "interval_steps": evaluate_every},
    }
    path = folder / f"recipe_{steps}.yaml"
    path.write_text(yaml.safe_dump(document))
    return path


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory, recipe: Path) -> Result:
    result = run(tmp_path_factory.mktemp("clean") / "run", recipe=recipe)
    assert result.code == 0, result.output
    return result


def weights(result: Result) -> dict[str, str]:
    """Hashes of the files that hold the tensors of the final checkpoint."""
    final = max(result.run_dir.glob("checkpoints/step_*"))
    return {name: file.sha256 for name, file in read_manifest(final).files.items() if name.endswith(".distcp")}


def last_loss(result: Result) -> float:
    rows = [json.loads(line) for line in (result.run_dir / "metrics.jsonl").read_text().splitlines()]
    return float([row["loss"] for row in rows if "loss" in row][-1])


def test_a_clean_run_raises_no_alarm(clean: Result) -> None:
    assert clean.failed_lines == []
    assert clean.document["notices"] == []
    assert clean.orphans == []
    assert weights(clean)


def test_a_run_that_met_every_death_and_a_damaged_checkpoint_ends_with_the_same_bytes(
    tmp_path: Path, recipe: Path, clean: Result
) -> None:
    result = run(
        tmp_path / "run",
        fault("crash", 1, 0, "init", signal="SIGSEGV"),
        fault("exception", 1, 4, "forward"),
        fault("kill", 0, 8, "backward", signal="SIGKILL"),
        fault("crash", 1, 13, "optimizer", signal="SIGABRT"),
        fault("damage", 1, 14, "forward", signal="SIGKILL"),
        fault("os_exit", 0, 15, "save"),
        fault("kill", 1, 18, "data", signal="SIGSTOP"),
        fault("exception", 0, 20, "evaluate"),
        restarts=4,
        recipe=recipe,
        timeout_seconds=280,
    )
    assert result.code == 0, result.output
    assert told(result) == [
        (1, "init", "signal(SIGSEGV)"),
        (1, "forward", "exception(FileNotFoundError)"),
        (0, "backward", "killed(SIGKILL)"),
        (1, "optimizer", "signal(SIGABRT)"),
        (1, "forward", "killed(SIGKILL)"),
        (0, "save", "early_exit(0)"),
        (1, "data", "stopped(SIGSTOP)"),
        (0, "evaluate", "exception(FileNotFoundError)"),
    ]
    assert all("strikes.py:" in result.faults[n]["at"] for n in (0, 1, 3, 7))
    check_every_fault_was_printed_once_and_handled_in_time(result)
    assert weights(result) == weights(clean)


def test_lack_of_memory_halves_the_micro_batch_and_learns_the_same(tmp_path: Path, recipe: Path, clean: Result) -> None:
    memory = fault("out_of_memory", 1, 9, "forward", fits=1)
    result = run(tmp_path / "run", memory, restarts=2, micro_batch=2, recipe=recipe)
    assert result.code == 0, result.output
    assert told(result) == [(1, "forward", "out_of_memory")]
    assert result.document["overrides"] == {"engine.micro_batch": 1}
    assert last_loss(result) == pytest.approx(last_loss(clean), abs=1e-4)


@pytest.mark.parametrize("to", ["supervisor", "rank"])
def test_sigterm_loses_no_step(tmp_path: Path, recipe: Path, to: str) -> None:
    long = write_recipe(tmp_path, yaml.safe_load(recipe.read_text())["data"]["tasks"], steps=100_000)
    started = start(tmp_path / "run", recipe=long)
    started.wait_for(lambda: rank_is_at_step(started.run_dir, 7))
    os.kill(started.process.pid if to == "supervisor" else started.rank_pid(1), signal.SIGTERM)
    result = started.finish(60)
    assert result.code == 143, result.output
    assert result.failed_lines == []
    assert "state=preempted" in result.verdict
    assert " lost=0" in result.verdict
    assert result.orphans == []
