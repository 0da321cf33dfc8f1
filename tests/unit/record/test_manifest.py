"""A committed directory is complete, damage is named, and no file of a user is ever deleted by accident."""

import errno
import hashlib
import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from ups.errors import IntegrityError, MachineError
from ups.record import manifest as module
from ups.record.files import exchange, write_file_atomically
from ups.record.manifest import (
    COMMITTED_NAME,
    MANIFEST_NAME,
    Manifest,
    clean_temporaries,
    commit_directory,
    hash_files,
    is_committed,
    make_temporary,
    read_manifest,
    remove_directory,
    verify,
    write_manifest,
)


def fill(directory: Path, version: str = "one") -> Path:
    (directory / "shards" / "deep").mkdir(parents=True)
    (directory / "model.bin").write_bytes(version.encode() * 1000)
    (directory / "shards" / "rank_0.bin").write_bytes(b"\0" * 4096)
    (directory / "shards" / "deep" / "empty").write_bytes(b"")
    return directory


@pytest.fixture
def committed(tmp_path: Path) -> Path:
    final = tmp_path / "step_00000010"
    commit_directory(fill(make_temporary(final)), final)
    return final


def test_manifest_lists_every_file_with_size_and_hash_in_sorted_order(tmp_path: Path) -> None:
    manifest = write_manifest(fill(tmp_path / "d"))
    assert list(manifest.files) == ["model.bin", "shards/deep/empty", "shards/rank_0.bin"]
    assert manifest.files["model.bin"] == (hashlib.sha256(b"one" * 1000).hexdigest(), 3000)
    assert manifest.total_bytes == 3000 + 4096
    assert Manifest.from_bytes((tmp_path / "d" / MANIFEST_NAME).read_bytes(), "stored") == manifest


def test_the_order_of_creation_does_not_change_the_manifest(tmp_path: Path) -> None:
    for name, order in (("forward", range(40)), ("backward", reversed(range(40)))):
        (tmp_path / name).mkdir()
        for number in order:
            (tmp_path / name / f"{number}.bin").write_bytes(bytes([number]) * 100)
    assert write_manifest(tmp_path / "forward").sha256 == write_manifest(tmp_path / "backward").sha256


def test_commit_moves_the_directory_and_leaves_no_temporary(committed: Path) -> None:
    assert is_committed(committed)
    assert verify(committed) == read_manifest(committed)
    assert [path.name for path in committed.parent.iterdir()] == [committed.name]


def test_replacing_shows_the_new_content_and_deletes_the_old(committed: Path) -> None:
    commit_directory(fill(make_temporary(committed), "two"), committed)
    verify(committed)
    assert (committed / "model.bin").read_bytes() == b"two" * 1000
    assert [path.name for path in committed.parent.iterdir()] == [committed.name]


def test_replacing_works_where_the_file_system_cannot_exchange(
    committed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "exchange", lambda first, second: False)
    commit_directory(fill(make_temporary(committed), "two"), committed)
    verify(committed)
    assert (committed / "model.bin").read_bytes() == b"two" * 1000
    assert [path.name for path in committed.parent.iterdir()] == [committed.name]


def test_this_kernel_exchanges_two_directories_in_one_call(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "content").write_text(name)
    if not exchange(tmp_path / "a", tmp_path / "b"):
        pytest.skip("renameat2(RENAME_EXCHANGE) is not supported by this file system")
    assert (tmp_path / "a" / "content").read_text() == "b"
    assert (tmp_path / "b" / "content").read_text() == "a"


def test_an_uncommitted_directory_is_not_committed(tmp_path: Path, committed: Path) -> None:
    assert not is_committed(tmp_path / "absent")
    assert not is_committed(fill(tmp_path / "plain"))
    write_manifest(tmp_path / "plain")
    assert not is_committed(tmp_path / "plain")
    (tmp_path / "plain" / COMMITTED_NAME).write_bytes((committed / COMMITTED_NAME).read_bytes())
    (tmp_path / "plain" / "model.bin").write_bytes(b"other")
    write_manifest(tmp_path / "plain")
    assert not is_committed(tmp_path / "plain"), "a marker of another manifest must not count"
    with pytest.raises(IntegrityError, match="not the one that COMMITTED names"):
        verify(tmp_path / "plain")


def test_bit_flip_is_found_by_hash_and_only_by_a_deep_look(committed: Path) -> None:
    content = bytearray((committed / "model.bin").read_bytes())
    content[1234] ^= 1
    (committed / "model.bin").write_bytes(content)
    verify(committed, deep=False)
    with pytest.raises(IntegrityError, match=r"model\.bin: hash is .* committed was"):
        verify(committed)


