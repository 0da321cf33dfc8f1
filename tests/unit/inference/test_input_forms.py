"""Every form of an input means the same field and gives the same result, or is refused by name."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
import xarray

from tests.support.small_bundle import make_bundle
from tests.support.small_model import awake
from ups import Simulator
from ups.errors import BundleError
from ups.inference.bundle import load_bundle
from ups.spec.task import AxisSpec, FieldSpec, ParameterSpec, TaskSpec

PLANE = TaskSpec(
    "plane",
    (FieldSpec("velocity", unit="m/s", tensor_rank=1), FieldSpec("height", unit="m"), FieldSpec("force", "static")),
    (AxisSpec("x", extent=1.5, unit="m"), AxisSpec("y", unit="m")),
    (ParameterSpec("nu", unit="m2/s", minimum=0.01, maximum=0.1, scale="log"),),
    dt=0.1,
    time_unit="s",
    symmetries=("translation",),
)
LINE = TaskSpec("line", (FieldSpec("u", unit="m/s"),), (AxisSpec("x"),), dt=0.1, time_unit="s")
CHANNEL = TaskSpec("channel", (FieldSpec("u"),), (AxisSpec("x"), AxisSpec("y", "wall")), dt=0.1)
GRIDS = {"plane": (24, 16), "line": (16,), "channel": (16, 16)}
SAME, REFUSED = "same", "refused"


def grid(task: TaskSpec) -> tuple[np.ndarray, ...]:
    return tuple((np.arange(n) + 0.5) / n * a.extent for n, a in zip(GRIDS[task.name], task.axes, strict=True))


def made(folder: Any) -> Simulator:
    """A simulator for three grids; its weights are not trained, and not zero."""
    bundle = load_bundle(make_bundle(folder, tasks=(PLANE, LINE, CHANNEL)))
    awake(bundle.stepper)
    coordinates = {task.name: grid(task) for task in bundle.info.tasks}
    return Simulator(replace(bundle, info=replace(bundle.info, coordinates=coordinates)), torch.device("cpu"))


def smooth(number: int, *points: int) -> np.ndarray:
    """A field of low waves at the centers of cells of any grid."""
    axes = np.meshgrid(*[2 * np.pi * (np.arange(n) + 0.5) / n for n in points], indexing="ij")
    return sum(np.sin((1 + (number + k) % 2) * x + number) for k, x in enumerate(axes)) + 0.1 * number


X, Y = grid(PLANE)
V, H, F = np.stack([smooth(1, 24, 16), smooth(2, 24, 16)]), smooth(3, 24, 16), smooth(4, 24, 16)
U = smooth(1, 16)
W = smooth(1, 16, 16) + smooth(2, 16, 16).T
STATE = np.concatenate([V, H[None]])
NU = {"nu": 0.05}
NAMES = ["velocity_x", "velocity_y", "height"]


def array(values: Any, *dims: str, units: str | None = None, **coords: Any) -> xarray.DataArray:
    attrs = {} if units is None else {"units": units}
    return xarray.DataArray(values, dims=dims, coords=coords, attrs=attrs)


def dataset(**changes: Any) -> xarray.Dataset:
    variables = {
        "velocity": array(V, "component", "x", "y", units="m/s"),
        "height": array(H, "x", "y", units="m"),
        "force": array(F, "x", "y"),
        "nu": xarray.DataArray(0.05, attrs={"units": "m2/s"}),
    } | changes
    return xarray.Dataset(variables, coords={"x": ("x", X, {"units": "m"}), "y": Y})


def in_time(times: Any, u: np.ndarray = U, units: str = "s") -> xarray.DataArray:
    frames = np.stack([u * (n + 1) for n in range(len(times))][::-1])  # the last one is `u`
    return array(frames, "time", "x", time=("time", times, {"units": units}))


def plane(state: Any = STATE, parameters: Any = NU, static: Any = F[None], **rest: Any) -> dict[str, Any]:
    return {"state": state, "parameters": parameters, "static": static, "task": "plane", **rest}


def line(state: Any, **rest: Any) -> dict[str, Any]:
    return {"state": state, "task": "line", **rest}


def square(state: Any, **rest: Any) -> dict[str, Any]:
    return {"state": state, "task": "channel", **rest}


REFERENCES = {"plane": plane(), "line": line(U[None]), "channel": square(W[None])}


def swapped(values: np.ndarray) -> np.ndarray:
    return values.swapaxes(-1, -2)


class OwnDataset(xarray.Dataset):
    """As packages that build on xarray have them."""

    __slots__ = ()


# form -> (what makes it, outcome: the same result as plain arrays, or refused with these words)
FORMS: dict[str, tuple[Callable[[], dict[str, Any]], str]] = {
    "array (C, x, y)": (lambda: plane(), SAME),
    "array (B, C, x, y)": (lambda: plane(STATE[None], static=F[None, None]), SAME),
    "list of lists": (lambda: plane(STATE.tolist(), static=[F.tolist()]), SAME),
    "float32": (lambda: plane(STATE.astype(np.float32)), SAME),
    "torch tensor": (lambda: plane(torch.from_numpy(STATE), static=torch.from_numpy(F[None])), SAME),
    "dict of arrays": (lambda: plane({"velocity": V, "height": H}), SAME),
    "read-only mapping": (lambda: plane(MappingProxyType({"velocity": V, "height": H})), SAME),
    "Dataset": (lambda: plane(dataset(), None, None), SAME),
    "Dataset, dims reversed": (lambda: plane(dataset().transpose("y", "x", "component"), None, None), SAME),
    "Dataset, components named y, x": (
        lambda: plane(dataset().assign_coords(component=["x", "y"]).isel(component=[1, 0]), None, None),
        SAME,
    ),
    "Dataset of a subclass, dims reversed": (
        lambda: plane(OwnDataset(dict(dataset().transpose("y", "x", "component"))), None, None),
        SAME,
    ),
    "Dataset without a field": (lambda: plane(dataset().drop_vars("height"), None, None), "no variable 'height'"),
    "Dataset with a further dim": (
        lambda: plane(dataset(height=array(H[..., None], "x", "y", "z")), None, None),
        "has dimensions ('x', 'y', 'z'); expected ('x', 'y')",
    ),
    "DataArray (channel, x, y)": (lambda: plane(array(STATE, "channel", "x", "y")), SAME),
    "DataArray (y, x, channel)": (lambda: plane(array(STATE.T, "y", "x", "channel")), SAME),
    "DataArray (variable, y, x), named": (
        lambda: plane(array(swapped(STATE[[2, 0, 1]]), "variable", "y", "x", variable=[NAMES[n] for n in (2, 0, 1)])),
        SAME,
    ),
    "DataArray, other channel names": (
        lambda: plane(array(STATE, "channel", "x", "y", channel=["u", "v", "w"])),
        "'channel' of state of task 'plane' is u, v, w; expected velocity_x, velocity_y, height",
    ),
    "DataArray without channels": (lambda: plane(array(H, "x", "y")), "expected ('channel', 'x', 'y')"),
    "DataArrays in a dict, dims reversed": (
        lambda: plane({"velocity": array(swapped(V), "component", "y", "x"), "height": array(H.T, "y", "x")}),
        SAME,
    ),
    "Variables in a dict, dims reversed": (
        lambda: plane({"velocity": V, "height": xarray.Variable(("y", "x"), H.T)}),
        SAME,
    ),
    "DataArray as static=, dims reversed": (lambda: plane(static=array(F.T, "y", "x", y=Y)), SAME),
    "DataArray (channel, y, x), square": (lambda: square(array(W.T[None], "channel", "y", "x")), SAME),
    "DataArray (y, x) in a dict, square": (lambda: square({"u": array(W.T, "y", "x")}), SAME),
    "DataArray (foo, bar) in a dict, square": (
        lambda: square({"u": array(W, "foo", "bar")}),
        "has dimensions ('foo', 'bar'); expected ('x', 'y')",
    ),
    "DataArray with dims (foo, bar)": (
        lambda: plane({"velocity": V, "height": array(H, "foo", "bar")}),
        "has dimensions ('foo', 'bar'); expected ('x', 'y')",
    ),
    "DataArray with dims of xarray's own": (
        lambda: plane(static=xarray.DataArray(F)),
        "has dimensions ('dim_0', 'dim_1'); expected ('x', 'y')",
    ),
    "DataArray (sample, x)": (lambda: line(array(U[None], "sample", "x")), SAME),
    "DataArray (x, sample)": (lambda: line(array(U[:, None], "x", "sample")), SAME),
    "DataArray (time, x)": (lambda: line(in_time([0.0, 0.1])), SAME),
    "DataArray on another domain, in a read-only mapping": (
        lambda: line(MappingProxyType({"u": array(U, "x", x=3 * grid(LINE)[0])})),
        "coordinate 'x' is another domain",
    ),
    "times that decrease": (lambda: line(in_time([0.1, 0.0])), "times do not increase: they go from 0.1 to 0.0"),
    "times that decrease, Dataset": (lambda: line(in_time([2, 1, 0]).to_dataset(name="u")), "do not increase"),
    "times that decrease, in a dict": (lambda: line({"u": in_time([0.1, 0.0])}), "do not increase"),
    "times that repeat": (lambda: line(in_time([0.0, 0.0])), "do not increase"),
    "times with a gap that is not a number": (lambda: line(in_time([0.0, np.nan, 0.2])), "do not increase"),
    "dates that decrease": (
        lambda: line(in_time(np.array(["2001-01-02", "2001-01-01"], "datetime64[ns]"))),
        "do not increase",
    ),
    "time in hours": (lambda: line(in_time([0.0], units="h")), "time is in 'h', and the model was trained in 's'"),
    "time in seconds since a date": (lambda: line(in_time([0.0], units="seconds since 2000-01-01")), SAME),
    "field in cm/s": (lambda: line(array(U, "x", units="cm/s")), "is in 'cm/s', and the model was trained in 'm/s'"),
    "field in m s-1": (lambda: line(array(U, "x", units="m s-1")), SAME),
    "field without a stated unit": (lambda: line(array(U, "x", units="1")), SAME),
    "field in cm/s, Dataset": (
        lambda: plane(dataset(velocity=array(V, "component", "x", "y", units="cm/s")), None, None),
        "is in 'cm/s'",
    ),
    "parameter in cm2/s": (
        lambda: plane(parameters={"nu": xarray.DataArray(0.05, attrs={"units": "cm2/s"})}),
        "parameter 'nu' is in 'cm2/s', and the model was trained in 'm2/s'",
    ),
    "parameter in cm2/s, Dataset": (
        lambda: plane(dataset(nu=xarray.DataArray(0.05, attrs={"units": "cm2/s"})), None, None),
        "parameter 'nu' is in 'cm2/s'",
    ),
    "parameter over time": (
        lambda: plane(parameters={"nu": array([0.05, 0.05], "time")}),
        "parameter 'nu' has dimensions ('time',); expected none, or ('sample',)",
    ),
    "coordinate in km": (
        lambda: plane(coordinates={"x": array(X, "x", units="km")}),
        "coordinate 'x' is in 'km', and the model was trained in 'm'",
    ),
    "transposed array": (
        lambda: plane(swapped(STATE), static=swapped(F)[None]),
        "transposed: 16 x 24 points were given, and task 'plane' was trained on 24 x 16",
    ),
    "transposed array, twice as fine": (
        lambda: plane(np.ones((3, 32, 48)), static=np.ones((1, 32, 48))),
        "transposed: 32 x 48 points",
    ),
    "32 points": (lambda: line(smooth(1, 32)[None]), SAME),
    "32 points with coordinates": (lambda: line(array(smooth(1, 32), "x", x=(np.arange(32) + 0.5) / 32)), SAME),
    "12 points": (lambda: line(smooth(1, 12)[None]), SAME),
    "15 points": (lambda: line(smooth(1, 15)[None]), SAME),
    "48 x 32 points": (
        lambda: plane(np.stack([smooth(n, 48, 32) for n in (1, 2, 3)]), static=smooth(4, 48, 32)[None]),
        SAME,
    ),
    "24 x 32 points": (
        lambda: plane(np.stack([smooth(n, 24, 32) for n in (1, 2, 3)]), static=smooth(4, 24, 32)[None]),
        SAME,
    ),
    "3 points": (lambda: line(smooth(1, 3)[None]), "too coarse along 'x': 3 points"),
    "1600 points": (lambda: line(smooth(1, 1600)[None]), "too fine along 'x': 1600 points"),
    "32 points along a wall": (
        lambda: square(np.ones((1, 16, 32))),
        "along 'y' (wall) cannot change",
    ),
    "closed periodic axis": (lambda: line(np.append(U, U[0])[None]), "repeat the first of 16 points"),
    "closed periodic axis with coordinates": (
        lambda: line(array(np.append(U, U[0]), "x", x=(np.arange(17) + 0.5) / 16)),
        "repeats the first point of a periodic axis at its end",
    ),
    "coordinates that decrease": (
        lambda: line(array(U[::-1], "x", x=grid(LINE)[0][::-1])),
        "coordinate 'x' must be one increasing list",
    ),
    "float64 1e200": (lambda: line(1e200 * U[None]), "which float32 cannot hold"),
    "parameter 1e-60": (lambda: plane(parameters={"nu": 1e-60}), "parameter 'nu' must be above 0"),
    "NaN": (lambda: line(np.where(np.arange(16) == 3, np.nan, U)[None]), "is not finite at 1 points"),
    "masked array": (lambda: line(np.ma.masked_greater(U[None], 0.9)), "is masked at"),
    "complex": (lambda: line(U[None] + 1j), "must hold real numbers"),
    "OrderedDict of ints": (lambda: line(OrderedDict(u=np.zeros(16, int))), "zero"),
}


@pytest.fixture(scope="module")
def simulator(tmp_path_factory) -> Simulator:
    return made(tmp_path_factory.mktemp("bundles") / "forms")


def values_of(result: xarray.Dataset) -> dict[str, np.ndarray]:
    """Fields of the first sample after two steps."""
    names = [name for name in ("velocity", "height", "u") if name in result]
    parts = {name: result[name].isel(time=-1) for name in names}
    return {name: (part.isel(sample=0) if "sample" in part.dims else part).values for name, part in parts.items()}


def resampled(values: np.ndarray, space: tuple[int, ...]) -> np.ndarray:
    """From centers of cells to those of another grid, by the waves that both can hold."""
    for number, points in enumerate(space):
        dim = number - len(space)
        have = values.shape[dim]
        if have == points:
            continue
        waves = np.moveaxis(np.fft.fft(values, axis=dim, norm="forward"), dim, -1)
        k = np.fft.fftfreq(have, 1 / have)
        resolved = np.abs(k) <= min(have, points) / 2
        x = (np.arange(points) + 0.5) / points - 0.5 / have
        values = np.moveaxis((waves[..., resolved] @ np.exp(2j * np.pi * k[resolved, None] * x)).real, -1, dim)
    return values


@pytest.mark.parametrize("form", FORMS)
def test_a_form_of_an_input_means_the_same_or_is_refused(simulator, form):
    make, outcome = FORMS[form]
    if outcome not in (SAME, "zero"):
        with pytest.raises(BundleError) as caught:
            simulator.rollout(**make(), steps=2)
        assert outcome in caught.value.message
        return
    result = simulator.rollout(**make(), steps=2)
    if outcome == "zero":
        return
    call = make()
    expected = values_of(simulator.rollout(**REFERENCES[call["task"]], steps=2))
    other_grid = False
    for name, values in values_of(result).items():
        space = values.shape[-len(GRIDS[call["task"]]) :]
        other_grid = space != GRIDS[call["task"]]
        np.testing.assert_allclose(values, resampled(expected[name], space), atol=1e-4)
    assert ("resampled from" in result.attrs["warnings"]) == other_grid
    assert bool(int(np.ravel(result["warnings"].values)[0]) & 2) == other_grid
