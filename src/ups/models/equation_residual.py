"""Equations in discretized form, for tasks that name theirs: how far a field is from a solution, and the way nearer.

`darcy`: -div(a grad u) = beta on a rectangle with u = 0 on its boundary, by finite volumes, as the reference solver has
it (`ups.solvers.darcy`): the medium is constant in each stored cell, stored cells are divided, faces take the harmonic
mean. Refinement is conjugate gradients from the given field, preconditioned by the solution in a constant medium, which
sine waves give directly. How fast it converges depends on the contrast of the medium and not on the grid.

B samples, X and Y stored cells, N and M cells of the finer grid.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor
from torch.nn import functional as F

from ups.errors import DataError
from ups.models.normalization import wide
from ups.spec.batch import Batch
from ups.spec.task import TaskSpec

# Cells of the finer grid along an axis, at least: as the reference solver has them.
LEAST_CELLS = 128


def equation_residual(batch: Batch, solution: Tensor) -> Tensor:
    """(B,): what solution (B, C, *S) misses the task's equation by, relative to u = 0.

    In the norm in which it is about the error of the gradient of u: a plain one would see the finest waves alone.
    """
    equation = _Darcy.of(batch)
    with torch.autocast(solution.device.type, enabled=False):
        missed = equation.energy(equation.missed(equation.finer(wide(solution)[:, 0])))
        return (missed / equation.energy(equation.source).clamp_min(1e-30)).sqrt()


def refined(batch: Batch, solution: Tensor, num_steps: int) -> Tensor:
    """solution (B, C, *S) in physical units after `num_steps` steps of conjugate gradients; gradients flow through."""
    if not num_steps:
        return solution
    equation = _Darcy.of(batch)
    with torch.autocast(solution.device.type, enabled=False):
        found = equation.coarser(equation.nearer(equation.finer(wide(solution)[:, 0]), num_steps))
    return found[:, None]


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

    def missed(self, u: Tensor) -> Tensor:
        """What is left of the source."""
        return self.source - self.apply(u)

    def in_constant_medium(self, r: Tensor) -> Tensor:
        """The solution for source r where the medium is its mean everywhere."""
        rows, columns = _sines(r.shape[1], r), _sines(r.shape[2], r)
        waves = _eigenvalues(r.shape[1], r)[:, None] + self.weights[1] * _eigenvalues(r.shape[2], r)
        return (rows.T @ ((rows @ r @ columns.T) / (waves * self.usual)) @ columns).to(r.dtype)

    def energy(self, r: Tensor) -> Tensor:
        """(B,): of the field whose source is r."""
        return _dot(r, self.in_constant_medium(r)).flatten()

    def nearer(self, u: Tensor, num_steps: int) -> Tensor:
        """Steps of preconditioned conjugate gradients."""
        r = self.missed(u)
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


@functools.lru_cache(maxsize=8)
def _sine_matrix(cells: int) -> Tensor:
    """(waves, cells), orthonormal: sines that are 0 half a cell beyond the first and the last center."""
    wave, place = torch.arange(1, cells + 1, dtype=torch.float64), torch.arange(cells, dtype=torch.float64) + 0.5
    basis = torch.sin(math.pi * wave[:, None] * place / cells)
    size: Tensor = basis.square().sum(1, keepdim=True).sqrt()
    return basis / size


def _sines(cells: int, like: Tensor) -> Tensor:
    return _sine_matrix(cells).to(device=like.device, dtype=like.dtype)


def _eigenvalues(cells: int, like: Tensor) -> Tensor:
    """(waves,): of the second difference with those boundaries."""
    wave = torch.arange(1, cells + 1, dtype=torch.float64)
    return (4 * torch.sin(math.pi * wave / (2 * cells)).square()).to(device=like.device, dtype=like.dtype)


def _dot(a: Tensor, b: Tensor) -> Tensor:
    """(B, 1, 1)."""
    return (a * b).sum((1, 2), keepdim=True)