def test_truncation_missing_and_extra_files_are_named_even_by_a_shallow_look(committed: Path) -> None:
    os.truncate(committed / "model.bin", 2999)
    (committed / "shards" / "deep" / "empty").unlink()
    (committed / "shards" / "new.bin").write_bytes(b"x")
    for deep in (True, False):
        with pytest.raises(IntegrityError) as caught:
            verify(committed, deep=deep)
        assert "model.bin: size is 2999 bytes, committed was 3000" in caught.value.message
        assert "shards/deep/empty: missing" in caught.value.message
        assert "shards/new.bin: extra" in caught.value.message
        assert caught.value.hint


def test_many_differences_stay_one_readable_line(committed: Path) -> None:
    for number in range(50):
        (committed / f"extra_{number}").write_bytes(b"")
    with pytest.raises(IntegrityError, match="and 45 more"):
        verify(committed)


def test_hostile_file_names_are_escaped_in_the_message(committed: Path) -> None:
    (committed / "a\x1b[31m\nb").write_bytes(b"")
    Path(os.fsdecode(bytes(committed) + b"/\xff")).write_bytes(b"")
    with pytest.raises(IntegrityError) as caught:
        verify(committed)
    assert caught.value.message.isprintable()
    caught.value.message.encode("utf-8")


def test_strange_file_names_survive_a_commit(tmp_path: Path) -> None:
    final = tmp_path / "d"
    temporary = make_temporary(final)
    for name in (b"\xff\xfe", b"new\nline", "größe µ".encode(), b'"quotes"\\'):
        Path(os.fsdecode(bytes(temporary) + b"/" + name)).write_bytes(name)
    commit_directory(temporary, final)
    assert len(verify(final).files) == 4


@pytest.mark.parametrize("kind", ["link to file", "link to folder", "dangling link", "pipe"])
def test_links_and_special_files_are_refused(tmp_path: Path, committed: Path, kind: str) -> None:
    final = tmp_path / "new"
    for directory in (fill(make_temporary(final)), committed):
        path = directory / "shards" / "odd"
        if kind == "pipe":
            os.mkfifo(path)
        else:
            target = {"link to file": "/etc/hostname", "link to folder": "/etc", "dangling link": "nowhere"}[kind]
            path.symlink_to(target)
        with pytest.raises(IntegrityError, match=r"shards/odd is a (symbolic link|special file)"):
            verify(directory) if directory is committed else commit_directory(directory, final)
    assert not final.exists()


def test_a_file_that_turns_into_a_link_after_the_commit_is_refused(committed: Path) -> None:
    (committed / "model.bin").rename(committed.parent / "elsewhere")
    (committed / "model.bin").symlink_to(committed.parent / "elsewhere")
    with pytest.raises(IntegrityError, match=r"model\.bin is a symbolic link"):
        verify(committed)


def test_hashes_computed_by_other_ranks_are_taken_over(tmp_path: Path) -> None:
    final = tmp_path / "step"
    temporary = fill(make_temporary(final))
    known = hash_files(temporary, ["model.bin", "shards/rank_0.bin"])
    assert commit_directory(temporary, final, known_hashes=known).files["model.bin"] == known["model.bin"]
    assert list(verify(final).files) == ["model.bin", "shards/deep/empty", "shards/rank_0.bin"]


def test_a_rank_whose_file_is_missing_or_short_stops_the_commit(tmp_path: Path) -> None:
    final = tmp_path / "step"
    temporary = fill(make_temporary(final))
    known = hash_files(temporary, ["model.bin"])
    with pytest.raises(IntegrityError, match=r"rank_7\.bin: missing"):
        commit_directory(temporary, final, known_hashes={**known, "rank_7.bin": known["model.bin"]})
    (temporary / "model.bin").write_bytes(b"short")
    with pytest.raises(IntegrityError, match=r"model\.bin: size is 5 bytes, committed was 3000"):
        commit_directory(temporary, final, known_hashes=known)
    with pytest.raises(IntegrityError, match="not a SHA-256"):
        commit_directory(temporary, final, known_hashes={"model.bin": ("abc", 5)})
    assert not final.exists()


