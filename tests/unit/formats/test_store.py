"""The store: what is written is what is read, by us and by anyone with a Zarr library."""

from __future__ import annotations

import json
import multiprocessing
import os
import pickle
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import zarr

from ups.errors import DataError
from ups.formats import shards, store_writer
from ups.formats.base import Reader, Subsampling
from ups.formats.store_writer import StoreWriter
from ups.formats.zarr_store import StoreReader
from ups.spec.task import AxisSpec, FieldSpec, ParameterSpec, TaskSpec

TRANSIENT = TaskSpec(
    name="flow",
    fields=(FieldSpec("density"), FieldSpec("velocity", tensor_rank=1), FieldSpec("force", role="static")),
    axes=(AxisSpec("x"), AxisSpec("y", boundary="wall")),
    parameters=(ParameterSpec("nu", minimum=0.0, maximum=1.0),),
    dt=0.5,
    conserved=("density",),
)
STEADY = TaskSpec(
    name="darcy",
    fields=(FieldSpec("a", role="static"), FieldSpec("u", role="target")),
    axes=(AxisSpec("x", boundary="dirichlet"), AxisSpec("y", boundary="dirichlet")),
    steady=True,
)
GRID = (np.linspace(0, 1, 8, endpoint=False), np.linspace(0, 1, 6))


def trajectory(number: int, frames: int = 7) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(number)
    return {
        "state": generator.normal(size=(frames, 3, 8, 6)).astype(np.float32),
        "static": generator.normal(size=(1, 8, 6)).astype(np.float32),
        "parameters": np.array([number / 100], np.float32),
    }


def write_flow(path: Path, counts: dict[str, int], frames: int = 7, **options: object) -> Path:
    with StoreWriter(path, TRANSIENT, GRID, frames, **options) as writer:  # type: ignore[arg-type]
        for split, count in counts.items():
            for i in range(count):
                writer.append(split, **trajectory(i + 1000 * len(split), frames))
    return path


def assert_windows_match(reader: Reader, split: str, count: int, frames: int = 7) -> None:
    for i in range(count):
        expected = trajectory(i + 1000 * len(split), frames)
        for start, length in ((0, frames), (2, 3), (frames - 1, 1)):
            window = reader.read(split, i, start, length)
            np.testing.assert_array_equal(window.state, expected["state"][start : start + length])
            np.testing.assert_array_equal(window.static, expected["static"])
            np.testing.assert_array_equal(window.parameters, expected["parameters"])
            assert window.target.shape == (0, 8, 6)
            assert window.state.flags.owndata or window.state.base is not None


def test_what_is_appended_is_read_back(tmp_path: Path) -> None:
    reader = StoreReader(write_flow(tmp_path / "flow.zarr", {"train": 5, "valid": 2, "test": 1}))
    assert isinstance(reader, Reader)
    assert reader.splits == {"train": 5, "valid": 2, "test": 1}
    assert (reader.num_frames, reader.space, reader.task) == (7, (8, 6), TRANSIENT)
    for split, count in reader.splits.items():
        assert_windows_match(reader, split, count)


@pytest.mark.parametrize("compression", [None, "zstd"])
@pytest.mark.parametrize(
    ("chunk_bytes", "shard_bytes"),
    [(10**9, 10**9), (10**9, 9000), (1200, 9000), (1200, 2400), (1, 1)],
    ids=["one shard", "two rows a shard", "chunks along time", "shards along time", "smallest"],
)
def test_every_cut_into_chunks_and_shards_gives_the_same_windows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compression: str | None, chunk_bytes: int, shard_bytes: int
) -> None:
    monkeypatch.setattr(store_writer, "TARGET_CHUNK_BYTES", chunk_bytes)
    monkeypatch.setattr(store_writer, "TARGET_SHARD_BYTES", shard_bytes)
    monkeypatch.setattr(store_writer, "PARAMETER_ROWS", 2)
    path = write_flow(tmp_path / "flow.zarr", {"train": 5}, compression=compression)
    assert_windows_match(StoreReader(path), "train", 5)
    opened = zarr.open_group(path, mode="r")
    for i in range(5):
        expected = trajectory(i + 5000)
        np.testing.assert_array_equal(opened["train/state"][i], expected["state"])
        np.testing.assert_array_equal(opened["train/static"][i], expected["static"])
        np.testing.assert_array_equal(opened["train/parameters"][i], expected["parameters"])


