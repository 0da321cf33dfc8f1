"""Kernels that serve several dimensions, and padding by the boundaries of each sample."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from ups.models.grid_convolution import (
    GridConvolution,
    GridKernel,
    Grow,
    Layout,
    Shrink,
    convolved,
    extended,
    halo_sources,
    reduced,
    smoothed,
    tap_sources,
    with_halo,
    with_taps,
)
from ups.models.multiscale import rope_angles
from ups.models.normalization import Constants


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def apply(module: GridKernel, x: torch.Tensor, layout: Layout) -> torch.Tensor:
    if isinstance(module, Shrink | Grow):
        return module(x, layout)
    sources = layout.sources(x.shape[1:-1], module.size, Constants(), x.device)
    return module(x, layout, sources)


KINDS = [GridConvolution, Shrink, Grow]


def made(kind: type, *dims: int) -> GridKernel:
    module: GridKernel = kind(3, 4, 5, dims) if kind is GridConvolution else kind(3, 4, dims)
    return module.double()


def padded(x: torch.Tensor, pads: tuple[int, ...], wraps: tuple[bool, ...]) -> torch.Tensor:
    """The same with torch's own padding, axis by axis: (B, *grid, C) -> (B, C, *padded)."""
    x = x.movedim(-1, 1)
    for axis, (pad, around) in enumerate(zip(pads, wraps, strict=True)):
        sizes = [0] * (2 * len(pads))
        sizes[2 * (len(pads) - 1 - axis) : 2 * (len(pads) - axis)] = [pad, pad]
        x = F.pad(x, sizes, mode="circular") if around and pad else F.pad(x, sizes)
    return x


@pytest.mark.parametrize(
    ("space", "pads", "kinds"),
    [
        ((1, 9), (0, 2), [(False, True), (False, False)]),
        ((4, 6), (2, 2), [(True, True), (True, False), (False, True), (False, False)]),
        ((4, 2, 3), (1, 1, 1), [(True, True, False), (False, False, True)]),
    ],
    ids=["line", "plane", "cube"],
)
@pytest.mark.parametrize("product", [False, True], ids=["convolution", "product"])
def test_each_sample_is_padded_by_its_own_boundaries(
    space: tuple[int, ...],
    pads: tuple[int, ...],
    kinds: list[tuple[bool, ...]],
    product: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Layout, "as_product", lambda *_: product)
    x = random(2 * len(kinds), *space, 3).requires_grad_()
    ranges = tuple((2 * n, 2 * n + 2, wraps) for n, wraps in enumerate(kinds))
    sources = [(tap_sources if product else halo_sources)(space, pads, wraps) for wraps in kinds]
    layout = Layout(1 if space[0] == 1 else len(pads), ranges)
    expected = torch.cat([padded(x[a:b], pads, wraps) for a, b, wraps in ranges])
    if not product:
        assert torch.equal(with_halo(x.detach(), pads, layout, sources).movedim(-1, 1), expected)
    kernel = random(4, *(2 * pad + 1 for pad in pads), 3).requires_grad_()
    bias = random(4).requires_grad_()
    ours = convolved(x, kernel, bias, layout, sources).movedim(-1, 1)
    plain = (F.conv2d if x.ndim == 4 else F.conv3d)(expected, kernel.movedim(-1, 1), bias)
    torch.testing.assert_close(ours, plain, rtol=0, atol=1e-12)
    weight = random(*plain.shape)
    mine, theirs = (torch.autograd.grad((y * weight).sum(), (x, kernel, bias)) for y in (ours, plain))
    torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-12)


def test_taps_of_a_point_are_the_points_around_it() -> None:
    x = random(1, 1, 5, 2)
    taps = with_taps(x, (0, 1), Layout(1, ((0, 1, (False, False)),)), [tap_sources((1, 5), (0, 1), (False, False))])
    taps = taps.view(1, 1, 5, 1, 3, 2)
    assert torch.equal(taps[0, 0, 2, 0], x[0, 0, 1:4])
    assert not taps[0, 0, 0, 0, 0].any(), "nothing beyond an end"
    assert not taps[0, 0, 4, 0, 2].any(), "nothing beyond an end"


