"""Data of a user, trained from scratch and from the shipped model for the same CPU-seconds.

    python benchmarks/model/finetune.py --out DIR [--seconds 60] [--sizes 16,64,256] [--data NAMES] [--choose] [--more]

Four data sets are made by our solvers with other coefficients, initial states, domains, time steps and names than those
of the nine tasks, and written as plain `.npz`. `ups init` writes the recipe of each, which is trained with and without
`start_from`. Budgets are CPU-seconds of one thread, of training alone. Errors are of 24 test trajectories, relative to
the trajectory.

The start is the task of the model that explains most of a change in the data, whether `ups init` would take it or not.
--choose: also start as each other task that can stand for the data; the threshold of `ups init` was chosen by errors of
one step on validation trajectories. --more: also continue from the run of 64 trajectories with 256.
What is in DIR/results.jsonl is not trained again. Last line: one JSON object. Exit code 1 unless the start is better in
rollouts on three of four data sets with 16 and with 64 trajectories.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np

import ups
from ups.data.open import open_paths
from ups.library.own_data import init_run
from ups.run.warm_start import explained, stepper_at
from ups.solvers import diffreact, spectral
from ups.solvers.problem import Draws, average_periodic_1d, cell_centers, truncate_periodic_2d

MODEL = "ups-joint"
VALID, TEST, CHUNK = 8, 24, 16
SCORES = {"one step": "one_step_trmse", "rollout": "trmse"}
Arrays = dict[str, Any]
# Length of the domain, points of an axis, time step, and what solves some trajectories.
Case = tuple[float, int, float, Callable[[Draws], Arrays]]


def random_waves(draws: Draws, points: int) -> Any:
    """(n, points): five waves whose amplitudes fall with their number."""
    numbers = np.arange(1, 6)[:, None]
    amplitudes = draws.normal("start", 10).reshape(-1, 2, 5, 1) / numbers
    angle = 2 * np.pi * numbers * np.arange(points) / points
    return (amplitudes[:, 0] * np.cos(angle) + amplitudes[:, 1] * np.sin(angle)).sum(1)


def flow(draws: Draws) -> Arrays:
    """Burgers from five waves with a mean wind, in other units: a length of 2, velocities times 1.5."""
    viscosity = draws.log_uniform("viscosity", 1, 0.05, 0.3)[:, 0] / np.pi
    start = 0.5 * random_waves(draws, 384) + draws.uniform("wind", 1, -0.3, 0.3)
    u = average_periodic_1d(spectral.burgers(start, viscosity, 0.04, 41), 384, 96)
    return {"velocity": 1.5 * u, "viscosity": viscosity * 1.5 * 2.0}


def population(draws: Draws) -> Arrays:
    """Fisher-KPP from smooth patches, on a length of 5."""
    numbers = [draws.log_uniform("diffusivity", 1, 0.01, 0.05), draws.log_uniform("growth", 1, 0.5, 2.0)]
    start = 1 / (1 + np.exp(4 * (1.5 - random_waves(draws, 256))))
    modes = spectral.fisher_kpp(start, np.concatenate(numbers, 1), 5.0, 0.25, 31)
    return {
        "density": average_periodic_1d(modes, 256, 128),
        "diffusivity": numbers[0][:, 0],
        "growth": numbers[1][:, 0],
    }


def tissue(draws: Draws) -> Arrays:
    """FitzHugh-Nagumo with ten times the offset, on a square of 3: diffusion is 4/9 of what the model knows."""
    start = np.stack([diffreact.cosine_noise(draws, name, 64, 3.0) for name in ("activator", "inhibitor")])
    spun_up = diffreact.evolve(start, 3.0, 1.5, 2, max_step=0.025, offset=0.05)[-1]
    frames = np.stack(diffreact.evolve(spun_up, 3.0, 0.25, 21, max_step=0.05, offset=0.05))  # (T, 2, n, N, N)
    activator, inhibitor = np.transpose(diffreact.resample_cosine(frames, 32), (1, 2, 0, 3, 4))
    return {"activator": activator, "inhibitor": inhibitor}


def eddies(draws: Draws) -> Arrays:
    """Decaying vorticity: half the viscosity, no forcing and no drag."""
    start = spectral.random_vorticity(draws, 64)
    modes = spectral.navier_stokes(start, 2 * math.pi, 0.01, 0.0, 0.0, 0.25, 21, skipped=2)
    return {"omega": truncate_periodic_2d(modes, 64, 32)}


CASES: dict[str, Case] = {
    "flow": (2.0, 96, 0.04 * 2.0 / 1.5, flow),
    "population": (5.0, 128, 0.25, population),
    "tissue": (3.0, 32, 0.25, tissue),
    "eddies": (2 * math.pi, 32, 0.25, eddies),
}


def trajectories(out: Path, name: str, split: Any, count: int) -> Arrays:
    """The first of a split; each chunk is solved once."""
    length, points, dt, solve = CASES[name]
    parts = []
    for first in range(0, count, CHUNK):
        path = out / "chunks" / f"{name}-{split}-{first}.npz"
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            arrays = solve(Draws(7, name, split, tuple(range(first, first + CHUNK))))
            partial = path.with_suffix(".partial.npz")
            np.savez(partial, **{key: array.astype(np.float32) for key, array in arrays.items()})
            partial.rename(path)
        with np.load(path) as loaded:
            parts.append(dict(loaded))
    joined = {key: np.concatenate([part[key] for part in parts])[:count] for key in parts[0]}
    field = next(iter(joined.values()))
    axes = {axis: cell_centers(points, length) for axis in "xy"[: field.ndim - 2]}
    return joined | {"t": dt * np.arange(field.shape[1])} | axes


def write_file(out: Path, name: str, *splits: tuple[str, int]) -> Path:
    """A file as a user has it: the trajectories of some splits, one after the other."""
    path = out / "data" / f"{name}-{'-'.join(f'{split}{count}' for split, count in splits)}.npz"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        parts = [trajectories(out, name, split, count) for split, count in splits]
        arrays: Arrays = {
            key: array if key in ("t", "x", "y") else np.concatenate([part[key] for part in parts])
            for key, array in parts[0].items()
        }
        np.savez(path, **arrays)
    return path


def train(out: Path, data: str, size: int, kind: str, seconds: float, start: dict[str, str | None]) -> dict[str, Any]:
    """Train the recipe that `ups init` writes for so many trajectories, with another start, unless that was done.

    start: `start_from` and `start_task`. Returns what is a row of results.jsonl.
    """
    results = out / "results.jsonl"
    key = {"data": data, "trajectories": size, "kind": kind, "seconds": seconds}
    rows = [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []
    done = [row for row in rows if key.items() <= row.items()]
    if done:
        return dict(done[0])
    name = f"{data}-{size}-{kind.replace(' ', '-')}-{seconds:g}"
    total = size + VALID + TEST
    fractions = {"valid": VALID / total, "test": TEST / total, "calibration": 0}
    run = ups.fit(
        ups.load_recipe(
            first_recipe(out, data, size),
            **{f"data__tasks__0__{split}_fraction": part for split, part in fractions.items()},
            **{f"stages__0__{field}": value for field, value in start.items()},
            data__tasks__0__name=data,
            data__tasks__0__path=str(write_file(out, data, ("train", size), ("valid", VALID), ("test", TEST))),
            run__name=name,
            run__dir=str((out / "runs" / name).absolute()),
            stages__0__steps=None,
            stages__0__budget_seconds=seconds,
            stages__0__budget_clock="cpu",
            engine__threads=1,
            engine__device="cpu",
        ),
        progress=False,
    )
    (result,) = json.loads((run.path / "bundle" / "bundle.json").read_text())["scores"].values()
    lines = [json.loads(line) for line in (run.path / "metrics.jsonl").read_text().splitlines()]
    (valid,) = [line for line in lines if f"valid/{data}/one_step" in line]
    row = key | {"steps": run.checkpoints[-1], "valid one step": valid[f"valid/{data}/one_step"]}
    row |= {
        word: {name: float(summary[score]) for name, summary in result["predictors"].items()}
        for word, score in SCORES.items()
    }
    with results.open("a") as file:
        file.write(json.dumps(row) + "\n")
    print(json.dumps(row), flush=True)
    return row


def first_recipe(out: Path, data: str, size: int) -> Path:
    """What `ups init` makes of the trajectories to train on, and nothing else."""
    place = out / "init" / f"{data}{size}"
    if not place.exists():
        init_run(place, write_file(out, data, ("train", size)))
    return place / "recipe.yaml"


def shares(out: Path, data: str, size: int) -> dict[str, float]:
    """Task of the model -> how much of a change in the data it explains, as `ups init` measures it."""
    (task,) = ups.load_recipe(first_recipe(out, data, size)).data.tasks
    with contextlib.closing(open_paths(task.path, description=task.description)) as reader:
        return explained(stepper_at(MODEL), reader)


def starts_at(task: str | None) -> dict[str, str | None]:
    return {"start_from": task and MODEL, "start_task": task}


def show(rows: Sequence[Mapping[str, Any]]) -> int:
    """The table; whether the start won in rollouts on three data sets with 16 and with 64 trajectories."""
    print(
        f"{'data':<12}{'trajectories':>12}{'seconds':>9}{'explained':>11}  error      {'start':<11}{'scratch':<11}ratio"
    )
    won: dict[int, int] = {}
    for start in (row for row in rows if "explained" in row):
        same = ("data", "trajectories", "seconds")
        (scratch,) = [
            row for row in rows if row["kind"] == "scratch" and [row[k] for k in same] == [start[k] for k in same]
        ]
        for word in SCORES:
            a, b = start[word]["model"], scratch[word]["model"]
            print(
                f"{start['data']:<12}{start['trajectories']:>12}{start['seconds']:>9g}{start['explained']:>11.2f}  "
                f"{word:<11}{a:<11.4g}{b:<11.4g}{b / a:.2f}"
            )
        won[start["trajectories"]] = won.get(start["trajectories"], 0) + (a < b)
    print(json.dumps({"rows": list(rows), "won": won}))
    return 0 if all(won.get(size, 0) >= 3 for size in (16, 64)) else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("finetune-benchmark"))
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--sizes", default="16,64,256")
    parser.add_argument("--data", default=",".join(CASES))
    parser.add_argument("--choose", action="store_true")
    parser.add_argument("--more", action="store_true")
    options = parser.parse_args()
    out, seconds = options.out.absolute(), options.seconds
    rows = []
    for size in map(int, options.sizes.split(",")):
        for data in options.data.split(","):
            of = shares(out, data, size)
            best = max(of, key=of.__getitem__)
            rows.append(train(out, data, size, f"as {best}", seconds, starts_at(best)) | {"explained": of[best]})
            rows.append(train(out, data, size, "scratch", seconds, starts_at(None)))
            for other in of if options.choose else ():
                row = train(out, data, size, f"as {other}", seconds, starts_at(other))
                print(f"as {other}: {of[other]:.2f} explained, valid one step {row['valid one step']:.4g}", flush=True)
            if options.more and size == 64:
                before = out / "runs" / f"{data}-64-as-{best}-{seconds:g}"
                train(out, data, 256, "continued", seconds, {"start_from": str(before), "start_task": None})
    return show(rows)


if __name__ == "__main__":
    sys.exit(main())
