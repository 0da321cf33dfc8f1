"""`ups train` with a mirror: a run whose directory is gone continues from the bucket, and ends with the same bytes."""

from __future__ import annotations

import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.support.mixture import mixture_recipe, write_mixture
from tests.support.seaweed_server import KEY, SECRET, Seaweed, serve_s3
from ups.buckets.client import open_bucket
from ups.buckets.run_copy import step_folder, steps_in
from ups.record.manifest import read_manifest, verify
from ups.supervise.run_file import read_run

obstore = pytest.importorskip("obstore", reason="needs obstore (extra: buckets)")
pytestmark = [
    pytest.mark.long,
    pytest.mark.processes,
    pytest.mark.timeout(3 * 1800),
]

STEPS, INTERVAL = 24, 2
# A run takes a minute, and many where others want the processors: the limit is against standing still.
RUN_SECONDS = 1200
SEED = int(os.environ.get("UPS_TEST_SEED") or time.time_ns() % 1_000_000)


@pytest.fixture(scope="module")
def server() -> Iterator[Seaweed]:
    with serve_s3() as found:
        yield found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data and a recipe without a mirror."""
    found = tmp_path_factory.mktemp("mirrored")
    stages = [{"type": "operator", "steps": STEPS, "optim": {"learning_rate": 2e-3}}]
    checkpoint = {"interval_steps": INTERVAL, "keep": 2}
    document = mixture_recipe(found / "run", write_mixture(found), stages=stages, checkpoint=checkpoint)
    (found / "recipe.yaml").write_text(yaml.safe_dump(document))
    return found


@pytest.fixture
def url(server: Seaweed, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    """A place of its own for each test."""
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    name = f"box-{abs(hash(request.node.name)) % 10**9}"
    return f"{server.place(name)}/runs/one"


def train(folder: Path, run: str, url: str = "", ranks: int = 1, *more: str) -> subprocess.Popen[str]:
    changes = [f"run.dir={folder / run}", *([f"checkpoint.mirror={url}"] if url else []), *more]
    words = ["train", "recipe.yaml", "--ranks", str(ranks), *(w for change in changes for w in ("--set", change))]
    return subprocess.Popen(
        [sys.executable, "-m", "ups", *words],
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> str:
    output = process.communicate(timeout=RUN_SECONDS)[0]
    assert "VERDICT state=completed" in output, output
    return output


def trained(run_dir: Path) -> dict[str, str]:
    """Name -> hash of the files with tensors in the last checkpoint."""
    path = run_dir / "checkpoints" / f"step_{STEPS:08d}"
    verify(path)
    return {name: file.sha256 for name, file in read_manifest(path).files.items() if name.endswith(".distcp")}


def wait_for_step(url: str, step: int, process: subprocess.Popen[str]) -> None:
    """Until the bucket has a checkpoint of `step` or later."""
    bucket = open_bucket(url)
    while max(steps_in(bucket), default=0) < step:
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.2)


def lose(process: subprocess.Popen[str], run_dir: Path) -> None:
    """As a machine that disappears: the supervisor, its ranks and the directory."""
    process.kill()
    process.communicate()
    deadline = time.monotonic() + 30
    while run_dir.exists() and time.monotonic() < deadline:  # a dying rank may still write
        shutil.rmtree(run_dir, ignore_errors=True)


def undisturbed(folder: Path, ranks: int = 1) -> dict[str, str]:
    """The last checkpoint of a run without a mirror."""
    run_dir = folder / f"whole_{ranks}"
    if not run_dir.exists():
        finish(train(folder, run_dir.name, "", ranks))
    return trained(run_dir)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_without_its_directory_goes_on_from_the_bucket_bitwise(folder: Path, url: str, ranks: int) -> None:
    run_dir = folder / f"lost_{ranks}"
    process = train(folder, run_dir.name, url, ranks)
    wait_for_step(url, INTERVAL, process)
    lose(process, run_dir)
    output = finish(train(folder, run_dir.name, url, ranks))
    assert f"{run_dir} was empty: the run continues from checkpoint" in output, output
    assert trained(run_dir) == undisturbed(folder, ranks)
    document = read_run(run_dir)
    assert len(document["attempts"]) == 2
    assert document["attempts"][1]["from_checkpoint"] >= INTERVAL
    assert (document["mirror"]["step"], document["mirror"]["problem"]) == (STEPS, "")
    assert sorted(steps_in(open_bucket(url))) == [STEPS - INTERVAL, STEPS]
    _has_no_credentials(run_dir, output)
    if ranks == 1:
        _is_refused_to_another_recipe(folder, url)
        _comes_back_completed(folder, run_dir, url, undisturbed(folder))
        _comes_back_without_a_wrong_byte(folder, run_dir, url, undisturbed(folder))


def _has_no_credentials(run_dir: Path, output: str) -> None:
    contents = {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()}
    for word in (SECRET, KEY):
        assert word not in output
        assert not [path for path, content in contents.items() if word.encode() in content]


def _is_refused_to_another_recipe(folder: Path, url: str) -> None:
    before = steps_in(open_bucket(url))
    output = train(folder, "other", url, 1, "run.seed=4").communicate(timeout=RUN_SECONDS)[0]
    assert "holds a run of another recipe: run.seed" in output, output
    assert not (folder / "other").exists()
    assert steps_in(open_bucket(url)) == before


def _comes_back_completed(folder: Path, run_dir: Path, url: str, expected: dict[str, str]) -> None:
    """With its bundle: there is nothing to train."""
    shutil.rmtree(run_dir)
    process = train(folder, run_dir.name, url)
    output = process.communicate(timeout=RUN_SECONDS)[0]
    assert process.returncode == 0, output
    assert "VERDICT" not in output
    assert (run_dir / "bundle" / "bundle.json").is_file()
    assert trained(run_dir) == expected


def _comes_back_without_a_wrong_byte(folder: Path, run_dir: Path, url: str, expected: dict[str, str]) -> None:
    """The damage is noticed, the checkpoint before it used, and the damaged one written again."""
    bucket = open_bucket(url)
    key = bucket.key(f"{step_folder(STEPS)}/{next(iter(expected))}")
    content = bytearray(bytes(obstore.get(bucket.store, key).bytes()))
    content[len(content) // 2] ^= 1
    obstore.put(bucket.store, key, bytes(content))
    shutil.rmtree(run_dir)
    output = finish(train(folder, run_dir.name, url))
    assert f"checkpoint {STEPS} in the bucket is not used" in output, output
    assert f"continues from checkpoint {STEPS - INTERVAL}" in output, output
    assert trained(run_dir) == expected
    assert bytes(obstore.get(bucket.store, key).bytes()) != bytes(content)


def _kill_at_random(folder: Path, url: str, name: str, kills: int) -> None:
    dice = random.Random(SEED)
    print(f"UPS_TEST_SEED={SEED}")
    started = time.monotonic()
    process = train(folder, name, url)
    wait_for_step(url, INTERVAL, process)
    longest = time.monotonic() - started
    for _ in range(kills):
        time.sleep(dice.uniform(0, longest / 2))
        lose(process, folder / name)
        process = train(folder, name, url)
        until = time.monotonic() + dice.uniform(longest / 3, longest)
        while process.poll() is None and time.monotonic() < until:
            time.sleep(0.05)
        if process.poll() is not None:  # it was done before it could be killed
            process.communicate()
            shutil.rmtree(folder / name, ignore_errors=True)
            process = train(folder, name, url)
    process.communicate(timeout=RUN_SECONDS)
    shutil.rmtree(folder / name, ignore_errors=True)
    assert train(folder, name, url).wait(RUN_SECONDS) == 0


def test_three_kills_leave_no_trace_in_what_is_learned(folder: Path, url: str) -> None:
    _kill_at_random(folder, url, "killed", 3)
    assert trained(folder / "killed") == undisturbed(folder)


@pytest.mark.timeout(4 * 3600)
def test_twenty_kills_leave_no_trace_in_what_is_learned(folder: Path, url: str) -> None:
    _kill_at_random(folder, url, "killed_often", 20)
    assert trained(folder / "killed_often") == undisturbed(folder)


@pytest.mark.parametrize("how", ["stopped", "dead"])
def test_a_bucket_that_does_not_answer_delays_no_step_and_is_reported(
    folder: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = folder / f"alone_{how}"
    with serve_s3() as server:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        url = f"{server.place('box')}/one"
        process = train(folder, run_dir.name, url)
        while not (run_dir / "run.json").exists():  # from here on nothing but the mirror speaks to the bucket
            assert process.poll() is None, process.communicate()[0]
            time.sleep(0.05)
        os.kill(server.pid, signal.SIGSTOP if how == "stopped" else signal.SIGKILL)
        output = finish(process)
    assert "the mirror is not complete" in output, output
    assert trained(run_dir) == undisturbed(folder)
    document = read_run(run_dir)
    assert (document["mirror"]["step"] or 0) < STEPS
    assert document["mirror"]["problem"] or how == "stopped"  # who hangs has not failed yet
    # A request to a stopped server hangs for 30 s: a step that waited for one would show.
    assert _longest_pause(run_dir) < _longest_pause(folder / "whole_1") + 20
    status = [sys.executable, "-m", "ups", "status", run_dir.name]
    shown = subprocess.run(status, cwd=folder, capture_output=True, text=True, timeout=120).stdout
    assert f"mirror: {url}" in shown, shown


def _longest_pause(run_dir: Path) -> float:
    """Seconds between two rows of metrics. Not the sum of them: how fast a machine is may change from run to run."""
    times = [json.loads(line)["time"] for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    found = max(after - before for before, after in itertools.pairwise(times))
    print(f"{run_dir.name}: at most {found:.1f} s from row to row")
    return float(found)
