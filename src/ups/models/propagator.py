"""What is linear in a problem, in Fourier space: exact for linear equations with constant coefficients.

change of u = S (exp(symbol) - 1) A u, for each channel and one axis after the other. A analyzes a line into waves (the
discrete Fourier transform on a periodic axis, cosines elsewhere), S sums them up again, both as products with real
matrices. The symbol of a wave with k periods along the axis is, with f = k / 8,

    dt / task.dt x (c0 - c2 f^2 - c4 f^4 - i (2 pi k c1 + c3 f^3)):

growth, diffusion and its fourth-order kin, and the shift c1 (in lengths of the axis) with dispersion. Each coefficient
is linear in (1, relative parameters, normalized parameters). All are zero when new: no change.

B samples, C channels, S space, F features of the parameters, R lines' owners: the channels of all samples.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from ups.models.network import NetworkInput
from ups.models.normalization import wide
from ups.models.task_tables import NamedTable, RowName
from ups.models.warm_start import UnitChange
from ups.spec.batch import Memo
from ups.spec.task import TaskSpec

_UNIT = 8.0  # periods of a wave at which all powers of the frequency are 1
_EVEN, _ODD = 3, 2
# A wave that decays further is gone; growth is bounded, so that a bad fit cannot overflow a rollout at once.
_SLOWEST, _FASTEST = -12.0, 0.5


class Propagator(NamedTable):
    """The linear part of the change of every transient task: five coefficients for each channel, axis and feature."""

    def __init__(self, tasks: Sequence[TaskSpec]) -> None:
        super().__init__(tasks)
        self.table = nn.Parameter(torch.zeros(len(self.row_names), _EVEN + _ODD))

    def names_of(self, task: TaskSpec) -> list[RowName]:
        """Rows of one task, in the order in which they are multiplied; none of a steady one."""
        parameters = [p.name for p in task.parameters]
        features = ["1", *(f"{p} relative" for p in parameters), *parameters]
        return [
            (task.name, feature, str(axis), channel)
            for feature in features
            for axis in range(len(task.axes))
            for channel in task.channel_names("state")
        ]

    def change_units(self, changes: Mapping[str, UnitChange]) -> None:
        """The same law for other units of time, length and parameters. Without gradients."""
        for task, change in changes.items():
            for name, row in self._rows.items():
                if name[0] == task:
                    length = change.lengths[int(name[2])]
                    powers = [1.0, length**2, length**4, length, length**3]
                    self.table[row] *= change.step * self.table.new_tensor(powers)
            for parameter, units in change.parameters.items():
                for name, row in self._rows.items():
                    if name[:2] == (task, f"{parameter} relative"):
                        self.table[row] *= units.relative
                    elif name[:2] == (task, parameter):
                        self.table[self._rows[(task, "1", *name[2:])]] += units.offset * self.table[row]
                        self.table[row] *= units.normalized

    def forward(self, group: Sequence[NetworkInput]) -> list[Tensor]:
        """The normalized change (B, C, *S) of the last frame of each transient task of a group with one grid."""
        changes: dict[int, Tensor] = {}
        by_kind: dict[tuple[bool, ...], list[int]] = {}
        for number, given in enumerate(group):
            kind = tuple(axis.periodic for axis in given.task.axes)
            by_kind.setdefault(kind, []).append(number)
        for kind, numbers in by_kind.items():
            lines = [wide(last_frame(group[n])).flatten(0, 1) for n in numbers]  # each (R, *S)
            memo = group[numbers[0]].memo if len(numbers) == 1 else Memo()
            symbols = memo.once("symbols", lambda: self._symbols([group[n] for n in numbers], kind))  # noqa: B023
            change = self._propagated(lines[0] if len(lines) == 1 else torch.cat(lines), symbols, kind)
            parts = torch.split(change, [line.shape[0] for line in lines])
            for n, part in zip(numbers, parts, strict=True):
                changes[n] = part.reshape(group[n].fields.shape[0], -1, *part.shape[1:])
        return [changes[n] for n in range(len(group))]

    def _coefficients(self, given: NetworkInput) -> Tensor:
        task = given.task
        # In at least float32 like the fields, whatever the weights' type is.
        dtype = wide(given.fields).dtype
        table = self.table[self.rows(task, self.table.device)].to(dtype)  # (F * axes * C, 5)
        ratio = (given.dt / task.dt).to(dtype)[:, None]  # (B, 1)
        parameters = torch.cat([given.relative_parameters, given.parameters], dim=1).to(dtype)
        features = torch.cat([ratio, parameters * ratio], dim=1)  # (B, F)
        product = features @ table.reshape(features.shape[1], -1)  # (B, axes * C * 5)
        shape = (given.fields.shape[0], len(task.axes), task.num_channels("state"), _EVEN + _ODD)
        return product.reshape(shape).transpose(1, 2).flatten(0, 1)

    def _symbols(self, group: Sequence[NetworkInput], periodic: Sequence[bool]) -> list[tuple[Tensor, Tensor]]:
        """Of each axis, real and imaginary part (R, 1, .., K) of exp(symbol) - 1."""
        coefficients = torch.cat([self._coefficients(given) for given in group])  # (R, axes, 5)
        space = group[0].fields.shape[2:]
        symbols = []
        for axis, points in enumerate(space):
            powers = self._matrix(symbol_powers, points, periodic[axis], coefficients)
            even, odd = torch.split(coefficients[:, axis], [_EVEN, _ODD], dim=-1)
            growth = (even @ powers[:_EVEN]).clamp(_SLOWEST, _FASTEST)  # (R, K)
            turn = odd @ powers[_EVEN:]
            # exp(growth) (cos(turn) - i sin(turn)) - 1, without the loss of digits where it is small.
            real = torch.expm1(growth) * turn.cos() - 2 * (turn / 2).sin().square()
            imaginary = -growth.exp() * turn.sin()
            shape = [growth.shape[0], *[1] * (len(space) - 1), -1]
            symbols.append((real.reshape(shape), imaginary.reshape(shape)))
        return symbols

    def _propagated(self, u: Tensor, symbols: Sequence[tuple[Tensor, Tensor]], periodic: Sequence[bool]) -> Tensor:
        """u (R, *S) -> the change (R, *S): by what happens along one axis after the other."""
        change = self._along(0, u, symbols[0], periodic[0])
        for axis in range(1, len(periodic)):
            change = change + self._along(axis, u + change, symbols[axis], periodic[axis])
        return change

    def _along(self, axis: int, u: Tensor, symbol: tuple[Tensor, Tensor], periodic: bool) -> Tensor:
        """u (R, *S) -> the change (R, *S) by what happens along one axis."""
        points, (real, imaginary) = u.shape[axis + 1], symbol
        waves = u.movedim(axis + 1, -1) @ self._matrix(analysis_matrix, points, periodic, u)  # (R, ..., 2 K or K)
        if periodic:
            c, s = waves.chunk(2, dim=-1)
            moved = torch.cat([c * real + s * imaginary, s * real - c * imaginary], dim=-1)
        else:
            moved = torch.cat([waves * real, -waves * imaginary], dim=-1)
        return (moved @ self._matrix(synthesis_matrix, points, periodic, u)).movedim(-1, axis + 1)

    def _matrix(self, make: Callable[[int, bool], Tensor], points: int, periodic: bool, like: Tensor) -> Tensor:
        return self._constants.get(lambda: make(points, periodic), (make, points, periodic), like.device, like.dtype)


def last_frame(given: NetworkInput) -> Tensor:
    """(B, C, *S): the state in the last context frame, normalized. It stands last in the fields."""
    return given.fields[:, given.fields.shape[1] - given.task.num_channels("state") :]


def _angles(points: int, periodic: bool) -> Tensor:
    """(points, K) in float64. The wave of Nyquist's frequency is left out: its shifts are not on the grid."""
    where = torch.arange(points, dtype=torch.float64)
    if periodic:
        return 2 * math.pi * torch.outer(where, torch.arange((points + 1) // 2, dtype=torch.float64)) / points
    return math.pi * torch.outer(where + 0.5, torch.arange(points, dtype=torch.float64)) / points


def analysis_matrix(points: int, periodic: bool) -> Tensor:
    """(points, 2 K) to cosines and sines, or (points, K) to the cosines of the even extension."""
    angles = _angles(points, periodic)
    norm = torch.full((angles.shape[1],), 2.0 / points, dtype=torch.float64)
    norm[0] = 1.0 / points
    return torch.cat([angles.cos() * norm, angles.sin() * norm], dim=1) if periodic else angles.cos() * norm


def synthesis_matrix(points: int, periodic: bool) -> Tensor:
    """(2 K, points) from cosines and sines."""
    angles = _angles(points, periodic)
    return torch.cat([angles.cos(), angles.sin()], dim=1).T


def symbol_powers(points: int, periodic: bool) -> Tensor:
    """(5, K): what the coefficients c0, c2, c4 and c1, c3 are multiplied by."""
    count = (points + 1) // 2 if periodic else points
    k = torch.arange(count, dtype=torch.float64) * (1.0 if periodic else 0.5)
    f = k / _UNIT
    return torch.stack([torch.ones_like(f), -(f**2), -(f**4), 2 * math.pi * k, f**3])
