"""`ups train` with trackers: they have the numbers of metrics.jsonl, and the verdict when every rank is dead."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from tests.support.mixture import mixture_recipe, write_mixture
from tests.unit.tracking import wandb_log
from ups.supervise.run_file import read_run
from ups.supervise.status import rank_statuses

pytest.importorskip("tensorboard", reason="needs TensorBoard, to read its files back (extra: tensorboard)")
pytest.importorskip("wandb", reason="needs the client of Weights & Biases (extra: wandb)")
pytestmark = [pytest.mark.processes, pytest.mark.timeout(1500)]

TRACKERS = [{"type": "tensorboard"}, {"type": "wandb", "mode": "offline"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("tracked")
    tracking = {"log_interval_steps": 2, "trackers": TRACKERS}
    document = mixture_recipe(found / "run", write_mixture(found), tracking=tracking)
    (found / "recipe.yaml").write_text(yaml.safe_dump(document))
    return found


def ups(folder: Path, *words: str) -> subprocess.Popen[str]:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "XDG_STATE_HOME": str(folder / "state")}
    command = [sys.executable, "-m", "ups", *words]
    return subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def ended(folder: Path, process: subprocess.Popen[str]) -> str:
    """What a run says until its end; if it stands still, where its ranks stand."""
    try:
        return process.communicate(timeout=600)[0]
    except subprocess.TimeoutExpired:
        status = ups(folder, "status", "run").communicate(timeout=300)[0]
        for path in (folder / "run").glob("logs/*/rank_*"):
            status += f"\n{path}:\n{path.read_bytes()[-2000:].decode(errors='replace')}"
        process.terminate()
        status += process.communicate(timeout=400)[0]
        pytest.fail(f"stood still for 200 s:\n{status}")


def rows(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def events(run_dir: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(run_dir / "tensorboard"), size_guidance={"scalars": 0, "tensors": 0})
    found.Reload()
    return found


def log_of(run_dir: Path) -> Path:
    (found,) = run_dir.glob("tracking/wandb/offline-run-*/run-*.wandb")
    return found


def test_every_tracker_has_the_numbers_of_the_run(folder: Path) -> None:
    output = ended(folder, ups(folder, "train", "recipe.yaml", "--ranks", "2"))
    run_dir = folder / "run"
    assert "VERDICT state=completed" in output, output
    assert "not complete" not in output
    written = [(row["step"], row["loss"]) for row in rows(run_dir) if "loss" in row]
    assert len(written) >= 4
    shown = [(event.step, event.value) for event in events(run_dir).Scalars("loss")]
    assert shown == [(step, float(np.float32(loss))) for step, loss in written]
    logged = wandb_log.history(log_of(run_dir))
    assert [(row["step"], row["loss"]) for row in logged if "loss" in row] == written
    assert wandb_log.exits(log_of(run_dir)) == [0]
    identity = read_run(run_dir)["identity"]
    facts = wandb_log.config(log_of(run_dir))
    assert facts["ups/recipe"] == identity["recipes"][-1]
    assert {name: facts[f"ups/data.{name}"] for name in identity["data"]} == identity["data"]
    status = ups(folder, "status", "run").communicate(timeout=300)[0]
    assert f"tensorboard: {run_dir}/tensorboard, {len(rows(run_dir))} rows, told completed" in status


def test_a_run_whose_ranks_were_all_killed_has_failed_in_every_tracker(folder: Path) -> None:
    run_dir = folder / "killed"
    changes = (f"run.dir={run_dir}", "stages.0.steps=100000")
    options = [word for change in changes for word in ("--set", change)]
    with ups(folder, "train", "recipe.yaml", "--ranks", "2", *options) as process:
        deadline = time.monotonic() + 400
        while not (run_dir / "metrics.jsonl").exists() or len(rows(run_dir)) < 2:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        for status in rank_statuses(run_dir, read_run(run_dir)):
            os.kill(status.pid, signal.SIGKILL)
        output = process.communicate(timeout=300)[0]
    assert process.returncode == 6, output
    assert wandb_log.exits(log_of(run_dir)) == [6]
    ending = events(run_dir).Tensors("run/ending")[-1].tensor_proto.string_val[0].decode()
    assert "| state | failed |" in ending
    assert "killed(SIGKILL)" in ending
