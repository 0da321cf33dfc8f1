"""What a training step costs in CPU time, measured so that others on the machine do not change the result.

A CPU-second of a busy machine is worth less than one of a quiet machine: neighbors take caches, memory bandwidth and,
under a hypervisor, the processor itself. So each step is measured in turns with a fixed piece of work, the yardstick,
which suffers alike. A cost is a number of yardsticks; how long one takes is found once, in its quick passes. A budget
of CPU-seconds becomes a number of steps beforehand: equal budgets stay equal on a machine whose speed drifts, a run can
be interrupted and moved, and it repeats bit by bit.
"""

from __future__ import annotations

import copy
import json
import statistics
import sys
import time
from typing import TYPE_CHECKING, Any

from ups.config.schema import Recipe
from ups.registry import use_script

if TYPE_CHECKING:
    from ups.distributed.agreement import Status
    from ups.training.engine import Engine

# Of each stage; the first ones warm caches up.
STEPS, WARM_UP_STEPS = 24, 4
# A window of few steps may fall into a bad moment: one of these, some time apart, is in the middle.
ROUNDS = 3
# Passes of the yardstick from which its seconds are taken, and which part of them was not disturbed.
PASSES, QUICK_PART = 40, 0.25


class Yardstick:
    """A tenth of a second of what training does most: convolutions forward and backward, a Fourier transform, a sum.

    Its arrays are larger than the caches of a core, as those of a training step are: neighbors slow both down alike.
    """

    def __init__(self) -> None:
        import torch

        made = torch.Generator().manual_seed(0)
        self._image = torch.randn(8, 32, 64, 64, generator=made)
        self._kernel = torch.randn(32, 32, 3, 3, generator=made, requires_grad=True)

    def seconds(self) -> float:
        """CPU time of one pass."""
        import torch

        started = time.process_time()
        with torch.inference_mode(False), torch.enable_grad():
            out = torch.nn.functional.gelu(torch.nn.functional.conv2d(self._image, self._kernel, padding=1))
            out = out + torch.nn.functional.conv2d(out, self._kernel, padding=1)
            torch.autograd.grad(out.square().mean(), self._kernel)
        with torch.no_grad():
            torch.fft.irfft2(torch.fft.rfft2(self._image), s=(64, 64))
        return time.process_time() - started


def yardstick_seconds() -> float:
    """Of one pass where nobody disturbs it: a low quantile over many."""
    stick = Yardstick()
    found = sorted(stick.seconds() for _ in range(PASSES))
    return found[int(QUICK_PART * len(found))]


class _Turns:
    """A hook of the engine: a pass of the yardstick after each step."""

    def __init__(self) -> None:
        self._stick = Yardstick()
        self.steps: list[float] = []
        self.sticks = [self._stick.seconds()]
        self._from = time.process_time()

    def before_step(self, engine: Engine) -> None:
        """Nothing is done before a step."""

    def after_checkpoint(self, engine: Engine) -> None:
        """Nothing is saved."""

    def after_step(self, engine: Engine, agreed: Status) -> None:
        self.steps.append(time.process_time() - self._from)
        self.sticks.append(self._stick.seconds())
        self._from = time.process_time()

    def at_end(self, engine: Engine) -> None:
        """Nothing is left to do."""

    def cost(self) -> float:
        """Yardsticks that a step takes: the median over steps, each relative to the passes before and after it."""
        around = zip(self.steps, self.sticks, self.sticks[1:], strict=False)
        return statistics.median([2 * step / (a + b) for step, a, b in around][WARM_UP_STEPS:])


def step_costs(recipe: dict[str, Any]) -> list[float]:
    """Yardsticks that a step of each stage takes, by training a few steps of each on this thread."""
    from ups.distributed.runtime import Runtime
    from ups.run.assemble import assemble, open_data
    from ups.training.progress import Progress, cpu_seconds

    short = copy.deepcopy(recipe)
    for stage in short["stages"]:
        stage.pop("budget_seconds", None)
        stage["steps"] = STEPS
    checked = Recipe.model_validate(short)
    costs = []
    with Runtime.start(checked.engine) as runtime, open_data(checked) as opened:
        for index in range(len(checked.stages)):
            turns = _Turns()
            with assemble(checked, opened, runtime, Progress(stage_index=index), hooks=[turns]) as parts:
                before = cpu_seconds() - time.process_time()
                parts.engine.run()
                of_workers = cpu_seconds() - time.process_time() - before
            costs.append(turns.cost() + of_workers / STEPS / statistics.fmean(turns.sticks))
    return costs


def with_steps(recipe: dict[str, Any], costs: list[float], seconds_of_yardstick: float) -> dict[str, Any]:
    """The recipe with as many steps of each stage as its budget pays for, unless it says how many."""
    found = copy.deepcopy(recipe)
    for stage, cost in zip(found["stages"], costs, strict=True):
        if "budget_seconds" in stage:
            stage["steps"] = max(1, round(stage.pop("budget_seconds") / (cost * seconds_of_yardstick)))
    return found


def main() -> None:
    """Recipes as JSON, one on each line of the input -> seconds of the yardstick, then costs of each, on a line each.

    In a process of its own: here torch has one thread, and CPU time is that of one.
    """
    sys.stdout.write(json.dumps(yardstick_seconds()) + "\n")
    recipes = [json.loads(line) for line in sys.stdin]
    rounds: list[list[list[float]]] = [[] for _ in recipes]
    for number in range(ROUNDS):
        for found, recipe in zip(rounds, recipes, strict=True):
            found.append(step_costs(recipe))
            if number + 1 == ROUNDS:
                sys.stdout.write(json.dumps(middle(found)) + "\n")
                sys.stdout.flush()


def middle(rounds: list[list[float]]) -> list[float]:
    """The median over rounds of the cost of each stage."""
    return [statistics.median(costs) for costs in zip(*rounds, strict=True)]


def keep_busy() -> None:
    """Passes of the yardstick for ever, in place of another training: two at a time are slower than one alone.

    Writes a line when it has begun. It must not be a child of who measures, whose CPU time includes its children's.
    """
    stick = Yardstick()
    stick.seconds()
    sys.stdout.write("busy\n")
    sys.stdout.flush()
    while True:
        stick.seconds()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--plugin"]:
        use_script(sys.argv[2])
    keep_busy() if sys.argv[1:] == ["busy"] else main()
