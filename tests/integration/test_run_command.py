"""`ups run`: from a file to a bundle that has passed its gate, in one command that can be killed and repeated."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.integration.environments import ROOT
from ups.record.manifest import verify
from ups.supervise.run_file import hold_steps

pytestmark = [pytest.mark.processes, pytest.mark.timeout(1500)]

# One rank: how several train is the subject of others, and a process more costs seconds in every step.
RANKS = ("--ranks", "1")
STEPS = ["data", "validate", "doctor", "plan", "train", "evaluate", "gate", "calibrate", "bundle", "report"]
RECIPE = """
version: 1
run: { name: waves }
data:
  tasks:
    - name: waves
      path: data/waves.zarr
      source: { type: import, files: waves.npy }
      test_fraction: 0.2
      calibration_fraction: 0.3
  batch_size: 4
model: { type: latent_operator, width: 16, depth: 1, num_heads: 2 }
stages:
  - { type: operator, steps: 8 }
checkpoint: { interval_steps: 3 }
tracking: { log_interval_steps: 2 }
gate:
  - { metric: one_step_trmse, at_most: 100, relative_to: persistence }
  - { metric: num_blown_up, at_most: 0 }
  - { metric: step_milliseconds, at_most: 10000 }
"""


def waves(path: Path, seed: int = 0) -> None:
    """(N, T, X): sums of traveling waves."""
    rng = np.random.default_rng(seed)
    x, t = np.arange(32) / 32 * 2 * np.pi, np.arange(8) * 0.1
    phase, size = rng.uniform(0, 6, (2, 10, 3, 1, 1))
    k = np.arange(1, 4)[:, None, None]
    np.save(path, (size * np.sin(k * (x - t[:, None]) + phase)).sum(axis=1).astype(np.float32))


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "NO_COLOR": "1"}


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "ups", *words]


def ups(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(*words), cwd=folder, env=environment(), capture_output=True, text=True, timeout=1200)


def run(folder: Path, *changes: str) -> subprocess.CompletedProcess[str]:
    sets = [word for change in changes for word in ("--set", change)]
    return ups(folder, "run", "recipe.yaml", *RANKS, *sets)


def start_folder(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    waves(folder / "waves.npy")
    (folder / "recipe.yaml").write_text(RECIPE)
    return folder


def records(folder: Path) -> dict[str, dict[str, Any]]:
    return {one["name"]: one for one in json.loads((folder / "runs/waves/steps.json").read_text())["steps"]}


def bundle_hash(folder: Path, name: str = "waves") -> str:
    return verify(folder / "runs" / name / "bundle").sha256


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One undisturbed run."""
    folder = start_folder(tmp_path_factory.mktemp("whole") / "place")
    done = run(folder)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "VERDICT state=completed exit=0" in done.stdout
    assert "gate=passed" in done.stdout
    return folder


@pytest.fixture
def copied(whole: Path, tmp_path: Path) -> Path:
    """The same, to be spoiled."""
    return Path(shutil.copytree(whole, tmp_path / "place", copy_function=shutil.copy2))


def test_every_step_is_done_in_order_and_recorded_with_its_time(whole: Path) -> None:
    by_step = records(whole)
    assert list(by_step) == STEPS
    assert all(one["outcome"] == "done" and one["inputs"] and one["outputs"] for one in by_step.values())
    assert by_step["train"]["seconds"] > 0.1
    assert bundle_hash(whole) == by_step["bundle"]["outputs"]
    assert "<html" in (whole / "runs/waves/report/index.html").read_text()
    scores = json.loads((whole / "runs/waves/report/scores.json").read_text())["results"][0]
    assert scores["cost"]["step_milliseconds"] > 0


def test_the_bundle_states_errors_that_were_measured_on_what_was_set_aside(whole: Path) -> None:
    assert "3 for calibration: error bars up to a level of 75.0%" in records(whole)["calibrate"]["says"]
    assert "3 for calibration" in (whole / "runs/waves/bundle/card.md").read_text()
    done = ups(whole, "rollout", "waves", "-o", "stated.nc", "--level", "0.7", "--on-doubt", "stop", "--json")
    assert done.returncode == 0, done.stderr
    (sample,) = json.loads(done.stdout)["samples"]
    assert 0.25 <= sample["p_value"] <= 1
    said = ups(whole, "rollout", "waves", "-o", "more.nc", "--level", "0.7", "--on-doubt", "ignore")
    assert "at each time, with a chance of 0.7 below" in said.stdout
    refused = ups(whole, "rollout", "waves", "-o", "refused.nc", "--level", "0.9")
    assert refused.returncode == 10
    assert "3 calibration trajectories allow levels above 0 and up to 0.75" in refused.stderr


