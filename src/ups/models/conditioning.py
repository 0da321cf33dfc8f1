"""What a step depends on in addition to the fields: parameters, dt, task, boundaries, resolution; and where a token
stands.

Scalars become one vector per sample that modulates every block (AdaLN-zero, see blocks.py). Positions become one vector
per token, and only where the equation is not the same everywhere: near boundaries, and on periodic axes of tasks that
do not declare the symmetry `translation`. All other tasks stay equivariant under shifts by whole patches.

B samples, P parameters of the task, K scalars, N tokens along each axis, D width.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ups.models.vocabulary import BOUNDARIES, Vocabulary
from ups.spec.task import AxisSpec, TaskSpec

MAX_AXES = 3
# Rows of the scalar table before the named parameters: log dt, then log points and log extent of each axis.
_LOG_DT = 0
_LOG_POINTS = 1
_LOG_EXTENT = _LOG_POINTS + MAX_AXES
_NUM_OWN_SCALARS = _LOG_EXTENT + MAX_AXES
OWN_SCALARS = ("log dt", *(f"log {what} {axis}" for what in ("points", "extent") for axis in range(MAX_AXES)))
# Brings the logarithms of usual steps, extents and resolutions (2^4 to 2^10 points) to about unit size.
_LOG_SCALE = 3.0
_TYPICAL_LOG2_POINTS = 6.0

_NUM_WAVES = 8
_FEATURES_PER_AXIS = 2 * _NUM_WAVES + 2


class Conditioning(nn.Module):
    """Parameters, dt, task, boundary kinds and resolution -> (B, D)."""

    def __init__(self, vocabulary: Vocabulary, width: int) -> None:
        super().__init__()
        self.vocabulary = vocabulary
        num_scalars = _NUM_OWN_SCALARS + len(vocabulary.parameters)
        self.scalar_slope = nn.Parameter(torch.randn(num_scalars, width))
        self.scalar_offset = nn.Parameter(torch.randn(num_scalars, width))
        self.task = nn.Parameter(torch.randn(len(vocabulary.tasks), width) * 0.5)
        self.boundary = nn.Parameter(torch.randn(MAX_AXES, len(BOUNDARIES), width) * 0.5)
        self.mix = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width))

    def forward(self, task: TaskSpec, parameters: Tensor, dt: Tensor, space: Sequence[int]) -> Tensor:
        """parameters (B, P) normalized, dt (B,) in the task's unit, space (X[, Y[, Z]]) points -> (B, D)."""
        device, dtype = dt.device, self.scalar_slope.dtype
        rows: list[int] = []
        values: list[Tensor] = []
        if not task.steady:
            rows.append(_LOG_DT)
            values.append(torch.log(dt) / _LOG_SCALE)
        for axis, (points, spec) in enumerate(zip(space, task.axes, strict=True)):
            rows += [_LOG_POINTS + axis, _LOG_EXTENT + axis]
            values.append(torch.full_like(dt, (math.log2(points) - _TYPICAL_LOG2_POINTS) / _LOG_SCALE))
            values.append(torch.full_like(dt, math.log(spec.extent) / _LOG_SCALE))
        names = [p.name for p in task.parameters]
        rows += [_NUM_OWN_SCALARS + i for i in self.vocabulary.parameter_ids(names)]
        values += parameters.unbind(1)
        scalars = torch.stack([v.to(dtype) for v in values], dim=1)  # (B, K)
        index = torch.tensor(rows, device=device)
        features = scalars[:, :, None] * self.scalar_slope[index] + self.scalar_offset[index]  # (B, K, D)
        embedded = nn.functional.silu(features).sum(1) * len(rows) ** -0.5  # (B, D)
        absent = ["absent"] * (MAX_AXES - len(task.axes))
        boundaries = self._boundaries([*(axis.ends[0] for axis in task.axes), *absent], device)
        if any(isinstance(axis.boundary, tuple) for axis in task.axes):
            last = self._boundaries([*(axis.ends[1] for axis in task.axes), *absent], device)
            # Turned by one place: otherwise a wall and then an open end would be the same as the other way round.
            differ = torch.tensor([[axis.ends[0] != axis.ends[1]] for axis in task.axes] + [[False]] * len(absent))
            boundaries = torch.where(differ.to(device), (boundaries + last.roll(1, dims=-1)) / 2, boundaries)
        task_index = torch.tensor([self.vocabulary.task_id(task.name)], device=device)
        fixed = self.task[task_index] + boundaries.sum(0)  # (1, D)
        mixed: Tensor = self.mix(embedded + fixed)
        return mixed

    def _boundaries(self, kinds: Sequence[str], device: torch.device) -> Tensor:
        """(axes, D), a kind for each axis."""
        # An unknown boundary takes some row times 0: it says nothing, and the table stays in the graph.
        kind_index = torch.tensor([BOUNDARIES.index(k) if k in BOUNDARIES else 0 for k in kinds], device=device)
        known = torch.tensor([[k in BOUNDARIES] for k in kinds], device=device)  # (axes, 1)
        return self.boundary[torch.arange(MAX_AXES, device=device), kind_index] * known


def position_features(center: Tensor, axis: AxisSpec, translation: bool) -> Tensor:
    """Patch centers (N,) from 0 to 1 along the axis -> (N, features); all 0 where position must not matter."""
    wave_numbers = torch.arange(1, _NUM_WAVES + 1, dtype=center.dtype, device=center.device)
    features = center.new_zeros(center.shape[0], _FEATURES_PER_AXIS)
    if axis.periodic and translation:
        return features
    turn = 2 * math.pi if axis.periodic else math.pi
    angle = turn * center[:, None] * wave_numbers
    features[:, : 2 * _NUM_WAVES] = torch.cat([angle.sin(), angle.cos()], dim=1)
    if not axis.periodic:
        tokens_from_start = torch.arange(center.shape[0], dtype=center.dtype, device=center.device)
        features[:, -2] = torch.exp(-tokens_from_start)
        features[:, -1] = torch.exp(-tokens_from_start.flip(0))
    return features


class Positions(nn.Module):
    """Where a token stands -> (*N, D), added to the tokens at the entry of the operator."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(MAX_AXES, _FEATURES_PER_AXIS, width) * 0.1)

    def forward(self, task: TaskSpec, grid: Sequence[int], coordinates: Sequence[Tensor]) -> Tensor:
        """grid: tokens along each axis; coordinates: one (n,) tensor per axis, in the axis' unit."""
        translation = "translation" in task.symmetries
        total = self.table.new_zeros(*grid, self.table.shape[-1])
        for number, (axis, tokens, points) in enumerate(zip(task.axes, grid, coordinates, strict=True)):
            # A periodic axis does not repeat its first point: its period is the extent, not last minus first.
            length = axis.extent if axis.periodic else points[-1] - points[0]
            center = ((points - points[0]) / length).reshape(tokens, -1).mean(1)
            features = position_features(center.to(self.table.dtype), axis, translation)
            shape = [1] * len(grid)
            shape[number] = tokens
            total = total + (features @ self.table[number]).reshape(*shape, -1)
        return total
