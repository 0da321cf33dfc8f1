"""Files of points, cells and fields: what several programs wrote is read, and damage is named."""

from __future__ import annotations

import gzip
import os
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import h5py
import numpy as np
import pytest

from tests.support import vtk_program
from ups.errors import DataError
from ups.formats.mesh_files import MeshFile, read_header, read_mesh_file, write_mesh_file

MESHES = Path(__file__).parent / "meshes"
OTHER = os.environ.get("UPS_VTK_PYTHON", "")


def example() -> MeshFile:
    rng = np.random.default_rng(0)
    points = np.array([[0.0, 0.0], [1.0, 0.0], [1.0, 1.0], [0.0, 1.0], [2.0, 0.0], [2.0, 1.0]])
    return MeshFile(
        points,
        {"u": rng.random((3, 6)), "v": rng.random((3, 6, 2), np.float32), "a": rng.random(6)},
        np.array([0.0, 0.5, 2.0]),
        [np.array([[0, 1, 2], [0, 2, 3]]), np.array([[1, 4, 5, 2]])],
        ("triangle", "quad"),
        np.array([1, 1, 0, 1, 2, 2]),
        {"nu": 0.25},
    )


def assert_equal(one: MeshFile, other: MeshFile) -> None:
    np.testing.assert_array_equal(one.points, other.points)
    assert one.fields.keys() == other.fields.keys()
    for name, values in one.fields.items():
        np.testing.assert_array_equal(values, other.fields[name])
    for first, second in ((one.times, other.times), (one.boundary, other.boundary)):
        assert (first is None) == (second is None)
        np.testing.assert_array_equal(0 if first is None else first, 0 if second is None else second)
    cells, others = (dict(zip(m.cell_kinds, m.cells or (), strict=True)) for m in (one, other))
    assert cells.keys() == others.keys()
    assert all(np.array_equal(block, others[kind]) for kind, block in cells.items())
    assert one.parameters == other.parameters


@pytest.mark.parametrize("suffix", [".npz", ".vtkhdf"])
def test_what_is_written_is_read_again(tmp_path: Path, suffix: str) -> None:
    whole = example()
    steady = MeshFile(whole.points, {"s": whole.fields["a"]})
    line = MeshFile(whole.points[:, :1], {"u": whole.fields["u"]}, whole.times)
    solid = MeshFile(
        np.vstack([np.eye(3), np.zeros(3)]), {"w": np.ones((4, 3))}, None, [np.arange(4)[None]], ("tetra",)
    )
    for number, mesh in enumerate((whole, steady, line, solid)):
        path = tmp_path / f"{number}{suffix}"
        write_mesh_file(path, mesh)
        assert_equal(read_mesh_file(path), mesh)
        header = read_header(path)
        assert (header.num_points, header.num_dims) == mesh.points.shape
        assert header.fields.keys() == mesh.fields.keys()


def test_files_of_meshlane_are_read() -> None:
    mesh = read_mesh_file(MESHES / "meshlane.xdmf")
    np.testing.assert_array_equal(mesh.fields["u"], mesh.points[:, 0])
    assert mesh.cell_kinds == ("triangle", "quad")
    series = read_mesh_file(MESHES / "meshlane_series.xdmf")
    assert series.times is not None
    for frame, time in enumerate(series.times):
        assert time == 0.5 * frame
        np.testing.assert_array_equal(series.fields["u"][frame], series.points[:, 0] + frame)
        np.testing.assert_array_equal(series.fields["v"][frame, :, 0], series.points[:, 1] * (frame + 1))


