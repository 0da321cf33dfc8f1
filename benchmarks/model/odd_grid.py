"""A periodic grid that halving does not divide, compared with one that it divides: the same physics, the same network.

    python benchmarks/model/odd_grid.py [--task burgers1d] [--points 100] [--reference 128] [--steps 400]
                                        [--seeds 0] [--resample] [--reference-steps N] [--directory DIR]

The network has four levels, so that 8 must divide the points. Both trainings see the same trajectories, stored with
as many points (with `--resample` the reference has the fewer points of the other, resampled by their waves, as a
person would do who wants to go around an odd grid), and have the same number of steps (not of CPU-seconds: on a busy
machine those buy unequal numbers). Scores are of whole rollouts and of single steps of the test split, relative to
the trajectory, as the geometric mean over seeds. `roll`: how much a step changes if the given frame is rolled and the
result rolled back, relative to the field, over many rolls; `ends`: the same within 4 points of the first and last
one, where a seam would be. Bar: the rollout's error is at most 1.05 times that of the reference; next to it stands
its 95 % interval over trajectories (bootstrap), which does not know how much another seed would change.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the checkout, for benchmarks.protocol

LIMIT = 1.05
NEAR = 4  # points at either end where a seam would be


def recipe_of(task: str, store: Path, run_dir: Path, seed: int, steps: int) -> dict[str, Any]:
    """The recipe of ups-bench for a network of one task, with a level more."""
    from benchmarks.protocol.recipes import entries

    recipe = entries(["ups-alone"], [task], str(store.parent))[0].recipe
    for stage in recipe["stages"]:
        del stage["budget_seconds"], stage["budget_clock"]
        stage["steps"] = steps if stage["type"] == "operator" else max(1, steps // 20)
    recipe["run"] = {"name": run_dir.name, "dir": str(run_dir), "seed": seed}
    recipe["data"]["tasks"][0]["path"] = str(store)
    recipe["model"] |= {"widths": [32, 64, 96, 128], "blocks": [1, 1, 1, 2]}
    return recipe


def rolls(run: Any) -> dict[str, float]:
    """Change of a step under rolls of the given frame, over all points and near the ends, relative to the field."""
    import torch

    from ups.evaluation.rollout import RolloutPlan, read_inputs
    from ups.run.trained import load_trained

    trained = load_trained(str(run.path))
    reader, step = trained.readers[0], trained.stepper
    plan = RolloutPlan(context_frames=1, start_frame=reader.num_frames // 4, num_steps=1)
    with torch.no_grad():
        batch, _ = read_inputs(reader, "test", range(reader.splits["test"]), plan, torch.device("cpu"), torch.float32)
        expected = step(batch)
        changes = []
        for shift in range(1, reader.space[0], 3):
            found = step(batch.with_state(batch.state.roll(shift, -1))).roll(-shift, -1)
            changes.append((found - expected).double().square().mean((0, 1)))  # (X,)
    change, size = torch.stack(changes).mean(0), expected.double().square().mean()
    near = torch.cat([change[:NEAR], change[-NEAR:]])
    return {"roll": float((change.mean() / size).sqrt()), "ends": float((near.mean() / size).sqrt())}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", default="burgers1d")
    parser.add_argument("--points", type=int, default=100)
    parser.add_argument("--reference", type=int, default=128)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--reference-steps", type=int, help="of the reference, to spend as much on it; default --steps")
    parser.add_argument("--resample", action="store_true", help="make the reference from the points, by waves")
    parser.add_argument("--directory", type=Path, help="keeps data and runs; what is there is not made again")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        directory = (asked.directory or Path(scratch)).resolve()
        found = {points: measure(asked, directory, points) for points in (asked.points, asked.reference)}
    ours, theirs = found[asked.points], found[asked.reference]
    low, high = interval(ours.pop("rows"), theirs.pop("rows"))
    ratio = ours["rollout"] / theirs["rollout"]
    for points, scores in found.items():
        print(f"{points:4d} points: " + ", ".join(f"{name} {value:.5f}" for name, value in scores.items()))
    what = f"rollout, {asked.points} points compared with {asked.reference}"
    print(f"{what}: {ratio:.3f} ({low:.3f} to {high:.3f}; bar {LIMIT})")
    verdict = {"ratio": ratio, "interval": [low, high], "passed": ratio <= LIMIT}
    print(json.dumps({"task": asked.task, "scores": found, **verdict}))
    return 0 if ratio <= LIMIT else 1


def interval(ours: Any, theirs: Any) -> tuple[float, float]:
    """95 % interval of the ratio of mean errors; (trajectories,) each, resampled as pairs."""
    import numpy as np

    draws = np.random.default_rng(0).integers(0, len(ours), (2000, len(ours)))
    low, high = np.quantile(ours[draws].mean(axis=1) / theirs[draws].mean(axis=1), [0.025, 0.975])
    return float(low), float(high)


def measure(asked: argparse.Namespace, directory: Path, points: int) -> dict[str, Any]:
    """Geometric means over seeds, and `rows`: (trajectories,) the mean rollout error of each."""
    import numpy as np

    import ups
    from ups.evaluation.results import trajectory_means

    made = asked.points if asked.resample else points
    steps = (asked.reference_steps if points == asked.reference else None) or asked.steps
    store = directory / f"data-{made}" / f"{asked.task}.zarr"
    ups.generate_data(asked.task, store.parent, trajectories=(256, 8, 64), resolution=made, processes=1)
    if made != points:
        store = resampled(store, directory / f"data-{made}-as-{points}" / store.name, points)
    rows, errors = [], []
    for seed in (int(text) for text in asked.seeds.split(",")):
        run_dir = directory / f"{asked.task}-{store.parent.name}-{steps}-{seed}"
        run = ups.fit(recipe_of(asked.task, store, run_dir, seed, steps), progress=False)
        model = ups.evaluate(run).results[0]["predictors"]["model"]
        summary = model["summary"]
        errors.append([error for _, error in sorted(trajectory_means(model["rows"]).items())])
        rows.append({"rollout": summary["trmse"], "one_step": summary["one_step_trmse"], **rolls(run)})
    means = {name: math.exp(sum(math.log(row[name]) for row in rows) / len(rows)) for name in rows[0]}
    return {**means, "rows": np.mean(errors, axis=0)}


def resampled(source: Path, target: Path, points: int) -> Path:
    """The store of a 1D task with more points around its axis, by the waves of each frame."""
    import contextlib

    import numpy as np

    from ups.config.schema import TaskConfig
    from ups.data.open import open_task
    from ups.formats.store_writer import StoreWriter

    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.closing(open_task(TaskConfig(name=source.stem, path=str(source)))) as reader:
        (axis,), (old,) = reader.task.axes, reader.coordinates
        x = old[0] + axis.extent * np.arange(points) / points
        with StoreWriter(target, reader.task, [x], reader.num_frames) as writer:
            for split, count in reader.splits.items():
                for number in range(count):
                    window = reader.read(split, number, 0, reader.num_frames)
                    waves = np.fft.rfft(window.state.astype(np.float64), norm="forward")
                    if len(old) % 2 == 0:
                        waves[..., -1] /= 2  # one wave there, and two of both signs on more points
                    state = np.fft.irfft(waves, points, norm="forward").astype(np.float32)
                    writer.append(split, state=state, parameters=window.parameters)
    return target


if __name__ == "__main__":
    sys.exit(main())
