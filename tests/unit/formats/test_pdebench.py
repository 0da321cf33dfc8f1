"""Every PDEBench layout becomes windows with the right axes, channels, parameters and splits."""

from __future__ import annotations

import multiprocessing
import pickle
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from tests.support import pdebench_files as files
from ups.config.schema import TaskConfig
from ups.data.open import open_task
from ups.errors import DataError
from ups.formats.base import Reader, Subsampling
from ups.formats.hdf5 import survey_files
from ups.formats.pdebench import PdebenchReader
from ups.formats.store_writer import StoreWriter
from ups.formats.zarr_store import StoreReader

STORAGE: dict[str, dict[str, Any]] = {
    "contiguous": {},
    "chunked": {"chunks": True},
    "gzip": {"chunks": True, "compression": "gzip"},
    "gzip and shuffle": {"chunks": True, "compression": "gzip", "shuffle": True},
    "lzf": {"chunks": True, "compression": "lzf"},
}
SINGLE = {
    "1D_Advection_Sols_beta0.4.hdf5": ("advection1d", {"beta": 0.4}),
    "1D_Burgers_Sols_Nu0.01.hdf5": ("burgers1d", {"Nu": 0.01}),
    "ReacDiff_Nu0.5_Rho2.0.hdf5": ("reacdiff1d", {"Nu": 0.5, "rho": 2.0}),
}
GROUPED: dict[str, tuple[tuple[int, ...], str, str, dict[str, float]]] = {
    "1D_diff-sorp_NA_NA.h5": ((6, 16, 1), files.CONFIG_DIFFSORP, "diffsorp1d", {"D": 5e-4, "rho_s": 2880}),
    "2D_diff-react_NA_NA.h5": ((6, 8, 4, 2), files.CONFIG_DIFFREACT, "diffreact2d", {"Du": 1e-3, "k": 5e-3}),
    "2D_rdb_NA_NA.h5": ((6, 8, 4, 1), files.CONFIG_RDB, "swe2d", {"gravity": 1.0}),
}
DARCY = "2D_DarcyFlow_beta0.1_Train.hdf5"
CFD = {dims: f"{dims}D_CFD_Rand_M0.5_Eta0.1_Zeta0.1_periodic_Train.hdf5" for dims in (1, 2, 3)}
EVERY_STORAGE = pytest.mark.parametrize("storage", list(STORAGE))


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], tuple[Path, Any]]:
    """(file name, storage) -> path and what was written; all surveyed by one child, to save starting many."""
    files_of: dict[tuple[str, str], tuple[Path, Any]] = {}
    for storage, options in STORAGE.items():
        folder = tmp_path_factory.mktemp("library")
        for name, (_, parameters) in SINGLE.items():
            files_of[name, storage] = (folder / name, files.single(folder / name, attributes=parameters, **options))
        for name, (shape, config, _, _) in GROUPED.items():
            files_of[name, storage] = (folder / name, files.grouped(folder / name, shape, config, **options))
        files_of[DARCY, storage] = (folder / DARCY, files.darcy(folder / DARCY, **options))
        for dims, name in CFD.items():
            files_of[name, storage] = (folder / name, files.compressible(folder / name, dims, **options))
    for answer in survey_files([path for path, _ in files_of.values()]):
        assert not isinstance(answer, DataError), answer
    return files_of


@EVERY_STORAGE
@pytest.mark.parametrize("name", SINGLE)
def test_single_array(library: Any, name: str, storage: str) -> None:
    path, data = library[name, storage]
    task, parameters = SINGLE[name]
    reader = PdebenchReader(path)
    assert isinstance(reader, Reader)
    assert (reader.task.name, reader.num_frames, reader.space) == (task, 7, (16,))
    assert reader.splits == {"train": 8, "valid": 1, "test": 1}
    assert reader.task.dt == pytest.approx(0.05)
    assert reader.task.axes[0].boundary == "periodic"
    assert reader.task.axes[0].extent == pytest.approx(1.0)
    for split, first in (("train", 0), ("valid", 8), ("test", 9)):
        window = reader.read(split, 0, 2, 4)
        np.testing.assert_array_equal(window.state, data[first, 2:6, None])
    np.testing.assert_array_equal(reader.read("train", 7, 0, 7).state[:, 0], data[7])
    values = dict(zip([p.name for p in reader.task.parameters], window.parameters.tolist(), strict=True))
    assert values == pytest.approx(parameters)


