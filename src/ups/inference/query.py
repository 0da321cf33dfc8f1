"""Values of fields between the points of their grid, by an interpolant for each axis. Around a periodic axis it is
trigonometric, between centers of cells without flux at the ends (`neumann`) a cosine series: exact for the waves of the
grid. Else it is linear, which does not overshoot at shocks. N points, S space, n grid points along an axis."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ups.errors import BundleError
from ups.inference.domain import Float64, axis_length, on_nodes
from ups.spec.grid import is_uniform
from ups.spec.task import AxisSpec, TaskSpec

if TYPE_CHECKING:
    import xarray


class Interpolant:
    """Weights of grid points for the values at points (N, D); gradients flow to values and points."""

    def __init__(self, task: TaskSpec, grid: Sequence[Float64], trained: Sequence[Float64], points: Any) -> None:
        x = torch.as_tensor(points if isinstance(points, Tensor) else np.asarray(points, np.float64)).double()
        x = x[:, None] if x.ndim == 1 and len(grid) == 1 else x
        if x.ndim != 2 or x.shape[1] != len(grid):
            names = ", ".join(axis.name for axis in task.axes)
            raise BundleError(
                f"points have shape {tuple(x.shape)}; expected (points, {len(grid)})", hint=f"give {names}"
            )
        self.weights = [_weights(*one) for one in zip(task.axes, grid, trained, x.unbind(1), strict=True)]

    def __call__(self, fields: Tensor, rows: Tensor | slice = slice(None)) -> Tensor:
        """Fields (..., *S) -> values (..., N), or those of some rows of the points."""
        *others, last = (weights[rows].to(fields) for weights in self.weights)
        values = fields @ last.T  # (..., *S but the last axis, N)
        for weights in reversed(others):
            values = (values * weights.T).sum(-2)
        return values


def _weights(axis: AxisSpec, grid: Float64, known: Float64, x: Tensor) -> Tensor:
    """(N, n)."""
    length, count = axis_length(grid, axis, known), len(grid)
    beyond = 0.0 if axis.periodic else (length - float(grid[-1] - grid[0])) / 2
    low, high, near = float(grid[0]) - beyond, float(grid[-1]) + beyond, 1e-9 * length
    outside = ~x.isfinite() if axis.periodic else ~((x >= low - near) & (x <= high + near))
    if outside.any():
        row = int(outside.nonzero()[0])
        problem = (
            f"{int(outside.sum())} points are outside of the domain, the first with {axis.name} = {float(x[row]):.6g}"
        )
        raise BundleError(f"{problem}; expected {low:.6g} to {high:.6g}", hint="leave them out")
    nodes = torch.from_numpy(np.array(grid, np.float64)).to(x.device)
    if is_uniform(grid) and (axis.periodic or (axis.boundary == "neumann" and not on_nodes(known, axis))):
        return waves(axis, (x - low) / length, count) @ waves(axis, None, count).to(x.device).T / count
    if axis.periodic:
        x, nodes = (x - low) % length + low, torch.cat([nodes, nodes[:1] + length])
    cell = (torch.searchsorted(nodes, x.detach().contiguous(), right=True) - 1).clamp(0, len(nodes) - 2)
    part = ((x - nodes[cell]) / (nodes[cell + 1] - nodes[cell]))[:, None]
    first, second = (torch.nn.functional.one_hot((cell + shift) % count, count) for shift in (0, 1))
    return first * (1 - part) + second * part


def waves(axis: AxisSpec, places: Tensor | None, count: int) -> Tensor:
    """Places (N,), as parts of the axis, None: of its grid -> waves of RMS 1 (N, count): 1, cos 1, sin 1, cos 2, ..."""
    modes = torch.arange(count, dtype=torch.float64, device=None if places is None else places.device)
    places = (modes + 0.5 * (not axis.periodic)) / count if places is None else places
    number, odd = (modes + 1) // 2 if axis.periodic else modes / 2, modes % 2 == 1
    angle = 2 * math.pi * places[:, None] * number
    size = (2 - ((number == 0) | (number * 2 == count)).double()).sqrt()
    return torch.where(odd | (number == 0) | (not axis.periodic), angle.cos(), angle.sin()) * size


def frame_numbers(wanted: Any, times: Float64, dt: float) -> list[int]:
    """The positions of some times among those of frames. Raises BundleError for a time without a frame."""
    apart = np.abs(np.ravel(wanted)[:, None] - times)
    if (missing := ~(apart.min(axis=1) <= 1e-3 * dt)).any():  # as far as files round
        have = np.array2string(np.asarray(times), precision=6, threshold=6, edgeitems=2)
        raise BundleError(
            f"there is no frame at time {np.ravel(wanted)[missing][0]:.6g}; frames are at {have}", hint="ask for these"
        )
    return [int(number) for number in apart.argmin(axis=1)]


def query_result(result: Any, points: Any, times: Any, task: TaskSpec, trained: Sequence[Float64]) -> xarray.Dataset:
    """Values of a rollout's dataset at points (N, axes) and some of its times."""
    names = [axis.name for axis in task.axes]
    at = Interpolant(task, [result[name].values for name in names], trained, points)
    if times is not None and "time" in result.dims:
        result = result.isel(time=frame_numbers(times, result["time"].values, task.dt))
    held = result[[name for name in result.data_vars if {*names} <= {*result[name].dims}]]
    values: dict[Any, Any] = {}
    for name, field in held.items():
        part = field.transpose(..., *names)
        numbers = at(torch.from_numpy(part.values.astype(np.float64))).detach().numpy()
        values[name] = ((*part.dims[: -len(names)], "point"), numbers, field.attrs)
    queried: xarray.Dataset = held.drop_dims(names).assign(values)
    return queried
