"""Arrays of one's own: every format gives the same windows, the description decides, and nothing is lost in silence."""

from __future__ import annotations

import contextlib
import json
import pickle
import shutil
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import xarray

from ups.config.description import describe_values
from ups.data.normalize import ensure_statistics
from ups.data.open import open_paths
from ups.errors import ConfigError, DataError
from ups.formats.base import Subsampling
from ups.formats.container import Container, MemoryContainer
from ups.formats.described import DescribedReader, open_described
from ups.formats.open_container import open_container

COUNT, FRAMES, NX, NY = 10, 7, 12, 8
RNG = np.random.default_rng(0)
U = RNG.normal(size=(COUNT, FRAMES, NX, NY)).astype(np.float32)
V = RNG.normal(size=(COUNT, FRAMES, NX, NY)).astype(np.float32)
X, Y, T = np.arange(NX) * 0.5, np.arange(NY) * 0.25 + 3, np.arange(FRAMES) * 0.1 + 1
NU = RNG.uniform(1, 2, COUNT)
TASK: dict[str, Any] = {
    "name": "mine",
    "fields": [{"name": "u", "unit": "m/s"}, {"name": "v"}],
    "axes": [{"name": "x", "boundary": "periodic", "unit": "m"}, {"name": "y"}],
    "dims": ["trajectory", "time", "x", "y"],
    "parameters": [{"name": "nu", "unit": "m2/s"}],
    "time_unit": "s",
    "times": "t",
    "equation": "u_t = ...",
}


def files(folder: Path) -> dict[str, Path]:
    arrays = {"u": U, "v": V, "x": X, "y": Y, "t": T, "nu": NU}
    paths = {name: folder / f"{name}.{end}" for name, end in KINDS.items()}
    np.savez(paths["npz"], **arrays)
    np.savez_compressed(paths["packed"], **arrays)
    with h5py.File(paths["h5"], "w") as file:
        for name, values in arrays.items():
            file.create_dataset(name, data=values, **({"chunks": True, "compression": "gzip"} if name == "v" else {}))
    with h5py.File(paths["groups"], "w") as file:
        for i in range(COUNT):
            group = file.create_group(f"run_{i}")
            group["u"], group["v"], group["x"], group["y"], group["t"] = U[i], V[i], X, Y, T
            group.attrs["nu"] = NU[i]
    dims = ("trajectory", "time", "x", "y")
    dataset = xarray.Dataset(
        {"u": (dims, U), "v": (dims, V), "nu": (("trajectory",), NU), "t": (("time",), T)}, {"x": X, "y": Y}
    )
    dataset.to_netcdf(paths["nc"], engine="h5netcdf")
    dataset.to_zarr(paths["zarr2"], zarr_format=2, consolidated=False)
    dataset.to_zarr(paths["zarr3"], zarr_format=3, consolidated=False)
    return paths


