"""Latent tokens back to fields on the grid: the transpose of the encoder's layout, with its own table.

The map is linear and has no constant part. That is a contract, not a shortcut: the decoded difference of two latents
is the difference of the decoded ones, so that the operator's update of the latent decodes directly into the change of
the fields, with no cancellation in half precision (see docs/model.md).

B samples, C channels asked for, N tokens along each axis, p points of a patch along an axis, d dimensions, D width.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ups.models.vocabulary import Vocabulary, patch_rows


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
    """Tokens -> named channels on the grid. table (channel names, rows, D)."""

    def __init__(self, vocabulary: Vocabulary, patch_size: int, width: int) -> None:
        super().__init__()
        self.vocabulary = vocabulary
        self.patch_size = patch_size
        self.rows = patch_rows(patch_size, vocabulary.dims)
        num_rows = max(s.stop for s in self.rows.values())
        self.table = nn.Parameter(torch.randn(len(vocabulary.channels), num_rows, width) * width**-0.5)

    def forward(self, tokens: Tensor, names: Sequence[str]) -> Tensor:
        """(B, *N, D) -> (B, C, *S), one channel per name."""
        ids = torch.tensor(self.vocabulary.channel_ids(names), device=tokens.device)
        weight = self.table[ids, self.rows[tokens.ndim - 2]].flatten(0, 1)  # (C * p^d, D)
        return unpatchify(tokens.to(weight.dtype) @ weight.T, self.patch_size, len(names))
