"""Latent tokens back to fields on the grid: the transpose of the encoder's layout, with its own table.

The map is linear and has no constant part. That is a contract, not a shortcut: the decoded difference of two latents
is the difference of the decoded ones, so that the operator's update of the latent decodes directly into the change of
the fields, with no cancellation in half precision (see docs/model.md). A decoder for latents of few channels first
spreads each token over its nearest neighbors, which is linear too: patches then overlap.

B samples, C channels asked for, N tokens along each axis, p points of a patch along an axis, d dimensions, D width,
Z channels of a latent token.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ups.models.blocks import NeighborMixing
from ups.models.vocabulary import Vocabulary, patch_rows
from ups.spec.task import TaskSpec


def unpatchify(patches: Tensor, patch_size: int, num_channels: int) -> Tensor:
    """(B, *N, C * p^d) -> (B, C, *S): inverse of `patchify`."""
    grid = patches.shape[1:-1]
    d = len(grid)
    x = patches.reshape(patches.shape[0], *grid, num_channels, *([patch_size] * d))  # (B, *N, C, p, ...)
    order = [0, 1 + d]
    for axis in range(d):
        order += [1 + axis, 2 + d + axis]
    return x.permute(order).reshape(patches.shape[0], num_channels, *(n * patch_size for n in grid))


class GridDecoder(nn.Module):
    """Tokens of `latent_channels` -> named channels on the grid. table (channel names, rows, D).

    overlapping: whether a token also counts in the patches next to its own; without, D is the number of latent
    channels.
    """

    def __init__(
        self, vocabulary: Vocabulary, patch_size: int, width: int, *, latent_channels: int, overlapping: bool
    ) -> None:
        super().__init__()
        self.vocabulary = vocabulary
        self.patch_size = patch_size
        self.rows = patch_rows(patch_size, vocabulary.dims)
        num_rows = max(s.stop for s in self.rows.values())
        width = width if overlapping else latent_channels
        self.table = nn.Parameter(torch.randn(len(vocabulary.channels), num_rows, width) * width**-0.5)
        self.lift = nn.Linear(latent_channels, width, bias=False) if overlapping else None
        self.mixing = NeighborMixing(width) if overlapping else None

    def forward(self, tokens: Tensor, names: Sequence[str], task: TaskSpec) -> Tensor:
        """(B, *N, Z) -> (B, C, *S), one channel per name."""
        if self.lift is not None and self.mixing is not None:
            tokens = self.mixing(self.lift(tokens), [axis.periodic for axis in task.axes])
        ids = torch.tensor(self.vocabulary.channel_ids(names), device=tokens.device)
        weight = self.table[ids, self.rows[tokens.ndim - 2]].flatten(0, 1)  # (C * p^d, D)
        return unpatchify(tokens.to(weight.dtype) @ weight.T, self.patch_size, len(names))
