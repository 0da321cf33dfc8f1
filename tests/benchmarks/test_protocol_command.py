"""The protocol from data to table with real trainings, and again without repeating one."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.checkout import path_with
from ups.record import processes

PROTOCOL = [sys.executable, "-m", "benchmarks.protocol"]
ENVIRONMENT = {**os.environ, **path_with()}

pytestmark = [pytest.mark.processes, pytest.mark.timeout(600)]


def bench(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [*PROTOCOL, "--small", "--cpu-seconds", "1", "--task", "advection1d", *options]
    return subprocess.run(command, cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, timeout=400)


@pytest.mark.long
def test_a_model_is_trained_scored_and_not_trained_again(tmp_path: Path) -> None:
    # The FNO: its complex weights are what an engine, an optimizer and a bundle stumble over.
    done = bench(tmp_path, "--model", "reference", "--model", "fno")
    assert done.returncode == 0, done.stdout + done.stderr
    rows = {row["model"]: row for row in json.loads((tmp_path / "bench/bench.json").read_text())["rows"]}
    assert set(rows) == {"reference", "fno"}
    assert rows["reference"]["predictor"] == "persistence"
    assert all(row["scores"]["num_samples"] == 8 for row in rows.values())
    assert 0 < rows["fno"]["cpu_seconds"] < 5
    assert rows["fno"]["budget_fraction"] == rows["fno"]["cpu_seconds"]
    assert min(rows["fno"][key] for key in ("windows_per_second", "memory_mib", "rollout_ms")) > 0
    assert "### Whole rollout, VRMSE (mean)" in done.stdout
    # What is kept of a finished training is enough for the table: its run may be gone, as on another machine.
    shutil.rmtree(tmp_path / "bench/runs")
    again = bench(tmp_path, "--model", "fno", "--model", "reference", "--json")
    assert again.returncode == 0, again.stderr
    assert "training" not in again.stderr
    scores = {row["model"]: row["scores"] for row in json.loads(again.stdout)["rows"]}
    assert scores == {name: row["scores"] for name, row in rows.items()}
    # Rows of another recipe are none of this one.
    stored = tmp_path / "bench/results/fno-advection1d.json"
    stored.write_text(stored.read_text().replace("seed: 0", "seed: 1"))
    other = bench(tmp_path, "--model", "fno")
    assert "training fno-advection1d" in other.stderr
    # Nor are those of the same recipe when a setting that it does not say had another default.
    result = json.loads(stored.read_text())
    assert result["learned"]["stages"][0]["noise_clean"] == 0.5
    result["learned"]["stages"][0]["noise_clean"] = 0.25
    stored.write_text(json.dumps(result))
    shutil.rmtree(tmp_path / "bench/runs")
    assert "training fno-advection1d" in bench(tmp_path, "--model", "fno").stderr


@pytest.mark.long
def test_who_is_asked_to_leave_leaves_no_training_behind(tmp_path: Path) -> None:
    options = ["--small", "--cpu-seconds", "600", "--task", "advection1d", "--model", "unet", "--model", "fno"]
    command = [*PROTOCOL, *options]
    metrics = tmp_path / "bench/runs/fno-advection1d/metrics.jsonl"
    with subprocess.Popen(command, cwd=tmp_path, env=ENVIRONMENT, stderr=subprocess.PIPE, text=True) as process:
        try:
            deadline = time.monotonic() + 200
            while not (metrics.exists() and metrics.stat().st_size) and time.monotonic() < deadline:
                assert process.poll() is None
                time.sleep(0.1)
            process.terminate()
            reported = process.communicate(timeout=60)[1]
        finally:
            process.kill()
    assert process.returncode == 143, reported
    assert "training unet-advection1d" not in reported
    run = json.loads((tmp_path / "bench/runs/fno-advection1d/run.json").read_text())
    assert run["state"] == "preempted"
    assert run["checkpoint"] > 0
    assert not processes.is_alive(run["supervisor_pid"])


def test_what_the_protocol_does_not_know_is_refused_before_any_work(tmp_path: Path) -> None:
    done = bench(tmp_path, "--model", "pinn")
    assert done.returncode == 3
    assert "ups-bench has no model 'pinn' -> choose from reference, fno, unet, fno+, " in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_page_is_of_a_whole_result_and_never_of_a_part(tmp_path: Path) -> None:
    done = bench(tmp_path, "--page-only")
    assert done.returncode == 3
    assert "--page-only shows what bench.json holds -> leave --model and --task out" in done.stderr
    assert list(tmp_path.iterdir()) == []