KINDS = {
    "npz": "npz",
    "packed": "npz",
    "h5": "h5",
    "groups": "h5",
    "nc": "nc",
    "zarr2": "zarr",
    "zarr3": "zarr",
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return files(tmp_path_factory.mktemp("arrays"))


def described(path: Path, **changes: Any) -> DescribedReader:
    values = json.loads(json.dumps(TASK)) | changes
    if path.name.startswith("groups"):
        for field in values["fields"]:
            field["dataset"] = f"*/{field['name']}"
        for axis in values["axes"]:
            axis["dataset"] = f"*/{axis['name']}"
        values["parameters"] = [{"name": "nu", "dataset": "*@nu"}]
        values["times"] = "*/t"
    return open_described([path], describe_values(values))


@pytest.mark.parametrize("kind", KINDS)
def test_every_format_gives_the_same_windows(made: dict[str, Path], kind: str) -> None:
    reader = described(made[kind])
    assert dict(reader.splits) == {"train": 8, "valid": 1, "test": 1}
    assert (reader.num_frames, reader.space, reader.task.dt) == (FRAMES, (NX, NY), pytest.approx(0.1))
    assert reader.times[0] == pytest.approx(1)
    window = reader.read("test", 0, 2, 3)
    np.testing.assert_array_equal(window.state, np.stack([U[9, 2:5], V[9, 2:5]], axis=1))
    assert window.parameters == pytest.approx(NU[9:])
    np.testing.assert_allclose(reader.coordinates[1], Y)
    assert reader.task.axes[0].extent == pytest.approx(6)
    assert [f.unit for f in reader.task.fields] == ["m/s", "1"]
    assert reader.task.equation == "u_t = ..."
    again = pickle.loads(pickle.dumps(reader))
    np.testing.assert_array_equal(again.read("test", 0, 2, 3).state, window.state)
    assert again.identity() == reader.identity()


def test_a_file_is_opened_by_the_description_next_to_it(tmp_path: Path) -> None:
    path = tmp_path / "u.npy"
    np.save(path, U)
    with pytest.raises(DataError, match="lies next to it") as caught:
        open_paths(path)
    assert "ups init" in caught.value.hint
    task = "fields: [{name: u}]\naxes: [{name: x}, {name: y}]\ndims: [trajectory, time, x, y]\ndt: 2\n"
    (tmp_path / "task.yaml").write_text(task.replace("dt: 2", "dt: 2.0"))
    reader = open_paths(path, Subsampling(time_stride=2, space_stride=2))
    np.testing.assert_array_equal(reader.read("train", 3, 1, 2).state[:, 0], U[3, 2:5:2, ::2, ::2])
    assert reader.task.dt == 4
    assert "lies next to" in " ".join(reader.assumptions), "whoever put it there"
    (tmp_path / "other.txt").write_text("of another reader")
    with pytest.raises(DataError, match="not an HDF5 file"):
        open_paths(tmp_path / "other.txt")
    (tmp_path / "task.yaml").write_text(task.replace("name: u", "nam: u"))
    with pytest.raises(ConfigError, match=r"task.yaml:1"):
        open_paths(path)


def test_order_channels_falling_coordinates_and_fortran(tmp_path: Path) -> None:
    path = tmp_path / "all.npz"
    both = np.asfortranarray(
        np.stack([U, V], axis=0).transpose(0, 4, 3, 2, 1)[:, ::-1]
    )  # channel, y (falling), x, T, N
    np.savez(path, data=both, y=Y[::-1])
    values = {
        "fields": [{"name": "v", "dataset": "data", "channel": 1}, {"name": "u", "dataset": "data", "channel": 0}],
        "axes": [{"name": "x", "extent": 6.0}, {"name": "y"}],
        "dims": ["channel", "y", "x", "time", "trajectory"],
        "dt": 0.1,
    }
    reader = open_described([path], describe_values(values))
    np.testing.assert_array_equal(reader.read("valid", 0, 1, 2).state, np.stack([V[8, 1:3], U[8, 1:3]], axis=1))
    np.testing.assert_allclose(reader.coordinates[1], Y)


def test_a_vector_and_a_static_field(tmp_path: Path) -> None:
    path = tmp_path / "flow.npz"
    np.savez(path, w=np.stack([U, V], axis=2), depth=U[0, 0], mask=U[:, 0])
    values = {
        "fields": [
            {"name": "w", "tensor_rank": 1},
            {"name": "depth", "role": "static", "dims": ["x", "y"]},
            {"name": "mask", "role": "static", "dims": ["trajectory", "x", "y"]},
        ],
        "axes": [{"name": "x"}, {"name": "y"}],
        "dims": ["trajectory", "time", "component", "x", "y"],
        "dt": 1.0,
    }
    values["fields"][1]["tensor_rank"] = 0  # type: ignore[index]
    reader = open_described([path], describe_values(values))
    window = reader.read("train", 2, 0, 2)
    assert reader.task.channel_names("state") == ("w_x", "w_y")
    np.testing.assert_array_equal(window.state[:, 1], V[2, :2])
    np.testing.assert_array_equal(window.static, np.stack([U[0, 0], U[2, 0]]))


def test_a_long_simulation_is_cut_and_files_are_put_together(tmp_path: Path) -> None:
    np.save(tmp_path / "long.npy", U.reshape(-1, NX, NY))
    values = {"fields": [{"name": "u"}], "axes": [{"name": "x"}, {"name": "y"}], "dims": ["time", "x", "y"], "dt": 1.0}
    cut = open_described([tmp_path / "long.npy"], describe_values(values | {"cut_frames": 6}))
    assert (sum(cut.splits.values()), cut.num_frames) == (11, 6)
    np.testing.assert_array_equal(cut.read("train", 2, 0, 6).state[:, 0], U.reshape(-1, NX, NY)[12:18])
    assert "leaves out up to 4 frames" in " ".join(cut.assumptions)
    paths = [tmp_path / f"run_{i}.npy" for i in range(COUNT)]
    for i, path in enumerate(paths):
        np.save(path, U[i])
    many = open_described(paths, describe_values(values))
    assert dict(many.splits) == {"train": 8, "valid": 1, "test": 1}
    np.testing.assert_array_equal(many.read("test", 0, 0, 7).state[:, 0], U[9])
    np.save(paths[3], U[3, :5, :6])
    with pytest.raises(DataError, match="have different grids"):
        open_described(paths, describe_values(values))


def test_files_may_differ_in_length_and_time_step(tmp_path: Path) -> None:
    values = {"fields": [{"name": "u"}], "axes": [{"name": "x"}, {"name": "y"}], "dims": ["time", "x", "y"]}
    lengths, steps = [7, 5, 7, 6, 7, 7, 7, 7, 4, 3], [0.1] * 8 + [0.2, 0.4]
    paths = [tmp_path / f"run_{i}.npz" for i in range(COUNT)]
    for i, path in enumerate(paths):
        np.savez(path, u=U[i, : lengths[i]], t=np.arange(lengths[i]) * steps[i])
    reader = open_described(paths, describe_values(values | {"times": "t"}))
    assert set(reader.differing) == {"frames", "dt"}
    train = [reader.frames_in("train", i) for i in range(8)]
    assert (train, reader.frames_in("valid", 0), reader.frames_in("test", 0)) == (lengths[:8], 4, 3)
    assert reader.num_frames == 7
    assert [reader.dt_in("train", 0), reader.dt_in("test", 0)] == pytest.approx([0.1, 0.4])
    assert reader.task.dt_range == pytest.approx((0.1, 0.4))
    np.testing.assert_array_equal(reader.read("train", 1, 3, 2).state[:, 0], U[1, 3:5])
    with pytest.raises(DataError):
        reader.read("train", 1, 4, 2)
    # Pieces of one length, as many as each file has.
    cut = open_described(paths, describe_values(values | {"times": "t", "cut_frames": 3}))
    assert sum(cut.splits.values()) == sum(n // 3 for n in lengths)
    assert cut.differing == ("dt",)
    np.testing.assert_array_equal(cut.read("train", 0, 0, 3).state[:, 0], U[0, :3])


def test_groups_of_unequal_length_are_trajectories(tmp_path: Path) -> None:
    path = tmp_path / "groups.h5"
    lengths = [FRAMES - i % 3 for i in range(10)]
    with h5py.File(path, "w") as file:
        for i, frames in enumerate(lengths):
            file[f"run_{i}/u"], file[f"run_{i}/t"] = U[i % len(U), :frames], 0.5 * np.arange(frames)
            file[f"run_{i}/k"] = np.full(U.shape[2:], i)
            file[f"run_{i}/u"].attrs["nu"], file[f"run_{i}"].attrs["mu"] = 0.1 * i, float(i)
        file["rate"] = np.arange(10) * 2.0
    values: dict[str, Any] = {"axes": [{"name": "x"}, {"name": "y"}], "dims": ["trajectory", "time", "x", "y"]}
    values["fields"] = [{"name": "u", "dataset": "*/u"}]
    values["fields"] += [{"name": "k", "dataset": "*/k", "role": "static", "dims": ["trajectory", "x", "y"]}]
    values["times"] = "*/t"
    names = {"nu": "*/u@nu", "mu": "*@mu", "rate": "rate"}
    values["parameters"] = [{"name": name, "dataset": dataset} for name, dataset in names.items()]
    reader = pickle.loads(pickle.dumps(open_described([path], describe_values(values))))
    assert dict(reader.splits) == {"train": 8, "valid": 1, "test": 1}
    assert [reader.frames_in("train", i) for i in range(8)] == lengths[:8]
    assert reader.task.dt == 0.5
    for split, number, i in (("train", 4, 4), ("valid", 0, 8), ("test", 0, 9)):
        window = reader.read(split, number, 1, lengths[i] - 1)
        np.testing.assert_array_equal(window.state[:, 0], U[i % len(U), 1 : lengths[i]])
        np.testing.assert_allclose(window.parameters, [0.1 * i, i, 2 * i], rtol=1e-6)
        assert (window.static == i).all()
        assert f"group run_{i}" in reader.where(split, number)
    with pytest.raises(DataError, match="is the same file as another"):
        open_described([path, path], describe_values(values))


def test_groups_with_different_grids_are_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "groups.h5"
    with h5py.File(path, "w") as file:
        for i in range(3):
            file[f"run_{i}/u"] = U[i, :, i:]
    values = {"fields": [{"name": "u", "dataset": "*/u"}], "axes": [{"name": "x"}, {"name": "y"}], "dt": 1.0}
    values["dims"] = ["trajectory", "time", "x", "y"]
    with pytest.raises(DataError, match=r"group run_1 and .* group run_0 have different grids"):
        open_described([path], describe_values(values))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"fields": [{"name": "w"}]}, "field 'w' is to be read from 'w', which is not there"),
        ({"dims": ["trajectory", "time", "y", "x"]}, "holds no"),
        ({"dims": ["time", "x", "y"]}, "has 4 dimensions"),
        ({"parameters": [{"name": "nu", "dataset": "t"}]}, "expected one number, or 10"),
        ({"parameters": [{"name": "mu"}]}, "neither an array nor an attribute"),
        ({"parameters": [{"name": "mu", "attribute": "mu"}]}, "no number in attribute 'mu'"),
        ({"times": "nu"}, "does not hold the times"),
    ],
)
def test_what_the_file_cannot_fulfil_is_said(made: dict[str, Path], change: dict[str, Any], words: str) -> None:
    with pytest.raises(DataError, match=words):
        described(made["npz"], **change)


