"""Fields on a grid to latent tokens: one linear map per channel name, added up over the channels of the task.

B samples, F field channels, S space (X[, Y[, Z]]), N tokens along each axis, p points of a patch along an axis,
d spatial dimensions, D width.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ups.models.vocabulary import Channels, Vocabulary, patch_rows, token_grid


def patchify(values: Tensor, patch_size: int, grid: Sequence[int]) -> Tensor:
    """(B, F, *S) -> (B, *N, F * p^d): the points of a patch become the last dimension."""
    d = len(grid)
    split = [size for n in grid for size in (n, patch_size)]
    x = values.reshape(*values.shape[:2], *split)  # (B, F, N1, p, N2, p, ...)
    order = [0, *range(2, 2 + 2 * d, 2), 1, *range(3, 3 + 2 * d, 2)]
    return x.permute(order).reshape(values.shape[0], *grid, values.shape[1] * patch_size**d)


class GridEncoder(nn.Module):
    """Patches of named channels -> tokens.

    table (slots, channel names, rows, D): rows hold p weights for 1D, p^2 for 2D, p^3 for 3D, as far as in use.
    """

    def __init__(self, vocabulary: Vocabulary, patch_size: int, width: int, context_frames: int) -> None:
        super().__init__()
        self.vocabulary = vocabulary
        self.patch_size = patch_size
        self.rows = patch_rows(patch_size, vocabulary.dims)
        num_rows = max(s.stop for s in self.rows.values())
        self.table = nn.Parameter(torch.empty(context_frames, len(vocabulary.channels), num_rows, width))
        for rows in self.rows.values():
            # Points of a patch are nearly equal for smooth fields: 1 / sqrt(points) keeps tokens at a few units.
            nn.init.normal_(self.table[:, :, rows], std=(rows.stop - rows.start) ** -0.5)

    def forward(self, values: Tensor, channels: Channels) -> Tensor:
        """(B, F, *S) normalized values -> (B, *N, D). Raises DataError where a patch does not fit the grid."""
        space = values.shape[2:]
        grid = token_grid(space, self.patch_size, f"field {channels.names[0]}")
        device = values.device
        slots = torch.tensor(channels.slots, device=device)
        ids = torch.tensor(self.vocabulary.channel_ids(channels.names), device=device)
        weight = self.table[slots, ids, self.rows[len(space)]].flatten(0, 1)  # (F * p^d, D)
        patches = patchify(values.to(weight.dtype), self.patch_size, grid)  # (B, *N, F * p^d)
        tokens: Tensor = patches @ weight * len(channels.names) ** -0.5
        return tokens