@EVERY_STORAGE
@pytest.mark.parametrize("name", GROUPED)
def test_one_group_per_trajectory(library: Any, name: str, storage: str) -> None:
    path, data = library[name, storage]
    shape, _, task, parameters = GROUPED[name]
    reader = PdebenchReader(path)
    assert (reader.task.name, reader.num_frames, reader.space) == (task, 6, shape[1:-1])
    assert reader.task.dt == pytest.approx(1.0)
    assert reader.task.axes[0].extent == pytest.approx(2.0)
    for i in range(8):
        np.testing.assert_array_equal(reader.read("train", i, 1, 3).state, np.moveaxis(data[i, 1:4], -1, 1))
    np.testing.assert_array_equal(reader.read("test", 0, 0, 6).state, np.moveaxis(data[9], -1, 1))
    values = dict(zip([p.name for p in reader.task.parameters], reader.read("test", 0, 0, 1).parameters, strict=True))
    assert {k: values[k] for k in parameters} == pytest.approx(parameters)
    assert "group 0009" in reader.where("test", 0)


@EVERY_STORAGE
def test_darcy_is_steady(library: Any, storage: str) -> None:
    path, (nu, tensor) = library[DARCY, storage]
    reader = PdebenchReader(path)
    assert (reader.task.steady, reader.num_frames, reader.task.dt) == (True, 0, 0)
    window = reader.read("train", 3, 0, 0)
    assert window.state.shape == (0, 0, 8, 8)
    np.testing.assert_array_equal(window.static, nu[3][None])
    np.testing.assert_array_equal(window.target, tensor[3])
    assert window.parameters.tolist() == pytest.approx([0.1])


@EVERY_STORAGE
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_compressible_flow_has_channels_in_the_order_of_the_benchmark(library: Any, dims: int, storage: str) -> None:
    path, fields = library[CFD[dims], storage]
    reader = PdebenchReader(path)
    names = ["density", "pressure", "Vx", "Vy", "Vz"][: 2 + dims]
    expected = np.stack([fields[n] for n in names], axis=2)
    np.testing.assert_array_equal(reader.read("train", 2, 1, 3).state, expected[2, 1:4])
    assert reader.task.channel_names("state")[2:] == ("velocity_x", "velocity_y", "velocity_z")[:dims]
    assert reader.task.conserved == ("density",)
    assert [p.name for p in reader.task.parameters] == ["eta", "zeta", "M"][: 2 + (dims > 1)]


def test_flow_that_leaves_the_domain_is_open_and_conserves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "1D_CFD_Shock_Eta1.e-8_Zeta1.e-8_trans_Train.hdf5"
    files.compressible(path, 1)
    task = PdebenchReader(path).task
    assert (task.axes[0].boundary, task.conserved, task.symmetries) == ("open", (), ())


def test_incompressible_flow(tmp_path: Path) -> None:
    path = tmp_path / "ns_incom_inhom_2d_512-7.h5"
    fields = files.incompressible(path)
    reader = PdebenchReader(path)
    assert reader.splits == {"train": 2, "valid": 1, "test": 1}
    window = reader.read("test", 0, 1, 4)
    np.testing.assert_array_equal(window.state[:, :2], np.moveaxis(fields["velocity"][3, 1:5], -1, 1))
    np.testing.assert_array_equal(window.state[:, 2:], np.moveaxis(fields["particles"][3, 1:5], -1, 1))
    np.testing.assert_array_equal(window.static, np.moveaxis(fields["force"][3], -1, 0))
    assert reader.task.channel_names("state") == ("velocity_x", "velocity_y", "particles")
    assert window.parameters.tolist() == pytest.approx([0.01])
    assert reader.task.dt == pytest.approx(0.005)


