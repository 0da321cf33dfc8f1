"""A run loses its directory, or never had standard streams: one verdict that is true, and a whole record."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.support.faults.small_run import rank_is_at_step
from tests.support.faults.supervised import start
from tests.support.mixture import mixture_recipe, write_mixture

pytestmark = [pytest.mark.processes, pytest.mark.timeout(1200)]


def test_a_run_whose_directory_was_moved_away_is_never_completed(tmp_path: Path) -> None:
    """The toy ranks make the directory again when they save, and even their last checkpoint is whole."""
    started = start(tmp_path / "run", steps=200, step_seconds=0.02, restarts=3)
    started.wait_for(lambda: rank_is_at_step(started.run_dir, 8))
    started.run_dir.rename(tmp_path / "moved")
    result = started.finish(300)
    assert result.code == 8, result.output
    assert "state=failed exit=8 attempts=1 faults=1 cause=run_directory_lost" in result.verdict
    assert "completed" not in result.output
    assert len(result.failed_lines) == 1
    assert " action=stop(not_retryable: run_directory_lost) " in result.failed_lines[0]
    assert result.orphans == []


def test_black_boxes_that_were_removed_are_missed_once_and_the_run_is_still_watched(tmp_path: Path) -> None:
    started = start(tmp_path / "run", steps=120, step_seconds=0.02, restarts=0)
    started.wait_for(lambda: rank_is_at_step(started.run_dir, 8))
    document = json.loads((started.run_dir / "run.json").read_text())
    shutil.rmtree(document["blackbox_dir"])
    result = started.finish(300)
    assert result.code == 0, result.output
    assert result.output.count("NOTICE") == 1
    assert f"{document['blackbox_dir']}, where the ranks record what they do, was removed" in result.output
    noticed = json.loads((started.run_dir / "run.json").read_text())["notices"]
    assert [entry["line"].startswith("NOTICE host=") for entry in noticed] == [True]
    # The proof that every rank did the same last step is read from rings that no new process can open.
    assert "state=completed exit=0" in result.verdict
    assert result.orphans == []


def test_a_run_without_standard_streams_goes_on_and_its_record_is_complete(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    stages = [{"type": "operator", "steps": 4}]
    recipe.write_text(yaml.safe_dump(mixture_recipe(tmp_path / "run", write_mixture(tmp_path), stages=stages)))
    command = [sys.executable, "-m", "ups", "train", str(recipe), "--set", "tracking.log_interval_steps=1"]
    done = subprocess.run(
        ["/bin/sh", "-c", '"$@" 2>&-', "sh", *command], stdout=subprocess.PIPE, text=True, timeout=400
    )
    assert done.returncode == 0, done.stdout
    assert "VERDICT state=completed exit=0" in done.stdout
    assert json.loads((tmp_path / "run/run.json").read_text())["state"] == "completed"
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "loss" in row] == [1, 2, 3, 4]
    assert (tmp_path / "run/bundle/COMMITTED").is_file()


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_no_file_gets_the_number_of_a_closed_stream(closed: str) -> None:
    code = (
        "import os, sys; from ups.cli.output import open_closed_streams; open_closed_streams(); "
        "bad = [os.open('/dev/null', os.O_RDONLY) < 3, None in (sys.stdin, sys.stdout, sys.stderr)]; "
        "print('out', flush=True); print('err', file=sys.stderr, flush=True); os.write(2, b'err'); sys.exit(any(bad))"
    )
    done = subprocess.run(
        ["/bin/sh", "-c", f'"$@" {closed}', "sh", sys.executable, "-c", code], capture_output=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert b"Traceback" not in done.stderr
