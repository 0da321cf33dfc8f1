"""Rollouts as VTKHDF files: what stands in them, and that VTK reads the same numbers."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import h5py
import numpy as np
import pytest
import xarray

from tests.support import vtk_program
from ups.errors import BundleError
from ups.inference.results import write_vtkhdf
from ups.spec.task import AxisSpec, FieldSpec, TaskSpec

OTHER = os.environ.get("UPS_VTK_PYTHON", "")
TIMES = np.array([0.5, 1.0, 1.75])


def _task(dims: int) -> TaskSpec:
    fields = (FieldSpec("u"), FieldSpec("v", tensor_rank=1), FieldSpec("s", tensor_rank=2))
    return TaskSpec("t", fields, tuple(AxisSpec(name) for name in "xyz"[:dims]), dt=0.5)


def _result(dims: int) -> xarray.Dataset:
    """As `Simulator.rollout` returns it: time, component, x, y, z."""
    space = (5, 4, 3)[:dims]
    axes = tuple("xyz"[:dims])
    rng = np.random.default_rng(dims)
    variables = {
        "u": (("time", *axes), rng.random((3, *space), np.float32)),
        "v": (("time", "component", *axes), rng.random((3, dims, *space), np.float32)),
        "s": (("time", "tensor_component", *axes), rng.random((3, dims**2, *space), np.float32)),
    }
    points = {name: 1.0 + np.arange(n) * 0.25 for name, n in zip(axes, space, strict=True)}
    return xarray.Dataset(variables, {"time": TIMES, **points})


@pytest.mark.parametrize("dims", [1, 2, 3])
def test_arrays_lie_in_the_order_of_the_format(tmp_path: Path, dims: int) -> None:
    result = _result(dims)
    write_vtkhdf(result, _task(dims), tmp_path / "a.vtkhdf")
    with h5py.File(tmp_path / "a.vtkhdf") as file:
        group = file["VTKHDF"]
        assert group.attrs["Type"] == b"ImageData"
        np.testing.assert_array_equal(group["Steps/Values"], TIMES)
        u, v, s = (np.asarray(group[f"PointData/{name}"]) for name in "uvs")
    space = (5, 4, 3)[:dims]
    for index in np.ndindex(*space):
        at = (slice(None), *reversed(index))
        np.testing.assert_array_equal(u[at], result["u"].values[(slice(None), *index)])
        np.testing.assert_array_equal(v[at][:, :dims], result["v"].values[(slice(None), slice(None), *index)])
        tensor = result["s"].values[(slice(None), slice(None), *index)].reshape(3, dims, dims)
        np.testing.assert_array_equal(s[at].reshape(3, 3, 3)[:, :dims, :dims], tensor)
    assert not v[..., dims:].any()


def test_what_an_image_cannot_hold_is_refused(tmp_path: Path) -> None:
    path, result = tmp_path / "a.vtkhdf", _result(2)
    with pytest.raises(BundleError, match="equally far"):
        write_vtkhdf(result.assign_coords(x=result["x"] ** 2), _task(2), path)
    with pytest.raises(BundleError, match="several along 'sample'"):
        write_vtkhdf(result.expand_dims(sample=2), _task(2), path)
    write_vtkhdf(result, _task(2), path)
    with pytest.raises(BundleError, match="exists already"):
        write_vtkhdf(result, _task(2), path)
    assert [p.name for p in tmp_path.iterdir()] == ["a.vtkhdf"]


@pytest.mark.processes
@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.skipif(not OTHER, reason="UPS_VTK_PYTHON names no Python with the package vtk")
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_vtk_reads_the_same_numbers(tmp_path: Path, dims: int) -> None:
    result = _result(dims)
    write_vtkhdf(result, _task(dims), tmp_path / "a.vtkhdf")
    command = [OTHER, str(vtk_program.__file__), str(tmp_path / "a.vtkhdf"), str(tmp_path / "out.npz")]
    subprocess.run(command, check=True, timeout=200)
    arrays = np.load(tmp_path / "out.npz")
    np.testing.assert_array_equal(arrays["times"], TIMES)
    assert tuple(arrays["dimensions"]) == (5, 4, 3)[:dims] + (1,) * (3 - dims)
    np.testing.assert_allclose(arrays["spacing"][:dims], 0.25)
    np.testing.assert_allclose(arrays["origin"][:dims], 1.0)
    for number in range(3):
        # VTK counts points with x fastest.
        expected = result["u"].values[number].transpose(*reversed(range(dims))).reshape(-1)
        np.testing.assert_array_equal(arrays[f"{number}/u"], expected)
        for component in range(dims):
            values = result["v"].values[number, component].transpose(*reversed(range(dims))).reshape(-1)
            np.testing.assert_array_equal(arrays[f"{number}/v"][:, component], values)
