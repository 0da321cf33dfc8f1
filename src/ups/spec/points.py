"""Values of fields on a grid at points between its nodes: linear in each cell, on any device, differentiable.

B samples, C channels, S space, D axes, N points: those of the largest geometry, of which others have fewer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

# In `Batch.extra`: the points (B, N, D) in units of nodes, below 0 where a geometry has fewer; the values of the
# predicted fields at them (B, T, C, N, 1, ...), T = 1 for a steady task.
POINTS, POINT_VALUES = "points", "point_values"
NO_POINT = -2.0


def at_points(fields: torch.Tensor, points: torch.Tensor) -> torch.Tensor:
    """Fields (B, ..., *S) at points (B, N, D) -> (B, ..., N, 1, ...), with as many dimensions as before."""
    from torch.nn import functional

    points = points.to(fields)
    dims, batch = points.shape[-1], fields.shape[0]
    lead, space = fields.shape[1:-dims], fields.shape[-dims:]
    sizes = points.new_tensor(space)
    places = (points * (2 / (sizes - 1)) - 1).flip(-1)  # as grid_sample counts: from -1 to 1, the last axis first
    flat = fields.reshape(batch, -1, *space)
    if dims == 1:  # grid_sample has two axes or three
        flat, places = flat[..., None, :], functional.pad(places, (0, 1))
    places = places.reshape(batch, -1, *[1] * (max(dims, 2) - 1), places.shape[-1])
    values = functional.grid_sample(flat, places, align_corners=True)
    return values.reshape(batch, *lead, -1, *[1] * (dims - 1))


def valid_at_points(points: torch.Tensor) -> torch.Tensor:
    """(B, 1, N, 1, ...): 1 at points, 0 where a geometry has fewer than the largest."""
    dims = points.shape[-1]
    return (points[..., 0] >= 0).to(points).reshape(points.shape[0], 1, -1, *[1] * (dims - 1))
