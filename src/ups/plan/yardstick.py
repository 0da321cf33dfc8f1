"""This machine's CPU as a device: rates of each kind of operation, measured on pieces of networks on one thread.

In CPU time, so that neighbors who take the processor do not count; those who take caches and bandwidth do.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ups.plan.devices import NEAR_BYTES, Device
from ups.plan.operations import KINDS, MOVE, Watch

_SMALL_BYTES = 1 << 16
_REPEATS = 5


class _Pieces(nn.Module):
    """What the networks of this package are made of, in sizes that fit into caches and in sizes that do not."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Conv2d(64, 64, 3, padding=1)
        self.along = nn.Conv2d(64, 64, 7, padding=3, groups=64)
        self.wide = nn.Linear(256, 768)
        self.narrow = nn.Linear(768, 256)
        self.norm = nn.LayerNorm(256)

    def forward(self, x: Tensor) -> Tensor:
        """x (B, 64, N, N) -> a number."""
        x = x + functional.gelu(self.mix(x))
        x = x + self.along(x)
        x = x + torch.fft.irfft2(torch.fft.rfft2(x), s=x.shape[-2:])
        tokens = x.reshape(x.shape[0], -1, 256)
        tokens = self.norm(tokens)
        tokens = tokens + self.narrow(functional.silu(self.wide(tokens)))
        weights = (tokens @ tokens.mT).softmax(-1)
        found: Tensor = (weights @ tokens).square().mean()
        return found


def this_cpu() -> Device:
    """The CPU of this machine as one rank with one thread sees it; takes a few seconds."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            pieces, sizes = _Pieces(), [torch.randn(2, 64, 16, 16), torch.randn(8, 64, 32, 32)]
        watches = [_one_pass(pieces, sizes) for _ in range(_REPEATS + 1)][1:]
    finally:
        torch.set_num_threads(threads)
    # The same operations in every pass: the median of each is what it takes when nobody disturbs it.
    times = [statistics.median(column) for column in zip(*(w.seconds for w in watches), strict=True)]
    done = list(zip(watches[0].operations, times, strict=True))
    launch = statistics.median([t for op, t in done if op.num_bytes < _SMALL_BYTES])
    moves = [(op.num_bytes, t) for op, t in done if op.kind == MOVE and op.num_bytes >= _SMALL_BYTES]
    far = [(size, t) for size, t in moves if size > NEAR_BYTES]
    near = [(size, max(t - launch, 1e-9)) for size, t in moves if size <= NEAR_BYTES]
    bandwidth, near_bandwidth = (sum(s for s, _ in part) / sum(t for _, t in part) for part in (far, near))
    rates = {}
    for kind in KINDS:
        of_kind = [(op.flops, t) for op, t in done if op.kind == kind and op.flops]
        if of_kind:
            rates[kind] = sum(f for f, _ in of_kind) / sum(t for _, t in of_kind)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Device(
        "cpu", rates, bandwidth, launch, memory, bandwidth / 4, "measured here, one thread", False, near_bandwidth
    )


def _one_pass(pieces: nn.Module, sizes: list[Tensor]) -> Watch:
    watch = Watch(_timed)
    with watch:
        for x in sizes:
            pieces(x).backward()
    pieces.zero_grad(set_to_none=True)
    return watch


def _timed(run: Callable[[], Any]) -> tuple[Any, float]:
    started = time.process_time()
    return run(), time.process_time() - started
