"""A save that does not end is named with its place, ended in time, and does not keep a run that was asked to leave."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from tests.faults.test_matrix import fault, reported
from tests.support.faults.small_run import rank_is_at_step, write_recipe
from tests.support.faults.supervised import PATIENCE, run, start
from tests.support.mixture import write_mixture

pytestmark = [pytest.mark.processes, pytest.mark.timeout(600)]

# Far below those of real runs; a save of the small model takes less than a second, and is reported as one.
QUICK = {
    "section_name_floor_seconds": 2.0 * PATIENCE,
    "section_first_name_seconds": 60.0,
    "section_kill_floor_seconds": 6.0 * PATIENCE,
    "name_factor": 2.0,
    "kill_factor": 6.0,
}


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    return write_recipe(folder, write_mixture(folder))


def test_a_rank_without_address_space_does_not_hang_in_its_save(tmp_path: Path, recipe: Path) -> None:
    result = run(
        tmp_path / "run",
        fault("no_address_space", 0, 10, "save", newest=5),
        ranks=1,
        recipe=recipe,
        timeout_seconds=300,
    )
    # What fits into the memory that is there may go on; what does not is a cause with a name.
    assert result.code == 0 or result.faults[0]["cause"] in ("out_of_memory", "checkpoint"), result.output
    assert "state=" in result.verdict
    assert result.orphans == []


def test_a_save_that_is_stuck_on_one_rank_is_named_with_its_place_and_ended(tmp_path: Path, recipe: Path) -> None:
    stuck = fault("wedge_saves", 1, 10, "save", newest=5)
    result = run(tmp_path / "run", stuck, recipe=recipe, deadlines=QUICK, timeout_seconds=400)
    assert result.code == 6, result.output
    assert reported(result) == [(1, "save", "stalled")]
    assert "faults_to_plant.py:" in result.faults[0]["at"]
    assert result.faults[0]["checkpoint"] == 5
    assert "SLOW rank=1/2 step=15 phase=save" in result.output
    assert [notice["rank"] for notice in result.document["notices"]] == [1]
    assert result.orphans == []


def test_sigterm_ends_a_run_whose_first_save_is_stuck(tmp_path: Path, recipe: Path) -> None:
    grace = 3.0 * PATIENCE
    deadlines = {**QUICK, "grace_seconds": grace}
    started = start(tmp_path / "run", fault("wedge_saves", 0, 5, "save"), ranks=1, recipe=recipe, deadlines=deadlines)
    started.wait_for(lambda: rank_is_at_step(started.run_dir, 10))
    asked = time.monotonic()
    started.process.send_signal(signal.SIGTERM)
    result = started.finish(120)
    assert time.monotonic() - asked < 60
    assert result.code == 143, result.output
    assert reported(result) == [(0, "save", "deadline(save)")]
    assert result.faults[0]["action"] == "stop(asked_to_leave)"
    assert "state=preempted" in result.verdict
    assert result.orphans == []
