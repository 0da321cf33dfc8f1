"""Packing and checking: a store made from files is the files, and the checker knows a good store from a bad one."""

from __future__ import annotations

import json
from pathlib import Path

import h5py
import numpy as np
import pytest
import zarr

from ups.data.inspect import card_lines, make_card
from ups.data.open import open_paths
from ups.data.pack import pack
from ups.data.validate import validate_paths
from ups.formats import store_writer
from ups.formats.base import Subsampling
from ups.formats.check_store import check_store
from ups.formats.zarr_store import StoreReader


@pytest.fixture(scope="module")
def burgers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "1D_Burgers_Sols_Nu0.01.hdf5"
    with h5py.File(path, "w") as file:
        file["tensor"] = np.random.default_rng(0).normal(size=(12, 9, 32)).astype(np.float32)
        file["x-coordinate"] = (np.arange(32) + 0.5) / 32
        file["t-coordinate"] = np.arange(10) * 0.01
        file.attrs["Nu"] = 0.01
    return path


@pytest.mark.parametrize("compression", [None, "zstd"])
def test_a_packed_store_is_the_file(
    burgers: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compression: str | None
) -> None:
    monkeypatch.setattr(store_writer, "TARGET_CHUNK_BYTES", 4 * 32 * 4)  # several blocks of frames
    reader = open_paths(burgers)
    steps: list[tuple[int, int]] = []
    pack(reader, tmp_path / "b.zarr", compression=compression, progress=lambda *step: steps.append(step))
    assert steps[-1] == (12, 12)
    store = StoreReader(tmp_path / "b.zarr")
    assert check_store(tmp_path / "b.zarr") == []
    assert (store.task, store.splits, store.num_frames) == (reader.task, reader.splits, reader.num_frames)
    for split, count in reader.splits.items():
        for i in range(count):
            np.testing.assert_array_equal(store.read(split, i, 3, 5).state, reader.read(split, i, 3, 5).state)
    with h5py.File(burgers) as file:
        whole = np.concatenate([zarr.open_group(tmp_path / "b.zarr", mode="r")[s]["state"] for s in store.splits])
        np.testing.assert_array_equal(whole[:, :, 0], file["tensor"])


def test_packing_can_thin(burgers: Path, tmp_path: Path) -> None:
    thin = Subsampling(time_stride=2, space_stride=4, antialias=True)
    pack(open_paths(burgers, thin), tmp_path / "b.zarr")
    store, direct = StoreReader(tmp_path / "b.zarr"), open_paths(burgers, thin)
    assert (store.num_frames, store.space, store.task.dt) == (5, (8,), pytest.approx(0.02))
    np.testing.assert_array_equal(store.read("test", 0, 0, 5).state, direct.read("test", 0, 0, 5).state)


def test_the_checker_names_what_is_wrong(burgers: Path, tmp_path: Path) -> None:
    path = tmp_path / "b.zarr"
    pack(open_paths(burgers), path)
    (path / "extra").write_text("x")
    assert any("extra" in problem for problem in check_store(path))
    (path / "extra").unlink()
    shard = path / "valid/state/c/0/0/0/0"
    data = shard.read_bytes()
    shard.write_bytes(data[:-4] + bytes(4))
    assert any("checksum" in problem for problem in check_store(path, deep=False))
    shard.write_bytes(data)
    assert check_store(path) == []
    (path / "COMMITTED").unlink()
    assert any("not committed" in problem for problem in check_store(path))
    assert check_store(tmp_path / "nothing") != []


def test_a_store_that_claims_a_billion_trajectories_is_checked_in_no_time(burgers: Path, tmp_path: Path) -> None:
    path = tmp_path / "b.zarr"
    pack(open_paths(burgers), path)
    for file in (path / "zarr.json", path / "train/state/zarr.json", path / "train/parameters/zarr.json"):
        data = json.loads(file.read_text())
        if "shape" in data:
            data["shape"][0] = 10**12
        else:
            data["attributes"]["ups"]["splits"]["train"] = 10**12
        file.write_text(json.dumps(data))
    assert any("needs" in problem for problem in check_store(path))
    assert validate_paths(path).num_findings >= 1000


def test_the_card_says_what_is_there(burgers: Path, tmp_path: Path) -> None:
    pack(open_paths(burgers), tmp_path / "b.zarr")
    card = make_card(StoreReader(tmp_path / "b.zarr"), [str(tmp_path / "b.zarr")])
    assert card["splits"] == {"train": 8, "valid": 2, "test": 2}
    assert card["axes"][0] == {
        "name": "x", "points": 32, "first": 1 / 64, "last": 63 / 64, "extent": 1.0, "unit": "1", "boundary": "periodic",
        "uniform": True,
    }  # fmt: skip
    assert card["parameters"][0]["found_maximum"] == pytest.approx(0.01)
    field = card["fields"][0]
    assert (field["minimum"] < -2, field["maximum"] > 2, abs(field["std"] - 1) < 0.1) == (True, True, True)
    text = "\n".join(f"{label} {value}" for label, value in card_lines(card))
    for part in ("burgers1d", "9 frames, 0.01 apart, from 0 on", "periodic", "conserved", "8 train, 2 valid, 2 test"):
        assert part in text
