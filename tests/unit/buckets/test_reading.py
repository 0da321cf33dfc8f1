"""Data in a bucket of a real S3 server: the bytes of a disk, one download for all, and faults that are named."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import pdebench_files, the_well_files
from tests.support.seaweed_server import BUCKET, SECRET, Seaweed, require_weed
from tests.support.slow_proxy import slow_proxy
from ups.buckets import cached_objects
from ups.buckets.block_cache import DIRECTORY
from ups.buckets.cached_objects import forget, object_info, read_range
from ups.buckets.path import BucketPath, data_path
from ups.config.schema import DataConfig, TaskConfig
from ups.data.loader import build_loader
from ups.data.open import open_paths, open_task
from ups.data.pack import pack
from ups.data.validate import validate_paths
from ups.errors import ConfigError, DataChangedError, DataError, StoreRefusedError, StoreUnavailableError
from ups.formats.base import GridReader
from ups.spec.batch import RankInfo

pytestmark = [pytest.mark.processes, pytest.mark.timeout(180)]

READER = """
import hashlib, sys
from ups.buckets.cached_objects import object_info, read_range
info = object_info(sys.argv[1])
print("ready", flush=True)
sys.stdin.readline()
print(hashlib.sha256(read_range(info, 0, info.size)).hexdigest())
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seaweed]:
    require_weed()
    seaweed = Seaweed(tmp_path_factory.mktemp("weed"))
    seaweed.start()
    yield seaweed
    seaweed.kill()


