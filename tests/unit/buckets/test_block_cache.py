"""The cache on disk: bounded, checked, safe when a writer is killed, and one download for eight readers."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from ups.buckets.block_cache import BLOCK_BYTES, DIRECTORY, LIMIT, BlockCache, the_cache
from ups.errors import MachineError

# Blocks of the tests of eviction and of killed writers: small, so that many are written in a moment.
SMALL_BYTES = 64_000
LIMIT_BYTES = 20 * (SMALL_BYTES + 4096)

WRITER = """
import hashlib, sys
from pathlib import Path
from ups.buckets.block_cache import BlockCache
cache = BlockCache(Path(sys.argv[1]), int(sys.argv[2]))
number = int(sys.argv[3])
print("ready", flush=True)
while True:
    key = hashlib.sha256(str(number % 40).encode()).hexdigest()[:40]
    cache.fill([key], lambda first, end: [key.encode() * 1600])
    number += 7
"""


def _key(number: int) -> str:
    return f"{number:02x}" + "0" * 38


def _never(first: int, end: int) -> list[bytes]:
    raise AssertionError("fetched though it is here")


def _giving(data: bytes) -> Callable[[int, int], list[bytes]]:
    return lambda first, end: [data] * (end - first)


def test_what_is_kept_is_read_back_in_any_part(tmp_path: Path) -> None:
    cache = BlockCache(tmp_path, 20 * BLOCK_BYTES)
    data = random.Random(0).randbytes(BLOCK_BYTES - 13)
    assert cache.read(_key(1), 0, 5) is None
    assert cache.fill([_key(1)], _giving(data)) == [data]
    assert cache.fill([_key(1)], _never) == [data]
    for start, stop in ((0, len(data)), (0, 1), (32767, 32769), (len(data) - 1, len(data)), (5, 5)):
        assert cache.read(_key(1), start, stop) == data[start:stop]


def test_blocks_are_fetched_together_from_the_first_that_is_missing_to_the_last(tmp_path: Path) -> None:
    cache = BlockCache(tmp_path, 20 * BLOCK_BYTES)
    for number in (0, 2):
        cache.fill([_key(number)], _giving(bytes([number] * 100)))
    asked = []

    def fetch(first: int, end: int) -> list[bytes]:
        asked.append((first, end))
        return [bytes([number] * 100) for number in range(first, end)]

    expected = [bytes([number] * 100) for number in range(5)]
    assert cache.fill([_key(number) for number in range(5)], fetch) == expected
    assert asked == [(1, 5)]
    assert cache.fill([_key(number) for number in range(5)], _never) == expected


def test_what_is_used_again_last_goes_first(tmp_path: Path) -> None:
    cache = BlockCache(tmp_path, LIMIT_BYTES)
    for number in range(20):
        cache.fill([_key(number)], _giving(bytes(SMALL_BYTES)))
        cache.expect(_key(number), 1000 - 10 * number if number != 7 else 50_000)
    cache.fill([_key(20)], _giving(bytes(SMALL_BYTES)))
    gone = [number for number in range(21) if not os.path.exists(cache._path(_key(number)))]
    assert gone == [0, 7]


@pytest.mark.parametrize("offset", [3, 20, 200, BLOCK_BYTES // 2])
def test_a_flipped_byte_is_noticed_and_the_block_fetched_again(offset: int, tmp_path: Path) -> None:
    cache = BlockCache(tmp_path, 20 * BLOCK_BYTES)
    data = random.Random(1).randbytes(BLOCK_BYTES)
    cache.fill([_key(1)], _giving(data))
    (file,) = (tmp_path / "blocks").glob("*/*")
    content = bytearray(file.read_bytes())
    content[offset] ^= 1
    file.write_bytes(content)
    assert cache.read(_key(1), 0, BLOCK_BYTES) is None
    assert cache.fill([_key(1)], _giving(data)) == [data]
    assert cache.read(_key(1), 0, BLOCK_BYTES) == data


@pytest.mark.parametrize("size", [0, 10, 500, BLOCK_BYTES])
def test_a_file_that_was_cut_is_no_block(size: int, tmp_path: Path) -> None:
    cache = BlockCache(tmp_path, 20 * BLOCK_BYTES)
    cache.fill([_key(1)], _giving(bytes(BLOCK_BYTES)))
    (file,) = (tmp_path / "blocks").glob("*/*")
    os.truncate(file, size)
    assert cache.read(_key(1), 0, 100) is None


def test_the_least_recently_used_blocks_go_and_the_bound_holds(tmp_path: Path) -> None:
    cache = BlockCache(tmp_path, LIMIT_BYTES)
    data = bytes(SMALL_BYTES)
    for number in range(18):
        cache.fill([_key(number)], _giving(data))
        os.utime(tmp_path / "blocks" / _key(number)[:2] / _key(number), (number, number))
    assert not cache.has_room()
    assert cache.read(_key(0), 0, 1) is not None  # used again: now the youngest
    for number in range(18, 60):
        cache.fill([_key(number)], _giving(data))
        assert cache.used_bytes() <= LIMIT_BYTES
        if number == 20:
            assert os.path.exists(cache._path(_key(0)))
            assert not os.path.exists(cache._path(_key(1)))
    assert os.path.exists(cache._path(_key(59)))
    assert cache.used_bytes() > LIMIT_BYTES // 2


@pytest.mark.processes
@pytest.mark.timeout(120)
def test_writers_that_are_killed_leave_no_wrong_block_and_the_bound_holds(tmp_path: Path) -> None:
    draw = random.Random(2)
    cache = BlockCache(tmp_path, LIMIT_BYTES)
    for attempt in range(3):
        command = [sys.executable, "-c", WRITER, str(tmp_path), str(LIMIT_BYTES), str(attempt)]
        writers = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(2)]
        for one in writers:
            assert one.stdout is not None
            assert one.stdout.readline() == b"ready\n"
        time.sleep(draw.uniform(0.02, 0.4))
        assert cache.used_bytes() <= LIMIT_BYTES
        for one in writers:
            one.send_signal(signal.SIGKILL)
            one.wait()
        assert cache.used_bytes() <= LIMIT_BYTES
        for file in (tmp_path / "blocks").glob("*/*"):
            if not file.name.startswith("."):
                assert cache.read(file.name, 0, 40) == file.name.encode()
                assert cache.read(file.name, 0, SMALL_BYTES) == file.name.encode() * 1600
    # What dead writers left goes with the next eviction.
    for number in range(60):
        cache.fill([_key(number)], _giving(bytes(SMALL_BYTES)))
    assert not list((tmp_path / "blocks").glob("*/.new-*"))


def test_a_limit_that_the_disk_cannot_hold_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(DIRECTORY, str(tmp_path))
    monkeypatch.setenv(LIMIT, str(1 << 60))
    with pytest.raises(MachineError, match="has room for"):
        the_cache()


def test_eviction_removes_blocks_and_nothing_else(tmp_path: Path) -> None:
    """A user may name a directory with photos as data.cache_dir, and it may have a folder `blocks` already."""
    photos = [tmp_path / "blocks" / "2026" / f"{number:02d}.jpg" for number in range(20)]
    # Of the name of a block, but not at its place; in a folder of blocks, but of another name; not in a folder at all.
    photos += [tmp_path / "blocks" / "2026" / _key(1), tmp_path / "blocks" / "00" / "beach.jpg", tmp_path / "blocks/a"]
    for photo in photos:
        photo.parent.mkdir(parents=True, exist_ok=True)
        photo.write_bytes(bytes(SMALL_BYTES))
    (tmp_path / "blocks" / "ff").symlink_to(tmp_path / "blocks" / "2026")
    cache = BlockCache(tmp_path, LIMIT_BYTES)
    for number in range(60):
        cache.fill([_key(number)], _giving(bytes(SMALL_BYTES)))
    assert all(photo.exists() for photo in photos)
    assert cache.used_bytes() <= LIMIT_BYTES


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o1777])
def test_a_cache_that_others_may_change_is_not_used(tmp_path: Path, mode: int) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache").chmod(mode)
    with pytest.raises(MachineError, match="not yours alone") as caught:
        BlockCache(tmp_path / "cache", LIMIT_BYTES)
    assert "chmod go-w" in caught.value.hint
    (tmp_path / "cache").chmod(0o755)
    BlockCache(tmp_path / "cache", LIMIT_BYTES)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a directory to another user")
def test_a_cache_of_another_user_is_not_used(tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir(mode=0o700)
    os.chown(tmp_path / "cache", 54321, 54321)
    with pytest.raises(MachineError, match="belongs to user 54321"):
        BlockCache(tmp_path / "cache", LIMIT_BYTES)
