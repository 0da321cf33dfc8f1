"""Zarr groups of others that are damaged, half written or planted: never code, never zeros in silence."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import os
import pickle
import resource
import zlib
from pathlib import Path
from typing import Any

import numcodecs
import numpy as np
import pytest
import xarray
import zarr
import zarr.codecs

from ups.errors import DataError
from ups.formats.container import Container
from ups.formats.open_container import open_container
from ups.formats.shards import encode_index

U = np.random.default_rng(0).normal(size=(12, 5, 8)).astype(np.float32)


class Planted:
    """What runs when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (Path("planted"),))


def _all(container: Container, name: str) -> Any:
    return container.read(name, tuple(slice(0, n, 1) for n in container.variables[name].shape))


def _group(path: Path, version: Any = 2, **options: Any) -> Path:
    group = zarr.open_group(path, mode="w", zarr_format=version)
    group.create_array("u", shape=U.shape, dtype="f4", chunks=(1, 5, 8), **options)[:] = U
    return path


def _change(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_consolidated_metadata_is_not_believed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("numcodecs.pickles.ALLOW_UNSAFE_PICKLE_DECODE", True, raising=False)
    path = _group(tmp_path / "a.zarr")
    planted = json.loads((path / "u" / ".zarray").read_text()) | {"dtype": "|O", "chunks": [12, 5, 8]}
    planted |= {"compressor": {"id": "pickle"}, "filters": [{"id": "pickle"}], "fill_value": ""}
    entries = {".zgroup": {"zarr_format": 2}, ".zattrs": {}, "u/.zarray": planted, "u/.zattrs": {}}
    (path / ".zmetadata").write_text(json.dumps({"metadata": entries, "zarr_consolidated_format": 1}))
    (path / "u" / "0.0.0").write_bytes(pickle.dumps(Planted()))
    with pytest.raises(DataError, match="cannot be read"):
        _all(open_container(path), "u")
    assert not (tmp_path / "planted").exists()


@pytest.mark.parametrize("version", [2, 3])
def test_an_array_is_read_without_a_group_around_it(tmp_path: Path, version: Any) -> None:
    zarr.create_array(tmp_path / "one.zarr", data=U, zarr_format=version)
    np.testing.assert_array_equal(_all(open_container(tmp_path / "one.zarr"), "array"), U)
    path = _group(tmp_path / "a.zarr", version)
    (path / (".zgroup" if version == 2 else "zarr.json")).unlink()
    if version == 2:
        np.testing.assert_array_equal(_all(open_container(path), "u"), U)
    else:
        with pytest.raises(DataError, match="no Zarr group"):
            open_container(path)


def test_an_attribute_that_is_no_number_of_this_machine_is_left_out(tmp_path: Path) -> None:
    path = _group(tmp_path / "a.zarr")
    (path / ".zattrs").write_text(json.dumps({"a": [1, 10**400], "b": 10**400, "c": 2}))
    container = open_container(path)
    assert container.attributes == {"c": 2.0}
    assert tuple(container.left_out) == ("attribute 'a'", "attribute 'b'")


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("dtype", ["f4", "f8", "i2"])
def test_missing_values_are_those_of_xarray(tmp_path: Path, version: Any, dtype: str) -> None:
    values = U.astype(np.float64)
    values[0, 0, :3] = np.nan
    encoding: dict[str, Any] = {"dtype": dtype, "_FillValue": np.dtype(dtype).type(-32767 if dtype == "i2" else 1e20)}
    encoding |= {"scale_factor": 0.001} if dtype == "i2" else {}
    dataset = xarray.Dataset({"u": (("trajectory", "time", "x"), values)})
    dataset.to_zarr(tmp_path / "a.zarr", zarr_format=version, encoding={"u": encoding}, consolidated=False)
    with xarray.open_zarr(tmp_path / "a.zarr", chunks=None, consolidated=False) as opened:
        expected = opened["u"].values
    container = open_container(tmp_path / "a.zarr")
    np.testing.assert_allclose(container.whole("u"), expected, rtol=1e-6)
    assert np.isnan(container.whole("u")).sum() == 3


@pytest.mark.parametrize("version", [2, 3])
def test_chunks_that_are_not_there_are_named(tmp_path: Path, version: Any) -> None:
    path = tmp_path / "a.zarr"
    group = zarr.open_group(path, mode="w", zarr_format=version)
    group.create_array("u", shape=U.shape, dtype="f4", chunks=(1, 5, 8))[:6] = U[:6]
    group.create_array("v", shape=U.shape, dtype="f4", chunks=(1, 5, 8))
    group.create_array("zero", shape=(), dtype="f4")
    container = open_container(path)
    assert set(container.variables) == {"u", "zero"}
    words = sorted(container.left_out)
    assert words[0] == "'v', of which no chunk is stored"
    assert words[1].startswith("1 of 1 chunks of 'zero'")
    assert words[2].startswith("6 of 12 chunks of 'u', which are not stored")
    assert not open_container(_group(tmp_path / "b.zarr", version)).left_out


def test_a_shape_beyond_all_bounds_is_left_out(tmp_path: Path) -> None:
    path = _group(tmp_path / "a.zarr")
    for change in ({"shape": [1 << 39, 1 << 39, 32]}, {"chunks": [12]}):
        _change(path / "u" / ".zarray", **change)
        with pytest.raises(DataError, match="no Zarr group with arrays"):
            open_container(path)


@pytest.mark.parametrize(
    ("codec", "pack"),
    [
        (numcodecs.GZip(), gzip.compress),
        (numcodecs.Zlib(), zlib.compress),
        (numcodecs.BZ2(), bz2.compress),
        (numcodecs.LZMA(), lzma.compress),
        (zarr.codecs.GzipCodec(), gzip.compress),
    ],
    ids=["gzip", "zlib", "bz2", "lzma", "gzip of version 3"],
)
def test_a_chunk_cannot_unpack_beyond_its_declared_size(tmp_path: Path, codec: Any, pack: Any) -> None:
    version = 3 if isinstance(codec, zarr.codecs.GzipCodec) else 2
    path = _group(tmp_path / "a.zarr", version, compressors=codec)
    np.testing.assert_array_equal(_all(open_container(path), "u"), U)
    (path / "u" / ("0.0.0" if version == 2 else "c/0/0/0")).write_bytes(pack(bytes(1 << 24)))
    container = open_container(path)
    container.close()
    with pytest.raises(DataError, match="unpacks to more than it may hold"):
        _all(container, "u")


def _zstd_stream(blocks: list[bytes], window: int = 0x58) -> bytes:
    """A frame that does not say its size, made of blocks with their headers."""
    return b"\x28\xb5\x2f\xfd\x00" + bytes([window]) + b"".join(blocks)


def _block(kind: int, size: int, content: bytes, last: bool) -> bytes:
    return (int(last) | kind << 1 | size << 3).to_bytes(3, "little") + content


# 98 kB that unpack to 3 GiB: one byte, repeated 131,072 times by each block.
BOMB = _zstd_stream([_block(1, 1 << 17, b"\0", number == 24575) for number in range(24576)])
ZEROS = bytes(1 << 24)


@pytest.mark.parametrize(
    ("codec", "chunk"),
    [
        (numcodecs.Zstd(), BOMB),
        (numcodecs.Zstd(), numcodecs.Zstd().encode(ZEROS)),
        (numcodecs.Zstd(), _zstd_stream([_block(0, 0, b"", True)]) + BOMB),
        (numcodecs.Blosc(), numcodecs.Blosc().encode(ZEROS)),
        (numcodecs.LZ4(), numcodecs.LZ4().encode(ZEROS)),
        (zarr.codecs.ZstdCodec(), BOMB),
        (zarr.codecs.ZstdCodec(), numcodecs.Zstd().encode(ZEROS)),
        (zarr.codecs.BloscCodec(typesize=4), numcodecs.Blosc().encode(ZEROS)),
        (zarr.codecs.ZstdCodec(), numcodecs.Zstd().encode(bytes(U.nbytes)) * 1000),
    ],
    ids=[
        "zstd stream",
        "zstd",
        "zstd frames",
        "blosc",
        "lz4",
        "zstd stream of version 3",
        "zstd of version 3",
        "blosc of version 3",
        "zstd frames that are each as large as a chunk",
    ],
)
def test_a_small_chunk_does_not_fill_the_memory(tmp_path: Path, codec: Any, chunk: bytes) -> None:
    version = 2 if isinstance(codec, numcodecs.abc.Codec) else 3
    path = _group(tmp_path / "a.zarr", version, compressors=codec)
    container = open_container(path)
    np.testing.assert_array_equal(_all(container, "u"), U)
    (path / "u" / ("0.0.0" if version == 2 else "c/0/0/0")).write_bytes(chunk)
    container.close()
    with pytest.raises(DataError, match="unpacks to more than it may hold"):
        _all(container, "u")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < 2 << 20  # KiB: nothing has unpacked 3 GiB


def test_a_chunk_that_does_not_say_its_size_is_read(tmp_path: Path) -> None:
    path = _group(tmp_path / "a.zarr", 3, compressors=zarr.codecs.ZstdCodec())
    values = U[0].tobytes()
    (path / "u" / "c/0/0/0").write_bytes(_zstd_stream([_block(0, len(values), values, True)]))
    np.testing.assert_array_equal(_all(open_container(path), "u"), U)


@pytest.mark.parametrize("codec", [zarr.codecs.ZstdCodec(), zarr.codecs.GzipCodec()], ids=["zstd", "gzip"])
@pytest.mark.parametrize("whole", [True, False])
def test_a_chunk_in_a_shard_is_bounded_by_its_own_size(tmp_path: Path, codec: Any, whole: bool) -> None:
    path = _group(tmp_path / "a.zarr", 3, shards=(12, 5, 8), compressors=codec)
    container = open_container(path)
    np.testing.assert_array_equal(_all(container, "u"), U)
    np.testing.assert_array_equal(container.read("u", (slice(3, 5, 1), slice(0, 5, 1), slice(0, 8, 1))), U[3:5])
    shard = path / "u" / "c/0/0/0"
    entries = np.frombuffer(shard.read_bytes()[-(16 * 12 + 4) :][: 16 * 12], "<u8").reshape(12, 2).copy()
    bomb = BOMB if isinstance(codec, zarr.codecs.ZstdCodec) else gzip.compress(ZEROS)
    body = shard.read_bytes()[: -(16 * 12 + 4)]
    entries[3] = len(body), len(bomb)
    shard.write_bytes(body + bomb + encode_index(entries))
    container.close()
    rows = slice(0, 12, 1) if whole else slice(3, 4, 1)
    with pytest.raises(DataError, match="unpacks to more than it may hold"):
        container.read("u", (rows, slice(0, 5, 1), slice(0, 8, 1)))


@pytest.mark.parametrize(
    "change",
    [
        {"chunk_grid": None},
        {"chunk_grid": {"name": "regular", "configuration": {"chunk_shape": ["a", 5, 8]}}},
        {"chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [12, 5, 9]}}},
        {"configuration": None},
        {"configuration": {"chunk_shape": [0, 5, 8]}},
        {"configuration": {"chunk_shape": [1, 5]}},
        {"configuration": {"codecs": None}},
        {"configuration": {"index_codecs": 3}},
        {"configuration": {"index_location": "start"}},
    ],
    ids=str,
)
def test_shards_whose_chunks_cannot_be_found_are_left_out(tmp_path: Path, change: dict[str, Any]) -> None:
    path = _group(tmp_path / "a.zarr", 3, shards=(12, 5, 8), compressors=zarr.codecs.ZstdCodec())
    document = json.loads((path / "u" / "zarr.json").read_text())
    if "configuration" in change:
        (shard,) = document["codecs"]
        new = change["configuration"]
        # Another codec that unpacks stays in sight, as in a file that hides it.
        shard["configuration"] = {"x": [{"name": "zstd"}]} | (shard["configuration"] | new if new else {})
    else:
        document |= change
    (path / "u" / "zarr.json").write_text(json.dumps(document))
    with pytest.raises(DataError, match="no Zarr group with arrays"):
        open_container(path)


@pytest.mark.parametrize("version", [2, 3])
def test_a_pipe_in_place_of_a_chunk_is_refused(tmp_path: Path, version: Any) -> None:
    """Each reader would wait for its writer, forever."""
    for name in ["u/0.0.0", ".zattrs", "u/.zarray"] if version == 2 else ["u/c/0/0/0", "zarr.json", "u/zarr.json"]:
        path = _group(tmp_path / name.replace("/", "_"), version)
        (path / name).unlink(missing_ok=True)
        os.mkfifo(path / name)
        with pytest.raises(DataError, match="is a pipe"):
            open_container(path)


def test_codecs_that_hide_are_found(tmp_path: Path) -> None:
    twice = {"compressor": {"id": "gzip", "level": 1}, "filters": [{"id": "gzip", "level": 1}]}
    path = _group(tmp_path / "a.zarr")
    _change(path / "u" / ".zarray", **twice)
    with pytest.raises(DataError) as caught:
        open_container(path)
    assert "inside of another codec" in caught.value.hint
    path = _group(tmp_path / "b.zarr", 3)
    codecs = json.loads((path / "u" / "zarr.json").read_text())["codecs"]
    _change(path / "u" / "zarr.json", codecs=[*codecs, {"id": "gzip", "name": "numcodecs.pickle"}])
    with pytest.raises(DataError) as caught:
        open_container(path)
    assert "'numcodecs.pickle' is not read" in caught.value.hint


def test_groups_do_not_become_fields_in_silence(tmp_path: Path) -> None:
    group = zarr.open_group(tmp_path / "a.zarr", mode="w", zarr_format=2)
    for i in range(4):
        group.create_array(f"run_{i}/u", data=U[i])
    group.create_array("w", data=U)
    container = open_container(tmp_path / "a.zarr")
    assert set(container.variables) == {"w"}
    assert "and 2 more: arrays of the same name in groups" in container.left_out[0]