def test_what_is_not_used_is_said(made: dict[str, Path]) -> None:
    reader = described(made["npz"], fields=[{"name": "u"}], parameters=[])
    text = " ".join(reader.assumptions)
    assert "'nu' (10,)" in text
    assert "'v' (10, 7, 12, 8)" in text


def test_time_steps_that_differ_are_refused(tmp_path: Path) -> None:
    times = np.outer(np.linspace(1, 2, COUNT), np.arange(FRAMES))
    np.savez(tmp_path / "a.npz", u=U, v=V, x=X, y=Y, nu=NU, t=times)
    with pytest.raises(DataError, match="differs between trajectories"):
        described(tmp_path / "a.npz")


def test_packed_numbers_are_unpacked(tmp_path: Path) -> None:
    whole = np.arange(COUNT * FRAMES * 8).reshape(COUNT, FRAMES, 8)
    dataset = xarray.Dataset({"u": (("trajectory", "time", "x"), whole * 0.5 + 3)})
    dataset.to_netcdf(
        tmp_path / "a.nc",
        engine="h5netcdf",
        encoding={"u": {"dtype": "i2", "scale_factor": 0.5, "add_offset": 3.0, "_FillValue": -9}},
    )
    values = {"fields": [{"name": "u"}], "axes": [{"name": "x"}], "dt": 1.0}
    reader = open_described([tmp_path / "a.nc"], describe_values(values))
    np.testing.assert_allclose(reader.read("test", 0, 0, 7).state[:, 0], whole[9] * 0.5 + 3)