@pytest.fixture
def here(server: Seaweed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of its own for a test, with an empty cache in it."""
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv(DIRECTORY, str(tmp_path / "cache"))
    cached_objects._store.cache_clear()
    forget("")
    return tmp_path


def _files(folder: Path) -> list[Path]:
    """One of each way in which arrays are stored."""
    pdebench_files.single(folder / "1D_Burgers_Sols_Nu0.01.hdf5", attributes={"Nu": 0.01})
    flow = folder / "2D_CFD_Rand_M0.1_Eta0.01_Zeta0.01_periodic_128_Train.hdf5"
    pdebench_files.compressible(flow, 2, chunks=True, compression="gzip")
    two = the_well_files.two_dims()
    well = the_well_files.write_set(folder / "well", {split: [two] for split in ("train", "valid", "test")})
    return [folder / "1D_Burgers_Sols_Nu0.01.hdf5", flow, well]


def _equal(one: GridReader, other: GridReader) -> None:
    assert one.identity() == other.identity()
    assert one.splits == other.splits
    for split, count in one.splits.items():
        for trajectory in range(count):
            frames = one.frames_in(split, trajectory)
            for start, length in ((0, frames), (frames // 2, 1), (1, min(3, frames - 1))):
                a, b = (reader.read(split, trajectory, start, length) for reader in (one, other))
                for name in ("state", "static", "target", "parameters"):
                    assert getattr(a, name).tobytes() == getattr(b, name).tobytes(), (split, trajectory, name)


def test_windows_of_hdf5_are_those_of_the_disk(server: Seaweed, here: Path) -> None:
    for path in _files(here):
        address = server.upload(path, f"hdf5/{path.name}")
        remote = open_paths(address)
        assert remote.remote
        _equal(remote, open_paths(path))


def test_batches_of_every_rank_are_those_of_the_disk(server: Seaweed, here: Path) -> None:
    path = _files(here)[1]
    address = server.upload(path, f"ranks/{path.name}")
    for rank, workers in ((0, 0), (1, 0), (1, 1)):
        batches = [_batches(str(source), rank, workers) for source in (path, address)]
        assert batches[0] == batches[1]


def _batches(path: str, rank: int, workers: int) -> list[bytes]:
    """The windows of the first steps of a rank of two."""
    data = DataConfig.model_validate(
        {"tasks": [{"name": "t", "path": path}], "batch_size": 4, "loader": {"workers": workers}}
    )
    reader = open_task(data.tasks[0])
    with build_loader(data, [reader], RankInfo(rank, 2), seed=0, window_frames=3) as loader:
        return [next(loader)[0].state.numpy().tobytes() for _ in range(5)]


def test_a_web_server_gives_the_same_windows(server: Seaweed, here: Path) -> None:
    files = _files(here)
    pack(open_paths(files[1]), here / "web.zarr")
    for path in (here / "web.zarr", files[0]):
        server.upload(path, f"web/{path.name}")
        _equal(open_paths(f"{server.web}/web/{path.name}"), open_paths(path))
    assert [f.kind for f in validate_paths(f"{server.web}/web/web.zarr").findings if f.kind == "damaged"] == []


def test_a_process_that_ends_with_an_open_file_of_a_bucket_ends_well(server: Seaweed, here: Path) -> None:
    path = _files(here)[1]
    address = server.upload(path, f"ends/{path.name}")
    program = "import sys; from ups.data.open import open_paths; r = open_paths(sys.argv[1]); r.read('train', 0, 0, 2)"
    done = subprocess.run([sys.executable, "-c", program, address], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr


def test_windows_of_a_store_are_those_of_the_disk_and_a_flipped_byte_is_fetched_again(
    server: Seaweed, here: Path
) -> None:
    source = open_paths(_files(here)[1])
    pack(source, here / "flow.zarr")
    address = server.upload(here / "flow.zarr", "flow.zarr")
    remote = open_paths(address)
    _equal(remote, open_paths(here / "flow.zarr"))
    for block in (here / "cache" / "blocks").glob("*/*"):
        content = bytearray(block.read_bytes())
        content[-1] ^= 255
        block.write_bytes(content)
    _equal(remote, open_paths(here / "flow.zarr"))
    assert [f.kind for f in validate_paths(address).findings if f.kind == "damaged"] == []
    server.put("flow.zarr/train/state/c/0/0/0/0/0", b"not what was committed")
    forget("")
    assert {"damaged", "unreadable"} & {f.kind for f in validate_paths(address).findings}


def test_eight_readers_of_one_cache_download_the_data_once(server: Seaweed, here: Path) -> None:
    content = os.urandom(12 << 20)
    server.put("large.bin", content)
    address = f"s3://{BUCKET}/large.bin"
    with slow_proxy(server.endpoint) as counter:
        environment = {**os.environ, "AWS_ENDPOINT_URL": counter.endpoint}
        command = [sys.executable, "-c", READER, address]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        readers = [subprocess.Popen(command, env=environment, **pipes) for _ in range(8)]
        for one in readers:
            assert one.stdout is not None
            assert one.stdout.readline() == "ready\n"
        expected = hashlib.sha256(content).hexdigest()
        for one in readers:
            assert one.stdin is not None
            one.stdin.write("\n")
            one.stdin.flush()
        for one in readers:
            assert one.communicate()[0].strip() == expected
    assert len(content) <= counter.num_bytes <= 1.1 * len(content)


def test_an_object_that_was_replaced_is_noticed(server: Seaweed, here: Path) -> None:
    server.put("one.bin", b"a" * 3_000_000)
    info = object_info(f"s3://{BUCKET}/one.bin")
    assert info is not None
    assert read_range(info, 0, 10) == b"a" * 10
    server.put("one.bin", b"b" * 3_000_000)
    assert read_range(info, 0, 10) == b"a" * 10  # from the cache: the version that was asked about
    with pytest.raises(DataChangedError, match="replaced"):
        read_range(info, 2_500_000, 2_500_010)


def test_what_is_not_there_or_not_for_us_is_said_without_secrets(
    server: Seaweed, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(DataError, match="does not exist"):
        open_paths(f"s3://{BUCKET}/nothing.zarr")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "another-canary")
    cached_objects._store.cache_clear()
    with pytest.raises(StoreRefusedError) as refused:
        open_paths(f"s3://{BUCKET}/other.zarr")
    assert "another-canary" not in f"{refused.value.message} {refused.value.hint}"
    monkeypatch.setattr(cached_objects, "GIVE_UP_SECONDS", 2.0)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    cached_objects._store.cache_clear()
    with pytest.raises(StoreUnavailableError) as gone:
        open_paths(f"s3://{BUCKET}/third.zarr")
    assert SECRET not in gone.value.message


def test_a_server_that_says_nothing_for_five_seconds_is_waited_for_and_longer_is_named(
    server: Seaweed, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.put("paused.bin", b"c" * 2_000_000)
    info = object_info(f"s3://{BUCKET}/paused.bin")
    assert info is not None
    server.pause()
    try:
        timer = threading.Timer(5.0, os.kill, (server.pid, signal.SIGCONT))
        timer.start()
        begin = time.monotonic()
        assert read_range(info, 0, 10) == b"c" * 10
        assert time.monotonic() - begin > 4
        timer.join()
        server.pause()
        monkeypatch.setattr(cached_objects, "GIVE_UP_SECONDS", 5.0)
        begin = time.monotonic()
        with pytest.raises(StoreUnavailableError, match="does not answer"):
            read_range(info, 1_500_000, 1_500_010)
        # The last request may begin just before patience ends.
        assert time.monotonic() - begin < 5 + cached_objects.REQUEST_SECONDS + 5
    finally:
        os.kill(server.pid, signal.SIGCONT)


@pytest.mark.parametrize(
    "path",
    ["s3://user:canary@bucket/x.zarr", "https://host/x.zarr?signature=canary", "ftp://host/x", "http://example.org/x"],
)
def test_credentials_in_an_address_are_refused_and_not_repeated(path: str) -> None:
    with pytest.raises(ConfigError) as refused:
        data_path(path)
    assert "canary" not in refused.value.one_line()
    with pytest.raises(ValueError, match="path"):
        TaskConfig(name="x", path=path)


def test_an_address_is_a_path() -> None:
    path = data_path("s3://bucket/a/b.zarr/")
    assert isinstance(path, BucketPath)
    assert str(path / "c") == "s3://bucket/a/b.zarr/c"
    assert (path.name, path.suffix, str(path.parent)) == ("b.zarr", ".zarr", "s3://bucket/a")
    assert str((path / "x" / "y").relative_to(path)) == "x/y"
