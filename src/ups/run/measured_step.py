"""A few real steps of a stage on this rank: the memory that the process came to hold, and the CPU time of a step."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from ups.config.schema import Recipe
from ups.distributed.runtime import Runtime
from ups.run.assemble import OpenData, assemble
from ups.training.engine import Engine
from ups.training.progress import Progress


@dataclass(frozen=True)
class Measured:
    """held_bytes: how much the resident memory grew at most, from before the stage was built. Seconds of CPU time."""

    held_bytes: int
    step_seconds: float


class _Clock:
    """A hook: CPU time of each step of this process."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._from = time.process_time()

    def after_step(self, engine: Engine, agreed: object) -> None:
        """Note the time since the last step."""
        now = time.process_time()
        self.seconds.append(now - self._from)
        self._from = now

    def at_end(self, engine: Engine) -> None:
        """Nothing is left to do."""


def measure_steps(recipe: Recipe, opened: OpenData, runtime: Runtime, index: int, steps: int) -> Measured:
    """Train `steps` steps of stage `index` and throw them away; the first one warms up. Collective: all ranks."""
    stages = list(recipe.stages)
    stages[index] = stages[index].model_copy(update={"steps": steps, "budget_seconds": None})
    short = recipe.model_copy(update={"stages": stages})
    clock = _Clock()
    _page_libraries_in()
    before = _status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
    with assemble(short, opened, runtime, Progress(stage_index=index), hooks=[clock]) as parts:
        parts.engine.run()
    return Measured(_status("VmHWM") - before, statistics.median(clock.seconds[1:]))


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
