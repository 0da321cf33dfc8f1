"""Replaced data is noticed by a sample of its bytes, moved data is the same data."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from ups.data.content import BLOCK_BYTES, NUM_BLOCKS, compare_changed, content_sample
from ups.errors import DataChangedError, DataError
from ups.record.manifest import commit_directory, make_temporary


@pytest.fixture
def store(tmp_path: Path) -> Path:
    final = tmp_path / "a.zarr"
    temporary = make_temporary(final)
    (temporary / "train" / "c").mkdir(parents=True)
    for i in range(20):
        (temporary / "train" / "c" / str(i)).write_bytes(bytes([i]) * 1000)
    commit_directory(temporary, final)
    return final


def test_a_store_that_was_moved_is_the_same_data(store: Path, tmp_path: Path) -> None:
    shutil.copytree(store, tmp_path / "elsewhere" / "b.zarr")
    assert content_sample([store])[0] == content_sample([tmp_path / "elsewhere" / "b.zarr"])[0]


def test_a_small_store_is_sampled_whole(store: Path) -> None:
    before = content_sample([store])[0]
    (store / "train" / "c" / "7").write_bytes(bytes([7]) * 999 + b"x")
    assert content_sample([store])[0] != before


def test_a_large_file_is_looked_into_everywhere(tmp_path: Path) -> None:
    path = tmp_path / "large.h5"
    size = 2 * NUM_BLOCKS * BLOCK_BYTES
    with path.open("wb") as file:
        file.truncate(size)
    before = content_sample([path])[0]
    for offset in (0, size // 2, size - 1):
        with path.open("r+b") as file:
            file.seek(offset // (2 * BLOCK_BYTES) * 2 * BLOCK_BYTES if offset < size - 1 else offset)
            file.write(b"x" * (2 * BLOCK_BYTES if offset < size - 1 else 1))
        after = content_sample([path])[0]
        assert after != before
        before = after


def test_what_was_modified_is_compared_with_the_manifest(store: Path) -> None:
    since = content_sample([store])[1]
    path = store / "train" / "c" / "3"
    os.utime(path)
    compare_changed([store], since)
    path.write_bytes(bytes([3]) * 999 + b"x")
    os.utime(path, ns=(since + 10**9, since + 10**9))
    with pytest.raises(DataChangedError, match="was modified after the run started"):
        compare_changed([store], since)
    compare_changed([store], since, limit_bytes=10)


def test_data_that_is_gone_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot be read"):
        content_sample([tmp_path / "nothing.h5"])


def test_a_file_that_a_network_file_system_adds_is_not_data(store: Path) -> None:
    before = content_sample([store])[0]
    (store / "train" / ".nfs0001").write_bytes(b"x")
    assert content_sample([store])[0] == before
