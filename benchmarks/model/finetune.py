"""Fine-tuning a bundle on few data of another viscosity range, compared with training from scratch for the same time.

    python benchmarks/model/finetune.py [--out DIR] [--base-seconds 60] [--budgets 8] [--seeds 0,1,2]
                                        [--trajectories 64]

A bundle is trained on burgers1d (viscosity 0.01 to 0.1, 256 trajectories). Then there are `trajectories` of viscosities
from 0.1 to 0.3, made by the same solver, and for each budget and seed two runs of the same model on them:
`ups.finetune_recipe` from the bundle, and the recipe of the bundle from scratch. Budgets are CPU-seconds of one thread,
of training alone. Errors are of 64 test trajectories of the new range, relative to the trajectory: one step, and whole
rollouts of 40 steps. What is finished is not trained again. Last line: one JSON object. Exit code 1 unless fine-tuning
is better for every budget and seed, in both errors.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import ups
from ups.solvers.problem import SPLITS, Draws
from ups.solvers.tasks import burgers1d
from ups.spec.task import ParameterSpec

SCORES = {"one step": "one_step_trmse", "rollout": "trmse"}
TEST = 64


def write_other_range(path: Path, num_train: int) -> None:
    """burgers1d with viscosities from 0.1 to 0.3, by the solver of the task."""
    from ups.formats.store_writer import StoreWriter

    spec = replace(burgers1d.spec, parameters=(ParameterSpec("nu", minimum=0.1, maximum=0.3, scale="log"),))
    task = replace(burgers1d, spec=spec)
    x = (ups.open_data(path.with_name("burgers1d.zarr")).trajectory("train", 0)["x"].values,)
    size = task.trajectories_per_chunk
    with StoreWriter(path, spec, x, task.num_frames) as writer:
        for split, count in zip(SPLITS, (num_train, 8, TEST), strict=True):
            for first in range(0, count, size):
                numbers = tuple(range(first, first + size))
                solution = task.solve(Draws(1, "other", split, numbers), task.resolution, task.num_frames)
                for row in range(min(size, count - first)):
                    writer.append(split, state=solution.state[row], parameters=solution.parameters[row])


def recipe_of(path: Path, name: str, seconds: float, seed: int) -> ups.Recipe:
    """recipes/joint.yaml for one task and some CPU-seconds of one thread, an eighth of them for the linear part."""
    optim = {
        "type": "muon", "learning_rate": 2e-3, "matrix_learning_rate": 5e-3, "warmup_fraction": 0.02,
        "final_fraction": 0.001, "weight_decay": 0, "clip_norm": 0, "clip_ratio": 3,
    }  # fmt: skip
    clock = {"budget_clock": "cpu"}
    return ups.load_recipe(
        {
            "version": 1,
            "run": {"name": name, "dir": str(path.parent.parent / "runs" / name), "seed": seed},
            "data": {"tasks": [{"name": "burgers1d", "path": str(path)}], "batch_size": 20},
            "model": {"type": "multiscale"},
            "stages": [
                {"type": "linear", "budget_seconds": seconds / 8, **clock},
                {"type": "operator", "budget_seconds": seconds * 7 / 8, **clock, "loss": "nrmse", "optim": optim},
            ],
            "engine": {"threads": 1, "device": "cpu", "ema": {"decay": 0.998}},
            "checkpoint": {"interval_steps": 100_000},
            "evaluate": {"max_trajectories": 4},
            "tracking": {"log_interval_steps": 100},
        }
    )


def scores(run: ups.Run) -> dict[str, dict[str, float]]:
    """Error -> predictor -> value on the test split, as the bundle of a run has them."""
    (result,) = json.loads((run.path / "bundle" / "bundle.json").read_text())["scores"].values()
    return {
        word: {name: float(summary[key]) for name, summary in result["predictors"].items()}
        for word, key in SCORES.items()
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("finetune-benchmark"))
    parser.add_argument("--base-seconds", type=float, default=60.0)
    parser.add_argument("--budgets", default="8")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--trajectories", type=int, default=64)
    options = parser.parse_args()
    data = (options.out / "data").absolute()
    data.mkdir(parents=True, exist_ok=True)
    other = data / "burgers1d-other.zarr"
    ups.generate_data("burgers1d", data, trajectories=(256, 8, TEST))
    if not other.exists():
        write_other_range(other, options.trajectories)
    base = ups.fit(recipe_of(data / "burgers1d.zarr", "base", options.base_seconds, 0), progress=False)

    rows: list[dict[str, Any]] = []
    for seconds in map(float, options.budgets.split(",")):
        for seed in map(int, options.seeds.split(",")):
            place = base.path.parent / f"tuned-{seconds:g}-{seed}"
            tuned = ups.finetune_recipe(
                base.path,
                other,
                budget_seconds=seconds,
                stages__0__budget_clock="cpu",
                engine__threads=1,
                engine__device="cpu",
                run__name=place.name,
                run__dir=str(place),
                run__seed=seed,
            )
            scratch = recipe_of(other, f"scratch-{seconds:g}-{seed}", seconds, seed)
            for kind, recipe in (("fine-tuned", tuned), ("from scratch", scratch)):
                run = ups.fit(recipe, progress=False)
                found = scores(run)
                rows.append({"seconds": seconds, "seed": seed, "kind": kind, "steps": run.checkpoints[-1], **found})
                print(json.dumps(rows[-1]), flush=True)
    return show(rows)


def show(rows: list[dict[str, Any]]) -> int:
    """The table: mean over seeds, with the least and the greatest; whether fine-tuning always won."""
    print(f"\n{'CPU-seconds':<12}{'error':<10}{'fine-tuned':<31}{'from scratch':<31}{'ratio':<8}persistence")
    won, document = True, []
    for seconds in dict.fromkeys(row["seconds"] for row in rows):
        for word in SCORES:
            chosen = {
                kind: [row[word]["model"] for row in rows if (row["seconds"], row["kind"]) == (seconds, kind)]
                for kind in ("fine-tuned", "from scratch")
            }
            cells = [f"{statistics.mean(v):.4g} ({min(v):.4g} to {max(v):.4g})" for v in chosen.values()]
            tuned, scratch = chosen.values()
            ratio = statistics.mean(scratch) / statistics.mean(tuned)
            won = won and all(a < b for a, b in zip(tuned, scratch, strict=True))
            still = next(row[word]["persistence"] for row in rows)
            print(f"{seconds:<12g}{word:<10}{cells[0]:<31}{cells[1]:<31}{ratio:<8.2f}{still:.4g}")
            document.append({"seconds": seconds, "error": word, **chosen, "ratio": ratio, "persistence": still})
    print(json.dumps({"rows": document, "fine_tuning_always_won": won}))
    return 0 if won else 1


if __name__ == "__main__":
    sys.exit(main())