def test_parameters_come_from_the_file_name_when_there_are_no_attributes(tmp_path: Path) -> None:
    files.single(tmp_path / "1D_Burgers_Sols_Nu0.002.hdf5", attributes={})
    reader = PdebenchReader(tmp_path / "1D_Burgers_Sols_Nu0.002.hdf5")
    assert reader.read("train", 0, 0, 1).parameters.tolist() == pytest.approx([0.002])


def test_several_files_are_one_task_with_a_parameter_that_varies(tmp_path: Path) -> None:
    paths = []
    data = []
    for i, beta in enumerate((0.1, 1.0, 4.0)):
        paths.append(str(tmp_path / f"1D_Advection_Sols_beta{beta}.hdf5"))
        data.append(files.single(Path(paths[-1]), seed=i, attributes={"beta": beta}))
    reader = open_task(TaskConfig(name="many", path=paths, valid_fraction=0.1, test_fraction=0.2))
    assert reader.splits == {"train": 21, "valid": 3, "test": 6}
    assert (reader.task.parameters[0].minimum, reader.task.parameters[0].maximum) == (0.1, 4.0)
    assert reader.task.name == "many"
    for number, beta in enumerate((0.1, 1.0, 4.0)):
        window = reader.read("train", 7 * number + 3, 0, 7)
        np.testing.assert_array_equal(window.state[:, 0], data[number][3])
        assert window.parameters.tolist() == pytest.approx([beta])
        np.testing.assert_array_equal(reader.read("test", 2 * number + 1, 0, 7).state[:, 0], data[number][9])


def test_files_of_different_problems_are_not_mixed(tmp_path: Path) -> None:
    files.single(tmp_path / "1D_Burgers_Sols_Nu0.1.hdf5", attributes={"Nu": 0.1})
    files.single(tmp_path / "1D_Advection_Sols_beta0.1.hdf5", attributes={"beta": 0.1})
    with pytest.raises(DataError, match="have different problems"):
        PdebenchReader([tmp_path / "1D_Burgers_Sols_Nu0.1.hdf5", tmp_path / "1D_Advection_Sols_beta0.1.hdf5"])


def test_files_of_few_trajectories_share_the_fractions(tmp_path: Path) -> None:
    paths = [tmp_path / f"ns_incom_inhom_2d_512-{i}.h5" for i in range(10)]
    for path in paths:
        files.incompressible(path)
    assert PdebenchReader(paths).splits == {"train": 30, "valid": 4, "test": 6}


@EVERY_STORAGE
def test_strides_read_only_what_they_keep(library: Any, storage: str) -> None:
    path, data = library["1D_Advection_Sols_beta0.4.hdf5", storage]
    reader = PdebenchReader(path, Subsampling(time_stride=2, space_stride=4))
    assert (reader.num_frames, reader.space) == (4, (4,))
    assert reader.task.dt == pytest.approx(0.1)
    np.testing.assert_array_equal(reader.read("train", 1, 1, 3).state[:, 0], data[1, 2:7:2, ::4])
    mean = PdebenchReader(path, Subsampling(space_stride=4, antialias=True))
    np.testing.assert_allclose(mean.read("train", 1, 0, 7).state[:, 0].mean(), data[1].mean(), rtol=1e-4)


