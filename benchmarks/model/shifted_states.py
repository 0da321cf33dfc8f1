"""States and parameters that the nine tasks were not trained on, with the solver's truth. Chosen before any scoring.

    python benchmarks/model/shifted_states.py --data data-seed2 --out shifted [--samples 24] [--task NAME ...]

--data: stores of fresh test trajectories (`ups data generate all --seed 2 --trajectories 1,0,256 --out data-seed2`).
Each kind changes the first frame of the next trajectories of the test split (of a steady task, its medium) or their
parameters, and our solver gives what follows, on a grid finer than the stored one (of euler1d and swe2d that of the
data). OUT/TASK.npz then has for each kind the given frames, static fields and parameters, the true frames, and how far
the truth on a grid half as fine is off. The table shows the kinds, and how often these two truths differ by more than
5 %: such samples are not counted.

Kinds keep what a range check sees where they can: a state that is drawn anew has the mean and the RMS deviation of
the one that it replaces, in each field. Positive fields are changed as logarithms, and so stay positive. What is
finished is not made again.
"""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ups.config.schema import TaskConfig
from ups.data.open import open_task
from ups.formats.base import Reader
from ups.solvers.coarse_solver import RESTARTS, Given, Setting
from ups.solvers.tasks import BENCH_TASKS, TASKS
from ups.spec.task import TaskSpec

Float64 = npt.NDArray[np.float64]
SEED = 38
# Truth is known where grids of this fineness and of half of it agree so well, relative to the RMS of the truth.
KNOWN = 0.05
# Points of the solver for each stored one. Data of the finite-volume solvers depend on their grid, so that their truth
# is what the grid of the data gives; of the others, what finer grids agree on.
OWN_GRID = {"euler1d": 4, "swe2d": 2}
FINENESS = {name: OWN_GRID.get(name, 8 if name.endswith("1d") else 4) for name in BENCH_TASKS}
# Channels of the given field that must stay positive.
POSITIVE = {"euler1d": (0, 1), "swe2d": (0,), "darcy2d": (0,)}
# The equation of this one has no bounded solution from a negative state.
NOT_NEGATIVE = ("reacdiff1d",)
# Vectors change the sign of their own component where the axis is mirrored: (channel, axis) by task.
COMPONENTS = {"euler1d": ((2, 0),), "swe2d": ((1, 0), (2, 1))}
SMOOTH = ("advection1d", "burgers1d", "ks1d", "reacdiff1d", "ns2d", "diffreact2d")
STEEP = ("euler1d", "swe2d", "darcy2d")
OTHER = {
    "advection1d": "ks1d",
    "burgers1d": "ks1d",
    "ks1d": "burgers1d",
    "reacdiff1d": "burgers1d",
    "euler1d": "ks1d",
    "ns2d": "diffreact2d",
    "swe2d": "ns2d",
    "diffreact2d": "ns2d",
    "darcy2d": "ns2d",
}
# Half of the width of the trained range beyond it; of a range that is drawn on a logarithmic scale, half of that.
BELOW = ("reacdiff1d",)  # below the others, the solver has no thin front or a parameter is negative


@dataclass(frozen=True)
class Case:
    """What a kind starts from. state: (n, C, *S), the given frame or the medium; other: that of another task."""

    task: TaskSpec
    state: Float64
    parameters: Float64
    other: Float64
    draw: np.random.Generator

    @property
    def space(self) -> tuple[int, ...]:
        return tuple(range(2, self.state.ndim))

    def like(self, values: Float64) -> Float64:
        """Values with the mean and the RMS deviation of the state, in each channel."""
        mean, size = self.mean(self.state), self.size(self.state)
        return mean + size * (values - self.mean(values)) / np.maximum(self.size(values), 1e-12)

    def mean(self, values: Float64) -> Float64:
        return np.asarray(values.mean(axis=self.space, keepdims=True))

    def size(self, values: Float64) -> Float64:
        return np.asarray(values.std(axis=self.space, keepdims=True))

    def grid(self) -> list[Float64]:
        """Cell centers of each axis in [0, 1), each shaped as an axis of the state."""
        shape = self.state.shape[2:]
        points = [(np.arange(size) + 0.5) / size for size in shape]
        return [p.reshape([-1 if i == axis else 1 for i in range(len(shape))]) for axis, p in enumerate(points)]


def ordinary(case: Case) -> Case:
    return case


def moved(case: Case) -> Case:
    """By a symmetry of the task: no harm should come of it. Periodic axes are shifted, the others mirrored."""
    state = case.state
    for axis, spec in zip(case.space, case.task.axes, strict=True):
        state = np.roll(state, 5, axis) if _periodic(spec) else _mirrored(case, state, axis)
    return replace(case, state=state)