def test_files_of_pyvista_are_read(tmp_path: Path) -> None:
    for packed in MESHES.glob("*.gz"):
        (tmp_path / packed.stem).write_bytes(gzip.decompress(packed.read_bytes()))
    disc = read_mesh_file(tmp_path / "pyvista_disc.vtkhdf")
    assert disc.points.shape[1] == 2
    np.testing.assert_allclose(disc.fields["u"], disc.points[:, 0] + 1, atol=1e-6)
    assert disc.boundary is not None
    np.testing.assert_array_equal(disc.boundary > 0, np.hypot(*disc.points.T) > 0.45)
    tetra = read_mesh_file(tmp_path / "pyvista_tetra.vtkhdf")
    assert tetra.cell_kinds == ("tetra",)
    np.testing.assert_allclose(tetra.fields["velocity"], tetra.points)


def test_a_file_by_hand_with_values_in_the_xml_is_read(tmp_path: Path) -> None:
    (tmp_path / "a.xdmf").write_text(
        """<?xml version="1.0"?><!DOCTYPE Xdmf SYSTEM "Xdmf.dtd" []><Xdmf><Domain><Grid>
        <Topology TopologyType="Triangle"><DataItem Format="XML" Dimensions="1 3">0 1 2</DataItem></Topology>
        <Geometry><DataItem Format="XML" Dimensions="3 3">0 0 0  1 0 0  0 1 0</DataItem></Geometry>
        <Attribute Name="u"><DataItem Format="XML" Dimensions="3">1 2 4</DataItem></Attribute>
        </Grid></Domain></Xdmf>"""
    )
    mesh = read_mesh_file(tmp_path / "a.xdmf")
    assert mesh.points.shape == (3, 2)
    np.testing.assert_array_equal(mesh.fields["u"], [1, 2, 4])


def _npz(**changes: np.ndarray) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        mesh = example()
        arrays = {"points": mesh.points, "times": mesh.times, "cells": (mesh.cells or [])[0], **mesh.fields, **changes}
        np.savez(folder / "a.npz", **{name: values for name, values in arrays.items() if values is not None})
        return folder / "a.npz"

    return write


def _cut(folder: Path) -> Path:
    path = _npz()(folder)
    path.write_bytes(path.read_bytes()[:-900])
    return path


def _vtkhdf(change: Callable[[h5py.Group], None]) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        write_mesh_file(folder / "a.vtkhdf", example())
        with h5py.File(folder / "a.vtkhdf", "r+") as file:
            change(file["VTKHDF"])
        return folder / "a.vtkhdf"

    return write


def _replaced(name: str, values: np.ndarray) -> Callable[[Path], Path]:
    def change(group: h5py.Group) -> None:
        del group[name]
        group[name] = values

    return _vtkhdf(change)


def _outside(group: h5py.Group) -> None:
    del group["Points"]
    group["Points"] = h5py.ExternalLink("/etc/other.h5", "/Points")


def _xdmf(text: str) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        (folder / "a.xdmf").write_text(text)
        return folder / "a.xdmf"

    return write


def _named(name: str) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        (folder / name).write_text("x")
        return folder / name

    return write


