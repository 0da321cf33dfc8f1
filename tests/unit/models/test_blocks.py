"""Windows, shifts, masks and relative offsets."""

from __future__ import annotations

import pytest
import torch

from ups.models.blocks import (
    RelativeBias,
    global_partition,
    join_windows,
    neighbor,
    split_windows,
    window_mask,
    windowed_partition,
)
from ups.models.latent_operator import patchify, unpatchify


@pytest.mark.parametrize("space", [(12,), (8, 12), (4, 8, 4)])
def test_patches_go_apart_and_together(space: tuple[int, ...]) -> None:
    fields = torch.randn(2, 3, *space)
    patches = patchify(fields, 4, [n // 4 for n in space])
    assert patches.shape == (2, *(n // 4 for n in space), 3 * 4 ** len(space))
    assert torch.equal(unpatchify(patches, 4, 3), fields)
    assert torch.equal(
        patches.flatten(1, -2)[0, 0].reshape(3, -1)[1], fields[0, 1][(slice(0, 4),) * len(space)].flatten()
    )


@pytest.mark.parametrize("shifted", [False, True])
@pytest.mark.parametrize("grid", [(12, 1, 1), (4, 6, 1), (4, 2, 6)])
def test_windows_go_apart_and_together(grid: tuple[int, int, int], shifted: bool) -> None:
    partition = windowed_partition(grid, (True, False, False), 3, shifted)
    x = torch.randn(2, grid[0] * grid[1] * grid[2], 5)
    windows = split_windows(x, partition)
    assert windows.shape == (2 * partition.num_windows, partition.tokens_per_window, 5)
    assert torch.equal(join_windows(windows, partition), x)


def test_a_window_is_the_largest_divisor_of_the_grid_or_the_whole_axis() -> None:
    partition = windowed_partition((12, 7, 1), (True, True, False), 5, shifted=True)
    assert partition.window == (4, 7, 1)
    assert partition.shift == (2, 0, 0)


def test_a_shift_over_the_end_of_a_wall_is_masked_and_over_a_period_is_not() -> None:
    device = torch.device("cpu")
    assert window_mask(windowed_partition((8, 1, 1), (True, False, False), 4, shifted=True), device) is None
    mask = window_mask(windowed_partition((8, 1, 1), (False, False, False), 4, shifted=True), device)
    assert mask is not None
    assert mask[0].all(), "tokens 2 to 5"
    together = torch.tensor([[1, 1, 0, 0], [1, 1, 0, 0], [0, 0, 1, 1], [0, 0, 1, 1]], dtype=torch.bool)
    assert torch.equal(mask[1], together), "tokens 6, 7 and 0, 1 share a window but not the domain"


def test_the_bias_depends_on_the_offset_alone_and_wraps_where_the_axis_does() -> None:
    torch.manual_seed(0)
    bias = RelativeBias(2)
    torch.nn.init.normal_(bias.outer.weight)
    around = bias(global_partition((6, 1, 1), (True, False, False)))
    across = bias(global_partition((6, 1, 1), (False, False, False)))
    assert around.shape == (2, 6, 6)
    torch.testing.assert_close(around[:, 0, 5], around[:, 1, 0])
    torch.testing.assert_close(across[:, 0, 4], across[:, 1, 5])
    torch.testing.assert_close(around[:, 2, 3], across[:, 2, 3])
    assert (across[:, 0, 5] - across[:, 1, 0]).abs().min() > 1e-4
    assert (around[:, 0, 1] - around[:, 1, 0]).abs().min() > 1e-4, "left is not right"


def test_neighbors_wrap_on_periodic_axes_and_are_zero_behind_an_end() -> None:
    line = torch.tensor([1.0, 2.0, 3.0]).reshape(1, 3, 1, 1, 1)
    assert neighbor(line, 0, 1, periodic=True).flatten().tolist() == [2.0, 3.0, 1.0]
    assert neighbor(line, 0, -1, periodic=True).flatten().tolist() == [3.0, 1.0, 2.0]
    assert neighbor(line, 0, 1, periodic=False).flatten().tolist() == [2.0, 3.0, 0.0]
    assert neighbor(line, 0, -1, periodic=False).flatten().tolist() == [0.0, 1.0, 2.0]
