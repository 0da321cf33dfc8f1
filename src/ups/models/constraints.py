"""What a task says about its fields, kept exactly in every step: integrals, fields without negative values, vectors
without divergence, values on the boundary; and what its data never have, the wave of two points. The stepper applies
them, whatever the network. At the end: equations in discretized form, and the refinement of a steady prediction by
them.

`darcy`: -div(a grad u) = beta on a rectangle with u = 0 on its boundary, by finite volumes, as the reference solver has
it (`ups.solvers.darcy`): the medium is constant in each stored cell, stored cells are divided, faces take the harmonic
mean. Refinement is conjugate gradients from the prediction: each step lowers the energy of the error.

B samples, C channels of the state, S space, A axes.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from ups.errors import DataError
from ups.models.normalization import Constants, wide
from ups.spec.batch import Batch
from ups.spec.grid import point_weights
from ups.spec.task import FieldSpec, TaskSpec

_constants = Constants()


def conserving(change: Tensor, task: TaskSpec) -> Tensor:
    """change (B, C, *S) without its mean over space in the fields that the task says are conserved.

    Exact on uniform grids, where the mean over points is the integral.
    """
    if not task.conserved:
        return change
    mean = change.mean(tuple(range(2, change.ndim)), keepdim=True)  # (B, C, 1, ...)
    if len(conserved_channels(task)) < change.shape[1]:
        mean = _mask(change, task, task.conserved) * mean
    return change - mean


def without_shortest_waves(change: Tensor, smooth_from: Sequence[Sequence[int]]) -> Tensor:
    """change (B, C, *S) without the wave of two points where the data never have it (`Statistics.smooth_from`).

    On the grid of the data and finer ones; on a coarser grid that wave is another one, which may be real.
    """
    for axis, columns in enumerate(zip(*smooth_from, strict=True)):
        dim, points = axis + 2, change.shape[axis + 2]
        chosen = [points % 2 == 0 and 0 < known <= points for known in columns]
        if not any(chosen):
            continue
        line = [-1 if d == dim else 1 for d in range(1, change.ndim)]
        wave = _constants.get(functools.partial(_wave, points, line), (points, *line), change.device, change.dtype)
        size = (change * wave).mean(dim, keepdim=True)
        if not all(chosen):
            size = size * _chosen(change, chosen)
        change = torch.addcmul(change, size, wave, value=-1)
    return change


def _wave(points: int, shape: Sequence[int]) -> Tensor:
    """1, -1, 1, ... along one axis."""
    return (1.0 - 2.0 * (torch.arange(points) % 2)).reshape(*shape)


def by_cells(x: Tensor, batch: Batch, constants: Constants) -> Tensor:
    """x (B, C, *S) on the grid of a batch, points counting by their cells: its mean is that of the field.

    constants: of one set of data, in which a task has one grid of a size.
    """

    def weights() -> Tensor:
        found = point_weights(batch.task.axes, [c.double().cpu().numpy() for c in batch.coordinates])
        return torch.ones(()) if found is None else torch.from_numpy(found)

    return x * constants.get(weights, ("cells", batch.task.name, batch.space), x.device, x.dtype)


def conserved_channels(task: TaskSpec) -> list[int]:
    """Numbers of the state channels whose integral the task says is conserved."""
    fields = [field for field, _ in _fields(task) for _ in range(field.num_channels(task.num_spatial_dims))]
    return [channel for channel, field in enumerate(fields) if field.name in task.conserved]


def not_negative(frame: Tensor, task: TaskSpec, *, conserve: bool) -> Tensor:
    """frame (B, C, *S) in physical units with 0 instead of negative values in the fields that the task calls positive.

    conserve: what a conserved field gains by that is taken from its other values in proportion, so that its integral
    stays, on a uniform grid.
    """
    if not task.positive:
        return frame
    space = tuple(range(2, frame.ndim))
    cut = frame.clamp(min=0)
    if not conserve:
        return torch.where(_mask(frame, task, task.positive) > 0, cut, frame)
    before, after = (x.sum(space, keepdim=True, dtype=torch.float64) for x in (frame, cut))
    share = torch.where(after > 0, before.clamp(min=0) / after.clamp(min=torch.finfo(torch.float64).tiny), 1.0)
    kept = [name for name in task.positive if name in task.conserved]
    share = torch.where(_mask(frame, task, kept) > 0, share, 1.0)
    return torch.where(_mask(frame, task, task.positive) > 0, cut * share.to(frame.dtype), frame)


def at_boundaries(frame: Tensor, task: TaskSpec) -> Tensor:
    """frame (B, C, *S) in physical units with the values that the task knows at the first and last points of its axes.

    Applied last: what they change of an integral, or of a divergence, is not made up for.
    """
    if not task.boundary_values:
        return frame
    names, axes = task.channel_names(task.predicted), [axis.name for axis in task.axes]
    result = frame.clone()
    for known in task.boundary_values:
        channel = result[:, names.index(known.channel)]
        channel.select(axes.index(known.axis) + 1, 0 if known.end == "first" else -1).fill_(known.value)
    return result


def without_divergence(change: Tensor, scale: Tensor, task: TaskSpec) -> Tensor:
    """change (B, C, *S) in units of scale (C, 1, ...) without the part of each vector field that has a divergence.

    In Fourier space, u - k (k . u) / |k|^2, for the fields that the task calls free of divergence; all axes of such a
    task are periodic, and the grid must be uniform. What a frame already has is neither removed nor increased. Wave
    numbers at the end of an even axis have no derivative on the grid and are left as they are.
    """
    if not task.divergence_free:
        return change
    dims = tuple(range(2, change.ndim))
    waves = wave_numbers(change, task)
    square = sum(k * k for k in waves)
    square = torch.where(torch.as_tensor(square) > 0, torch.as_tensor(square), 1.0)
    result = change.clone()
    for field, first in _fields(task):
        if field.name not in task.divergence_free:
            continue
        rows = slice(first, first + task.num_spatial_dims)
        # At least float32: half precision has no transform.
        modes = torch.fft.rfftn(change[:, rows] * scale[rows], dim=dims)  # (B, A, *K)
        along = sum(k * modes[:, axis] for axis, k in enumerate(waves)) / square
        modes = modes - torch.stack([k * along for k in waves], dim=1)
        result[:, rows] = torch.fft.irfftn(modes, s=change.shape[2:], dim=dims) / scale[rows]
    return result


def wave_numbers(like: Tensor, task: TaskSpec) -> list[Tensor]:
    """One (1, .., K, .., 1) per axis, of the transform of real numbers; 0 at the end of an even axis."""
    space = like.shape[2:]
    all_numbers = []
    for axis, (points, spec) in enumerate(zip(space, task.axes, strict=True)):
        last = axis == len(space) - 1
        make = torch.fft.rfftfreq if last else torch.fft.fftfreq
        k = make(points, spec.extent / points, device=like.device, dtype=like.dtype) * (2 * math.pi)
        if points % 2 == 0:
            k = torch.where(torch.arange(len(k), device=like.device) == points // 2, torch.zeros_like(k), k)
        all_numbers.append(k.reshape([-1 if other == axis else 1 for other in range(len(space))]))
    return all_numbers


def _mask(like: Tensor, task: TaskSpec, names: tuple[str, ...] | list[str]) -> Tensor:
    """(C, 1, ...): 1 for the channels of these state fields, else 0."""
    chosen = [field.name in names for field, _ in _fields(task) for _ in range(field.num_channels(len(task.axes)))]
    return _chosen(like, chosen)


def _chosen(like: Tensor, chosen: Sequence[bool]) -> Tensor:
    """(C, 1, ...) for tensors like `like` (B, C, *S): 1 for the channels that are chosen, else 0."""
    key, shape = tuple(chosen), (-1, *[1] * (like.ndim - 2))
    return _constants.get(lambda: torch.tensor(key).reshape(*shape), (key, shape), like.device, like.dtype)


def _fields(task: TaskSpec) -> Iterator[tuple[FieldSpec, int]]:
    """State fields, each with the number of its first channel."""
    first = 0
    for field in task.fields_of("state"):
        yield field, first
        first += field.num_channels(task.num_spatial_dims)


# Cells of the finer grid along an axis, at least: as the reference solver has them.
LEAST_CELLS = 128


def refined(batch: Batch, solution: Tensor, num_steps: int) -> Tensor:
    """solution (B, C, *S) in physical units after `num_steps` steps of conjugate gradients; gradients flow through."""
    if not num_steps:
        return solution
    equation = _Darcy.of(batch)
    with torch.autocast(solution.device.type, enabled=False):
        refined_solution = equation.coarser(equation.nearer(equation.finer(wide(solution)[:, 0]), num_steps))
    return refined_solution[:, None]


class _Darcy:
    """One batch of media and sources on the finer grid."""

    def __init__(self, medium: Tensor, source: Tensor, factor: int, aspect: float) -> None:
        self.factor = factor
        fine = medium.repeat_interleave(factor, 1).repeat_interleave(factor, 2)
        # Fluxes along y count by the square of how much narrower cells are there.
        self.faces = [_faces(fine, 1), _faces(fine, 2)]
        self.weights = (1.0, aspect)
        self.source = source.expand_as(fine)
        self.usual = fine.flatten(1).mean(1)[:, None, None]

    @classmethod
    def of(cls, batch: Batch) -> _Darcy:
        task = batch.task
        check_darcy(task)
        medium = wide(batch.static)[:, task.channel_names("static").index("a")]  # (B, X, Y)
        beta = wide(batch.parameters)[:, [p.name for p in task.parameters].index("beta")]
        factor = max(2, -(-LEAST_CELLS // min(medium.shape[1:])))
        sizes = [axis.extent / (points * factor) for axis, points in zip(task.axes, medium.shape[1:], strict=True)]
        source = (beta * sizes[0] ** 2)[:, None, None]
        return cls(medium, source, factor, (sizes[0] / sizes[1]) ** 2)

    def apply(self, u: Tensor) -> Tensor:
        """The flux out of each cell, (B, N, M)."""
        total = torch.zeros_like(u)
        for dim, (faces, weight) in enumerate(zip(self.faces, self.weights, strict=True), start=1):
            padded = F.pad(u, (1, 1, 0, 0) if dim == 2 else (0, 0, 1, 1))  # zeros: on the boundary, half a cell away
            flux = faces * padded.diff(dim=dim)
            total = total - weight * flux.diff(dim=dim)
        return total

    def in_constant_medium(self, r: Tensor) -> Tensor:
        """The solution for source r where the medium is its mean everywhere."""
        rows, columns = _sines(r.shape[1], r), _sines(r.shape[2], r)
        waves = _eigenvalues(r.shape[1], r)[:, None] + self.weights[1] * _eigenvalues(r.shape[2], r)
        return (rows.T @ ((rows @ r @ columns.T) / (waves * self.usual)) @ columns).to(r.dtype)

    def nearer(self, u: Tensor, num_steps: int) -> Tensor:
        """Steps of preconditioned conjugate gradients."""
        r = self.source - self.apply(u)  # what is left of the source
        z = self.in_constant_medium(r)
        p, rz = z, _dot(r, z)
        for number in range(num_steps):
            flux = self.apply(p)
            step = rz / _dot(p, flux).clamp_min(1e-30)
            u = u + step * p
            if number + 1 < num_steps:
                r = r - step * flux
                z = self.in_constant_medium(r)
                before, rz = rz, _dot(r, z)
                p = z + rz / before.clamp_min(1e-30) * p
        return u

    def finer(self, u: Tensor) -> Tensor:
        """(B, X, Y) cell means -> (B, N, M), linear between the centers and 0 on the boundary."""
        x = u[:, None]
        for dim in (2, 3):
            first, last = -x.narrow(dim, 0, 1), -x.narrow(dim, x.shape[dim] - 1, 1)
            x = torch.cat([first, x, last], dim=dim)
        grown = F.interpolate(x, scale_factor=self.factor, mode="bilinear", align_corners=False)[:, 0]
        f = self.factor
        return grown[:, f:-f, f:-f]

    def coarser(self, u: Tensor) -> Tensor:
        """(B, N, M) -> (B, X, Y): means of the cells."""
        return F.avg_pool2d(u[:, None], self.factor)[:, 0]


def check_darcy(task: TaskSpec) -> None:
    """Raises DataError for a task whose fields are not those of the equation that it names."""
    fits = (
        task.residual == "darcy"
        and task.channel_names("target") == ("u",)
        and "a" in task.channel_names("static")
        and "beta" in [p.name for p in task.parameters]
        and [axis.boundary for axis in task.axes] == ["dirichlet", "dirichlet"]
    )
    if not fits:
        raise DataError(
            f"task '{task.name}' names the equation '{task.residual}', and has other fields, parameters or boundaries",
            hint="darcy needs a static field a, a target u, a parameter beta and two axes with boundary dirichlet",
        )


def _faces(medium: Tensor, dim: int) -> Tensor:
    """Conductivities of the faces along an axis, one more than cells: those on the boundary are half a cell away."""
    before, after = medium.narrow(dim, 0, medium.shape[dim] - 1), medium.narrow(dim, 1, medium.shape[dim] - 1)
    inner = 2 * before * after / (before + after)
    ends = [2 * medium.narrow(dim, place, 1) for place in (0, medium.shape[dim] - 1)]
    return torch.cat([ends[0], inner, ends[1]], dim=dim)


def _sine_matrix(cells: int) -> Tensor:
    """(waves, cells), orthonormal: sines that are 0 half a cell beyond the first and the last center."""
    wave, place = torch.arange(1, cells + 1, dtype=torch.float64), torch.arange(cells, dtype=torch.float64) + 0.5
    basis = torch.sin(math.pi * wave[:, None] * place / cells)
    size: Tensor = basis.square().sum(1, keepdim=True).sqrt()
    return basis / size


def _sines(cells: int, like: Tensor) -> Tensor:
    return _constants.get(functools.partial(_sine_matrix, cells), ("sines", cells), like.device, like.dtype)


def _eigenvalues(cells: int, like: Tensor) -> Tensor:
    """(waves,): of the second difference with those boundaries."""

    def values() -> Tensor:
        wave = torch.arange(1, cells + 1, dtype=torch.float64)
        return 4 * torch.sin(math.pi * wave / (2 * cells)).square()

    return _constants.get(values, ("eigenvalues", cells), like.device, like.dtype)


def _dot(a: Tensor, b: Tensor) -> Tensor:
    """(B, 1, 1)."""
    return (a * b).sum((1, 2), keepdim=True)
