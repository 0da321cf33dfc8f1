"""The copy of a run in a bucket: whole or absent at every moment, and believed only as far as its hashes go."""

from __future__ import annotations

import hashlib
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.seaweed_server import Seaweed, serve_s3
from ups.buckets.client import Bucket, open_bucket
from ups.buckets.mirror_process import ALONE_SECONDS, LATE, REFUSED, read_note
from ups.buckets.run_copy import (
    RunCopy,
    delete,
    get,
    identity_in,
    names,
    put,
    restore_bundle,
    restore_checkpoints,
    restore_record,
    step_folder,
    steps_in,
)
from ups.config.schema import CheckpointConfig
from ups.errors import BucketError, CheckpointError, ConfigError
from ups.record.checkpoints import list_checkpoints
from ups.record.identity import RunIdentity
from ups.record.manifest import Manifest, commit_directory, make_temporary, remove_directory, verify
from ups.record.run_dir import RunDir
from ups.supervise.bucket_mirror import BucketMirror
from ups.supervise.run_file import RunFile

pytest.importorskip("obstore", reason="needs obstore (extra: buckets)")
pytestmark = [
    pytest.mark.processes,
    pytest.mark.timeout(300),
]
SEED = int(os.environ.get("UPS_TEST_SEED") or time.time_ns() % 1_000_000)
STATISTICS = b'{"a": 1}\n'


@pytest.fixture(scope="module")
def server() -> Iterator[Seaweed]:
    with serve_s3() as seaweed:
        yield seaweed


