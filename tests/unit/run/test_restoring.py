"""A run that comes back from a bucket: what of its record is believed, and when nothing is begun."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.seaweed_server import Seaweed, serve_s3
from ups.buckets.client import Bucket, open_bucket
from ups.buckets.run_copy import RunCopy, put
from ups.config.recipe import ResolvedRecipe, resolve_data
from ups.errors import BucketError, CheckpointError, ConfigError
from ups.record.files import MAX_RUN_BYTES
from ups.record.identity import RunIdentity
from ups.record.manifest import commit_directory, make_temporary
from ups.record.run_dir import RunDir
from ups.run.restoring import restore_run
from ups.supervise.run_file import RunFile, read_run

pytest.importorskip("obstore", reason="needs obstore (extra: buckets)")
pytestmark = [
    pytest.mark.processes,
    pytest.mark.timeout(300),
]


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Seaweed]:
    with serve_s3() as seaweed:
        for name, value in seaweed.environment.items():
            monkeypatch.setenv(name, value)
        yield seaweed


def recipe(url: str, seed: int = 1) -> ResolvedRecipe:
    return resolve_data(
        {
            "version": 1,
            "run": {"name": "one", "seed": seed},
            "data": {"tasks": [{"name": "wave", "path": "wave.zarr"}]},
            "stages": [{"type": "operator", "steps": 10}],
            "checkpoint": {"mirror": url},
        }
    )


def copy_of_a_run(bucket: Bucket, run_dir: Path, resolved: ResolvedRecipe) -> None:
    """A run of one checkpoint, in the bucket."""
    run_dir.mkdir()
    (run_dir / "config.yaml").write_text(resolved.text)
    identity = RunIdentity.new()
    RunFile(run_dir).begin(ranks=1, max_restarts=0, box_root=run_dir, identity=identity)
    temporary = make_temporary(RunDir(run_dir).checkpoint(5))
    progress = {"format": 1, "progress": {"step": 5, "stage_finished": False}, "identity": identity.mark()}
    (temporary / "progress.json").write_text(json.dumps(progress))
    commit_directory(temporary, RunDir(run_dir).checkpoint(5))
    copy = RunCopy(bucket, run_dir, 1)
    while copy.update():
        pass


def test_only_the_past_is_believed_and_only_of_the_same_recipe(server: Seaweed, tmp_path: Path) -> None:
    url = f"{server.place('box')}/one"
    bucket, resolved = open_bucket(url), recipe(url)
    empty = tmp_path / "empty"
    assert restore_run(empty, resolved.recipe) is None  # nothing there yet: the run begins
    copy_of_a_run(bucket, tmp_path / "run", resolved)
    with pytest.raises(ConfigError, match=r"another recipe: run\.seed"):
        restore_run(empty, recipe(url, seed=2).recipe)
    assert not empty.exists()
    forged = json.loads((tmp_path / "run" / "run.json").read_text())
    forged |= {
        "overrides": {"model.width": 5, "engine.micro_batch": 2},
        "blackbox_dir": "/etc",
        "supervisor_pid": 1,
    }
    put(bucket, "run.json", json.dumps(forged).encode())
    assert restore_run(empty, resolved.recipe) == 5
    document = read_run(empty)
    assert document["overrides"] == {"engine.micro_batch_size": 2}
    assert (document["blackbox_dir"], document["supervisor_pid"]) == ("", 0)
    assert document["identity"] == forged["identity"]
    assert restore_run(empty, resolved.recipe) is None  # it has a run: the bucket is not asked
    put(bucket, "run.json", b'{"format": 1}')
    with pytest.raises(CheckpointError, match=r"run\.json cannot be used"):
        restore_run(tmp_path / "other", resolved.recipe)
    put(bucket, "run.json", b" " * (MAX_RUN_BYTES + 1))
    with pytest.raises(CheckpointError, match="are not read"):
        restore_run(tmp_path / "other", resolved.recipe)


def test_a_bucket_that_cannot_be_asked_begins_nothing(server: Seaweed, tmp_path: Path) -> None:
    url = f"{server.place('box')}/one"
    server.kill()
    with pytest.raises(BucketError, match="box/one"):
        restore_run(tmp_path / "empty", recipe(url).recipe)
    assert not (tmp_path / "empty").exists()
