"""Whether data are what their task declares of them: positive, free of divergence, with known values at boundaries.

A model keeps these things exactly (`ups.models.constraints`): where the data do not have them, it is forced to be
wrong.

T frames, C state or target channels, S space, A axes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from ups.spec.batch import Float32, Float64
from ups.spec.task import BoundaryValue, TaskSpec

# Relative to the size of a field in the same frame: what rounding to float32, or a solver's own error, may leave.
_TOLERANCE = 1e-3


def contradictions(block: Float32, task: TaskSpec) -> Iterator[tuple[str, int, str, str]]:
    """(kind, frame, channel, message) of each frame of a block (T, C, *S) that is not as the task says.

    Values that are not finite are another finding and count as nothing here.
    """
    names = task.channel_names(task.predicted)
    fields = task.fields_of(task.predicted)
    owners = [field.name for field in fields for _ in range(field.num_channels(len(task.axes)))]
    values = np.nan_to_num(block.astype(np.float64), nan=0.0, posinf=0.0, neginf=0.0)
    space = tuple(range(2, values.ndim))
    size = np.abs(values).max(axis=space)  # (T, C)
    for channel, (name, owner) in enumerate(zip(names, owners, strict=True)):
        if owner in task.positive:
            yield from _negative(values[:, channel], size[:, channel], name)
    for known in task.boundary_values:
        channel = names.index(known.channel)
        yield from _at_boundary(values[:, channel], size[:, channel], known, task)
    for field in task.divergence_free:
        first = owners.index(field)
        yield from _divergence(values[:, first : first + len(task.axes)], field, names[first], task)


def _negative(values: Float64, size: Float64, name: str) -> Iterator[tuple[str, int, str, str]]:
    """values (T, *S), size (T,)."""
    lowest = values.reshape(len(values), -1).min(axis=1)
    for frame in np.flatnonzero(lowest < -_TOLERANCE * size):
        yield "negative", int(frame), name, f"'{name}' is as low as {lowest[frame]:.3g}, and the task calls it positive"


def _at_boundary(
    values: Float64, size: Float64, known: BoundaryValue, task: TaskSpec
) -> Iterator[tuple[str, int, str, str]]:
    """values (T, *S), size (T,)."""
    axis = [axis.name for axis in task.axes].index(known.axis)
    end = np.take(values, 0 if known.end == "first" else -1, axis=axis + 1)
    off = np.abs(end - known.value).reshape(len(values), -1).max(axis=1)
    for frame in np.flatnonzero(off > _TOLERANCE * np.maximum(size, abs(known.value))):
        message = (
            f"'{known.channel}' is off by {off[frame]:.3g} from {known.value:g}, which the task says it is at the "
            f"{known.end} point of {known.axis}"
        )
        yield "boundary_value", int(frame), known.channel, message


def _divergence(vectors: Float64, field: str, channel: str, task: TaskSpec) -> Iterator[tuple[str, int, str, str]]:
    """vectors (T, A, *S). By Fourier derivatives, for the axes of such a task are periodic; relative to the derivatives
    that a divergence is the sum of."""
    total, squares = np.zeros_like(vectors[:, 0]), np.zeros(len(vectors))
    for axis, spec in enumerate(task.axes):
        points = vectors.shape[2 + axis]
        k = np.fft.fftfreq(points, spec.extent / points) * 2 * math.pi
        if points % 2 == 0:
            k[points // 2] = 0.0  # the wave of two points has no derivative on the grid
        shape = [-1 if other == axis else 1 for other in range(len(task.axes))]
        slope = np.fft.ifft(np.fft.fft(vectors[:, axis], axis=1 + axis) * (1j * k.reshape(shape)), axis=1 + axis).real
        total += slope
        squares += np.square(slope).reshape(len(vectors), -1).mean(axis=1)
    found, usual = np.sqrt(np.square(total).reshape(len(vectors), -1).mean(axis=1)), np.sqrt(squares)
    for frame in np.flatnonzero(found > _TOLERANCE * usual):
        share = found[frame] / usual[frame]
        message = f"the divergence of '{field}' is {share:.2g} of its derivatives, and the task says that it has none"
        yield "divergence", int(frame), channel, message
