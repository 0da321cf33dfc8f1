"""Fields on a grid to latent tokens: one linear map per channel name, added up over the channels of the task, and then,
if asked for, blocks that mix neighboring patches and a projection to fewer channels.

Nothing here knows where a token stands: on periodic axes latents commute with shifts by whole patches.

B samples, F field channels, S space (X[, Y[, Z]]), N tokens along each axis, p points of a patch along an axis,
d spatial dimensions, D width, Z channels of a latent token.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ups.models.blocks import NeighborMixing
from ups.models.vocabulary import Channels, Vocabulary, patch_rows, token_grid
from ups.spec.task import TaskSpec

_MLP_RATIO = 2


def patchify(values: Tensor, patch_size: int, grid: Sequence[int]) -> Tensor:
    """(B, F, *S) -> (B, *N, F * p^d): the points of a patch become the last dimension."""
    d = len(grid)
    split = [size for n in grid for size in (n, patch_size)]
    x = values.reshape(*values.shape[:2], *split)  # (B, F, N1, p, N2, p, ...)
    order = [0, *range(2, 2 + 2 * d, 2), 1, *range(3, 3 + 2 * d, 2)]
    return x.permute(order).reshape(values.shape[0], *grid, values.shape[1] * patch_size**d)


class EncoderBlock(nn.Module):
    """x + MLP of each token and its nearest neighbors."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.mixing = NeighborMixing(width)
        self.mlp_in = nn.Linear(width, _MLP_RATIO * width)
        self.mlp_out = nn.Linear(_MLP_RATIO * width, width)

    def forward(self, x: Tensor, periodic: Sequence[bool]) -> Tensor:
        """x (B, *N, D), periodic for each axis -> (B, *N, D)."""
        seen = self.mixing(F.rms_norm(x, (x.shape[-1],), eps=1e-6), periodic)
        out: Tensor = x + self.mlp_out(F.gelu(self.mlp_in(seen)))
        return out


class GridEncoder(nn.Module):
    """Patches of named channels -> tokens of `latent_channels`.

    table (slots, channel names, rows, D): rows hold p weights for 1D, p^2 for 2D, p^3 for 3D, as far as in use. Without
    blocks the table is all there is, and D is the number of latent channels.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        patch_size: int,
        width: int,
        context_frames: int,
        *,
        latent_channels: int,
        num_blocks: int,
    ) -> None:
        super().__init__()
        self.vocabulary = vocabulary
        self.patch_size = patch_size
        self.rows = patch_rows(patch_size, vocabulary.dims)
        num_rows = max(s.stop for s in self.rows.values())
        width = width if num_blocks else latent_channels
        self.table = nn.Parameter(torch.empty(context_frames, len(vocabulary.channels), num_rows, width))
        for rows in self.rows.values():
            # Points of a patch are nearly equal for smooth fields: 1 / sqrt(points) keeps tokens at a few units.
            nn.init.normal_(self.table[:, :, rows], std=(rows.stop - rows.start) ** -0.5)
        self.blocks = nn.ModuleList(EncoderBlock(width) for _ in range(num_blocks))
        self.out = nn.Linear(width, latent_channels, bias=False) if num_blocks else None

    def forward(self, values: Tensor, channels: Channels, task: TaskSpec) -> Tensor:
        """(B, F, *S) normalized values -> (B, *N, Z). Raises DataError where a patch does not fit the grid."""
        space = values.shape[2:]
        grid = token_grid(space, self.patch_size, f"field {channels.names[0]}")
        device = values.device
        slots = torch.tensor(channels.slots, device=device)
        ids = torch.tensor(self.vocabulary.channel_ids(channels.names), device=device)
        weight = self.table[slots, ids, self.rows[len(space)]].flatten(0, 1)  # (F * p^d, D)
        patches = patchify(values.to(weight.dtype), self.patch_size, grid)  # (B, *N, F * p^d)
        tokens: Tensor = patches @ weight * len(channels.names) ** -0.5
        periodic = [axis.periodic for axis in task.axes]
        for block in self.blocks:
            tokens = block(tokens, periodic)
        return tokens if self.out is None else self.out(tokens)
