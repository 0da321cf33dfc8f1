"""CPU time of a rollout step: of the model, and of the solver that made the data, at the error of the model.

The solver runs on coarser grids and with larger steps. Each setting starts from the same stored frames as the model, is
scored on the stored grid by the same metric, and is timed in CPU-seconds of one thread, over the same number of
trajectories at once. A setting that blows up has an infinite error. The data is itself a solution on some grid: on that
grid a solver only repeats it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import torch

from ups.evaluation.accumulate import Accumulator
from ups.evaluation.rollout import RolloutPlan, read_inputs
from ups.formats.base import Reader
from ups.models.normalization import one_thread
from ups.models.stepper import Predictor, rollout
from ups.record.text import counted
from ups.solvers.coarse_solver import RESTARTS, Given, Restart, Setting, own_task
from ups.solvers.problem import Float64

CPU = torch.device("cpu")
BATCH_SIZE = 32
# Repeats of a timing: three, more while they are short, fewer once they are long.
MIN_REPEATS, MAX_REPEATS = 3, 10
SHORT_SECONDS, LONG_SECONDS = 0.3, 4.0
# Grids finer than the first that is so many times more accurate than the model only cost more.
ENOUGH = 10.0
# CPU-seconds for the settings of one task; a grid that would need more is left out, and the result says so.
BUDGET_SECONDS = 150.0


def solver_cost(
    reader: Reader,
    plan: RolloutPlan,
    model: Predictor,
    model_error: float,
    *,
    split: str = "test",
    batch_size: int = BATCH_SIZE,
    max_trajectories: int | None = None,
    budget_seconds: float = BUDGET_SECONDS,
    progress: Callable[[str, int, int], None] | None = None,
) -> dict[str, Any]:
    """Error and cost of each solver setting and of the model, and a sentence that says where the model lies.

    model_error: rollout error of the model over the same trajectories (tRMSE, see `ups.evaluation.metrics`).
    """
    task, reason = own_task(reader)
    if task is None:
        return {"reason": f"no solver can start from a frame of this task: {reason}"}
    if reader.differing:
        return {"reason": f"trajectories differ in {' and '.join(reader.differing)}, which is not compared"}
    count = min(reader.splits[split], max_trajectories or reader.splits[split])
    size = min(batch_size, count)
    restart = RESTARTS[task.spec.name]
    settings: list[dict[str, Any]] = []
    left_out: list[int] = []
    with one_thread():
        grids = restart.settings(reader.space[0], reader.task.dt)
        started, last, last_seconds = time.process_time(), 0, 0.0
        for grid in grids:
            points, spent = grid[0].points, time.process_time() - started
            # work grows with the number of points, and with that of the steps that they force
            expected = last_seconds * (points / last) ** (len(reader.space) + 1) if last else 0.0
            if last and spent + expected > budget_seconds:
                left_out = [g[0].points for g in grids if g[0].points >= points]
                break
            for setting in grid:
                if progress is not None:
                    progress(f"solver of {reader.task.name}", len(settings), sum(map(len, grids)))
                error, milliseconds = _measure(restart, setting, reader, plan, split, count, size)
                settings.append({**asdict(setting), "error": error, "milliseconds": milliseconds})
            last, last_seconds = points, time.process_time() - started - spent
            if any(s["error"] * ENOUGH < model_error for s in settings):
                break
        ours = {"error": model_error, "milliseconds": model_milliseconds(model, reader, plan, split, range(size))}
    sizes = {"batch_size": size, "num_trajectories": count}
    measured = {"settings": settings, "left_out": left_out, "model": ours}
    return sizes | measured | verdict(settings, ours, steady=reader.task.steady)


def verdict(settings: Sequence[dict[str, Any]], model: dict[str, float], *, steady: bool) -> dict[str, Any]:
    """The cheapest setting at least as accurate as the model, how many times faster the model is, and the sentence."""
    unit = "per sample" if steady else "per step and trajectory"
    able = [s for s in settings if s["error"] <= model["error"]]
    shown = min(able or settings, key=lambda s: float(s["milliseconds" if able else "error"]))
    steps = f", {counted(shown['substeps'], 'step')} per frame" if shown["substeps"] else ""
    points = f"{shown['points']} points per axis{steps}"
    price = f"({points}, error {shown['error']:.3g}) costs {shown['milliseconds']:.3g} ms {unit}"
    if not able:
        sentence = (
            f"None of {len(settings)} solver settings is as accurate as the model (error {model['error']:.3g}); "
            f"the most accurate {price}, the model {model['milliseconds']:.3g} ms."
        )
        return {"cheapest": None, "speedup": None, "sentence": sentence}
    speedup = shown["milliseconds"] / model["milliseconds"]
    factor = f"{speedup:.3g} times faster" if speedup >= 1 else f"{1 / speedup:.3g} times slower"
    sentence = (
        f"At the model's error of {model['error']:.3g} the cheapest solver setting that is at least as accurate "
        f"{price}; the model costs {model['milliseconds']:.3g} ms: {factor}."
    )
    return {"cheapest": shown, "speedup": speedup, "sentence": sentence}


def _measure(
    restart: Restart, setting: Setting, reader: Reader, plan: RolloutPlan, split: str, count: int, size: int
) -> tuple[float, float]:
    """Rollout error over all trajectories, and CPU milliseconds per step and trajectory of the first batch."""
    task = reader.task
    score = Accumulator(plan.num_steps, task.channel_names(task.predicted))
    milliseconds = math.nan
    for first in range(0, count, size):
        part = range(first, min(first + size, count))
        # always `size` of them: compiled solvers would compile again for another number
        batch, truth = read_inputs(reader, split, [part[i % len(part)] for i in range(size)], plan, CPU, torch.float64)
        last = batch.state[:, :0].flatten(1, 2) if task.steady else batch.state[:, -1]
        inputs = Given(*(np.ascontiguousarray(t.numpy()) for t in (last, batch.static, batch.parameters)))

        def run(inputs: Given = inputs) -> Float64:
            with np.errstate(all="ignore"):
                return restart.run(task, inputs, task.dt, plan.num_steps, setting)

        frames = torch.from_numpy(run())
        own = slice(0, len(part))
        score.add(list(part), frames[own], truth[own], None if task.steady else batch.state[own])
        if first == 0:
            milliseconds = 1e3 * cpu_seconds(run) / (size * plan.num_steps)
    return score.summary()["trmse"], milliseconds


@torch.no_grad()
def model_milliseconds(
    model: Predictor, reader: Reader, plan: RolloutPlan, split: str, trajectories: Sequence[int]
) -> float:
    """CPU milliseconds per step and trajectory of rollouts of these trajectories together."""
    batch, _ = read_inputs(reader, split, trajectories, plan, CPU, torch.float32)

    def run() -> None:
        for _ in rollout(model, batch, plan.num_steps):
            pass

    with one_thread():
        run()  # the first call pays for what later ones find in memory
        return 1e3 * cpu_seconds(run) / (len(trajectories) * plan.num_steps)


def cpu_seconds(run: Callable[[], object]) -> float:
    """The least CPU time of a call over some repeats, all threads of the process together.

    The least, because other programs on the machine only add to it.
    """
    spent: list[float] = []
    while sum(spent) < LONG_SECONDS and len(spent) < (MAX_REPEATS if sum(spent) < SHORT_SECONDS else MIN_REPEATS):
        started = time.process_time()
        run()
        spent.append(time.process_time() - started)
    return min(spent)