def test_strides_along_time_cross_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_writer, "TARGET_CHUNK_BYTES", 2 * 3 * 8 * 6 * 4)
    reader = StoreReader(write_flow(tmp_path / "flow.zarr", {"train": 1}, frames=11), Subsampling(time_stride=3))
    assert (reader.num_frames, reader.task.dt) == (4, 1.5)
    expected = trajectory(5000, 11)["state"][::3]
    np.testing.assert_array_equal(reader.read("train", 0, 0, 4).state, expected)
    np.testing.assert_array_equal(reader.read("train", 0, 1, 2).state, expected[1:3])


def test_space_is_thinned_by_picking_or_by_cell_means(tmp_path: Path) -> None:
    path = write_flow(tmp_path / "flow.zarr", {"train": 1})
    full = trajectory(5000)
    picked = StoreReader(path, Subsampling(space_stride=2))
    np.testing.assert_array_equal(picked.read("train", 0, 0, 7).state, full["state"][..., ::2, ::2])
    np.testing.assert_array_equal(picked.coordinates[0], GRID[0][::2])
    mean = StoreReader(path, Subsampling(space_stride=2, antialias=True))
    window = mean.read("train", 0, 3, 1)
    cells = full["state"][3:4].reshape(1, 3, 4, 2, 3, 2).mean(axis=(3, 5), dtype=np.float64)
    np.testing.assert_allclose(window.state, cells, rtol=1e-6)
    np.testing.assert_allclose(window.state.mean(), full["state"][3].mean(), rtol=1e-4)
    np.testing.assert_allclose(mean.coordinates[1], (GRID[1][::2] + GRID[1][1::2]) / 2)
    assert len({picked.identity(), mean.identity(), StoreReader(path).identity()}) == 3


def test_a_stride_that_breaks_the_period_is_refused(tmp_path: Path) -> None:
    path = write_flow(tmp_path / "flow.zarr", {"train": 1})
    with pytest.raises(DataError, match="periodic axis"):
        StoreReader(path, Subsampling(space_stride=3))


def test_a_steady_task_has_no_frames(tmp_path: Path) -> None:
    fields = np.random.default_rng(0).normal(size=(3, 2, 8, 6)).astype(np.float32)
    with StoreWriter(tmp_path / "darcy.zarr", STEADY, GRID, 0) as writer:
        for a, u in fields:
            writer.append("train", static=a[None], target=u[None])
    reader = StoreReader(tmp_path / "darcy.zarr")
    window = reader.read("train", 2, 0, 0)
    assert (reader.num_frames, window.state.shape, window.parameters.shape) == (0, (0, 0, 8, 6), (0,))
    np.testing.assert_array_equal(window.static[0], fields[2, 0])
    np.testing.assert_array_equal(window.target[0], fields[2, 1])


def test_a_block_equals_its_windows(tmp_path: Path) -> None:
    reader = StoreReader(write_flow(tmp_path / "flow.zarr", {"train": 4}))
    block = reader.read_block("train", [3, 0, 3], [1, 4, 0], 3)
    for i, (which, start) in enumerate(((3, 1), (0, 4), (3, 0))):
        np.testing.assert_array_equal(block.state[i], reader.read("train", which, start, 3).state)
    assert block.state.flags.c_contiguous
    assert block.state.flags.writeable
    again = reader.read_block("train", [1, 2, 1], [0, 1, 2], 3, out=block)
    assert again.state is block.state
    np.testing.assert_array_equal(again.state[1], reader.read("train", 2, 1, 3).state)
    with pytest.raises(ValueError, match="out"):
        reader.read_block("train", [1], [0], 3, out=block)


def test_zarr_and_xarray_open_it_with_names_and_coordinates(tmp_path: Path) -> None:
    xarray = pytest.importorskip("xarray")
    path = write_flow(tmp_path / "flow.zarr", {"train": 3})
    opened = xarray.open_zarr(path, group="train", consolidated=False)
    assert opened["state"].dims == ("trajectory", "time", "state_channel", "x", "y")
    np.testing.assert_array_equal(opened["x"], GRID[0])
    np.testing.assert_array_equal(opened["time"], np.arange(7) * 0.5)
    np.testing.assert_array_equal(opened["state"][2], trajectory(5002)["state"])
    attributes = zarr.open_group(path, mode="r").attrs["ups"]
    assert TaskSpec.from_json(attributes["task"]) == TRANSIENT


