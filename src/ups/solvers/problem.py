"""What a solver is given and what it returns: keyed draws in, stored arrays out. The solvers are in the other modules.

A draw depends on (seed, task, split, trajectory number, purpose) alone, so any trajectory can be made again without
the others, in any process and in any order.

From the solver's grid to the stored one without aliasing: smooth periodic fields are truncated (exact values of the
modes below the Nyquist mode), fields with steep fronts are averaged over the stored cells, which keeps integrals to
round-off. Stored values belong to cell centers in both cases.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from ups.errors import DataError, MissingExtraError
from ups.spec.keyed import key_of, keyed_uniform
from ups.spec.task import Role, TaskSpec

Split = Literal["train", "valid", "test"]
SPLITS: tuple[Split, ...] = ("train", "valid", "test")

# Part of every key and of the identity of the data: a change of a solver or of a draw is a new version.
GENERATOR = "ups-bench"
GENERATOR_VERSION = "1"

Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]
Complex128 = npt.NDArray[np.complex128]
Integers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Draws:
    """The random numbers of some trajectories of one split; row i belongs to trajectory numbers[i].

    fixed: parameters that are not drawn but given, by name.
    """

    seed: int
    task: str
    split: Split
    numbers: tuple[int, ...]
    fixed: Mapping[str, float] = field(default_factory=dict)

    def uniform(self, purpose: str, num_draws: int, low: float = 0.0, high: float = 1.0) -> Float64:
        """(n, num_draws) uniform draws in [low, high)."""
        key = key_of(self.seed, f"{GENERATOR}-v{GENERATOR_VERSION}", self.task, self.split, purpose)
        return low + (high - low) * keyed_uniform(key, self.numbers, num_draws)

    def log_uniform(self, purpose: str, num_draws: int, low: float, high: float) -> Float64:
        """(n, num_draws) draws in [low, high) whose logarithm is uniform."""
        values: Float64 = np.exp(self.uniform(purpose, num_draws, np.log(low), np.log(high)))
        return values

    def integers(self, purpose: str, num_draws: int, low: int, high: int) -> npt.NDArray[np.int64]:
        """(n, num_draws) integers from low to high, both included."""
        return np.floor(self.uniform(purpose, num_draws, low, high + 1)).astype(np.int64)

    def normal(self, purpose: str, num_draws: int) -> Float64:
        """(n, num_draws) standard normal draws (Box-Muller)."""
        pairs = self.uniform(purpose, 2 * num_draws)
        radius = np.sqrt(-2.0 * np.log1p(-pairs[:, :num_draws]))
        values: Float64 = radius * np.cos(2.0 * np.pi * pairs[:, num_draws:])
        return values

    def parameters(self, spec: TaskSpec) -> Float64:
        """(n, P): the parameters of the equation, in the order of `spec.parameters`."""
        columns = [np.zeros((len(self.numbers), 0))]
        for parameter in spec.parameters:
            purpose = f"parameter {parameter.name}"
            if parameter.name in self.fixed:
                column = np.full((len(self.numbers), 1), float(self.fixed[parameter.name]))
            elif parameter.scale == "log":
                column = self.log_uniform(purpose, 1, parameter.minimum, parameter.maximum)
            else:
                column = self.uniform(purpose, 1, parameter.minimum, parameter.maximum)
            columns.append(column)
        return np.concatenate(columns, axis=1)


@dataclass(frozen=True, slots=True)
class Solution:
    """n solved trajectories in their stored form.

    state (n, T, C, *S), static (n, C, *S), target (n, C, *S) float32; parameters (n, P) float32. A role without
    fields has 0 channels, a steady task 0 frames.
    """

    state: Float32
    static: Float32
    target: Float32
    parameters: Float32

    def first(self, count: int) -> Solution:
        """The first `count` trajectories."""
        return Solution(self.state[:count], self.static[:count], self.target[:count], self.parameters[:count])

    def arrays(self) -> dict[str, Float32]:
        return {"state": self.state, "static": self.static, "target": self.target, "parameters": self.parameters}


def stored(
    spec: TaskSpec,
    resolution: int,
    parameters: Float64,
    *,
    state: Float64 | None = None,
    static: Float64 | None = None,
    target: Float64 | None = None,
) -> Solution:
    """Rounds solver arrays to float32, fills the roles that the task does not have, and checks the shapes."""
    num, space = len(parameters), (resolution,) * spec.num_spatial_dims
    arrays: dict[str, Float32] = {}
    roles: tuple[tuple[Role, Float64 | None], ...] = (("state", state), ("static", static), ("target", target))
    for role, array in roles:
        frame = (spec.num_channels(role), *space)
        if array is None:
            array = np.zeros((num, *((0,) if role == "state" else ()), *frame))
        if len(array) != num or array.shape[-len(frame) :] != frame:
            raise DataError(f"solver of '{spec.name}' returned {role} of shape {array.shape}")
        arrays[role] = np.ascontiguousarray(array, dtype=np.float32)
    return Solution(**arrays, parameters=np.ascontiguousarray(parameters, dtype=np.float32))


def cell_centers(resolution: int, extent: float) -> Float64:
    """(resolution,): the middle of each of `resolution` equal cells of [0, extent]."""
    centers: Float64 = (np.arange(resolution, dtype=np.float64) + 0.5) * (extent / resolution)
    return centers


def solver_points(resolution: int, minimum: int = 0) -> int:
    """Points per axis that a solver uses: a multiple of the stored ones, at least twice them and at least `minimum`."""
    return resolution * max(2, -(-minimum // resolution))


def require_solvers(doing: str = "starting a solver from stored frames") -> None:
    """Raises MissingExtraError if what the solvers need is not installed: better before long work than after it."""
    for package in ("exponax", "scipy", "skfem"):
        if importlib.util.find_spec(package) is None:
            raise MissingExtraError.of("generate", package, doing)


def namespace(array: Float64) -> Any:
    """NumPy, or jax.numpy for an array that JAX traces."""
    return np if isinstance(array, np.ndarray) else array.__array_namespace__()


def steps_of(duration: float, longest: float) -> int:
    """The least number of equal steps of at most `longest`."""
    return max(1, math.ceil(duration / longest - 1e-9))


def half_cell_shift(modes: npt.NDArray[Any], resolution: int) -> Complex128:
    """Phase of each integer mode that moves samples from the left end of a cell to its center."""
    phase: Complex128 = np.exp(1j * np.pi * modes / resolution)
    return phase


def truncate_periodic_1d(coefficients: Complex128, num_points: int, resolution: int) -> Float64:
    """(..., num_points // 2 + 1) rfft coefficients -> (..., resolution) values at cell centers.

    Keeps modes below the Nyquist mode of the stored grid.
    """
    modes = np.arange((resolution + 1) // 2)
    resolved = coefficients[..., : modes.size] * half_cell_shift(modes, resolution) * (resolution / num_points)
    return np.fft.irfft(resolved, n=resolution)


def average_periodic_1d(coefficients: Complex128, num_points: int, resolution: int) -> Float64:
    """(..., num_points // 2 + 1) rfft coefficients -> (..., resolution) averages over the stored cells.

    The average of each mode over a cell is exact, so the mean of the field is kept to round-off.
    """
    modes = np.arange(num_points // 2 + 1)
    filtered = coefficients * np.sinc(modes / resolution) * half_cell_shift(modes, resolution)
    fine: Float64 = np.fft.irfft(filtered, n=num_points)
    return fine[..., :: num_points // resolution]


def kept_modes_2d(points: int) -> tuple[Integers, Integers]:
    """Indices of the modes below the Nyquist mode in an rfft2: rows (2 h - 1, 1), columns (1, h)."""
    half = (points + 1) // 2
    rows = np.concatenate([np.arange(half), np.arange(-(half - 1), 0)])
    return rows[:, None], np.arange(half)[None, :]


def truncate_periodic_2d(coefficients: Complex128, num_points: int, resolution: int) -> Float64:
    """(..., num_points, num_points // 2 + 1) rfft2 coefficients -> (..., resolution, resolution) at cell centers."""
    rows, columns = kept_modes_2d(resolution)
    spectrum = np.zeros((*coefficients.shape[:-2], resolution, resolution // 2 + 1), dtype=np.complex128)
    shift = half_cell_shift(rows + columns, resolution) * (resolution / num_points) ** 2
    spectrum[..., rows, columns] = coefficients[..., rows, columns] * shift
    return np.fft.irfft2(spectrum, s=(resolution, resolution))


def block_mean(field: Float64, resolution: int, num_spatial_dims: int) -> Float64:
    """(..., *fine) cell averages -> (..., *stored) cell averages over blocks of whole solver cells."""
    lead = field.shape[: field.ndim - num_spatial_dims]
    blocks = field.reshape(*lead, *(resolution, field.shape[-1] // resolution) * num_spatial_dims)
    means: Float64 = blocks.mean(axis=tuple(range(len(lead) + 1, blocks.ndim, 2)))  # of (..., n, factor[, n, factor])
    return means