def test_only_the_frames_of_a_window_are_read(made: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    kind = type(open_container(made["npz"]))
    plain = kind.read

    def read(self: Container, name: str, region: tuple[slice, ...]) -> Any:
        array = plain(self, name, region)  # type: ignore[arg-type]
        sizes.append(array.size)
        return array

    reader = described(made["npz"])
    monkeypatch.setattr(kind, "read", read)
    reader.read("train", 5, 3, 2)
    assert sizes == [2 * NX * NY] * 2


class Planted:
    """What runs when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (Path("planted"),))


def test_nothing_is_unpickled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    np.save("bad.npy", np.array([Planted()], dtype=object), allow_pickle=True)
    with pytest.raises(DataError, match="would have to be unpickled"):
        open_container("bad.npy")
    np.savez("bad.npz", u=U, bad=np.array([Planted()], dtype=object))
    assert "unpickled" in " ".join(open_container("bad.npz").left_out)
    (tmp_path / "bad.pkl").write_bytes(pickle.dumps(Planted()))
    with pytest.raises(DataError, match="none of the formats"):
        open_container("bad.pkl")
    store = tmp_path / "bad.zarr"
    (store / "u").mkdir(parents=True)
    (store / ".zgroup").write_text('{"zarr_format": 2}')
    metadata = {"zarr_format": 2, "shape": [1], "chunks": [1], "dtype": "|O", "fill_value": None, "order": "C"}
    (store / "u" / ".zarray").write_text(json.dumps(metadata | {"compressor": None, "filters": [{"id": "pickle"}]}))
    (store / "u" / "0").write_bytes(pickle.dumps(Planted()))
    with pytest.raises(DataError, match="no Zarr group with arrays"):
        open_container(store)
    assert not (tmp_path / "planted").exists()


@pytest.mark.parametrize("damage", ["short", "header", "huge"])
def test_damaged_numpy_files_are_refused(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "a.npy"
    np.save(path, U)
    content = path.read_bytes()
    if damage == "short":
        path.write_bytes(content[: len(content) // 2])
    elif damage == "header":
        path.write_bytes(content[:20] + b"\0" * 40 + content[60:])
    else:
        path.write_bytes(content.replace(b"(10, 7, 12, 8)", b"(9**9, 7, 1,8)"))
    with pytest.raises(DataError):
        open_container(path)


@pytest.mark.parametrize(
    "change",
    [
        {"chunks": ["a"]},
        {"chunks": [0]},
        {"chunks": None},
        {"chunks": [1 << 40]},
        {"shape": [-1]},
        {"shape": "x"},
        {"dtype": [["a", "<f4"]]},
        {"dtype": "|O"},
        {"dtype": 3},
        {"filters": [{"id": "pickle"}]},
        {"compressor": {"id": "unknown"}},
    ],
    ids=str,
)
def test_metadata_of_zarr_that_makes_no_sense_is_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    folder = tmp_path / "a.zarr" / "u"
    folder.mkdir(parents=True)
    (tmp_path / "a.zarr" / ".zgroup").write_text('{"zarr_format": 2}')
    sound = {"zarr_format": 2, "shape": [4], "chunks": [4], "dtype": "<f4", "fill_value": 0, "order": "C"}
    sound |= {"compressor": None, "filters": None}
    (folder / ".zarray").write_text(json.dumps(sound))
    assert set(open_container(tmp_path / "a.zarr").variables) == {"u"}
    (folder / ".zarray").write_text(json.dumps(sound | change))
    with pytest.raises(DataError, match="no Zarr group with arrays"):
        open_container(tmp_path / "a.zarr")


def test_links_in_a_zarr_group_are_refused(made: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "a.zarr").mkdir()
    (tmp_path / "a.zarr" / ".zgroup").write_text('{"zarr_format": 2}')
    (tmp_path / "a.zarr" / "u").symlink_to(made["zarr2"] / "u")
    with pytest.raises(DataError, match="symbolic links"):
        open_container(tmp_path / "a.zarr")
    shutil.copytree(made["zarr3"], tmp_path / "b.zarr")
    chunk = next(path for path in (tmp_path / "b.zarr" / "u" / "c").rglob("*") if path.is_file())
    chunk.unlink()
    chunk.symlink_to("/etc/passwd")
    with pytest.raises(DataError, match="symbolic links"):
        open_container(tmp_path / "b.zarr")


def test_a_falling_axis_whose_last_point_is_the_first_again(tmp_path: Path) -> None:
    ring = np.concatenate([U, U[:, :, :1]], axis=2)[:, :, ::-1]
    np.savez(tmp_path / "a.npz", u=ring, x=np.arange(NX + 1)[::-1] * 0.5, y=Y)
    values = {
        "fields": [{"name": "u"}],
        "axes": [{"name": "x", "boundary": "periodic", "repeated_end": True}, {"name": "y"}],
    }
    reader = open_described([tmp_path / "a.npz"], describe_values(values | {"dims": TASK["dims"], "dt": 1.0}))
    field = reader.read("train", 0, 0, 1).state[0, 0]
    shift = round(float(reader.coordinates[0][0]) / 0.5)
    np.testing.assert_array_equal(field, np.roll(U[0, 0], -shift, axis=0))
    assert reader.task.axes[0].extent == pytest.approx(6)


def test_arrays_called_like_axes_or_time_are_not_taken_for_coordinates(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=U[..., 0], t=V[..., 0])
    values = {"fields": [{"name": "x"}, {"name": "t"}], "axes": [{"name": "s", "extent": 2.0}], "dt": 1.0}
    reader = open_described([tmp_path / "a.npz"], describe_values(values | {"dims": ["trajectory", "time", "s"]}))
    np.testing.assert_array_equal(reader.read("train", 1, 2, 1).state[0], np.stack([U[1, 2, :, 0], V[1, 2, :, 0]]))


def test_parts_of_an_hdf5_file_that_lead_elsewhere_are_left_out_and_named(tmp_path: Path) -> None:
    secret = tmp_path / "secret.h5"
    with h5py.File(secret, "w") as file:
        file["u"] = U
    (tmp_path / "raw.bin").write_bytes(U.tobytes())
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        file["u"] = U
        file["soft"] = h5py.SoftLink("/u")
        file["external"] = h5py.ExternalLink(str(secret), "/u")
        file.create_dataset("raw", U.shape, "f4", external=[(str(tmp_path / "raw.bin"), 0, U.nbytes)])
        layout = h5py.VirtualLayout(U.shape, "f4")
        layout[:] = h5py.VirtualSource(str(secret), "u", U.shape)
        file.create_virtual_dataset("virtual", layout)
        file["text"] = "words"
        file["pairs"] = np.zeros(3, [("a", "f4"), ("b", "f4")])
        file["szip"] = U
        file.attrs["vector"] = [1.0, 2.0]
        file.attrs["flag"] = "yes"
    container = open_container(path)
    assert set(container.variables) == {"u", "szip"}
    for name in ("soft", "external", "raw", "virtual", "text", "pairs"):
        assert f"'{name}'" in " ".join(container.left_out), name
    assert (container.attributes["vector[0]"], container.attributes["vector[1]"]) == (1.0, 2.0)
    values = {"fields": [{"name": "v", "dataset": "virtual"}], "axes": [{"name": "x"}, {"name": "y"}], "dt": 1.0}
    with pytest.raises(DataError, match="is not read"):
        open_described([path], describe_values(values | {"dims": TASK["dims"]}))


@pytest.mark.parametrize("seed", range(6))
def test_a_damaged_hdf5_file_is_an_error_and_no_crash(made: dict[str, Path], tmp_path: Path, seed: int) -> None:
    content = bytearray(made["groups"].read_bytes())
    rng = np.random.default_rng(seed)
    for offset in rng.integers(8, 4000, 40):
        content[int(offset)] = int(rng.integers(0, 256))
    path = tmp_path / "groups.h5"
    path.write_bytes(bytes(content))
    with contextlib.suppress(DataError):
        described(path).read("test", 0, 0, 7)


@pytest.mark.parametrize("kind", ["nc", "zarr2", "zarr3"])
def test_single_numbers_and_strides(tmp_path: Path, kind: str) -> None:
    dims = ("trajectory", "time", "x", "y")
    dataset = xarray.Dataset({"u": (dims, U), "g": ((), 9.81), "count": ((), 4)}, attrs={"nu": 0.5})
    path = tmp_path / f"a.{kind}"
    if kind == "nc":
        dataset.to_netcdf(path, engine="h5netcdf")
    else:
        dataset.to_zarr(path, zarr_format=int(kind[-1]), consolidated=False)
    values: dict[str, Any] = {"fields": [{"name": "u"}], "axes": [{"name": "x"}, {"name": "y"}], "dt": 1.0}
    values["parameters"] = [{"name": "g"}, {"name": "nu"}]
    reader = open_described([path], describe_values(values), Subsampling(time_stride=3, space_stride=2))
    window = reader.read("train", 1, 0, 3)
    np.testing.assert_array_equal(window.state[:, 0], U[1, ::3, ::2, ::2])
    assert window.parameters == pytest.approx([9.81, 0.5])
    assert "'count' ()" in " ".join(reader.assumptions)


LINE: dict[str, Any] = {"fields": [{"name": "u"}], "axes": [{"name": "x"}], "dims": ["trajectory", "time", "x"]}


def in_memory(arrays: dict[str, Any], **changes: Any) -> DescribedReader:
    return DescribedReader([MemoryContainer(arrays)], describe_values(LINE | changes))


def test_statistics_of_one_array_are_not_those_of_another(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    np.savez(path, data=np.stack([U[..., 0], 1000 + U[..., 1]], axis=-1))
    dims = ["trajectory", "time", "x", "channel"]
    means = []
    for channel in (0, 1):
        fields = [{"name": "u", "dataset": "data", "channel": channel}]
        reader = open_described([path], describe_values(LINE | {"fields": fields, "dims": dims, "dt": 1.0}))
        means.append(float(ensure_statistics(reader, [path]).state_mean[0]))
    assert abs(means[0]) < 1
    assert means[1] == pytest.approx(1000, abs=1)


def simulations(reader: DescribedReader, split: str) -> set[str]:
    return {reader.where(split, i).split(" from frame")[0] for i in range(reader.splits[split])}


def test_simulations_that_are_cut_are_held_out_whole(tmp_path: Path) -> None:
    long = RNG.normal(size=(15, 100, 8))
    reader = in_memory({"u": long}, dt=1.0, cut_frames=20)
    assert dict(reader.splits) == {"train": 55, "valid": 10, "test": 10}
    np.testing.assert_allclose(reader.read("test", 9, 0, 20).state[:, 0], long[14, 80:], rtol=1e-6)
    paths = [tmp_path / f"run_{i}.npy" for i in range(10)]
    for i, path in enumerate(paths):
        np.save(path, long[i, : 100 - 20 * (i % 2)])
    of_files = open_described(paths, describe_values(LINE | {"dims": ["time", "x"], "dt": 1.0, "cut_frames": 20}))
    assert dict(of_files.splits) == {"train": 36, "valid": 5, "test": 4}
    for source in (reader, of_files):
        train, valid, test = (simulations(source, split) for split in ("train", "valid", "test"))
        assert not train & valid
        assert not (train | valid) & test
        assert "too few simulations" not in " ".join(source.assumptions)
    few = in_memory({"u": long[:2]}, dt=1.0, cut_frames=20)
    assert dict(few.splits) == {"train": 8, "valid": 1, "test": 1}
    assert "too few simulations (2)" in " ".join(few.assumptions)


def test_a_file_that_is_listed_twice_is_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", U[..., 0])
    (tmp_path / "b.npy").symlink_to(tmp_path / "a.npy")
    for other in ("a.npy", "b.npy"):
        with pytest.raises(DataError, match="same file"):
            open_described([tmp_path / "a.npy", tmp_path / other], describe_values(LINE | {"dt": 1.0}))


def test_small_steps_are_told_apart() -> None:
    uneven = np.append(np.arange(FRAMES - 1), FRAMES + 3) * 1e-9
    with pytest.raises(DataError, match="differs between frames"):
        in_memory({"u": U[..., 0], "t": uneven})
    said = in_memory({"u": U[..., 0], "t": np.arange(FRAMES) * 1e-9}, dt=5e-9)
    assert "dt is 5e-09 by the description, and 1e-09 by 't'" in said.assumptions
    containers = [MemoryContainer({"u": U[..., 0], "x": np.arange(NX) * step}) for step in (1e-9, 2e-9)]
    with pytest.raises(DataError, match="different grids"):
        DescribedReader(containers, describe_values(LINE | {"dt": 1.0}))
    containers = [MemoryContainer({"u": U[..., 0], "t": np.arange(FRAMES) * step}) for step in (1e-9, 2e-9)]
    assert DescribedReader(containers, describe_values(LINE)).differing == ("dt",)


def test_times_of_a_long_run_in_single_precision_are_taken() -> None:
    times = (np.arange(40_000) * 0.01 + 1000).astype(np.float32)
    reader = in_memory({"u": np.zeros((10, 40_000, 2), np.float32), "t": times})
    assert reader.task.dt == pytest.approx(0.01, rel=1e-5)
    with pytest.raises(DataError, match="differs between frames"):
        in_memory({"u": np.zeros((10, 40_000, 2), np.float32), "t": np.delete(np.append(times, 1400.0), 7)})


@pytest.mark.parametrize(
    ("dims", "shape", "fields", "words"),
    [
        (("trajectory", "time", "x", "channel"), (NX, 3), [{"name": "u"}], "must say which"),
        (("trajectory", "time", "x"), (NX,), [{"name": "u", "tensor_rank": 1}], "'component' must stand there 1 times"),
        (("trajectory", "time", "component", "x"), (1, NX), [{"name": "u"}], "'component' must stand there 0 times"),
        (("trajectory", "time", "x"), (NX,), [{"name": "u", "channel": 1}], "has no 'channel'"),
        (
            ("trajectory", "time", "x"),
            (NX,),
            [{"name": "u"}, {"name": "k", "dataset": "u", "role": "static"}],
            "has 'time', and its role is static",
        ),
    ],
)
def test_dimensions_that_the_file_names_are_checked_as_those_of_a_description(
    dims: tuple[str, ...], shape: tuple[int, ...], fields: list[dict[str, Any]], words: str
) -> None:
    dataset = xarray.Dataset({"u": (dims, np.zeros((COUNT, FRAMES, *shape)))})
    values = {"fields": fields, "axes": [{"name": "x"}], "dt": 1.0}
    with pytest.raises(DataError, match=words):
        DescribedReader([MemoryContainer(dataset)], describe_values(values))


def test_a_channel_of_an_array_without_channels_is_refused() -> None:
    with pytest.raises(ConfigError, match="has no 'channel'"):
        describe_values(LINE | {"fields": [{"name": "u", "channel": 1}]})


def test_a_logarithm_of_zero_is_refused() -> None:
    arrays = {"u": U[..., 0], "nu": np.arange(COUNT)}
    with pytest.raises(DataError, match="its scale is log"):
        in_memory(arrays, dt=1.0, parameters=[{"name": "nu", "scale": "log"}])


def test_a_field_that_does_not_fit_may_be_left_out_or_be_a_coordinate() -> None:
    arrays = {"u": np.zeros((3, 9, 8)), "moment": np.arange(9.0)}
    fields = [{"name": "u"}, {"name": "moment", "role": "static", "dims": ["x"]}]
    with pytest.raises(DataError, match="'x' has 8 entries in array 'u' and 9 in 'moment'") as caught:
        in_memory(arrays, fields=fields, axes=[{"name": "x"}], dims=["trajectory", "time", "x"], dt=1.0, parameters=[])
    for words in ("leave one of the fields out", "`times: moment`", "`dataset: moment`"):
        assert words in str(caught.value.hint)


def test_an_extent_that_the_coordinates_contradict_is_said() -> None:
    arrays = {"u": U[..., 0], "x": np.arange(NX) * 0.5}
    wrong = in_memory(arrays, dt=1.0, axes=[{"name": "x", "extent": 100.0}])
    assert "extent of axis 'x' is 100 by the description, and 6 by 'x'" in wrong.assumptions
    for extent in (5.5, 6.0):
        right = in_memory(arrays, dt=1.0, axes=[{"name": "x", "extent": extent}])
        assert not any("extent" in text for text in right.assumptions)
