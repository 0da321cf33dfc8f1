"""What a task says about its fields, kept exactly in every step: integrals, fields without negative values, vectors
without divergence, values on the boundary; and what its data never have, the wave of two points. The stepper applies
them, whatever the network.

B samples, C channels of the state, S space, A axes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ups.spec.batch import Batch
from ups.spec.grid import point_weights
from ups.spec.task import FieldSpec, TaskSpec


def conserving(change: Tensor, task: TaskSpec) -> Tensor:
    """change (B, C, *S) without its mean over space in the fields that the task says are conserved.

    Exact on uniform grids, where the mean over points is the integral.
    """
    if not task.conserved:
        return change
    mask = _mask(change, task, task.conserved)
    mean = change.mean(tuple(range(2, change.ndim)), keepdim=True)  # (B, C, 1, ...)
    return change - mask * mean


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
        wave = (1.0 - 2.0 * (torch.arange(points, device=change.device) % 2)).to(change.dtype).reshape(line)
        found = wave * (change * wave).mean(dim, keepdim=True)
        if not all(chosen):  # else no mask has to go to the device in every step
            mask = torch.tensor(chosen, dtype=change.dtype, device=change.device)
            found = mask.reshape(-1, *([1] * (change.ndim - 2))) * found
        change = change - found
    return change


def by_cells(x: Tensor, batch: Batch) -> Tensor:
    """x (B, C, *S) on the grid of a batch, points counting by their cells: its mean is that of the field."""
    weights = point_weights(batch.task.axes, [c.double().cpu().numpy() for c in batch.coordinates])
    return x if weights is None else x * torch.from_numpy(weights).to(x)


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
    found = frame.clone()
    for known in task.boundary_values:
        channel = found[:, names.index(known.channel)]
        channel.select(axes.index(known.axis) + 1, 0 if known.end == "first" else -1).fill_(known.value)
    return found


def without_divergence(change: Tensor, scale: Tensor, task: TaskSpec) -> Tensor:
    """change (B, C, *S) in units of scale (C, 1, ...) without the part of each vector field that has a divergence.

    In Fourier space, u - k (k . u) / |k|^2, for the fields that the task calls free of divergence; all axes of such a
    task are periodic, and the grid must be uniform. What a frame already has is neither removed nor increased. Wave
    numbers at the end of an even axis have no derivative on the grid and are left as they are.
    """
    if not task.divergence_free:
        return change
    dims = tuple(range(2, change.ndim))
    waves = _wave_numbers(change, task)
    square = sum(k * k for k in waves)
    square = torch.where(torch.as_tensor(square) > 0, torch.as_tensor(square), 1.0)
    found = change.clone()
    for field, first in _fields(task):
        if field.name not in task.divergence_free:
            continue
        rows = slice(first, first + task.num_spatial_dims)
        # At least float32: half precision has no transform.
        modes = torch.fft.rfftn(change[:, rows] * scale[rows], dim=dims)  # (B, A, *K)
        along = sum(k * modes[:, axis] for axis, k in enumerate(waves)) / square
        modes = modes - torch.stack([k * along for k in waves], dim=1)
        found[:, rows] = torch.fft.irfftn(modes, s=change.shape[2:], dim=dims) / scale[rows]
    return found


def divergence(vectors: Tensor, task: TaskSpec) -> Tensor:
    """(B, A, *S) of a task whose axes are periodic -> (B, *S): the divergence, by Fourier derivatives."""
    dims = tuple(range(2, vectors.ndim))
    modes = torch.fft.rfftn(vectors, dim=dims)
    total = sum(1j * k * modes[:, axis] for axis, k in enumerate(_wave_numbers(vectors, task)))
    found: Tensor = torch.fft.irfftn(torch.as_tensor(total), s=vectors.shape[2:], dim=tuple(d - 1 for d in dims))
    return found


def _wave_numbers(like: Tensor, task: TaskSpec) -> list[Tensor]:
    """One (1, .., K, .., 1) per axis, of the transform of real numbers; 0 at the end of an even axis."""
    space = like.shape[2:]
    found = []
    for axis, (points, spec) in enumerate(zip(space, task.axes, strict=True)):
        last = axis == len(space) - 1
        make = torch.fft.rfftfreq if last else torch.fft.fftfreq
        k = make(points, spec.extent / points, device=like.device, dtype=like.dtype) * (2 * math.pi)
        if points % 2 == 0:
            k = torch.where(torch.arange(len(k), device=like.device) == points // 2, torch.zeros_like(k), k)
        found.append(k.reshape([-1 if other == axis else 1 for other in range(len(space))]))
    return found


def _mask(like: Tensor, task: TaskSpec, names: tuple[str, ...] | list[str]) -> Tensor:
    """(C, 1, ...): 1 for the channels of these state fields, else 0."""
    chosen = [field.name in names for field, _ in _fields(task) for _ in range(field.num_channels(len(task.axes)))]
    mask = torch.tensor(chosen, dtype=like.dtype, device=like.device)
    return mask.reshape(-1, *([1] * task.num_spatial_dims))


def _fields(task: TaskSpec) -> Iterator[tuple[FieldSpec, int]]:
    """State fields, each with the number of its first channel."""
    first = 0
    for field in task.fields_of("state"):
        yield field, first
        first += field.num_channels(task.num_spatial_dims)