def rougher(case: Case) -> Case:
    """Every second point, and the domain filled with copies: all lengths are halved."""
    state = case.state
    for axis, spec in zip(case.space, case.task.axes, strict=True):
        half = np.take(state, range(0, state.shape[axis], 2), axis)
        state = np.concatenate([half, half if _periodic(spec) else _mirrored(case, half, axis)], axis)
    return replace(case, state=state)


def doubled(case: Case) -> Case:
    mean = case.mean(case.state)
    return replace(case, state=mean + 2 * (case.state - mean))


def box(case: Case) -> Case:
    """A jump to another value in a third to a half of each axis."""
    inside: Any = np.ones(1)
    for points in case.grid():
        start, length = case.draw.uniform(size=(2, len(case.state), 1, *[1] * points.ndim))
        inside = inside * ((points - start) % 1.0 < 0.3 + 0.3 * length)
    return replace(case, state=case.like(np.broadcast_to(inside, case.state.shape).astype(float)))


def smooth(case: Case) -> Case:
    """A few long waves instead of a state of steps."""
    return replace(case, state=case.like(_waves(case, range(3))))


def short_wave(case: Case) -> Case:
    """One wave of three cells on each axis."""
    cells = case.state.shape[2] // 3
    return replace(case, state=case.like(_waves(case, range(cells, cells + 1))))


def white_noise(case: Case) -> Case:
    return replace(case, state=case.like(case.draw.normal(size=case.state.shape)))


def bump(case: Case) -> Case:
    """One narrow bump on a constant."""
    away: Any = 0.0
    for points in case.grid():
        center = case.draw.uniform(0.3, 0.7, size=(len(case.state), 1, *[1] * points.ndim))
        away = away + (points - center) ** 2
    return replace(case, state=case.like(np.broadcast_to(np.exp(-0.5 * away / 0.04**2), case.state.shape)))


def constant(case: Case) -> Case:
    return replace(case, state=np.broadcast_to(case.mean(case.state), case.state.shape).copy())


def higher_mean(case: Case) -> Case:
    return replace(case, state=case.state + case.size(case.state).mean(axis=0))


def of_another_task(case: Case) -> Case:
    return replace(case, state=case.like(case.other))


def _beyond(case: Case, sign: int) -> Case:
    """Parameters above (sign 1) or below (-1) their range."""
    columns = []
    for spec in case.task.parameters:
        low, high = np.log([spec.minimum, spec.maximum]) if spec.scale == "log" else (spec.minimum, spec.maximum)
        share = case.draw.uniform(0.05, 0.5, len(case.state))
        value = high + share * (high - low) if sign > 0 else low - share * (high - low)
        columns.append(np.exp(value) if spec.scale == "log" else value)
    return replace(case, parameters=np.stack(columns, axis=1))


WITH_PARAMETERS = tuple(name for name, task in TASKS.items() if task.spec.parameters)
# name -> (what is changed, in which tasks). "twice as long" goes on after the last stored frame.
KINDS: dict[str, tuple[Callable[[Case], Case], tuple[str, ...]]] = {
    "moved (benign)": (moved, BENCH_TASKS),
    "twice as long": (ordinary, tuple(name for name in BENCH_TASKS if not TASKS[name].spec.steady)),
    "parameters above": (partial(_beyond, sign=1), WITH_PARAMETERS),
    "parameters below": (partial(_beyond, sign=-1), BELOW),
    "twice as rough": (rougher, BENCH_TASKS),
    "amplitude doubled": (doubled, BENCH_TASKS),
    "box": (box, BENCH_TASKS),
    "smooth": (smooth, STEEP),
    "short wave": (short_wave, BENCH_TASKS),
    "white noise": (white_noise, BENCH_TASKS),
    "bump": (bump, BENCH_TASKS),
    "constant": (constant, BENCH_TASKS),
    "higher mean": (higher_mean, BENCH_TASKS),
    "state of another task": (of_another_task, BENCH_TASKS),
}


def _periodic(axis: Any) -> bool:
    return bool(axis.boundary == "periodic")


def _mirrored(case: Case, state: Float64, axis: int) -> Float64:
    """Reversed along an array axis, where a vector's own component changes its sign."""
    out = np.flip(state, axis).copy()
    for channel, own in COMPONENTS.get(case.task.name, ()):
        if own == axis - 2:
            out[:, channel] *= -1
    return out


def _waves(case: Case, numbers: range) -> Float64:
    """Products of cosines of these wave numbers with random phases and sizes, drawn for each sample and channel."""
    many = (*case.state.shape[:2], *[1] * len(case.space))
    total: Any = 0.0
    for number in numbers:
        wave: Any = case.draw.normal(size=many)
        for axis, points in zip(case.task.axes, case.grid(), strict=True):
            # Whole periods where the axis is periodic, half ones elsewhere: no flow through an end.
            phase = case.draw.uniform(0, 2 * np.pi, many) if _periodic(axis) else 0.0
            wave = wave * np.cos((2 if _periodic(axis) else 1) * np.pi * number * points + phase)
        total = total + wave
    return np.asarray(total)