def test_a_wrong_hash_of_another_rank_is_found_at_verification(tmp_path: Path) -> None:
    final = tmp_path / "step"
    temporary = fill(make_temporary(final))
    commit_directory(temporary, final, known_hashes={"model.bin": ("0" * 64, 3000)})
    verify(final, deep=False)
    with pytest.raises(IntegrityError, match=r"model\.bin: hash"):
        verify(final)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[]",
        b"\xff",
        b"[" * 100_000,
        b'{"format": "ups-manifest", "version": 2, "files": {}}',
        b'{"format": "ups-manifest", "version": 1, "files": []}',
        b'{"format": "ups-manifest", "version": 1, "files": {"a": {"sha256": "00", "size": 1}}}',
        b'{"format": "ups-manifest", "version": 1, "files": {"a": 1, "a": 2}}',
        json.dumps(
            {"format": "ups-manifest", "version": 1, "files": {"../a": {"sha256": "0" * 64, "size": 1}}}
        ).encode(),
        json.dumps({"format": "ups-manifest", "version": 1, "files": {"/a": {"sha256": "0" * 64, "size": 1}}}).encode(),
        json.dumps({"format": "ups-manifest", "version": 1, "files": {"a": {"sha256": "0" * 64, "size": -1}}}).encode(),
    ],
)
def test_a_untrusted_manifest_is_an_integrity_error_and_never_a_crash(committed: Path, content: bytes) -> None:
    (committed / MANIFEST_NAME).write_bytes(content)
    marker = {"manifest_sha256": hashlib.sha256(content).hexdigest()}
    (committed / COMMITTED_NAME).write_text(json.dumps(marker))
    assert not is_committed(committed)
    with pytest.raises(IntegrityError):
        verify(committed)
    (committed / COMMITTED_NAME).write_bytes(content)
    assert not is_committed(committed)


def test_a_directory_that_was_never_committed_is_not_replaced(tmp_path: Path) -> None:
    thesis = fill(tmp_path / "thesis")
    with pytest.raises(IntegrityError, match="never committed"):
        commit_directory(fill(make_temporary(thesis), "two"), thesis)
    assert (thesis / "model.bin").read_bytes() == b"one" * 1000
    (tmp_path / "file").write_text("precious")
    with pytest.raises(IntegrityError, match="not a directory"):
        commit_directory(fill(make_temporary(tmp_path / "file")), tmp_path / "file")
    (tmp_path / "link").symlink_to(thesis)
    with pytest.raises(IntegrityError, match="not a directory"):
        commit_directory(fill(make_temporary(tmp_path / "link")), tmp_path / "link")
    assert (tmp_path / "file").read_text() == "precious"


def test_an_empty_or_damaged_commit_may_be_replaced(tmp_path: Path, committed: Path) -> None:
    (tmp_path / "empty").mkdir()
    commit_directory(fill(make_temporary(tmp_path / "empty")), tmp_path / "empty")
    verify(tmp_path / "empty")
    (committed / MANIFEST_NAME).write_bytes(b"damaged")
    commit_directory(fill(make_temporary(committed)), committed)
    verify(committed)


def test_a_failed_commit_can_be_retried_with_the_same_directory(tmp_path: Path) -> None:
    final = tmp_path / "step"
    temporary = fill(make_temporary(final))
    (temporary / "odd").symlink_to("nowhere")
    with pytest.raises(IntegrityError):
        commit_directory(temporary, final)
    (temporary / "odd").unlink()
    (temporary / f".ups-tmp.{MANIFEST_NAME}.0123456789ab").write_bytes(b"half a manifest")
    assert list(commit_directory(temporary, final).files) == ["model.bin", "shards/deep/empty", "shards/rank_0.bin"]


def test_cleaning_removes_temporaries_and_nothing_else(tmp_path: Path, committed: Path) -> None:
    left = fill(make_temporary(committed))
    half = tmp_path / ".ups-tmp.run.json.0123456789ab"
    half.write_bytes(b"{")
    (tmp_path / ".hidden").write_text("stays")
    assert clean_temporaries(tmp_path) == sorted([left, half])
    assert sorted(path.name for path in tmp_path.iterdir()) == [".hidden", committed.name]
    assert clean_temporaries(tmp_path / "absent") == []
    verify(committed)


def test_what_was_moved_aside_by_a_dead_writer_comes_back(committed: Path) -> None:
    aside = committed.with_name(f".ups-old.{committed.name}")
    committed.rename(aside)
    fill(make_temporary(committed), "two")
    clean_temporaries(committed.parent)
    verify(committed)
    assert (committed / "model.bin").read_bytes() == b"one" * 1000
    assert [path.name for path in committed.parent.iterdir()] == [committed.name]