def test_a_bundle_is_calibrated_again_in_its_place(copied: Path) -> None:
    file = copied / "runs/waves/bundle/calibration.safetensors"
    first = file.read_bytes()
    done = ups(copied, "calibrate", "waves")
    assert done.returncode == 0, done.stderr
    assert "waves: 3 for calibration" in done.stdout
    assert file.read_bytes() == first
    assert bundle_hash(copied)
    seen = ups(copied, "calibrate", "waves", "--data", "waves=data/waves.zarr", "--json")
    assert json.loads(seen.stdout)["tasks"]["waves"]["split"] == "calibration"


def test_an_unchanged_second_call_does_nothing_and_imports_no_torch(whole: Path) -> None:
    before = (whole / "runs/waves/steps.json").stat()
    program = [sys.executable, "-X", "importtime", "-m", "ups", "run", "recipe.yaml", *RANKS]
    with subprocess.Popen(program, cwd=whole, env=environment(), stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        imported = process.stderr.read()
        _, status, used = os.wait4(process.pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    modules = {line.rpartition("|")[2].strip() for line in imported.splitlines()}
    assert "ups.library.run_recipe" in modules
    assert not modules & {"torch", "numpy", "jax"}
    assert used.ru_utime + used.ru_stime < 3.0, "seconds of CPU; the clock of a busy machine says nothing"
    after = (whole / "runs/waves/steps.json").stat()
    assert (before.st_mtime_ns, before.st_ino) == (after.st_mtime_ns, after.st_ino)


def test_a_changed_threshold_repeats_only_the_gate_and_a_failed_one_is_a_verdict(copied: Path) -> None:
    before = records(copied)
    failed = run(copied, "gate.0.at_most=1e-9")
    assert failed.returncode == 9, failed.stdout + failed.stderr
    assert "VERDICT state=gate_failed exit=9" in failed.stdout
    assert "cause=gate" in failed.stdout
    assert "Traceback" not in failed.stderr
    after = records(copied)
    assert {name for name in STEPS if before[name] != after[name]} == {"gate"}
    assert (after["gate"]["outcome"], after["gate"]["cause"]) == ("gate_failed", "gate")
    again = run(copied, "gate.0.at_most=1e-9")
    assert again.returncode == 9, "the same call gives the same answer"
    assert records(copied) == after
    status = json.loads(ups(copied, "status", "waves", "--json").stdout)
    assert (status["state"], status["cause"], status["gate"]["passed"]) == ("gate_failed", "gate", False)
    why = ups(copied, "why", "waves").stdout
    assert "did not reach the bar" in why
    assert "FAILED  waves: one_step_trmse at most 1e-09 times persistence: is" in why
    passed = run(copied)
    assert passed.returncode == 0, passed.stdout + passed.stderr
    assert {name for name in STEPS if before[name] != records(copied)[name]} == {"gate"}
    assert json.loads(ups(copied, "runs", "--json").stdout)[0]["state"] == "completed"


def test_without_a_passed_gate_there_is_a_report_and_no_bundle(copied: Path) -> None:
    shutil.rmtree(copied / "runs/waves/bundle")
    (copied / "runs/waves/report/index.html").unlink()
    done = run(copied, "gate.1.metric=correlation_time", "gate.1.at_most=-1")
    assert done.returncode == 9, done.stdout + done.stderr
    assert not (copied / "runs/waves/bundle").exists()
    assert (copied / "runs/waves/report/index.html").exists()
    assert records(copied)["train"]["outcome"] == "done"
    trained = ups(copied, "train", "recipe.yaml")
    assert trained.returncode == 9, trained.stdout + trained.stderr
    assert "its scores did not pass the gate" in trained.stderr
    assert not (copied / "runs/waves/bundle").exists()


def test_a_second_one_at_the_same_time_is_refused(whole: Path) -> None:
    with hold_steps(whole / "runs/waves"):
        second = run(whole)
    assert second.returncode == 11
    assert "run_held" in second.stderr


def test_a_swapped_file_is_noticed(copied: Path) -> None:
    waves(copied / "waves.npy", seed=1)
    done = run(copied)
    assert done.returncode == 4, done.stdout + done.stderr
    assert "data_changed" in done.stderr
    waves(copied / "waves.npy")
    assert run(copied).returncode == 0, "the old content is back, whatever its time"


def test_a_swapped_store_is_noticed_before_anything_is_trained_on_it(copied: Path) -> None:
    from ups import import_data

    before = bundle_hash(copied)
    waves(copied / "other.npy", seed=1)
    shutil.rmtree(copied / "data/waves.zarr")
    import_data(copied / "other.npy", copied / "data/waves.zarr", test_fraction=0.2)
    done = run(copied)
    assert done.returncode == 4, done.stdout + done.stderr
    assert "data_changed" in done.stderr
    assert bundle_hash(copied) == before


def test_a_damaged_store_is_noticed(copied: Path) -> None:
    chunk = max((copied / "data/waves.zarr").rglob("*"), key=lambda path: path.stat().st_size if path.is_file() else 0)
    content = bytearray(chunk.read_bytes())
    content[len(content) // 2] ^= 1
    chunk.write_bytes(content)
    done = run(copied)
    assert done.returncode == 4, done.stdout + done.stderr
    assert "damaged" in done.stderr


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("name", ["model.safetensors", "MANIFEST"])
def test_one_flipped_bit_of_the_bundle_is_noticed_and_the_bundle_is_made_again(
    whole: Path, copied: Path, name: str
) -> None:
    before = records(copied)
    flip(copied / "runs/waves/bundle" / name)
    refused = ups(copied, "runs", "promote", "waves", "best")
    assert refused.returncode == 8, refused.stdout + refused.stderr
    assert "make it again with: ups run runs/waves" in refused.stderr
    again = ups(copied, "run", "runs/waves", *RANKS)
    assert again.returncode == 0, again.stdout + again.stderr
    assert "runs/waves/bundle is damaged" in again.stderr
    assert {step for step in STEPS if before[step] != records(copied)[step]} == {"bundle"}
    assert bundle_hash(copied) == bundle_hash(whole)
    assert ups(copied, "runs", "promote", "waves", "best").returncode == 0


def test_one_flipped_bit_of_the_last_checkpoint_is_noticed_and_its_steps_are_trained_again(
    whole: Path, copied: Path
) -> None:
    flip(max((copied / "runs/waves/checkpoints/step_00000008").glob("*.distcp")))
    again = run(copied)
    assert again.returncode == 0, again.stdout + again.stderr
    assert "step_00000008 is damaged" in again.stderr
    assert "NOTICE checkpoint step=8 is damaged and is not used" in again.stdout
    document = json.loads((copied / "runs/waves/run.json").read_text())
    assert [attempt["from_checkpoint"] for attempt in document["attempts"]] == [None, 6]
    assert bundle_hash(copied) == bundle_hash(whole), "the same steps give the same weights"


@pytest.mark.long
def test_a_disk_that_is_full_ends_with_its_own_code_and_the_next_call_goes_on(whole: Path, tmp_path: Path) -> None:
    """A limit on the size of files stands for the disk: the store does not fit."""
    folder = start_folder(tmp_path / "place")
    limited = " ".join(["ulimit -f 2;", "exec", *command("run", "recipe.yaml", *RANKS)])
    done = subprocess.run(
        ["bash", "-c", limited], cwd=folder, env=environment(), capture_output=True, text=True, timeout=1200
    )
    assert done.returncode == 5, done.stdout + done.stderr
    assert not (folder / "data/waves.zarr").exists()
    assert records(folder)["data"]["outcome"] == "failed"
    done = run(folder)
    assert done.returncode == 0, done.stdout + done.stderr
    assert bundle_hash(folder) == bundle_hash(whole)


def killed_and_started_again(folder: Path, moments: int, seed: int, longest: float) -> None:
    """SIGKILL to `ups run` at random moments, then once to its end."""
    draw = random.Random(seed)
    for _ in range(moments):
        with subprocess.Popen(
            command("run", "recipe.yaml", *RANKS),
            cwd=folder,
            env=environment(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        ) as process:
            time.sleep(draw.uniform(0.5, longest))
            process.send_signal(signal.SIGKILL)
            process.wait(120)
    done = run(folder)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.long
@pytest.mark.parametrize("moments", [1, pytest.param(10, marks=[pytest.mark.long, pytest.mark.timeout(3600)])])
def test_killed_at_random_moments_it_ends_in_the_same_bundle(whole: Path, tmp_path: Path, moments: int) -> None:
    folder = start_folder(tmp_path / "place")
    longest = sum(one["seconds"] for one in records(whole).values())
    killed_and_started_again(folder, moments, seed=moments, longest=longest)
    assert bundle_hash(folder) == bundle_hash(whole)
    assert list(records(folder)) == STEPS


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_the_tiny_recipe_goes_from_an_empty_directory_to_a_bundle_in_four_minutes_of_cpu(tmp_path: Path) -> None:
    """On two quiet cores the clock shows less than the CPU time; on a busy machine it says nothing."""
    shutil.copy(ROOT / "recipes/tiny.yaml", tmp_path / "tiny.yaml")
    with subprocess.Popen(command("run", "tiny.yaml", "--ranks", "2"), cwd=tmp_path, env=environment()) as process:
        _, status, used = os.wait4(process.pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert used.ru_utime + used.ru_stime < 240
    assert bundle_hash(tmp_path, "tiny")
    assert (tmp_path / "runs/tiny/report/index.html").exists()
