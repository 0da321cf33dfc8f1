"""Real steps of a drawn recipe on a rank, for the comparison with what was planned."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import torch

from ups.config.schema import Recipe
from ups.distributed.runtime import Runtime
from ups.plan.devices import this_cpu
from ups.run.assemble import open_data
from ups.run.planning import measure_steps

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_LARGEST_THRESHOLD = 32 << 20  # what glibc's own rule comes to where large blocks are freed


def measured_on_rank(arguments: dict[str, Any]) -> dict[str, Any]:
    """Train a few steps of the recipe's first stage on this rank, twice, and run the yardstick in between.

    held_bytes: with a malloc that gives every large block its own mapping, so that what is freed is gone, as the
    allocator of a GPU counts. The rest as a rank usually runs: freed blocks stay in glibc's heap, and steps are faster.
    """
    recipe = Recipe.model_validate(arguments["recipe"])
    libc, steps = ctypes.CDLL(None), int(arguments["steps"])
    with Runtime.start(recipe.engine) as runtime, open_data(recipe) as opened:
        libc.mallopt(_M_MMAP_THRESHOLD, 1 << 16)
        _page_libraries_in()
        before = _status("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
        measure_steps(recipe, opened, runtime, 0, 2)
        held_bytes = _status("VmHWM") - before
        libc.mallopt(_M_MMAP_THRESHOLD, _LARGEST_THRESHOLD)
        libc.mallopt(_M_TRIM_THRESHOLD, 2 * _LARGEST_THRESHOLD)
        device = this_cpu() if runtime.is_first else None
        usual = measure_steps(recipe, opened, runtime, 0, steps)
    result: dict[str, Any] = {
        "held_bytes": held_bytes,
        "step_seconds": usual,
    }
    if device is not None:
        result["device"] = {
            "rates": dict(device.rates),
            "bandwidth": device.bandwidth,
            "launch_seconds": device.launch_seconds,
            "near_bandwidth": device.near_bandwidth,
        }
    return result


def _page_libraries_in() -> None:
    """Pages of libraries that any network needs are not what a stage costs."""
    x = torch.randn(2, 8, 16, 16, requires_grad=True)
    weight = torch.randn(8, 8, 3, 3, requires_grad=True)
    y = torch.nn.functional.conv2d(x, weight, padding=1)
    z = torch.fft.irfft2(torch.fft.rfft2(y), s=(16, 16)).flatten(1)
    (z @ z.mT).softmax(-1).sum().backward()


def _status(name: str) -> int:
    line = next(row for row in Path("/proc/self/status").read_text().splitlines() if row.startswith(name + ":"))
    return int(line.split()[1]) * 1024
