"""Values at points: limited at shocks, with a measured error, at times of frames unless asked otherwise, as files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import torch
import xarray

import ups
from tests.support.command_line import ups_here
from tests.support.small_bundle import DARCY, FLOW, make_bundle
from ups.errors import BundleError
from ups.inference.query import Interpolant, LimitedCubic
from ups.solvers.tasks import TASKS
from ups.spec.task import AxisSpec, FieldSpec, TaskSpec

POINTS = np.random.default_rng(0).uniform(0, 1, (40, 2))


def test_smooth_fields_are_of_fourth_order_on_uneven_grids_too() -> None:
    errors = []
    for count in (16, 32):
        nodes = np.linspace(0, 1, count) ** 1.2
        found = LimitedCubic(nodes, x := torch.linspace(0.1, 0.9, 99, dtype=torch.float64), None)(
            torch.from_numpy(np.cos(5 * nodes))[:, None]
        )
        errors.append(float((found - (5 * x).cos()).abs().max()))
    assert errors[1] < errors[0] / 10
    assert errors[1] < 1e-4


@pytest.mark.parametrize("count", [2, 3, 4, 5])
def test_short_axes_are_exact_for_lines(count: int) -> None:
    nodes = np.arange(count) + 0.5
    found = LimitedCubic(nodes, torch.tensor([0.0, 0.7, count]).double(), None)(torch.from_numpy(2 * nodes)[:, None])
    np.testing.assert_allclose(found, [0, 1.4, 2 * count], atol=1e-12)


def test_gradients_agree_with_finite_differences() -> None:
    task = TaskSpec("t", (FieldSpec("u"),), (AxisSpec("x"), AxisSpec("y", "wall")), dt=0.1)
    grid = [np.arange(8) / 8, (np.arange(7) + 0.5) / 7]
    values, points = torch.randn(2, 8, 7, dtype=torch.float64), torch.from_numpy(POINTS[:9].copy()).requires_grad_()
    values = (10 * values).requires_grad_()  # a slope is limited in most cells
    for limited in (False, True):
        assert torch.autograd.gradcheck(
            lambda v, p, limited=limited: Interpolant(task, grid, grid, p, limited=limited)(v),
            (values, points),
            atol=1e-5,
        )


@pytest.fixture(scope="module")
def simulator(tmp_path_factory: pytest.TempPathFactory) -> ups.Simulator:
    return ups.Simulator.load(make_bundle(tmp_path_factory.mktemp("b") / "b", tasks=(FLOW, DARCY)), device="cpu")


@pytest.fixture(scope="module")
def flow(simulator: ups.Simulator) -> Any:
    state = np.random.default_rng(1).normal(size=(3, 16, 16))
    return simulator.rollout(state, 6, {"nu": 0.02, "rho": 1.5}, static=state[:1], task="flow")


def test_a_result_states_its_error_and_its_meaning(simulator: ups.Simulator, flow: Any) -> None:
    found = simulator.query(flow, POINTS)
    assert found["velocity"].dims == ("time", "component", "point")
    np.testing.assert_array_equal(found["y"], POINTS[:, 1])
    assert "limited cubic" in found.attrs["interpolation"]
    assert found.attrs["interpolation_error"].startswith("velocity ")
    assert "every second point" in found.attrs["interpolation_error"]
    assert "does not say" in found.attrs["values"]
    known = TASKS["swe2d"]
    grid = [(np.arange(32) + 0.5) / 32] * 2
    fields = {f.name: (("x", "y"), np.zeros((32, 32))) for f in known.spec.fields}
    from ups.inference.query import query_result

    own = query_result(xarray.Dataset(fields, {"x": grid[0], "y": grid[1]}), POINTS, None, known.spec, grid)
    assert own.attrs["values"].startswith("averages over a cell")
    assert own.attrs["interpolation_error"].endswith("against a finer solution")
    assert len(known.interpolation_errors) == 2


def test_many_points_are_taken_in_parts(simulator: ups.Simulator, flow: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = simulator.query(flow, POINTS)
    monkeypatch.setattr("ups.inference.query.MOST_AT_ONCE", 2000)
    xarray.testing.assert_allclose(simulator.query(flow, POINTS), whole)


def test_a_shock_around_a_periodic_axis_is_limited() -> None:
    from ups.inference.query import query_result

    task = TaskSpec("t", (FieldSpec("u"),), (AxisSpec("x"),), dt=0.1)
    x = np.arange(64) / 64
    for u, kind in ((np.sin(8 * x * np.pi), "trigonometric"), ((x > 0.4) * 1.0, "limited cubic")):
        result = xarray.Dataset({"u": ("x", u)}, {"x": x})
        found = query_result(result, np.linspace(0, 1, 300), None, task, [x])
        assert found.attrs["interpolation"] == f"{kind} along x"
        assert u.min() - 1e-3 <= found["u"].min()
        assert found["u"].max() <= u.max() + 1e-3


def test_times_between_frames_are_interpolated_on_request_only(simulator: ups.Simulator, flow: Any) -> None:
    with pytest.raises(BundleError, match=r"no frame at time 0\.25; the nearest are at 0\.2 and 0\.3") as raised:
        simulator.query(flow, POINTS, 0.25)
    assert "in_time='cubic'" in str(raised.value.hint)
    found = simulator.query(flow, POINTS, [0.2, 0.25], in_time="cubic")
    assert found["velocity"].dims == ("time", "component", "point")
    xarray.testing.assert_allclose(found.isel(time=[0]), simulator.query(flow, POINTS, 0.2))
    assert "every second frame" in found.attrs["time_interpolation_error"]
    for times, how in ((0.7, "cubic"), (0.25, "linear"), (np.nan, "cubic")):
        with pytest.raises(BundleError):
            simulator.query(flow, POINTS, times, in_time=how)


def run(*words: str) -> Any:
    return ups_here(Path.cwd(), *words)


def test_values_of_a_csv_file(simulator: ups.Simulator, flow: Any, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    bundle = str(simulator._bundle.path)
    random = np.random.default_rng(1).normal(size=(2, 16, 16))
    xarray.Dataset({"a": (("x", "y"), random[0])}).to_netcdf("darcy.nc", engine="h5netcdf")
    state = {"density": (("x", "y"), random[0]), "velocity": (("component", "x", "y"), random)}
    state |= {"force": (("x", "y"), random[1]), "nu": 0.02, "rho": 1.5}
    xarray.Dataset(state).to_netcdf("flow.nc", engine="h5netcdf")
    Path("at.csv").write_text(
        "name, x, y, time, density\nb, 0.5, 0.1, 0.2, 7\na, 0.1, 0.9, 0.1, 8\nc, 0.3, 0.3, 0.2, 9\n"
    )
    given = ("rollout", bundle, "flow.nc", "--task", "flow", "--steps", "4", "--at", "at.csv")
    done = run(*given, "-o", "values.csv")
    assert done.returncode == 0, done.stderr
    table = pandas.read_csv("values.csv")
    assert [*table.columns] == ["name", "density_given", "time", "x", "y", "velocity_x", "velocity_y", "density"]
    assert [*table["name"]] == ["b", "a", "c"]
    result = simulator.rollout(xarray.open_dataset("flow.nc"), 4, task="flow")
    expected = simulator.query(result, [[0.1, 0.9]], 0.1)["velocity"].sel(component="y")
    assert table["velocity_y"][1] == pytest.approx(float(expected.item()), rel=1e-6)
    assert run(*given, "-o", "values.csv").returncode != 0  # is there already
    Path("at.csv").write_text("x,y\n0.5,0.1\n0.1,0.9\n")
    assert run(*given, "-o", "values.nc").returncode == 0
    assert xarray.open_dataset("values.nc")["velocity"].sizes == {"time": 4, "component": 2, "point": 2}
    assert run(*given, "-o", "all.csv").returncode == 0
    assert len(pandas.read_csv("all.csv")) == 8
    assert run("rollout", bundle, "darcy.nc", "--task", "darcy", "--at", "at.csv", "-o", "u.csv").returncode == 0
    assert [*pandas.read_csv("u.csv").columns] == ["x", "y", "u"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "cannot read points"),
        ("x\n0.5\n", "has no column y"),
        ("x,y\n", "has no points"),
        ("x,y\n0.5,south\n", "'south' as y in row 1"),
        ("x,y\n0.5,0.1\n0.5,inf\n", "'inf' as y in row 2"),
        ("x,y,time\n0.5,0.1,0.15\n", "no frame at time 0.15"),
        ("x,y\n0.5,3\n", "outside of the domain"),
        ("x,y\n1,2,3,4\n1\n1,2,3,4,5,6\n", "cannot read points"),
    ],
)
def test_wrong_points_are_named(
    text: str, words: str, simulator: ups.Simulator, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    random = np.random.default_rng(1).normal(size=(2, 16, 16))
    state = {"density": (("x", "y"), random[0]), "velocity": (("component", "x", "y"), random)}
    state |= {"force": (("x", "y"), random[1]), "nu": 0.02, "rho": 1.5}
    xarray.Dataset(state).to_netcdf("flow.nc", engine="h5netcdf")
    Path("at.csv").write_text(text)
    done = run(
        "rollout",
        str(simulator._bundle.path),
        "flow.nc",
        "--task",
        "flow",
        "--steps",
        "2",
        "--at",
        "at.csv",
        "-o",
        "v.csv",
    )
    assert done.returncode != 0
    assert words in " ".join(done.stderr.split())
    assert not Path("v.csv").exists()