@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize("averages", [False, True])
def test_an_extended_kernel_reduces_to_what_it_was(size: int, averages: bool) -> None:
    line = random(4, size, 3)
    cube = extended(line, 1, 3, averages)
    assert cube.shape == (4, size, size, size, 3)
    torch.testing.assert_close(reduced(cube, 3, 1, averages)[:, 0], line)
    plane = random(4, size, size, 3)
    again = extended(plane, 2, 3, averages)
    torch.testing.assert_close(reduced(again, 3, 2, averages), plane)
    if size % 2 and not averages:
        assert torch.equal(again[:, size // 2], plane), "the center plane"
        assert again.count_nonzero() == plane.numel()


@pytest.mark.parametrize("dims", [(2,), (1, 2)], ids=["shared", "own"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_plane_that_does_not_depend_on_its_first_axis_is_a_line(kind: type, dims: tuple[int, ...]) -> None:
    """With kernels of their own for lines as well, when they are new."""
    module = made(kind, *dims)
    line = random(2, 1, 8, 3)
    plane = line.expand(2, 6, 8, 3).contiguous()
    one = apply(module, line, Layout(1, ((0, 2, (False, True)),)))
    two = apply(module, plane, Layout(2, ((0, 2, (True, True)),)))
    # Growing gives two kinds of rows, whose mean is the line.
    rows = two.unflatten(1, (6, -1)).mean(2) if kind is Grow else two
    # Own kernels were summed in float32.
    torch.testing.assert_close(rows, one.expand_as(rows), rtol=0, atol=1e-5)


def test_initial_kernels_keep_the_size_of_noise_in_every_dimension() -> None:
    torch.manual_seed(0)
    module = GridConvolution(32, 32, 3, [3])
    for dims, grid in ((1, (1, 256)), (2, (32, 32)), (3, (10, 10, 10))):
        x = torch.randn(2, *grid, 32)
        wraps = tuple(n > 1 for n in grid)
        assert 0.8 < apply(module, x, Layout(dims, ((0, 2, wraps),))).std() < 1.2


def test_rotary_products_depend_on_the_offset_alone_and_go_around_periodic_axes() -> None:
    points = 6
    angles = rope_angles((1, points), (False, True), 8)
    assert not angles[:, :4].any(), "a line has no first axis"
    turns = (angles[1:] - angles[:-1])[:, 4:]
    torch.testing.assert_close(turns, turns[:1].expand_as(turns))
    around = (angles[0] - angles[-1])[4:]
    torch.testing.assert_close(torch.cos(around), torch.cos(turns[0]))
    wall = rope_angles((1, points), (False, False), 8)
    torch.testing.assert_close(wall, angles / 2)


def test_a_third_axis_leaves_the_low_frequencies_of_the_others() -> None:
    plane, cube = rope_angles((4, 6), (True, True), 16), rope_angles((1, 4, 6), (True, True, True), 16)
    same = (plane == cube).all(0)
    assert same[[0, 1, 2, 3, 4, 5, 8, 9, 10, 11, 12, 13]].all()
    assert not cube[:, [6, 7, 14, 15]].any(), "along the first axis, where this cube has one point"


def test_a_plane_of_one_row_does_not_get_the_taps_of_a_line() -> None:
    constants, grid, ranges = Constants(), (1, 8), ((0, 1, (False, True)),)
    line, plane = (Layout(dims, ranges).sources(grid, 3, constants, torch.device("cpu"))[0] for dims in (1, 2))
    assert torch.equal(line, tap_sources(grid, (0, 1), (False, True)))
    assert torch.equal(plane, tap_sources(grid, (1, 1), (False, True)))


@pytest.mark.parametrize("kind", KINDS)
def test_kernels_of_their_own_are_used_where_they_belong_and_go_over_to_other_modules(kind: type) -> None:
    source, line = made(kind, 1, 2), random(2, 1, 8, 3)
    layout = Layout(1, ((0, 2, (False, True)),))
    before = apply(source, line, layout)
    with torch.no_grad():
        source.own["1"].add_(1.0)
        moved = apply(source, line, layout)
        assert not torch.allclose(moved, before)
        source.weight.add_(1.0)
        assert torch.equal(apply(source, line, layout), moved), "that of planes is not for lines"
    kernels = {1: source.own["1"].detach(), 2: source.weight.detach()}
    for dims in ((1,), (1, 2), (1, 3), (1, 2, 3)):
        target = made(kind, *dims)
        taken = target.converted(kernels)
        assert taken.keys() == dict(target.named_parameters()).keys() - {"bias"}
        target.load_state_dict(taken, strict=False)
        torch.testing.assert_close(apply(target, line, layout), moved)
    shared = made(kind, 3)
    shared.load_state_dict(shared.converted(kernels), strict=False)
    torch.testing.assert_close(shared.prepared(2, torch.float64), source.prepared(2, torch.float64))
    assert made(kind, 2).converted({2: kernels[2][:, 1:]}) == {}


@pytest.mark.parametrize("kind", KINDS)
def test_a_kernel_that_is_not_used_has_a_gradient_of_zero(kind: type) -> None:
    module = made(kind, 1, 2)
    apply(module, random(2, 1, 8, 3), Layout(1, ((0, 2, (False, True)),))).square().sum().backward()
    assert module.own["1"].grad is not None
    assert module.own["1"].grad.any()
    assert module.weight.grad is not None
    assert not module.weight.grad.any()


def test_averages_over_neighbors_keep_the_mean_and_take_out_the_shortest_wave() -> None:
    """Samples with different ends in one tensor: around where an axis wraps, the last value again elsewhere."""
    layout = Layout(2, ((0, 1, (True, True)), (1, 2, (False, True))))
    wave = 1.0 - 2.0 * (torch.arange(8) % 2)
    both = torch.stack([wave[:, None].expand(8, 6), wave[:, None].expand(8, 6)])[..., None]  # (B, X, Y, C)
    averaged = smoothed(3.0 + both, layout, Constants())
    assert torch.equal(averaged[0], torch.full((8, 6, 1), 3.0))
    assert averaged[1, 1:-1, :, 0].unique().tolist() == [3.0]
    assert averaged[1, 0, :, 0].unique().tolist() == [3.5]  # 1/2 and 1/4 of the first value, 1/4 of its neighbor
    drawn = torch.randn(2, 8, 6, 3)
    assert torch.allclose(smoothed(drawn, layout, Constants())[0].mean((0, 1)), drawn[0].mean((0, 1)), atol=1e-6)


@pytest.mark.parametrize("points", [6, 40])
@pytest.mark.parametrize("trained", [(True, True), (False, True), (True, False), (False, False)])
def test_only_gradients_that_are_asked_for_are_computed(points: int, trained: tuple[bool, bool]) -> None:
    """As a product of matrices (few points) and as a convolution."""
    layout = Layout(2, ((0, 1, (True, True)),))
    module = GridConvolution(3, 4, 3, [2]).double()
    x = random(1, points, points, 3).requires_grad_()
    apply(module, x, layout).square().sum().backward()
    whole = [x.grad, module.weight.grad, module.bias.grad]
    x.grad = module.weight.grad = module.bias.grad = None
    module.weight.requires_grad_(trained[0])
    module.bias.requires_grad_(trained[1])
    with TorchOperations() as seen:
        apply(module, x, layout).square().sum().backward()
    for expected, found, wanted in zip(
        whole, [x.grad, module.weight.grad, module.bias.grad], [True, *trained], strict=True
    ):
        assert (found is None) == (not wanted)
        assert found is None or torch.allclose(found, expected)
    backward = any("convolution_backward" in name for name in seen.names)
    assert backward == (points == 40 and any(trained))


class TorchOperations(TorchDispatchMode):
    """Names of the operations inside."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))