NAN = example().fields["u"].copy()
NAN[1, 4] = np.nan
TWO = "<Xdmf><Domain><Grid><Geometry/></Grid><Grid><Geometry/></Grid></Domain></Xdmf>"
GRID = "<Xdmf><Domain><Grid><Geometry><DataItem Format='HDF'>{}</DataItem></Geometry></Grid></Domain></Xdmf>"
ENTITY = "<!DOCTYPE x [<!ENTITY e SYSTEM 'file:///etc/passwd'>]><Xdmf>&e;</Xdmf>"
DAMAGE: dict[str, tuple[Callable[[Path], Path], str]] = {
    "cut": (_cut, "no sound NumPy file"),
    "pickled": (_npz(extra=np.array([{}, []], object)), "Python objects"),
    "without points": (_npz(points=None), "no array 'points'"),  # type: ignore[arg-type]
    "4D points": (_npz(points=np.zeros((6, 4))), r"'points' has the shape \(6, 4\)"),
    "nan": (_npz(u=NAN), r"'u' has 1 values that are not finite, the first at \(1, 4\)"),
    "a point too few": (_npz(u=np.zeros((3, 5))), r"field 'u' has the shape \(3, 5\)"),
    "times that fall": (_npz(times=np.array([0.0, 1.0, 0.5])), r"time 2 \(0.5\)"),
    "cells of other points": (_npz(cells=np.array([[0, 1, 6]])), "names point 6, and there are 6"),
    "a kind of boundary and a half": (_npz(boundary=np.full(6, 1.5)), "'boundary' must hold whole numbers"),
    "two values of a parameter": (_npz(parameter_nu=np.zeros(2)), "'parameter_nu' has the shape"),
    "an image": (_vtkhdf(lambda g: g.attrs.create("Type", b"ImageData")), "holds ImageData"),
    "polyhedra": (_replaced("Types", np.full(3, 42, np.uint8)), "cells of the type 42"),
    "offsets that fall": (_replaced("Offsets", np.array([0, 6, 3, 10])), "must rise"),
    "too few rows": (_replaced("PointData/u", np.zeros(12)), "'VTKHDF/PointData/u' has 12 rows"),
    "a number of points that is none": (_replaced("NumberOfPoints", np.array([np.nan])), "is damaged: cannot convert"),
    "several parts": (_replaced("Steps/NumberOfParts", np.full(3, 2)), "several parts"),
    "moving points": (_replaced("Steps/PointOffsets", np.array([0, 1, 2])), "its offsets need 8"),
    "points elsewhere": (_vtkhdf(_outside), "soft or external link"),
    "no XML": (_xdmf("<Xdmf><Domain>"), "no sound XML file"),
    "an entity": (_xdmf(ENTITY), "declares XML entities"),
    "two grids": (_xdmf(TWO), "has 2 grids"),
    "a file outside": (_xdmf(GRID.format("../../etc/a.h5:/points")), "the Geometry lies in"),
    "a file that is not there": (_xdmf(GRID.format("a.h5:/points")), "a.h5 cannot be opened"),
    "another format": (_named("a.msh"), "a .msh file"),
    "an empty file": (_named("a.npz"), "not a mesh file"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_named(tmp_path: Path, damage: str) -> None:
    write, words = DAMAGE[damage]
    path = write(tmp_path)
    with pytest.raises(DataError, match=words):
        read_mesh_file(path)


@pytest.mark.parametrize(("name", "program"), [("a.vtu", "pyvista.read('a.vtu')"), ("b.med", "meshlane.read('b.med')")])
def test_other_formats_name_what_converts_them(tmp_path: Path, name: str, program: str) -> None:
    with pytest.raises(DataError) as error:
        read_mesh_file(_named(name)(tmp_path))
    assert program in error.value.hint


@pytest.mark.processes
@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.skipif(not OTHER, reason="UPS_VTK_PYTHON names no Python with the package vtk")
def test_vtk_reads_the_same_numbers_at_points(tmp_path: Path) -> None:
    mesh = replace(example(), cells=None, cell_kinds=())
    for number, one in enumerate((example(), mesh)):
        write_mesh_file(tmp_path / f"{number}.vtkhdf", one)
        command = [OTHER, str(vtk_program.__file__), str(tmp_path / f"{number}.vtkhdf"), str(tmp_path / "out.npz")]
        subprocess.run(command, check=True, timeout=200)
        arrays = np.load(tmp_path / "out.npz")
        np.testing.assert_array_equal(arrays["times"], mesh.times)
        np.testing.assert_array_equal(arrays["points"][:, :2], mesh.points)
        np.testing.assert_array_equal(arrays["cells"], [5, 5, 9] if one.cells else [1] * 6)
        for frame in range(3):
            np.testing.assert_array_equal(arrays[f"{frame}/u"], mesh.fields["u"][frame])
            np.testing.assert_array_equal(arrays[f"{frame}/v"][:, :2], mesh.fields["v"][frame])
            np.testing.assert_array_equal(arrays[f"{frame}/a"], mesh.fields["a"])
