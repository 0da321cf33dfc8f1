"""Solvers of our tasks started from stored frames, on any grid and with any step: what accuracy costs without a model.

All are compiled by JAX but the advection, which is one pair of FFTs. They are the reference solvers, and for Darcy flow
preconditioned conjugate gradients, which reach the error of a model at a fraction of the cost of the factorization.

A stored frame is taken back to the solver's grid by the inverse of what stored it (see `problem`): Fourier or cosine
modes are divided by their filter and cut or padded, cell averages are averaged or reconstructed with limited slopes.
What the stored frame has lost (modes above its grid, digits beyond float32) the solver does not know either.

Shapes: n trajectories, T frames after the given one, C channels, R stored and N solver points per axis, S is R or
(R, R).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import numpy as np

from ups.formats.base import Reader
from ups.solvers import darcy, diffreact, finite_volume, spectral
from ups.solvers.finite_volume import conserved, limited_slope, primitive
from ups.solvers.problem import (
    Complex128,
    Float64,
    average_periodic_1d,
    block_mean,
    half_cell_shift,
    kept_modes_2d,
    steps_of,
    truncate_periodic_1d,
    truncate_periodic_2d,
)
from ups.solvers.tasks import TASKS, SolverTask
from ups.spec.task import TaskSpec

# Grids to try, as parts of the stored one.
GRID_FACTORS = (1 / 8, 1 / 4, 3 / 8, 1 / 2, 5 / 8, 3 / 4, 1, 5 / 4, 3 / 2, 2, 4)
MIN_POINTS = 4
MAX_HALVINGS = 4
# What data of a task has in common with it: neither its name in a recipe nor the time between its frames.
_SAME = ("fields", "axes", "parameters", "steady", "equation")


@dataclass(frozen=True, slots=True)
class Setting:
    """How fine a solver works.

    substeps: steps per frame, of a steady task iterations; 0 where the solver has none or chooses them itself. order:
    of the time stepper, where there is a choice. single: in float32.
    """

    points: int
    substeps: int = 0
    order: int = 4
    single: bool = False


@dataclass(frozen=True, slots=True)
class Given:
    """What a solver starts from, as stored: frame (n, C, *S), static (n, Cs, *S), parameters (n, P), in float64."""

    frame: Float64
    static: Float64
    parameters: Float64


# (task, given, dt, num_frames, setting) -> (n, T, C, *S) on the stored grid; what blew up is not finite
Run = Callable[[TaskSpec, Given, float, int, Setting], Float64]


@dataclass(frozen=True, slots=True)
class Restart:
    """A solver that starts from stored frames.

    substeps: (points, dt) -> steps per frame with which the data was made; None where there is no choice of steps.
    orders: whether its time stepper has several. singles: whether it can work in float32.
    """

    run: Run
    substeps: Callable[[int, float], int] | None = None
    orders: bool = False
    singles: bool = True

    def settings(self, resolution: int, dt: float) -> list[list[Setting]]:
        """Settings to try, one list per grid from coarse to fine, each from large to small steps."""
        grids = []
        for points in dict.fromkeys(int(resolution * factor) for factor in GRID_FACTORS):
            if points < MIN_POINTS or points % 2:
                continue
            most = self.substeps(points, dt) if self.substeps is not None else 0
            steps = sorted({max(1, most >> halving) for halving in range(MAX_HALVINGS + 1)}) if most else [0]
            grids.append([Setting(points, n) for n in steps])
        return grids

    def cheaper(self, setting: Setting) -> list[Setting]:
        """Settings near this one that may cost less: the other precision, fewer steps, lower orders, a coarser grid."""
        near = [replace(setting, points=setting.points * 7 // 16 * 2)]
        if self.singles:
            near.append(replace(setting, single=True))
        if setting.substeps > 1:
            near.append(replace(setting, substeps=setting.substeps * 3 // 4))
        if self.orders and setting.order > 2:
            near += [replace(setting, order=2, substeps=setting.substeps * times) for times in (1, 2)]
        return [one for one in near if one != setting and one.points >= MIN_POINTS]


def solved_by(spec: TaskSpec) -> SolverTask | None:
    """The task of ours with the fields, axes, parameters and equation of this one."""
    return next((t for t in TASKS.values() if all(getattr(spec, n) == getattr(t.spec, n) for n in _SAME)), None)


def own_task(reader: Reader) -> tuple[SolverTask | None, str]:
    """The task of ours that the data of a reader was made by, or None and why no solver can start from its frames."""
    task = solved_by(reader.source.task)
    if task is None:
        return None, "it was not made by one of our solvers"
    if reader.subsampling.space_stride > 1:
        return None, "it is read with a space_stride: its frames are not what the solver stores"
    if len(set(reader.space)) != 1:
        return None, "its axes have different numbers of points"
    return task, ""


def _advection(spec: TaskSpec, inputs: Given, dt: float, num_frames: int, setting: Setting) -> Float64:
    """Exact in time: each mode turns. Points are those of the one transform."""
    resolution = inputs.frame.shape[-1]
    modes = _modes_1d(inputs.frame[:, 0], averages=False)
    modes = modes[:, : min(modes.shape[1], setting.points // 2)]
    wave = 2j * np.pi / spec.axes[0].extent * np.arange(modes.shape[1])
    time = dt * np.arange(1, num_frames + 1)
    turned = modes[:, None] * np.exp(-wave * inputs.parameters[:, 0, None, None] * time[None, :, None])
    padded = _pad_1d(turned, 2 * modes.shape[1], resolution)
    return truncate_periodic_1d(padded, resolution, resolution)[:, :, None]


def _spectral_1d(
    spec: TaskSpec,
    inputs: Given,
    dt: float,
    num_frames: int,
    setting: Setting,
    *,
    kind: str,
    averages: bool,
    coefficients: Callable[[Float64], Float64] = lambda parameters: parameters,
) -> Float64:
    """coefficients: of the equation, from the parameters (n, P) of the task."""
    resolution, points = inputs.frame.shape[-1], setting.points
    start = np.fft.irfft(_pad_1d(_modes_1d(inputs.frame[:, 0], averages), resolution, points), n=points)
    of_each = coefficients(inputs.parameters)
    solved = spectral.solve_1d(
        kind,
        start,
        of_each,
        spec.axes[0].extent,
        dt,
        num_frames + 1,
        setting.substeps,
        order=setting.order,
        single=setting.single,
    )[:, 1:]
    fine = resolution * -(-points // resolution)
    padded = _pad_1d(solved / points, points, fine)
    reduce = average_periodic_1d if averages else truncate_periodic_1d
    return reduce(padded, fine, resolution)[:, :, None]


def _navier_stokes(spec: TaskSpec, inputs: Given, dt: float, num_frames: int, setting: Setting) -> Float64:
    resolution, points = inputs.frame.shape[-1], setting.points
    rows, columns = kept_modes_2d(resolution)
    modes = np.fft.rfft2(inputs.frame[:, 0])[..., rows, columns] / resolution**2
    modes = modes / half_cell_shift(rows + columns, resolution)
    start = np.fft.irfft2(_pad_2d(modes, resolution, points), s=(points, points))
    flow = spectral.navier_stokes(
        start,
        spec.axes[0].extent,
        spectral.NS_VISCOSITY,
        spectral.NS_DRAG,
        1.0,
        dt,
        num_frames + 1,
        substeps=setting.substeps,
        order=setting.order,
        single=setting.single,
    )[:, 1:]
    if points < resolution:
        flow = _pad_2d(flow[..., kept_modes_2d(points)[0], kept_modes_2d(points)[1]] / points**2, points, resolution)
        points = resolution
    return truncate_periodic_2d(flow, points, resolution)[:, :, None]


def _diffusion_reaction(spec: TaskSpec, inputs: Given, dt: float, num_frames: int, setting: Setting) -> Float64:
    start = diffreact.resample_cosine(np.moveaxis(inputs.frame, 1, 0), setting.points)
    frames = _compiled("reaction", setting, spec.axes[0].extent, dt, num_frames)(start)
    return np.transpose(diffreact.resample_cosine(frames, inputs.frame.shape[-1]), (2, 0, 1, 3, 4))  # (n, T, 2, R, R)


def _euler(spec: TaskSpec, inputs: Given, dt: float, num_frames: int, setting: Setting) -> Float64:
    density, pressure, velocity = np.moveaxis(inputs.frame, 1, 0)
    start = _regrid(conserved(np.stack([density, velocity, pressure])), setting.points, 1)
    frames = _compiled("gas", setting, spec.axes[0].extent, dt, num_frames)(np.moveaxis(start, 1, -1))  # (T, 3, N, n)
    stored = _regrid(np.moveaxis(frames, -1, 0), inputs.frame.shape[-1], 1)  # (n, T, 3, R)
    density, velocity, pressure = primitive(np.moveaxis(stored, 2, 0))
    return np.stack([density, pressure, velocity], axis=2)


def _shallow_water(spec: TaskSpec, inputs: Given, dt: float, num_frames: int, setting: Setting) -> Float64:
    start = np.moveaxis(_regrid(inputs.frame, setting.points, 2), 0, -1)  # (3, N, N, n)
    frames = _compiled("water", setting, spec.axes[0].extent, dt, num_frames)(start)  # (T, 3, N, N, n)
    return _regrid(np.moveaxis(frames, -1, 0), inputs.frame.shape[-1], 2)


def _darcy(spec: TaskSpec, inputs: Given, dt: float, num_frames: int, setting: Setting) -> Float64:
    """A coarse cell takes the geometric mean of the medium, which is exact for a random two-phase medium in 2D."""
    resolution, cells = inputs.static.shape[-1], setting.points
    parts = _overlaps(resolution, cells)
    medium = np.exp(parts @ np.log(inputs.static[:, 0]) @ parts.T)
    field = _compiled("darcy", setting, spec.axes[0].extent, dt, num_frames)(medium)
    back = _linear_weights(cells, resolution) if cells < resolution else _overlaps(cells, resolution)
    return (inputs.parameters[:, 0, None, None] * (back @ field @ back.T))[:, None, None]


@lru_cache(maxsize=64)
def _compiled(kind: str, setting: Setting, extent: float, dt: float, num_frames: int) -> Callable[[Float64], Float64]:
    """State of all trajectories -> that of each later frame (T, ...), compiled; of a steady task medium -> solution."""
    import jax
    from jax import lax
    from jax import numpy as jnp

    dx, steps = extent / setting.points, setting.substeps

    def march(flow: finite_volume.Flow, u: Any) -> Any:
        """`finite_volume.march` over one frame."""
        rate, limit = flow

        def advance(carry: Any) -> Any:
            u, left = carry
            count = jnp.maximum(1.0, jnp.ceil(left / limit(u) - 1e-5))
            step = left / count
            middle = u + step * rate(u)
            # no step at all, or not a number: it has blown up, and the frame ends
            return 0.5 * (u + middle + step * rate(middle)), jnp.where((count > 1) & (step > 0), left - step, 0.0)

        return lax.while_loop(lambda carry: carry[1] > 0, advance, (u, jnp.asarray(dt, u.dtype)))[0]

    def solve(start: Any) -> Any:
        if kind == "darcy":
            return darcy.iterate(start, extent, steps, lax.fori_loop)
        read: Callable[[Any], Any] = lambda u: u  # noqa: E731
        follow: Callable[[Any], Any]
        if kind == "reaction":
            start, read = diffreact.to_modes(start), diffreact.to_values
            one = diffreact.stepper(setting.points, extent, dt / steps)
            follow = lambda u: lax.fori_loop(0, steps, lambda _, v: one(v), u)  # noqa: E731
        else:
            flow = finite_volume.gas(dx, "open") if kind == "gas" else finite_volume.water(dx)
            follow = partial(march, flow)

        def frame(u: Any, _: None) -> Any:
            later = follow(u)
            return later, read(later)

        return lax.scan(frame, start, None, length=num_frames)[1]

    jitted = jax.jit(solve)

    def run(start: Float64) -> Float64:
        with jax.enable_x64(not setting.single):
            return np.asarray(jitted(start.astype(np.float32 if setting.single else np.float64)))

    return run


def _overlaps(points: int, wanted: int) -> Float64:
    """(wanted, points): the means over `wanted` cells of a function that is constant in each of `points` cells."""
    fine = np.lcm(points, wanted)
    return block_mean(np.eye(points).repeat(fine // points, axis=1), wanted, 1).T


def _modes_1d(values: Float64, averages: bool) -> Complex128:
    """(n, R) stored values -> (n, (R + 1) // 2) amplitudes of the modes below the Nyquist mode, filter undone."""
    resolution = values.shape[-1]
    modes = np.arange((resolution + 1) // 2)
    amplitudes = np.fft.rfft(values)[..., : modes.size] / resolution / half_cell_shift(modes, resolution)
    undone: Complex128 = amplitudes / np.sinc(modes / resolution) if averages else amplitudes
    return undone


def _pad_1d(amplitudes: Complex128, points: int, wanted: int) -> Complex128:
    """Amplitudes of modes on `points` points -> (..., wanted // 2 + 1) rfft coefficients, cut or padded with zeros."""
    num_modes = min((points + 1) // 2, (wanted + 1) // 2, amplitudes.shape[-1])
    out = np.zeros((*amplitudes.shape[:-1], wanted // 2 + 1), dtype=np.complex128)
    out[..., :num_modes] = amplitudes[..., :num_modes] * wanted
    return out


def _pad_2d(amplitudes: Complex128, points: int, wanted: int) -> Complex128:
    """Amplitudes in the order of `kept_modes_2d(points)` -> (..., wanted, wanted // 2 + 1) rfft2 coefficients."""
    out = np.zeros((*amplitudes.shape[:-2], wanted, wanted // 2 + 1), dtype=np.complex128)
    rows, columns = kept_modes_2d(min(points, wanted))
    out[..., rows, columns] = amplitudes[..., rows, columns] * wanted**2
    return out


def _regrid(averages: Float64, wanted: int, num_spatial_dims: int) -> Float64:
    """Cell averages (..., *S) on another grid: means over blocks, of limited slopes where cells are cut.

    Integrals are kept to round-off.
    """
    points = averages.shape[-1]
    for axis in range(averages.ndim - num_spatial_dims, averages.ndim):
        fine = np.moveaxis(_refine(averages, int(np.lcm(points, wanted)) // points, axis), axis, -1)
        averages = np.moveaxis(block_mean(fine, wanted, 1), -1, axis)
    return averages


def _refine(averages: Float64, factor: int, axis: int) -> Float64:
    if factor == 1:
        return averages
    values = np.moveaxis(averages, axis, -1)
    jump = np.diff(values, axis=-1)
    none = np.zeros_like(values[..., :1])
    slope = limited_slope(np.concatenate([none, jump], axis=-1), np.concatenate([jump, none], axis=-1))
    offset = (np.arange(factor) + 0.5) / factor - 0.5
    fine = values[..., None] + slope[..., None] * offset  # (..., N, factor)
    return np.moveaxis(fine.reshape(*values.shape[:-1], -1), -1, axis)


def _linear_weights(cells: int, resolution: int) -> Float64:
    """(resolution, cells): linear interpolation from coarse to fine cell centers, with zero on both ends."""
    coarse = np.concatenate([[0.0], (np.arange(cells) + 0.5) / cells, [1.0]])
    fine = (np.arange(resolution) + 0.5) / resolution
    columns = [np.interp(fine, coarse, unit) for unit in np.eye(cells + 2)[1:-1]]
    return np.stack(columns, axis=1)


RESTARTS: dict[str, Restart] = {
    "advection1d": Restart(_advection, singles=False),
    "burgers1d": Restart(
        partial(_spectral_1d, kind="burgers", averages=True, coefficients=lambda nu: nu / np.pi),
        spectral.burgers_substeps,
        orders=True,
    ),
    "ks1d": Restart(
        partial(_spectral_1d, kind="ks", averages=False, coefficients=lambda none: np.zeros((len(none), 1))),
        lambda points, dt: steps_of(dt, spectral.KS_STEP),
        orders=True,
    ),
    "reacdiff1d": Restart(
        partial(_spectral_1d, kind="fisher", averages=True),
        lambda points, dt: steps_of(dt, spectral.REACDIFF_STEP),
        orders=True,
    ),
    "euler1d": Restart(_euler),
    "ns2d": Restart(_navier_stokes, spectral.ns_substeps, orders=True),
    "swe2d": Restart(_shallow_water),
    "diffreact2d": Restart(_diffusion_reaction, lambda points, dt: steps_of(dt, diffreact.STEP)),
    "darcy2d": Restart(_darcy, lambda points, dt: 16),
}
