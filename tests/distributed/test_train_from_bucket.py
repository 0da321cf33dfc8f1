"""Training from an S3 server: the same weights as from the disk, a pause is survived, an end is named in time."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.faults.small_run import rank_is_at_step, write_recipe
from tests.support.seaweed_server import SECRET, Seaweed, require_weed
from ups.record.manifest import read_manifest

# A start takes seconds, and minutes where many others want the processors: limits are against standing still.
START_SECONDS = 600
pytestmark = [pytest.mark.processes, pytest.mark.timeout(4 * START_SECONDS)]
UPS = str(Path(sys.executable).parent / "ups")


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("local")
    command = [UPS, "data", "generate", "advection1d", "--out", str(folder), "--trajectories", "16,4,4"]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    return folder / "advection1d.zarr"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Seaweed]:
    require_weed()
    found = Seaweed(tmp_path / "weed")
    found.start()
    yield found
    found.kill()


def _command(recipe: Path, run_dir: Path, ranks: int) -> list[str]:
    return [UPS, "train", str(recipe), "--ranks", str(ranks), "--set", f"run.dir={run_dir}", "--json"]


def _recipe(folder: Path, path: str, steps: int = 6, workers: int = 1) -> Path:
    folder.mkdir()
    found = write_recipe(folder, [{"name": "advection1d", "path": path}], steps=steps, save_every=3)
    text = found.read_text().replace("workers: 1", f"workers: {workers}")
    found.write_text(text)
    return found


def _environment(server: Seaweed, cache: Path) -> dict[str, str]:
    return {**os.environ, **server.environment, "UPS_DATA_CACHE_DIR": str(cache), "XDG_CACHE_HOME": str(cache / "xdg")}


def _weights(run_dir: Path) -> dict[str, str]:
    final = max(run_dir.glob("checkpoints/step_*"))
    return {name: file.sha256 for name, file in read_manifest(final).files.items() if name.endswith(".distcp")}


@pytest.mark.parametrize(("ranks", "workers"), [(1, 0), pytest.param(2, 1, marks=pytest.mark.long)])
def test_weights_from_a_bucket_are_those_from_the_disk(
    ranks: int, workers: int, local: Path, server: Seaweed, tmp_path: Path
) -> None:
    places = {"disk": str(local), "bucket": server.upload(local, "sets/advection1d.zarr")}
    found = {}
    for name, path in places.items():
        recipe = _recipe(tmp_path / name, path, workers=workers)
        run_dir = tmp_path / f"run_{name}"
        environment = _environment(server, tmp_path / "cache")
        done = subprocess.run(
            _command(recipe, run_dir, ranks), env=environment, capture_output=True, text=True, timeout=START_SECONDS
        )
        assert done.returncode == 0, done.stderr[-3000:]
        found[name] = _weights(run_dir)
    assert found["disk"] == found["bucket"] != {}
    written = b"".join(p.read_bytes() for p in (tmp_path / "run_bucket").rglob("*") if p.is_file())
    assert SECRET.encode() not in written


def _at_step(process: subprocess.Popen[str], run_dir: Path, step: int) -> None:
    deadline = time.monotonic() + START_SECONDS
    while not rank_is_at_step(run_dir, step):
        assert process.poll() is None, process.communicate()[1][-3000:]
        assert time.monotonic() < deadline
        time.sleep(0.1)


def _started(server: Seaweed, local: Path, tmp_path: Path, steps: int) -> tuple[subprocess.Popen[str], Path]:
    """A run whose cache holds nothing of the windows, so that every step needs the server."""
    path = server.upload(local, "advection1d.zarr")
    recipe = _recipe(tmp_path / "recipe", path, steps=steps, workers=0)
    run_dir = tmp_path / "run"
    environment = _environment(server, tmp_path / "cache")
    command = [*_command(recipe, run_dir, 1), "--set", "supervise.max_restarts=0"]
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ), run_dir


def _empty(cache: Path) -> None:
    for block in (cache / "blocks").glob("*/*"):
        block.unlink(missing_ok=True)


@pytest.mark.long
def test_a_server_that_is_away_for_five_seconds_is_a_pause(local: Path, server: Seaweed, tmp_path: Path) -> None:
    process, run_dir = _started(server, local, tmp_path, steps=400)
    _at_step(process, run_dir, 5)
    server.pause()
    _empty(tmp_path / "cache")
    time.sleep(5)
    os.kill(server.pid, signal.SIGCONT)
    out, err = process.communicate(timeout=START_SECONDS)
    assert process.returncode == 0, err[-3000:]
    assert json.loads(out)["faults"] == []


@pytest.mark.long
def test_a_server_that_is_gone_for_good_is_named_in_time(local: Path, server: Seaweed, tmp_path: Path) -> None:
    process, run_dir = _started(server, local, tmp_path, steps=100_000)
    _at_step(process, run_dir, 5)
    server.kill()
    _empty(tmp_path / "cache")
    gone = time.monotonic()
    out, err = process.communicate(timeout=START_SECONDS)
    took = time.monotonic() - gone
    assert process.returncode == 5, err[-3000:]
    faults = json.loads(out)["faults"]
    assert [fault["cause"] for fault in faults] == ["store_unavailable"], faults
    assert took < 60, f"named after {took:.0f} s"
    assert SECRET not in out + err