def test_out_of_range_requests_are_refused(tmp_path: Path) -> None:
    reader = StoreReader(write_flow(tmp_path / "flow.zarr", {"train": 2}))
    for request in (("train", 2, 0, 1), ("train", -1, 0, 1), ("train", 0, 7, 1), ("train", 0, 5, 3), ("nope", 0, 0, 1)):
        with pytest.raises(DataError, match="flow"):
            reader.read(*request)
    with pytest.raises(DataError, match="does not fit"):
        reader.read("train", 0, 0, 0)


def test_an_exception_leaves_no_store_and_no_litter(tmp_path: Path) -> None:
    def fail() -> None:
        with StoreWriter(tmp_path / "flow.zarr", TRANSIENT, GRID, 7) as writer:
            writer.append("train", **trajectory(0))
            raise RuntimeError("solver")

    with pytest.raises(RuntimeError, match="solver"):
        fail()
    assert list(tmp_path.iterdir()) == []


def test_wrong_shapes_and_existing_stores_are_refused(tmp_path: Path) -> None:
    path = write_flow(tmp_path / "flow.zarr", {"train": 1})
    with pytest.raises(DataError, match="exists already"):
        StoreWriter(path, TRANSIENT, GRID, 7)
    writer = StoreWriter(tmp_path / "b.zarr", TRANSIENT, GRID, 7)
    with pytest.raises(DataError, match="shape"):
        writer.append("train", **trajectory(0, frames=6))
    writer.abort()
    write_flow(path, {"train": 3}, overwrite=True)
    assert_windows_match(StoreReader(path), "train", 3)


def test_identity_follows_the_data_and_nothing_else(tmp_path: Path) -> None:
    first = StoreReader(write_flow(tmp_path / "a.zarr", {"train": 2}))
    same = StoreReader(write_flow(tmp_path / "b.zarr", {"train": 2}))
    other = StoreReader(write_flow(tmp_path / "c.zarr", {"train": 3}))
    assert first.identity() == same.identity() != other.identity()
    first.rename("my_flow")
    assert first.identity() == same.identity()
    assert first.task.name == first.read("train", 0, 0, 1).task.name == "my_flow"


def _digest_in_child(reader: StoreReader, queue: multiprocessing.Queue) -> None:  # type: ignore[type-arg]
    queue.put((os.getpid(), reader.read("train", 1, 2, 3).state.tobytes()))


@pytest.mark.processes
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_child_reads_what_the_parent_reads(tmp_path: Path, method: str) -> None:
    reader = StoreReader(write_flow(tmp_path / "flow.zarr", {"train": 2}))
    expected = reader.read("train", 1, 2, 3).state.tobytes()
    context = multiprocessing.get_context(method)
    queue = context.Queue()
    child = context.Process(target=_digest_in_child, args=(reader, queue))
    child.start()
    pid, answer = queue.get(timeout=30)
    child.join(30)
    assert pid != os.getpid()
    assert answer == expected


def test_threads_share_a_reader_and_files_stay_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_writer, "TARGET_SHARD_BYTES", 1)
    monkeypatch.setattr(shards, "_open_files", shards.ProcessCache(3))
    reader = StoreReader(write_flow(tmp_path / "flow.zarr", {"train": 12}))

    def read(i: int) -> bool:
        window = reader.read("train", i % 12, i % 5, 3)
        return bool((window.state == trajectory(5000 + i % 12)["state"][i % 5 : i % 5 + 3]).all())

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(read, range(400)))
    assert len(shards._open_files._items) <= 3
    reader.close()
    assert len(shards._open_files._items) == 0


def test_a_reader_is_small_when_pickled(tmp_path: Path) -> None:
    reader = StoreReader(write_flow(tmp_path / "flow.zarr", {"train": 2}))
    reader.read("train", 0, 0, 1)
    data = pickle.dumps(reader)
    assert len(data) < 20_000
    np.testing.assert_array_equal(pickle.loads(data).read("train", 1, 0, 7).state, reader.read("train", 1, 0, 7).state)


def _edit(path: Path, **changes: object) -> None:
    data = json.loads(path.read_text())
    data.update(changes)
    path.write_text(json.dumps(data))