@pytest.fixture
def bucket(server: Seaweed, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Bucket:
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    name = "box-" + hashlib.sha256(str(tmp_path).encode()).hexdigest()[:12]
    return open_bucket(f"{server.place(name)}/runs/one")


def make_run(run_dir: Path, identity: RunIdentity | None = None) -> RunIdentity:
    """A run directory that a supervisor has begun, without ranks."""
    run_dir.mkdir(parents=True)
    (run_dir / "config.yaml").write_text("version: 1\n")
    (run_dir / "statistics.json").write_bytes(STATISTICS)
    (run_dir / "metrics.jsonl").write_text('{"step": 1}\n')
    (run_dir / "notes-of-somebody.txt").write_text("private")
    named = identity or RunIdentity("0123" * 8, recipes=("r",))
    note(run_dir, named)
    return named


def note(run_dir: Path, identity: RunIdentity) -> None:
    RunFile(run_dir).begin(ranks=1, max_restarts=0, box_root=run_dir, identity=identity)


def save(run_dir: Path, identity: RunIdentity, step: int, content: bytes = b"", *, ends: bool = False) -> Manifest:
    """Commit a checkpoint as a rank does."""
    final = RunDir(run_dir).checkpoint(step)
    temporary = make_temporary(final)
    (temporary / "__0_0.distcp").write_bytes(content or f"tensors of {step}".encode() * 1000)
    for number in range(1, 9):
        (temporary / f"__{number}_0.distcp").write_bytes(f"{step} {number}".encode())
    (temporary / ".metadata").write_bytes(b"metadata")
    progress = {"format": 1, "progress": {"step": step, "stage_finished": ends}, "identity": identity.mark()}
    (temporary / "progress.json").write_text(json.dumps(progress, indent=1))
    return commit_directory(temporary, final)


def copied(bucket: Bucket, run_dir: Path, keep: int = 2) -> RunCopy:
    copy = RunCopy(bucket, run_dir, keep)
    while copy.update():
        pass
    copy.send_record()
    return copy


def test_a_copy_has_checkpoints_bundle_and_record_and_comes_back(bucket: Bucket, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    identity = make_run(run_dir)
    hashes = {step: save(run_dir, identity, step, ends=step == 2).sha256 for step in (2, 4, 6)}
    (run_dir / "failures" / "attempt_0").mkdir(parents=True)
    (run_dir / "failures" / "attempt_0" / "rank_00000.json").write_text("{}")
    temporary = make_temporary(run_dir / "bundle")
    (temporary / "bundle.json").write_text("{}")
    commit_directory(temporary, run_dir / "bundle")
    assert copied(bucket, run_dir, keep=3).newest == 6
    assert steps_in(bucket) == hashes
    assert identity_in(bucket) == identity
    assert not any("somebody" in name or "lock" in name for name in names(bucket))
    back = tmp_path / "back"
    assert restore_checkpoints(bucket, back, identity) == 6
    # The newest, and the one that a later stage may begin from; not what is never read.
    assert [step for step, _ in list_checkpoints(back)] == [6, 2]
    assert verify(RunDir(back).checkpoint(6)).sha256 == hashes[6]
    assert restore_bundle(bucket, back / "bundle")
    restore_record(bucket, back, 2**20)
    assert (back / "statistics.json").read_bytes() == STATISTICS
    assert (back / "failures" / "attempt_0" / "rank_00000.json").exists()


def test_old_checkpoints_leave_the_bucket_after_the_newer_one_came(bucket: Bucket, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    identity = make_run(run_dir)
    for step in (2, 4, 6):
        save(run_dir, identity, step)
        copied(bucket, run_dir, keep=1)
        if step > 2:
            remove_directory(RunDir(run_dir).checkpoint(step - 2))
    save(run_dir, identity, 8)
    copied(bucket, run_dir, keep=1)
    assert sorted(steps_in(bucket)) == [6, 8]  # 6 is still in the run directory
    assert not names(bucket, step_folder(2))
    assert not names(bucket, step_folder(4))


@pytest.mark.parametrize("damage", ["byte", "truncated", "missing", "marker", "traversal", "foreign", "renamed"])
def test_what_is_not_whole_or_not_of_this_run_is_refused_and_the_older_one_used(
    bucket: Bucket, tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    run_dir = tmp_path / "run"
    identity = make_run(run_dir)
    save(run_dir, identity, 2)
    save(run_dir, identity, 4)
    copied(bucket, run_dir)
    name = f"{step_folder(4)}/__0_0.distcp"
    content = get(bucket, name, 2**20) or b""
    if damage == "byte":
        put(bucket, name, content[:-1] + b"!")
    elif damage == "truncated":
        put(bucket, name, content[:-1])
    elif damage == "missing":
        delete(bucket, name)
    elif damage == "marker":
        put(bucket, f"{step_folder(4)}/COMMITTED", json.dumps({"manifest_sha256": "0" * 64}).encode())
    elif damage == "traversal":
        text = json.dumps(
            {
                "files": {"../../../escaped": {"sha256": hashlib.sha256(b"x").hexdigest(), "size": 1}},
                "format": "ups-manifest",
                "version": 1,
            }
        ).encode()
        put(bucket, f"{step_folder(4)}/MANIFEST", text)
        marker = {"format": "ups-committed", "manifest_sha256": hashlib.sha256(text).hexdigest(), "version": 1}
        put(bucket, f"{step_folder(4)}/COMMITTED", json.dumps(marker).encode())
        put(bucket, "escaped", b"x")
    else:
        # Whole by its own manifest, and still not a checkpoint of this run after 4 steps.
        other = tmp_path / "other"
        whose = RunIdentity("4567" * 8) if damage == "foreign" else identity
        wrong = save(other, whose, 4 if damage == "foreign" else 6)
        source = RunDir(other).checkpoint(4 if damage == "foreign" else 6)
        for file in (*wrong.files, "MANIFEST", "COMMITTED"):
            put(bucket, f"{step_folder(4)}/{file}", (source / file).read_bytes())
    back = tmp_path / "back"
    assert restore_checkpoints(bucket, back, identity) == 2
    assert "checkpoint 4 in the bucket is not used" in caplog.text
    assert [path.name for path in (back / "checkpoints").iterdir()] == ["step_00000002"]
    assert not list(tmp_path.rglob("escaped"))
    assert sorted(steps_in(bucket)) == [2]  # and is written again when the run comes there
    put(bucket, f"{step_folder(2)}/__0_0.distcp", b"")
    with pytest.raises(CheckpointError, match="none of the 1 checkpoints"):
        restore_checkpoints(bucket, tmp_path / "again", identity)


def test_a_record_from_a_bucket_has_only_the_names_of_a_record(bucket: Bucket, tmp_path: Path) -> None:
    for name in ("config.yaml", "evil.sh", "logs/x", "start/../../x", ".supervisor.lock", "checkpoints/x", "run.json"):
        put(bucket, name.replace("..", "%2e%2e"), b"x")
    restore_record(bucket, tmp_path / "back", 2**20)
    assert [path.name for path in (tmp_path / "back").rglob("*")] == ["config.yaml"]


def test_the_copy_of_another_run_is_left_alone(bucket: Bucket, tmp_path: Path) -> None:
    save(tmp_path / "one", make_run(tmp_path / "one"), 2)
    copied(bucket, tmp_path / "one")
    before = names(bucket)
    save(tmp_path / "two", make_run(tmp_path / "two", RunIdentity("4567" * 8)), 2)
    with pytest.raises(ConfigError, match="another run"):
        copied(bucket, tmp_path / "two")
    assert names(bucket) == before


def test_a_step_that_is_saved_again_never_contradicts_the_record(bucket: Bucket, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    identity = make_run(run_dir)
    save(run_dir, identity, 2)
    first = save(run_dir, identity, 4)
    note(run_dir, identity.with_commit(4, first.sha256))
    copied(bucket, run_dir)
    second = save(run_dir, identity, 4, b"other bytes")
    note(run_dir, identity.with_commit(4, second.sha256))
    copy = RunCopy(bucket, run_dir, 2)
    copy._open()
    copy.send_record()  # killed before the checkpoint itself comes
    known = identity_in(bucket)
    assert known is not None
    assert sorted(steps_in(bucket)) == [2]  # 4 is not what the record notes: it exists no more
    assert restore_checkpoints(bucket, tmp_path / "between", known) == 2
    copied(bucket, run_dir)
    assert restore_checkpoints(bucket, tmp_path / "after", known) == 4


def test_a_checkpoint_that_is_removed_while_it_is_copied_comes_whole(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = tmp_path / "run"
    identity = make_run(run_dir)
    save(run_dir, identity, 2)

    def put_slowly(bucket: Bucket, name: str, content: bytes | Path) -> None:
        if RunDir(run_dir).checkpoint(2).exists():
            remove_directory(RunDir(run_dir).checkpoint(2))  # as the retention of a run that is faster than the bucket
        put(bucket, name, content)

    monkeypatch.setattr("ups.buckets.run_copy.put", put_slowly)
    copied(bucket, run_dir)
    assert restore_checkpoints(bucket, tmp_path / "back", identity) == 2
    assert not list(run_dir.glob(".ups*"))


def _start(run_dir: Path, bucket: Bucket, seconds: float) -> subprocess.Popen[bytes]:
    words = [sys.executable, "-m", "ups.buckets.mirror_process", str(run_dir), str(bucket.url), "2", str(seconds)]
    return subprocess.Popen(words, stdin=subprocess.PIPE, stderr=subprocess.PIPE)


def test_a_kill_during_a_copy_never_leaves_half_a_checkpoint(bucket: Bucket, tmp_path: Path) -> None:
    dice = random.Random(SEED)
    print(f"UPS_TEST_SEED={SEED}")
    run_dir = tmp_path / "run"
    identity = make_run(run_dir)
    halves = 0
    for step in range(1, 6):
        save(run_dir, identity, step, dice.randbytes(2_000_000))
        process = _start(run_dir, bucket, 60)
        while not names(bucket, step_folder(step)):
            time.sleep(0.01)
        time.sleep(dice.uniform(0.0, 0.03))
        process.kill()
        process.wait()
        marked = max(steps_in(bucket), default=None)
        halves += marked != step
        assert restore_checkpoints(bucket, tmp_path / f"back_{step}", identity) == marked
    assert halves, "no kill came before the end of a copy"
    process = _start(run_dir, bucket, 60)
    assert process.stdin is not None
    process.stdin.write(b"finish\n")
    process.stdin.flush()
    assert process.wait(100) == 0
    assert restore_checkpoints(bucket, tmp_path / "last", identity) == 5
    state = read_note(run_dir)
    assert state is not None
    assert (state.step, state.behind_since, state.problem) == (5, None, "")


def test_the_process_leaves_at_once_when_its_supervisor_is_gone(bucket: Bucket, tmp_path: Path) -> None:
    make_run(tmp_path / "run")
    process = _start(tmp_path / "run", bucket, 1000)
    process.communicate(b"", timeout=60)
    assert process.returncode == 1


def test_the_process_does_not_wait_long_for_a_bucket_when_its_supervisor_dies_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = tmp_path / "run"
    save(run_dir, make_run(run_dir), 2)
    with serve_s3() as server:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        bucket = open_bucket(f"{server.place('box')}/one")
        server.pause()
        process = _start(run_dir, bucket, 1000)
        assert process.stdin is not None
        process.stdin.write(b"finish\n")
        process.stdin.flush()
        with pytest.raises(subprocess.TimeoutExpired):  # it is still waited for
            process.wait(ALONE_SECONDS + 5)
        began = time.monotonic()
        process.stdin.close()
        assert process.wait(100) == LATE
        assert ALONE_SECONDS - 1 < time.monotonic() - began < ALONE_SECONDS + 20
        server.resume()


def test_a_process_that_meets_the_copy_of_another_run_says_so_and_leaves(bucket: Bucket, tmp_path: Path) -> None:
    save(tmp_path / "one", make_run(tmp_path / "one"), 2)
    copied(bucket, tmp_path / "one")
    save(tmp_path / "two", make_run(tmp_path / "two", RunIdentity("4567" * 8)), 2)
    process = _start(tmp_path / "two", bucket, 60)
    process.wait(60)
    assert process.returncode == REFUSED
    state = read_note(tmp_path / "two")
    assert state is not None
    assert "another run" in state.problem


@pytest.mark.parametrize("how", ["pause", "kill"])
def test_a_bucket_that_does_not_answer_ends_the_wait_in_time(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run_dir = tmp_path / "run"
    identity = make_run(run_dir)
    with serve_s3() as server:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        bucket = open_bucket(f"{server.place('box')}/one")
        save(run_dir, identity, 2)
        copied(bucket, run_dir)
        getattr(server, how)()
        save(run_dir, identity, 4)
        if how == "kill":
            with pytest.raises(BucketError) as caught:
                copied(bucket, run_dir)
            assert server.environment["AWS_SECRET_ACCESS_KEY"] not in caught.value.one_line()
        with BucketMirror(run_dir, CheckpointConfig(mirror=str(bucket.url), keep=2), close_seconds=3.0) as mirror:
            began = time.monotonic()
            mirror.look()
            assert time.monotonic() - began < 1.0
            began = time.monotonic()
        assert time.monotonic() - began < 30.0
    assert "the mirror is not complete" in caplog.text
    assert mirror.note().behind_since is not None or how == "pause"
    assert LATE == 12
