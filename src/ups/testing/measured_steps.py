"""Real steps of a drawn recipe on a rank, for the comparison with what was planned."""

from __future__ import annotations

import ctypes
from typing import Any

from ups.config.schema import Recipe
from ups.distributed.runtime import Runtime
from ups.plan.yardstick import this_cpu
from ups.run.assemble import open_data
from ups.run.measured_step import measure_steps

_M_MMAP_THRESHOLD = -3


def measured_on_rank(arguments: dict[str, Any]) -> dict[str, Any]:
    """Train a few steps of the recipe's first stage on this rank.

    returns_memory: malloc gives every large block its own mapping, so that what is freed is gone, as the allocator of
    a GPU counts; otherwise glibc keeps freed blocks in its heap as it likes. calibrate: also run the yardstick.
    """
    if arguments["returns_memory"]:
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 1 << 16)
    recipe = Recipe.model_validate(arguments["recipe"])
    with Runtime.start(recipe.engine) as runtime, open_data(recipe) as opened:
        device = this_cpu() if arguments.get("calibrate") and runtime.is_first else None
        found = measure_steps(recipe, opened, runtime, 0, int(arguments["steps"]))
    result: dict[str, Any] = {"held_bytes": found.held_bytes, "step_seconds": found.step_seconds}
    if device is not None:
        result["device"] = {
            "rates": dict(device.rates),
            "bandwidth": device.bandwidth,
            "launch_seconds": device.launch_seconds,
        }
    return result
