"""What is counted: arithmetic by hand, and bytes as long as they are referenced."""

from __future__ import annotations

import torch
from torch.nn import functional

from ups.plan.operations import CONVOLUTION, DEPTHWISE, FOURIER, PRODUCT, OperationTrace


def test_arithmetic_of_products_convolutions_and_transforms() -> None:
    x = torch.randn(2, 4, 8, 8)
    with OperationTrace() as watch:
        torch.randn(3, 5) @ torch.randn(5, 7)
        functional.conv2d(x, torch.randn(6, 4, 3, 3), padding=1)
        functional.conv2d(x, torch.randn(4, 1, 3, 3), padding=1, groups=4)
        torch.fft.fft(x)
    flops = {op.kind: op.flops for op in watch.operations if op.flops}
    assert flops[PRODUCT] == 2 * 3 * 5 * 7
    assert flops[CONVOLUTION] == 2 * (2 * 6 * 64) * 4 * 9
    assert flops[DEPTHWISE] == 2 * (2 * 4 * 64) * 9
    assert flops[FOURIER] == 5 * (2 * 4 * 64) * 3


def test_a_convolution_costs_twice_as_much_backward() -> None:
    for groups, kind in ((1, CONVOLUTION), (4, DEPTHWISE)):
        x = torch.randn(2, 4, 8, 8, requires_grad=True)
        weight = torch.randn(4, 4 // groups, 3, 3, requires_grad=True)
        with OperationTrace() as watch:
            functional.conv2d(x, weight, padding=1, groups=groups).sum().backward()
        forward, backward = (op.flops for op in watch.operations if op.kind == kind)
        assert backward == 2 * forward


def test_bytes_are_alive_as_long_as_autograd_keeps_them() -> None:
    x = torch.zeros(256, 256, requires_grad=True)
    size = x.nbytes
    with OperationTrace() as watch:
        y = x.exp().exp()  # both results are kept for the backward pass
        assert watch.live_bytes == 2 * size
        y.sum().backward()
        del y
        assert watch.live_bytes == size  # the gradient
        assert watch.mark() >= 3 * size
        assert watch.mark() == size
