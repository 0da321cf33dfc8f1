"""Values of fields between the points of their grid, by an interpolant for each axis. Around a periodic axis it is
trigonometric, between centers of cells without flux at the ends (`neumann`) a cosine series: exact for the waves of the
grid. Else it is cubic, with slopes of fourth order that are limited at shocks (Huynh 1993, SIAM J. Numer. Anal. 30).
N points, S space, n grid points along an axis."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
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

# (..., n, 1 or N) and which of the N points -> (..., N)
Along = Callable[[Tensor, Tensor | slice], Tensor]
WAVES, LIMITED = ("trigonometric", "cosine series"), "limited cubic"
# Numbers of a field at a time: a limited axis makes about sixty arrays of this size.
MOST_AT_ONCE = 2**18
MOST_MEASURED = 64  # frames, of each channel
IN_TIME = "cubic"


class Interpolant:
    """Fields at points (N, D); gradients flow to values and points. kinds: of the interpolants, by axis.

    limited: along all axes, for fields with shocks around a periodic axis. Waves would go through holes."""

    def __init__(
        self, task: TaskSpec, grid: Sequence[Float64], trained: Sequence[Float64], points: Any, *, limited: bool = False
    ) -> None:
        x = torch.as_tensor(points if isinstance(points, Tensor) else np.array(points, np.float64)).double()
        x = x[:, None] if x.ndim == 1 and len(grid) == 1 else x
        if x.ndim != 2 or x.shape[1] != len(grid) or not len(x):
            names = ", ".join(axis.name for axis in task.axes)
            raise BundleError(
                f"points have shape {tuple(x.shape)}; expected (points, {len(grid)})", hint=f"give {names}"
            )
        self.points, self.kinds, self.axes = x.unbind(1), list[str](), list[Along]()
        for axis, nodes, known, places in zip(task.axes, grid, trained, self.points, strict=True):
            length = axis_length(nodes, axis, known)
            self.kinds.append(LIMITED if limited or task.mask else _kind(axis, nodes, length, known))
            low = _check_inside(axis, nodes, length, places)
            self.axes.append(_along(axis, self.kinds[-1], nodes, length, low, places))

    def __call__(self, fields: Tensor, rows: Tensor | slice = slice(None)) -> Tensor:
        """Fields (..., *S) -> values (..., N), or those of some rows of the points."""
        values = fields[..., None]
        for along in reversed(self.axes):
            values = along(values, rows)
        return values

    def kinds_text(self, names: list[str]) -> str:
        """Which interpolant is along which axes, in words."""
        by_kind = {
            kind: [n for n, other in zip(names, self.kinds, strict=True) if other == kind] for kind in self.kinds
        }
        return " and ".join(f"{kind} along {', '.join(axes)}" for kind, axes in by_kind.items())


def _kind(axis: AxisSpec, grid: Float64, length: float, known: Float64) -> str:
    if axis.periodic:
        return WAVES[0] if is_uniform(np.append(grid, grid[0] + length)) else LIMITED
    return WAVES[1] if axis.boundary == "neumann" and is_uniform(grid) and not on_nodes(known, axis) else LIMITED


def _check_inside(axis: AxisSpec, grid: Float64, length: float, x: Tensor) -> float:
    """The first end of the domain. Raises BundleError for points outside."""
    beyond = 0.0 if axis.periodic else (length - float(grid[-1] - grid[0])) / 2
    low, high, near = float(grid[0]) - beyond, float(grid[-1]) + beyond, 1e-9 * length
    outside = ~x.isfinite() if axis.periodic else ~((x >= low - near) & (x <= high + near))
    if outside.any():
        first = f"the first with {axis.name} = {float(x[int(outside.nonzero()[0])]):.6g}"
        expected = "expected a finite number" if axis.periodic else f"expected {low:.6g} to {high:.6g}"
        raise BundleError(
            f"{int(outside.sum())} points are outside of the domain, {first}; {expected}", hint="leave them out"
        )
    return low


def _along(axis: AxisSpec, kind: str, grid: Float64, length: float, low: float, x: Tensor) -> Along:
    """The interpolant of an axis at places x (N,)."""
    if kind == LIMITED:
        return LimitedCubic(grid, x, length if axis.periodic else None)
    count = len(grid)
    weights = waves(axis, (x - low) / length, count) @ waves(axis, None, count).to(x.device).T / count  # (N, n)

    def along(values: Tensor, rows: Tensor | slice) -> Tensor:
        here = weights[rows].to(values)
        return values[..., 0] @ here.T if values.shape[-1] == 1 else (values * here.T).sum(-2)

    return along


class LimitedCubic:
    """Cubic between the nodes of a cell, linear beyond the ends of the axis. Six nodes belong to each place, whose cell
    is between the third and the fourth. Two more nodes stand beyond each end, with values of the parabola through the
    last three. length: of a periodic axis, else None."""

    def __init__(self, grid: Float64, x: Tensor, length: float | None) -> None:
        nodes, count = torch.from_numpy(np.array(grid, np.float64)).to(x.device), len(grid)
        self.ends: list[Tensor] = []
        if length is None:
            two = torch.arange(1.0, 3.0, dtype=torch.float64, device=x.device)
            first, last = nodes[0] - two.flip(0) * (nodes[1] - nodes[0]), nodes[-1] + two * (nodes[-1] - nodes[-2])
            self.ends = [_lagrange(first, nodes[:3]), _lagrange(last, nodes[-3:])]
            nodes = torch.cat([first, nodes, last])
            cell = (torch.searchsorted(nodes, x.detach().contiguous(), right=True) - 1).clamp(2, count)
        else:
            x = (x - nodes[0]) % length + nodes[0]
            cell = torch.searchsorted(nodes, x.detach().contiguous(), right=True) - 1
        index = cell + torch.arange(-2, 4, device=x.device)[:, None]  # (6, N)
        self.index, turns = index % len(nodes), index.div(len(nodes), rounding_mode="floor")
        self.nodes = nodes[self.index] + turns * (length or 0.0)
        self.slopes = torch.stack([_derivative(self.nodes[:5]), _derivative(self.nodes[1:])])  # (2, 5, N)
        self.x = x

    def __call__(self, values: Tensor, rows: Tensor | slice = slice(None)) -> Tensor:
        if self.ends:
            first, last = (ends.to(values) for ends in self.ends)
            n = first.shape[1]
            values = torch.cat([first @ values[..., :n, :], values, last @ values[..., -n:, :]], -2)
        index, (x, nodes, weights) = self.index[:, rows], (p[..., rows] for p in (self.x, self.nodes, self.slopes))
        column = torch.arange(index.shape[1], device=index.device) if values.shape[-1] > 1 else torch.zeros_like(index)
        v, steps = values[..., index, column], nodes.diff(dim=0)  # (..., 6, N), (5, N)
        weights, h = weights.to(v), steps.to(v)
        secants = v.diff(dim=-2) / h
        bends = secants.diff(dim=-2) / (h[1:] + h[:-1])
        bends = _minmod(bends[..., 1:, :], bends[..., :-1, :])  # of the parabolas of three cells
        left = secants[..., 1:3, :] + h[1:3] * bends[..., :2, :]
        right = secants[..., 2:4, :] - h[2:4] * bends[..., 1:, :]
        bound, usual = 3 * _minmod(secants[..., 1:3, :], secants[..., 2:4, :]).abs(), _minmod(left, right)
        slope = torch.stack([(v[..., :5, :] * weights[0]).sum(-2), (v[..., 1:, :] * weights[1]).sum(-2)], -2)
        slope = usual.sign() * torch.minimum((usual.sign() * slope).relu(), torch.maximum(bound, 1.5 * usual.abs()))
        t, low, high, h = ((x - nodes[2]) / steps[2]).to(v), v[..., 2, :], v[..., 3, :], h[2]
        rise = slope * h  # (..., 2, N)
        bent = t * (1 - t) * ((1 - t) * rise[..., 0, :] - t * rise[..., 1, :] + (2 * t - 1) * (high - low))
        line = low + t * (high - low)
        cubic = torch.where(bent.isnan(), line, line + bent)  # NaN: near a hole
        if not self.ends:
            return cubic
        before, after = (h * _minmod(secants[..., 2, :], secants[..., k, :]) for k in (3, 1))
        return torch.where(t < 0, low + t * before, torch.where(t > 1, high + (t - 1) * after, cubic))


def _minmod(a: Tensor, b: Tensor) -> Tensor:
    """The smaller one where both have the same sign, else 0."""
    return torch.where(a.sign() == b.sign(), a.sign() * torch.minimum(a.abs(), b.abs()), torch.zeros_like(a))


def _lagrange(x: Tensor, nodes: Tensor) -> Tensor:
    """(M, K): the weights of values at K nodes for the polynomial through them at x (M,)."""
    others = ~torch.eye(len(nodes), dtype=torch.bool, device=x.device)
    apart = (nodes[:, None] - nodes).where(others, torch.ones_like(nodes))
    return ((x[:, None] - nodes)[:, None].where(others, torch.ones_like(nodes)) / apart).prod(-1)


def _derivative(nodes: Tensor) -> Tensor:
    """(5, N): the weights of values at five nodes for the slope of the polynomial through them at the middle one."""
    apart = (nodes[:, None] - nodes).masked_fill_(torch.eye(5, dtype=torch.bool, device=nodes.device)[..., None], 1.0)
    there = apart[2].clone()  # middle less node; 1 at the middle
    weights = there.prod(0) / there / apart.prod(1)
    weights[2] = (1 / there).sum(0) - 1
    return weights


def waves(axis: AxisSpec, places: Tensor | None, count: int) -> Tensor:
    """Places (N,), as parts of the axis, None: of its grid -> waves of RMS 1 (N, count): 1, cos 1, sin 1, cos 2, ..."""
    modes = torch.arange(count, dtype=torch.float64, device=None if places is None else places.device)
    places = (modes + 0.5 * (not axis.periodic)) / count if places is None else places
    number, odd = (modes + 1) // 2 if axis.periodic else modes / 2, modes % 2 == 1
    angle = 2 * math.pi * places[:, None] * number
    size = (2 - ((number == 0) | (number * 2 == count)).double()).sqrt()
    return torch.where(odd | (number == 0) | (not axis.periodic), angle.cos(), angle.sin()) * size


def frame_numbers(wanted: Any, times: Float64, dt: float, hint: str = "ask for these") -> list[int]:
    """The positions of some times among those of frames. Raises BundleError for a time without a frame."""
    apart = np.abs(np.ravel(wanted)[:, None] - times)
    if (missing := ~(apart.min(axis=1) <= 1e-3 * dt)).any():  # as far as files round
        near = " and ".join(f"{time:.6g}" for time in np.sort(times[apart[missing][0].argsort()[:2]]))
        problem = f"there is no frame at time {np.ravel(wanted)[missing][0]:.6g}; the nearest are at {near}"
        raise BundleError(problem, hint=hint)
    return [int(number) for number in apart.argmin(axis=1)]


def query_result(
    result: Any, points: Any, times: Any, task: TaskSpec, trained: Sequence[Float64], in_time: str | None = None
) -> xarray.Dataset:
    """Values of a rollout's dataset at points (N, axes) and some of its times, with the error of interpolating."""
    from ups.solvers.coarse_solver import solved_by  # a simulator loads without solvers

    names = [axis.name for axis in task.axes]
    grid = [np.asarray(result[name].values, np.float64) for name in names]
    at = Interpolant(task, grid, trained, points)
    if in_time not in (None, IN_TIME):
        raise BundleError(f"in_time is '{IN_TIME}' or None, not {str(in_time)[:40]!r}")
    if times is not None and "time" in result.dims and in_time is None:
        hint = f"ask for these, or for interpolation in time, whose error is measured: in_time='{IN_TIME}'"
        result = result.isel(time=frame_numbers(times, result["time"].values, task.dt, hint))
    held = result[[name for name in result.data_vars if {*names} <= {*result[name].dims}]].transpose(..., *names)
    fields = {str(name): torch.from_numpy(held[name].values.astype(np.float64)) for name in held}
    own = solved_by(task)
    if own is not None and {*map(len, grid)} == {own.resolution}:
        meaning, how = _MEANINGS[own.reduction], "against a finer solution"
        errors = dict(own.interpolation_errors)
    else:
        meaning, how = _MEANINGS[""], "at every second point, from the others: at twice the spacing of the grid"
        errors = _left_out(fields, at.kinds, task, grid, trained)
        other = Interpolant(task, grid, trained, points, limited=True)
        limited = errors if at.kinds == other.kinds else _left_out(fields, other.kinds, task, grid, trained)
        if sum(limited.values()) < sum(errors.values()):  # waves ring at a shock
            at, errors = other, limited
    values: dict[Any, Any] = {name: ("point", x.detach().numpy()) for name, x in zip(names, at.points, strict=True)}
    for name, x in fields.items():
        rows = torch.split(torch.arange(len(at.points[0])), max(1, MOST_AT_ONCE // max(1, x[..., 0].numel())))
        numbers = torch.cat([at(x, part).detach() for part in rows], -1).numpy()
        values[name] = ((*held[name].dims[: -len(names)], "point"), numbers, held[name].attrs)
    queried: xarray.Dataset = held.drop_dims(names).assign(values).set_coords(names)
    stated = {"values": meaning, "interpolation": at.kinds_text(names), "interpolation_error": _words(errors, how)}
    if times is not None and in_time is not None and "time" in result.dims:
        queried, errors = _between_frames(queried, np.ravel(np.asarray(times, np.float64)))
        how = "at every second frame, from the others: at twice the time between frames"
        stated |= {"time_interpolation": IN_TIME, "time_interpolation_error": _words(errors, how)}
    return queried.assign_attrs(stated)


_MEANINGS = {"": "as on the grid: the task does not say whether at points or averages over cells"}
_MEANINGS |= dict.fromkeys(("exact values", "spectral truncation"), "at points")
_MEANINGS["cell averages"] = "averages over a cell of the grid around each point"


def _words(errors: dict[str, float], how: str) -> str:
    return ", ".join(f"{name} {error:.2g}" for name, error in errors.items()) + f" of the RMS, measured {how}"


def _relative(off: Tensor, of: Tensor) -> float:
    """Missing values, as of a trajectory that was stopped, count for nothing."""
    return float((off.square().nanmean() / of.square().nanmean().clamp_min(1e-300)).sqrt())


def _left_out(
    fields: dict[str, Tensor], kinds: list[str], task: TaskSpec, grid: Sequence[Float64], trained: Sequence[Float64]
) -> dict[str, float]:
    """RMS errors at every second point along each axis, from the others, relative to the RMS; of a few frames."""
    few = {name: x.flatten(0, -len(grid) - 1) if x.ndim > len(grid) else x[None] for name, x in fields.items()}
    few = {name: x[:: -(-len(x) // MOST_MEASURED)] for name, x in few.items()}
    errors = dict.fromkeys((f.name for f in task.fields_of(task.predicted) if f.name in fields), 0.0)
    for dim, (axis, kind, nodes, known) in enumerate(zip(task.axes, kinds, grid, trained, strict=True)):
        if len(nodes) < 4:
            continue
        # The rest of a cosine's grid, and of an odd number of points around an axis, holds no waves.
        kind = kind if kind == WAVES[0] and len(nodes) % 2 == 0 else LIMITED
        places = torch.from_numpy(nodes[1::2].copy())
        along = _along(axis, kind, nodes[::2], axis_length(nodes, axis, known), float(nodes[0]), places)
        for name in errors:
            x = few[name].movedim(dim - len(grid), -1)
            errors[name] = math.hypot(errors[name], _relative(along(x[..., ::2, None], slice(None)) - x[..., 1::2], x))
    return errors


def _between_frames(frames: xarray.Dataset, times: Float64) -> tuple[xarray.Dataset, dict[str, float]]:
    """The values of a result at times between its frames, and the relative error at every second frame."""
    import xarray

    clock = frames["time"].values
    if len(clock) < 4 or not ((times >= clock[0] - 1e-9) & (times <= clock[-1] + 1e-9)).all():
        asked = f"times {times.min():.6g} to {times.max():.6g}" if len(times) else "no times"
        problem = (
            f"{asked} were asked for; the result has {len(clock)} frames at times {clock[0]:.6g} to {clock[-1]:.6g}"
        )
        raise BundleError(problem, hint="ask for times between these, of a rollout with at least four frames")
    values: dict[Any, Any] = {"time": ("time", times, frames["time"].attrs)}
    errors: dict[str, float] = {}
    for name, field in frames.data_vars.items():
        x = torch.from_numpy(field.transpose(..., "time").values)
        test = LimitedCubic(clock[::2], torch.from_numpy(clock[1 : len(clock) - 1 : 2].copy()), None)(x[..., ::2, None])
        errors[str(name)] = _relative(test - x[..., 1 : len(clock) - 1 : 2], x)
        new = LimitedCubic(clock, torch.from_numpy(times), None)(x[..., None])
        dims = [dim for dim in field.dims if dim != "time"]
        values[name] = xarray.Variable([*dims, "time"], new.numpy(), field.attrs).transpose(*field.dims)
    return frames.drop_dims("time").assign(values), errors