def test_what_was_moved_aside_goes_once_the_new_one_is_in_place(tmp_path: Path, committed: Path) -> None:
    aside = committed.with_name(f".ups-old.{committed.name}")
    committed.rename(aside)
    module.shutil.copytree(aside, committed)
    clean_temporaries(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [committed.name]


def test_removing_is_complete(committed: Path) -> None:
    remove_directory(committed)
    assert list(committed.parent.iterdir()) == []
    with pytest.raises(MachineError, match="cannot remove"):
        remove_directory(committed)


def test_a_file_is_replaced_whole_and_keeps_no_temporary(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    for content in (b"old", b"new" * 100_000, b""):
        write_file_atomically(path, content)
        assert path.read_bytes() == content
    assert list(tmp_path.iterdir()) == [path]
    with pytest.raises(MachineError, match="cannot write"):
        write_file_atomically(tmp_path / "absent" / "file", b"")


def test_an_unreadable_marker_is_not_mistaken_for_no_commit(committed: Path) -> None:
    if os.geteuid() == 0:
        (committed / COMMITTED_NAME).unlink()
        (committed / COMMITTED_NAME).symlink_to(COMMITTED_NAME)  # a loop: unreadable even for root
    else:
        (committed / COMMITTED_NAME).chmod(0)
    with pytest.raises(IntegrityError, match="COMMITTED cannot be read"):
        is_committed(committed)


def test_a_file_size_limit_leaves_the_old_commit_and_names_the_limit(committed: Path) -> None:
    temporary = make_temporary(committed)
    for number in range(60):
        (temporary / f"{number}.bin").write_bytes(b"two")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(MachineError, match=os.strerror(errno.EFBIG)) as caught:
            commit_directory(temporary, committed)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "ulimit" in caught.value.hint
    verify(committed)
    assert (committed / "model.bin").read_bytes() == b"one" * 1000
    assert not any(path.name.startswith(".ups-tmp") for path in temporary.iterdir())


@pytest.fixture
def small_disk(tmp_path: Path):  # type: ignore[no-untyped-def]
    mount = tmp_path / "small"
    mount.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(mount)], capture_output=True, text=True
    )
    if done.returncode != 0:
        pytest.skip(f"cannot mount a small disk here: {done.stderr.strip()}")
    yield mount
    subprocess.run(["umount", "-l", str(mount)], check=True)


def test_a_full_disk_leaves_the_old_commit_and_says_so(small_disk: Path) -> None:
    final = small_disk / "step"
    commit_directory(fill(make_temporary(final)), final)
    temporary = fill(make_temporary(final), "two")
    with pytest.raises(OSError, match="No space"):
        (temporary / "filler").write_bytes(b"x" * 2**20)
    with pytest.raises(MachineError, match="No space left on device") as caught:
        commit_directory(temporary, final)
    assert "free some space" in caught.value.hint
    verify(final)
    assert (final / "model.bin").read_bytes() == b"one" * 1000
    clean_temporaries(small_disk)
    commit_directory(fill(make_temporary(final), "two"), final)
    verify(final)


def test_another_file_system_is_refused_with_the_reason(tmp_path: Path, small_disk: Path) -> None:
    final = tmp_path / "step"
    with pytest.raises(MachineError, match="cross-device") as caught:
        commit_directory(fill(make_temporary(small_disk / "step")), final)
    assert "same file system" in caught.value.hint
    assert not final.exists()


def test_a_large_file_is_hashed_in_bounded_memory(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    with open(tmp_path / "d" / "big", "wb") as file:
        file.truncate(200 * 2**20)
    program = (
        "import sys; from pathlib import Path; from ups.record.manifest import write_manifest\n"
        # not ru_maxrss, which begins with the size of the parent before exec
        "def peak(): return int(Path('/proc/self/status').read_text().split('VmHWM:')[1].split()[0])\n"
        "before = peak(); write_manifest(Path(sys.argv[1])); print(peak() - before)"
    )
    done = subprocess.run([sys.executable, "-c", program, tmp_path / "d"], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 8 * 1024, "kilobytes above the start"


def test_a_small_manifest_is_read_with_little_memory(tmp_path: Path) -> None:
    """Not with as much as the largest manifest needs: under a limit of memory nothing could be read at all."""
    commit_directory(fill(make_temporary(tmp_path / "store")), tmp_path / "store")
    program = """
import resource, sys
from pathlib import Path
from ups.record.manifest import read_manifest
used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (32 << 20), -1))
print(len(read_manifest(Path(sys.argv[1])).files))
"""
    command = [sys.executable, "-P", "-c", program, str(tmp_path / "store")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "3", done.stderr
