"""Does a model pay? CPU time of its rollouts next to the cheapest solver that is at least as accurate.

The solver runs on coarser grids, with larger steps, lower orders and in float32 (`ups.solvers.coarse_solver`): a grid
from coarse to fine until two are accurate enough, then whatever is near the cheapest. Each setting starts from the same
stored frames as the model and is scored on the stored grid by the same metric. Then the model and the cheapest settings
are timed in turns, in CPU-seconds of all threads of the process. A setting that blows up has an infinite error. The
data is itself a solution on some grid: on that grid a solver only repeats it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ups.evaluation import metrics
from ups.evaluation.rollout import RolloutPlan, read_inputs
from ups.formats.base import Reader
from ups.models.normalization import one_thread
from ups.models.stepper import Predictor, rollout
from ups.record.text import counted
from ups.solvers.coarse_solver import RESTARTS, Given, Setting, own_task
from ups.solvers.problem import Draws
from ups.solvers.tasks import SolverTask
from ups.spec.batch import Batch

CPU = torch.device("cpu")
BATCH_SIZE = 32
# Repeats of a timing: three, more while they are short, fewer once they are long.
MIN_REPEATS, MAX_REPEATS = 3, 10
SHORT_SECONDS, LONG_SECONDS = 0.3, 4.0
# CPU-seconds for the settings of one task; what would come later is left out, and the result says so.
BUDGET_SECONDS = 150.0
# Timed in turns: the model and the cheapest settings, each once in a block.
BLOCKS, CANDIDATES = 5, 2
# Part of the processors' time that other virtual machines may take while times are measured.
MOST_STEAL = 0.1
GENERATED = 4  # trajectories that tell what the data cost
INSTANT, AVERAGED = "each frame", "time average"
# What a setting is judged by, and its key in a row.
TARGETS = {INSTANT: "error", AVERAGED: "error_of_average"}
# Assumed of a model that does not exist yet: `ups-joint` has 0.0006 to 0.022 on the nine tasks of ups-bench.
TYPICAL_ERROR = 0.01


def break_even(
    reader: Reader,
    plan: RolloutPlan,
    model: Predictor,
    *,
    split: str = "test",
    trained: bool = True,
    training_seconds: float | None = None,
    solve_seconds: float | None = None,
    budget_seconds: float = BUDGET_SECONDS,
    progress: Callable[[str, int, int], None] | None = None,
) -> dict[str, Any]:
    """How many solves it takes until data, training and rollouts cost less than the solver at the model's error.

    A solve is a rollout of one trajectory. trained: else the model has the error `TYPICAL_ERROR`, a guess.
    training_seconds: of training and tuning, for this task. solve_seconds: what a solve costs the user, who has a
    solver of their own. The result is plain data with a `sentence`, or with a `reason` why nothing was measured.
    """
    task, reason = own_task(reader)
    if solve_seconds is None and task is None:
        return {"reason": f"no solver can start from a frame of this task: {reason}; state what a solve costs"}
    if reader.differing:
        return {"reason": f"trajectories differ in {' and '.join(reader.differing)}, which is not compared"}
    size, steps = min(BATCH_SIZE, reader.splits[split]), plan.num_steps
    batch, truth = read_inputs(reader, split, range(size), plan, CPU, torch.float64)
    restart = None if task is None or solve_seconds is not None else RESTARTS[task.spec.name]

    def solve(setting: Setting, batch: Batch) -> np.ndarray[Any, Any]:
        assert restart is not None
        last = batch.state[:, :0].flatten(1, 2) if batch.task.steady else batch.state[:, -1]
        given = Given(*(np.ascontiguousarray(t.numpy()) for t in (last, batch.static, batch.parameters)))
        with np.errstate(all="ignore"):
            return restart.run(batch.task, given, batch.task.dt, steps, setting)

    with one_thread():
        target = dict.fromkeys(TARGETS.values(), TYPICAL_ERROR)
        if trained:
            target = _errors(torch.stack(list(_frames(model, batch, steps)), dim=1), truth, batch)
        rows: dict[Setting, dict[str, Any]] = {}
        left_out: list[int] = []
        if restart is not None:
            started = time.process_time()

            def measure(setting: Setting) -> bool:
                """Whether a setting is as accurate as the model."""
                if setting not in rows:
                    if progress is not None:
                        progress(f"solver of {reader.task.name}", len(rows), len(rows) + 1)
                    found = _errors(torch.from_numpy(np.array(solve(setting, batch))), truth, batch)
                    seconds = _seconds(lambda: solve(setting, batch))
                    rows[setting] = {**asdict(setting), **found, "milliseconds": 1e3 * seconds / (size * steps)}
                return bool(rows[setting]["error"] <= target["error"])

            grids, able = restart.settings(reader.space[0], reader.task.dt), 0
            for grid in grids:
                if able == 2 or (rows and time.process_time() - started > budget_seconds):
                    left_out = [g[0].points for g in grids if g[0].points >= grid[0].points and able < 2]
                    break
                able += any(measure(setting) for setting in grid)  # smaller steps only cost more
            for key in TARGETS.values():
                while time.process_time() - started < budget_seconds:
                    new = [s for one in _able(rows, key, target)[:1] for s in restart.cheaper(one) if s not in rows]
                    if not new:
                        break
                    for setting in new:
                        measure(setting)
        candidates = {name: _able(rows, key, target)[:CANDIDATES] for name, key in TARGETS.items()}
        costs, steal = _in_turns(model, solve, {s for chosen in candidates.values() for s in chosen}, batch, steps)
        data_seconds = _data_seconds(task, reader, plan, solve_seconds)
    matched: dict[str, Any] = {}
    for name, chosen in candidates.items():
        if name == AVERAGED and (reader.task.steady or restart is None):
            continue
        matched[name] = {
            str(count): _matched(timed, chosen, rows, solve_seconds and 1e3 * solve_seconds / steps)
            for count, timed in costs.items()
        }
        for one in matched[name].values():
            one["num_solves"] = _num_solves(one, data_seconds + (training_seconds or 0.0), steps)
    result = {
        "num_trajectories": size,
        "num_steps": steps,
        "steady": reader.task.steady,
        "settings": list(rows.values()),
        "left_out": left_out,
        "model": target | {"milliseconds": median(costs[size][None]) * 1e3},
        "trained": trained,
        "matched": matched,
        "data_seconds": data_seconds,
        "training_seconds": training_seconds,
        "stated": solve_seconds is not None,
        "steal": steal,
        "judged": steal <= MOST_STEAL,
    }
    return result | {"sentence": sentence(result)}


def _able(rows: Mapping[Setting, Mapping[str, Any]], key: str, target: Mapping[str, float]) -> list[Setting]:
    """The settings that are as accurate as the model, the cheapest first."""
    able = [setting for setting, row in rows.items() if row[key] <= target[key]]
    return sorted(able, key=lambda setting: float(rows[setting]["milliseconds"]))


def _matched(
    timed: Mapping[Setting | None, Sequence[float]],
    chosen: Sequence[Setting],
    rows: Mapping[Setting, Mapping[str, Any]],
    stated: float | None,
) -> dict[str, Any]:
    """Milliseconds per step and trajectory of the model and of the cheapest solver; None if none is able."""
    ours = 1e3 * median(timed[None])
    if stated is not None:
        return {"model": ours, "solver": stated, "ratio": ours / stated, "setting": None}
    if not chosen:
        return {"model": ours, "solver": None, "ratio": None, "setting": None}
    best = min(chosen, key=lambda setting: median(timed[setting]))
    ratio = median(a / b for a, b in zip(timed[None], timed[best], strict=True))
    return {"model": ours, "solver": 1e3 * median(timed[best]), "ratio": ratio, "setting": dict(rows[best])}


def _num_solves(matched: Mapping[str, Any], fixed_seconds: float, steps: int) -> float | None:
    """Solves after which the model has been cheaper; None for never, or where no solver is known."""
    if matched["ratio"] is None or matched["ratio"] >= 1:
        return None
    return float(fixed_seconds / (1e-3 * steps * matched["solver"] * (1 - matched["ratio"])))


def sentence(result: Mapping[str, Any]) -> str:
    """What a card and `ups eval --break-even` say about a task."""
    unit = " per sample" if result["steady"] else " per step and trajectory"
    words = ""
    for name, by_batch in result["matched"].items():
        answers = []
        for count, one in reversed(by_batch.items()):
            answer = "never" if one["num_solves"] is None else f"after {one['num_solves']:,.0f} solves"
            if one["solver"] is None:
                answers = [f"no solver setting reaches the error {result['model'][TARGETS[name]]:.3g}"]
                break
            batch = "one at a time" if count == "1" else f"{count} at once"
            prices = f"{batch}: model {one['model']:.3g} ms{unit}, solver {one['solver']:.3g} ms"
            if one["setting"] is not None and unit:
                setting = setting_words(one["setting"], steady=result["steady"])
                prices += f" with {setting}, error {one['setting']['error']:.2g}"
            unit = ""
            answers.append(f"{answer} ({prices if name == INSTANT else batch})")
        head = "Break-even:" if name == INSTANT else " Time-averaged fields:"
        words += f"{head} {'; '.join(answers)}."
    training = result["training_seconds"]
    guess = "" if result["trained"] else ", a guess"
    words += (
        f" Error of the model {result['model']['error']:.3g}{guess}; data {result['data_seconds']:.3g} s, training "
    )
    words += "not counted." if training is None else f"{training:.3g} s."
    if result["stated"]:
        words += " The cost of a solve is as stated; a coarser solve with the error of the model may cost less."
    if not result["judged"]:
        words += f" Not judged: other machines took {100 * result['steal']:.0f} % of the processors."
    return words


def setting_words(setting: Mapping[str, Any], *, steady: bool) -> str:
    """A solver setting in a few words."""
    words = f"{setting['points']} points per axis"
    if setting["substeps"]:
        words += (
            f", {setting['substeps']} iterations" if steady else f", {counted(setting['substeps'], 'step')} per frame"
        )
    return words + f", {'float32' if setting['single'] else 'float64'}"


def _errors(frames: Tensor, truth: Tensor, batch: Batch) -> dict[str, float]:
    """Mean error relative to the trajectory, of each frame and of the average over the second half of the frames."""
    known = truth if batch.task.steady else torch.cat([batch.state, truth], dim=1)
    scale, frames = metrics.trajectory_rms(known), frames.double()
    averaged, average = (f[:, f.shape[1] // 2 :].mean(dim=1, keepdim=True) for f in (frames, truth))
    pairs = zip(TARGETS.values(), (frames, averaged), (truth, average), strict=True)
    errors = {key: float(metrics.trmse(a, b, scale).mean()) for key, a, b in pairs}
    return {key: value if math.isfinite(value) else math.inf for key, value in errors.items()}


@torch.no_grad()
def _frames(model: Predictor, batch: Batch, steps: int) -> list[Tensor]:
    return list(rollout(model, batch.to(CPU, torch.float32), steps))


def _in_turns(
    model: Predictor,
    solve: Callable[[Setting, Batch], object],
    settings: set[Setting],
    batch: Batch,
    steps: int,
) -> tuple[dict[int, dict[Setting | None, list[float]]], float]:
    """Batch size -> setting, None for the model -> CPU-seconds per step and trajectory of each block; and the steal."""
    costs, before = {}, _processor_ticks()
    for size in dict.fromkeys((1, batch.num_samples)):
        part = batch.cut(0, size)
        runs: dict[Setting | None, Callable[[], object]] = {None: partial(_frames, model, part, steps)}
        runs |= {setting: partial(solve, setting, part) for setting in settings}
        blocks: dict[Setting | None, list[float]] = {key: [] for key in runs}
        for block in range(BLOCKS + 1):
            for key, run in runs.items():
                started = time.process_time()
                run()
                if block:  # the first call pays for compilation
                    blocks[key].append((time.process_time() - started) / (size * steps))
        costs[size] = blocks
    spent = [after - earlier for earlier, after in zip(before, _processor_ticks(), strict=True)]
    return costs, spent[7] / max(1, sum(spent[:8]))


def _processor_ticks() -> list[int]:
    """Ticks of all processors by kind; the eighth is what other virtual machines took."""
    try:
        return [int(word) for word in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]]
    except OSError:  # not Linux
        return [0] * 8


def _data_seconds(task: SolverTask | None, reader: Reader, plan: RolloutPlan, solve_seconds: float | None) -> float:
    """CPU-seconds of the solves that made the train and valid splits."""
    count = reader.splits["train"] + reader.splits.get("valid", 0)
    if solve_seconds is not None or task is None:
        return count * (solve_seconds or 0.0)
    draws = Draws(0, task.spec.name, "train", tuple(range(GENERATED)))
    frames = 0 if task.spec.steady else plan.start_frame + 1 + plan.num_steps
    task.solve(draws, reader.space[0], frames)  # compiles
    started = time.process_time()
    task.solve(draws, reader.space[0], frames)
    return (time.process_time() - started) / GENERATED * count


@torch.no_grad()
def model_milliseconds(
    model: Predictor, reader: Reader, plan: RolloutPlan, split: str, trajectories: Sequence[int]
) -> float:
    """CPU milliseconds per step and trajectory of rollouts of these trajectories together."""
    batch, _ = read_inputs(reader, split, trajectories, plan, CPU, torch.float32)
    with one_thread():
        _frames(model, batch, plan.num_steps)  # the first call pays for what later ones find in memory
        seconds = cpu_seconds(lambda: _frames(model, batch, plan.num_steps))
    return 1e3 * seconds / (len(trajectories) * plan.num_steps)


def cpu_seconds(run: Callable[[], object]) -> float:
    """The least CPU time of a call over some repeats, all threads of the process together.

    The least, because other programs on the machine only add to it.
    """
    spent: list[float] = []
    while sum(spent) < LONG_SECONDS and len(spent) < (MAX_REPEATS if sum(spent) < SHORT_SECONDS else MIN_REPEATS):
        spent.append(_seconds(run))
    return min(spent)


def _seconds(run: Callable[[], object]) -> float:
    started = time.process_time()
    run()
    return time.process_time() - started