@pytest.mark.parametrize(
    ("file", "changes"),
    [
        ("train/state/zarr.json", {"shape": [2, 7, 3, 8, 10**15]}),
        ("train/state/zarr.json", {"shape": [10**6, 7, 3, 8, 6]}),
        ("train/state/zarr.json", {"data_type": "object"}),
        ("train/state/zarr.json", {"codecs": [{"name": "bytes", "configuration": {"endian": "big"}}]}),
        ("train/state/zarr.json", {"chunk_key_encoding": {"name": "v2"}}),
        ("train/zarr.json", {"node_type": "array"}),
        ("zarr.json", {"attributes": {"ups": {"format": "ups-store", "version": 99}}}),
        ("zarr.json", {"attributes": {"ups": {"format": "ups-store", "version": 1, "splits": {"../x": 1}}}}),
    ],
)
def test_changed_metadata_is_refused(tmp_path: Path, file: str, changes: dict[str, object]) -> None:
    path = write_flow(tmp_path / "flow.zarr", {"train": 2})
    _edit(path / file, **changes)
    with pytest.raises(DataError):
        StoreReader(path)


def test_a_shard_that_points_outside_itself_is_refused(tmp_path: Path) -> None:
    path = write_flow(tmp_path / "flow.zarr", {"train": 2})
    file = path / "train/state/c/0/0/0/0/0"
    data = file.read_bytes()
    size = shards.index_bytes(2)
    index = np.frombuffer(data[-size:-4], "<u8").reshape(2, 2).copy()
    index[1, 0] = len(data)
    file.write_bytes(data[:-size] + shards.encode_index(index))
    with pytest.raises(DataError, match="outside the file"):
        StoreReader(path).read("train", 0, 0, 1)
    file.write_bytes(data[:-1] + b"\x00")
    with pytest.raises(DataError, match="checksum"):
        StoreReader(path).read("train", 0, 0, 1)
    file.write_bytes(data[:10])
    with pytest.raises(DataError, match="index"):
        StoreReader(path).read("train", 0, 0, 1)


def test_links_in_place_of_files_are_refused(tmp_path: Path) -> None:
    path = write_flow(tmp_path / "flow.zarr", {"train": 2})
    file = path / "train/state/c/0/0/0/0/0"
    moved = tmp_path / "elsewhere"
    file.rename(moved)
    file.symlink_to(moved)
    with pytest.raises(DataError, match="not a plain file"):
        StoreReader(path).read("train", 0, 0, 1)


def test_deep_json_is_refused(tmp_path: Path) -> None:
    path = write_flow(tmp_path / "flow.zarr", {"train": 1})
    (path / "zarr.json").write_text("[" * 100_000)
    with pytest.raises(DataError, match="JSON"):
        StoreReader(path)


def test_a_compressed_chunk_cannot_expand(tmp_path: Path) -> None:
    from numcodecs import zstd

    path = write_flow(tmp_path / "flow.zarr", {"train": 1}, compression="zstd")
    file = path / "train/state/c/0/0/0/0/0"
    bomb = zstd.compress(bytes(64 << 20), 3)
    file.write_bytes(bomb + shards.encode_index(np.array([[0, len(bomb)]], np.uint64)))
    with pytest.raises(DataError, match="promises"):
        StoreReader(path).read("train", 0, 0, 1)


def test_times_start_where_the_data_starts(tmp_path: Path) -> None:
    path = write_flow(tmp_path / "flow.zarr", {"train": 1}, times=1.0 + np.arange(7) * 0.5)
    assert StoreReader(path, Subsampling(time_stride=3)).times.tolist() == [1.0, 2.5, 4.0]


def test_few_file_descriptors_mean_few_open_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards.resource, "getrlimit", lambda _: (64, 64))
    assert shards.ProcessCache(128).capacity == 8


@pytest.mark.parametrize("part", ["train", "train/state", "train/state/c"])
def test_a_part_that_is_a_link_is_refused(tmp_path: Path, part: str) -> None:
    store = write_flow(tmp_path / "flow.zarr", {"train": 2})
    elsewhere = (store / part).rename(tmp_path / "elsewhere")
    (store / part).symlink_to(elsewhere)
    with pytest.raises(DataError, match="is a symbolic link"):
        StoreReader(store)
