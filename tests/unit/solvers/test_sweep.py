"""Sweeps through real processes: equal bytes, resuming after a kill, refusals, both formats."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from ups.config.schema import TaskConfig
from ups.data.open import open_task
from ups.errors import ConfigError, MachineError, MissingExtraError
from ups.formats.zarr_store import read_store_attributes
from ups.record.manifest import read_manifest
from ups.solvers.request import make_request
from ups.solvers.sweep import generate

pytestmark = [pytest.mark.processes, pytest.mark.timeout(1200)]

COUNTS = (24, 8, 8)
# Solved in milliseconds, without JAX.
QUICK = "advection1d"


def small(task=QUICK, **changes):
    return make_request(task, **{"trajectories": COUNTS, "resolution": 16, "num_frames": 3, **changes})


def command(out, *more):
    return [sys.executable, "-m", "ups.cli.main", "data", "generate", "darcy2d", "--out", str(out), *more]


def children(pid):
    pids = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rsplit(")", 1)[1].split()
            except OSError:
                continue
            if int(fields[1]) == pid and fields[0] != "Z":
                pids.append(int(entry.name))
    return pids


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def wait_until(condition, seconds=400):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "nothing happened in time"
        time.sleep(0.02)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """One finished store of `small()`, made by one process."""
    return generate([small()], tmp_path_factory.mktemp("made"))[0]


def test_the_bytes_do_not_depend_on_the_number_of_processes_and_a_second_run_keeps_them(made, tmp_path):
    seen = []
    requests = [small(), small("darcy2d", trajectories=(1, 0, 0))]
    two = generate(requests, tmp_path, num_processes=2, on_progress=lambda *a: seen.append(a))
    assert read_manifest(two[0].path).sha256 == read_manifest(made.path).sha256
    assert two[0].summary == made.summary
    assert seen[0] == (0, 4, QUICK)
    assert (4, 4, QUICK) in seen
    again = generate(requests, tmp_path)
    assert [g.kept for g in again] == [True, True]
    assert again[0].summary == made.summary
    assert not list(tmp_path.glob(".*partial"))


def test_a_killed_sweep_leaves_no_process_and_continues_to_the_same_bytes(tmp_path):
    sizes = ["--trajectories", "64,16,16", "--resolution", "16", "--processes", "1"]
    process = subprocess.Popen(command(tmp_path / "killed", *sizes))
    partial = tmp_path / "killed" / ".darcy2d.zarr.partial"
    wait_until(lambda: len(list(partial.glob("*.npz"))) >= 2)
    workers = children(process.pid)
    process.send_signal(signal.SIGKILL)
    process.wait()
    wait_until(lambda: not any(alive(pid) for pid in workers), 120)
    committed = {f.name: f.stat().st_mtime_ns for f in partial.glob("*.npz")}
    assert 2 <= len(committed) < 6
    damaged = partial / sorted(committed)[0]
    damaged.write_bytes(damaged.read_bytes()[:-100])
    (partial / ".ups-tmp.train-0000003.npz.abc").write_bytes(b"half")

    solved = []
    request = make_request("darcy2d", trajectories=(64, 16, 16), resolution=16)
    resumed = generate([request], tmp_path / "killed", on_progress=lambda done, *_: solved.append(done))
    # What was committed and whole was not solved again.
    assert solved[0] == len(committed) - 1
    whole = generate([request], tmp_path / "whole", num_processes=2)
    assert read_manifest(resumed[0].path).sha256 == read_manifest(whole[0].path).sha256


def test_a_killed_worker_is_an_error_that_says_how_to_go_on(tmp_path):
    # A batch of training data large enough that the worker is still busy when it is found.
    sizes = ["--trajectories", "640,64,64", "--processes", "1"]
    process = subprocess.Popen(command(tmp_path, *sizes), stderr=subprocess.PIPE, text=True)
    partial = tmp_path / ".darcy2d.zarr.partial"
    wait_until(lambda: len(list(partial.glob("*.npz"))) >= 1)
    (worker,) = [p for p in children(process.pid) if "spawn_main" in Path(f"/proc/{p}/cmdline").read_text()]
    os.kill(worker, signal.SIGKILL)
    _, text = process.communicate(timeout=300)
    assert process.returncode == MachineError.exit_code
    assert "run the same command again" in text
    assert list(partial.glob("*.npz"))


class TestRefusals:
    def test_another_data_set_of_that_name_is_not_replaced_without_being_reported(self, made, tmp_path):
        shutil.copytree(made.path, tmp_path / made.path.name)
        other = small(seed=1, trajectories=(1, 0, 0))
        with pytest.raises(ConfigError) as caught:
            generate([other], tmp_path)
        assert "--overwrite" in caught.value.hint
        assert read_manifest(tmp_path / made.path.name).sha256 == read_manifest(made.path).sha256
        replaced = generate([other], tmp_path, overwrite=True)[0]
        assert read_store_attributes(replaced.path)["generator"]["identity"] == other.identity()

    def test_chunks_of_another_request_are_not_mixed_in(self, made, tmp_path):
        partial = tmp_path / f".{QUICK}.zarr.partial"
        partial.mkdir()
        (partial / "request.json").write_text(json.dumps({"identity": "other"}))
        wrong = small(seed=9).solve(next(iter(small(seed=9).chunks())))
        np.savez(partial / "train-0000000.npz", **wrong.arrays())
        again = generate([small()], tmp_path)[0]
        assert read_manifest(again.path).sha256 == read_manifest(made.path).sha256

    def test_two_sweeps_of_one_data_set_at_once(self, tmp_path):
        partial = tmp_path / f".{QUICK}.zarr.partial"
        partial.mkdir()
        with (partial / "lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            with pytest.raises(ConfigError, match="another process"):
                generate([small()], tmp_path)

    def test_a_disk_that_is_too_small_is_noticed_before_the_work(self, tmp_path):
        with pytest.raises(MachineError, match="free"):
            generate([make_request("ns2d", trajectories=(10**7, 0, 0), resolution=2048, num_frames=1000)], tmp_path)

    def test_a_missing_package_names_the_extra(self, tmp_path, monkeypatch):
        monkeypatch.setitem(sys.modules, "exponax", None)
        with pytest.raises(MissingExtraError, match="exponax") as caught:
            generate([small()], tmp_path)
        assert "[generate]" in caught.value.hint

    def test_one_task_asked_for_twice(self, tmp_path):
        with pytest.raises(ConfigError, match="twice"):
            generate([small(), small(seed=1)], tmp_path)

    def test_a_directory_that_is_a_file(self, tmp_path):
        (tmp_path / "data").write_text("")
        with pytest.raises(MachineError):
            generate([small()], tmp_path / "data")

    def test_no_processes(self, tmp_path):
        with pytest.raises(ConfigError):
            generate([small()], tmp_path, num_processes=0)


class TestStore:
    def test_a_store_gives_back_the_trajectories_and_its_origin(self, made):
        reader = open_task(TaskConfig(name=QUICK, path=str(made.path)))
        assert tuple(reader.splits.values()) == COUNTS
        chunk = list(small().chunks())[1]
        solution = small().solve(chunk)
        for row in range(chunk.count):
            window = reader.read("train", 16 + row, 0, 3)
            assert np.array_equal(window.state, solution.state[row])
            assert np.array_equal(window.parameters, solution.parameters[row])
        origin = read_store_attributes(made.path)["generator"]
        assert origin["identity"] == small().identity()
        assert origin["request"]["trajectories"] == list(COUNTS)
        assert origin["summary"]["train"]["state"]["u"]["std"] > 0
        assert set(origin["libraries"]) >= {"numpy", "scipy", "exponax"}