@pytest.mark.parametrize("name", [*SINGLE, *GROUPED, DARCY, *CFD.values()])
def test_the_same_physics_in_both_formats_gives_identical_windows(library: Any, tmp_path: Path, name: str) -> None:
    path = library[name, "gzip"][0]
    original = PdebenchReader(path)
    with StoreWriter(tmp_path / "s.zarr", original.task, original.coordinates, original.num_frames) as writer:
        for split, count in original.splits.items():
            for i in range(count):
                whole = original.read(split, i, 0, original.num_frames)
                writer.append(
                    split, state=whole.state, static=whole.static, target=whole.target, parameters=whole.parameters
                )
    store = StoreReader(tmp_path / "s.zarr")
    assert store.task == original.task
    assert store.splits == original.splits
    length = 0 if original.task.steady else 3
    for split, count in original.splits.items():
        for i in range(count):
            for start in (0, 0 if original.task.steady else 2):
                a, b = original.read(split, i, start, length), store.read(split, i, start, length)
                for part in ("state", "static", "target", "parameters"):
                    np.testing.assert_array_equal(getattr(a, part), getattr(b, part))
                for mine, theirs in zip(a.coordinates, b.coordinates, strict=True):
                    np.testing.assert_array_equal(mine, theirs)


def _read_in_child(reader: PdebenchReader, queue: Any) -> None:
    queue.put(reader.read("train", 1, 2, 3).state.tobytes())


@pytest.mark.processes
@pytest.mark.parametrize(
    ("method", "storage"), [("fork", "contiguous"), ("fork", "lzf"), ("fork", "gzip"), ("spawn", "lzf")]
)
def test_a_child_reads_what_the_parent_reads(library: Any, storage: str, method: str) -> None:
    path, _ = library["1D_Advection_Sols_beta0.4.hdf5", storage]
    reader = PdebenchReader(path)
    expected = reader.read("train", 1, 2, 3).state.tobytes()
    context = multiprocessing.get_context(method)
    queue = context.Queue()
    child = context.Process(target=_read_in_child, args=(reader, queue))
    child.start()
    assert queue.get(timeout=30) == expected
    child.join(30)
    assert child.exitcode == 0


@pytest.mark.parametrize("storage", ["contiguous", "gzip", "lzf"])
def test_threads_share_a_reader(library: Any, storage: str) -> None:
    path, data = library["1D_Advection_Sols_beta0.4.hdf5", storage]
    reader = pickle.loads(pickle.dumps(PdebenchReader(path)))

    def read(i: int) -> bool:
        window = reader.read("train", i % 8, i % 5, 3)
        return bool((window.state[:, 0] == data[i % 8, i % 5 : i % 5 + 3]).all())

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(read, range(200)))


def test_a_file_that_changed_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "1D_Advection_Sols_beta0.4.hdf5"
    files.single(path)
    reader = PdebenchReader(path)
    first = reader.identity()
    files.single(path, seed=1)
    with pytest.raises(DataError, match="changed since"):
        reader.read("train", 0, 0, 1)
    assert PdebenchReader(path).identity() != first


def test_identity_survives_a_copy(tmp_path: Path) -> None:
    (tmp_path / "copy").mkdir()
    path, copy = tmp_path / "1D_Advection_Sols_beta0.4.hdf5", tmp_path / "copy" / "1D_Advection_Sols_beta0.4.hdf5"
    files.single(path)
    copy.write_bytes(path.read_bytes())
    assert PdebenchReader(path).identity() == PdebenchReader(copy).identity()


@pytest.mark.parametrize(
    ("times", "message"),
    [
        (np.arange(5) * 0.1, "5 times for 7 frames"),
        (np.array([0, 1, 3, 2, 4, 5, 6, 7]) * 0.1, "not increasing"),
        (np.array([0, 1, 2, 3, 4, 5, 9, 10]) * 0.1, "not constant"),
        (np.full(8, np.nan), "not increasing"),
    ],
)
def test_wrong_times_are_refused(tmp_path: Path, times: np.ndarray, message: str) -> None:
    path = tmp_path / "1D_Advection_Sols_beta0.4.hdf5"
    files.single(path)
    with h5py.File(path, "r+") as file:
        del file["t-coordinate"]
        file["t-coordinate"] = times
    with pytest.raises(DataError, match=message):
        PdebenchReader(path)