def shifted(reader: Reader, other: Reader, kind: str, first: int, count: int) -> dict[str, npt.NDArray[Any]]:
    """Given frames, static fields, parameters, true frames (n, T, C, *S) and the error of the truth, of one kind."""
    task, change = reader.task, KINDS[kind][0]
    given = _given(reader, first, count)
    positive = POSITIVE.get(task.name, ())
    state = (given.static if task.steady else given.frame).copy()
    state[:, positive] = np.log(state[:, positive])
    others = _given(other, first, count).frame[:, [0] * state.shape[1]]
    if others.shape[2:] != state.shape[2:]:
        raise ValueError(f"the stores of {task.name} and {other.task.name} have different grids")
    draw = np.random.default_rng([SEED, BENCH_TASKS.index(task.name), list(KINDS).index(kind)])
    case = change(Case(task, state, given.parameters, others, draw))
    state = case.state.copy()
    state[:, positive] = np.exp(state[:, positive])
    state = np.maximum(state, 0.0) if task.name in NOT_NEGATIVE else state
    changed = replace(given, parameters=case.parameters, **{"static" if task.steady else "frame": state})
    num_frames = 1 if task.steady else (reader.num_frames - 1) * (2 if kind == "twice as long" else 1)
    if not task.steady:  # what the solver cannot know of a state, the model is not given either
        frame = _solve(task, changed, 1e-9, 1, FINENESS[task.name])[:, 0]
        changed = replace(changed, frame=frame.astype(np.float32).astype(np.float64))
    truth = _solve(task, changed, task.dt, num_frames, FINENESS[task.name])
    coarser = truth
    if task.name not in OWN_GRID:
        coarser = _solve(task, changed, task.dt, num_frames, FINENESS[task.name] // 2)
    axes = tuple(range(1, truth.ndim))
    with np.errstate(all="ignore"):
        off = np.sqrt(np.square(truth - coarser).mean(axes) / np.maximum(np.square(truth).mean(axes), 1e-12))
    return {
        "state": changed.frame.astype(np.float32),
        "static": changed.static.astype(np.float32),
        "parameters": changed.parameters,
        "truth": truth.astype(np.float32),
        "truth_off": np.where(np.isfinite(off), off, np.inf),
    }


def _given(reader: Reader, first: int, count: int) -> Given:
    """First frames of trajectories of the test split, beginning again after the last one."""
    part = [number % reader.splits["test"] for number in range(first, first + count)]
    steady = reader.task.steady
    block = reader.read_block("test", part, [0] * count, 0 if steady else 1)
    frame = np.zeros((count, 0, *reader.space)) if steady else block.state[:, 0].astype(np.float64)
    return Given(frame, block.static.astype(np.float64), block.parameters.astype(np.float64))


def _solve(task: TaskSpec, given: Given, dt: float, num_frames: int, fineness: int) -> Float64:
    restart = RESTARTS[task.name]
    points = fineness * (given.static if task.steady else given.frame).shape[-1]
    # Twice as many steps as for states of ordinary size.
    substeps = 2 * restart.substeps(points, dt) if restart.substeps is not None else 0
    with np.errstate(all="ignore"):
        return restart.run(task, given, dt, num_frames, Setting(points, substeps))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--samples", type=int, default=24, help="of each kind and task")
    parser.add_argument("--task", action="append", choices=BENCH_TASKS, help="default: all nine")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    print("| task | kind | samples with a known truth | solver off by, median |\n|---|---|---|---|")
    for name in options.task or BENCH_TASKS:
        path = options.out / f"{name}.npz"
        found: dict[str, npt.NDArray[Any]] = {}
        if not path.exists():
            with contextlib.ExitStack() as stack:
                reader, other = (
                    stack.enter_context(
                        contextlib.closing(open_task(TaskConfig(name=n, path=str(options.data / f"{n}.zarr"))))
                    )
                    for n in (name, OTHER[name])
                )
                for number, (kind, (_, tasks)) in enumerate(KINDS.items()):
                    if name in tasks:
                        made = shifted(reader, other, kind, number * options.samples, options.samples)
                        found |= {f"{kind}/{part}": values for part, values in made.items()}
            part = path.with_suffix(".part.npz")
            np.savez(part, **found)  # type: ignore[arg-type]
            os.replace(part, path)
        with np.load(path) as stored:
            for kind in KINDS:
                if f"{kind}/truth_off" in stored:
                    off = stored[f"{kind}/truth_off"]
                    print(
                        f"| {name} | {kind} | {(off < KNOWN).sum()} of {off.size} | {np.median(off):.2g} |", flush=True
                    )


if __name__ == "__main__":
    main()
