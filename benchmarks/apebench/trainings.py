"""The trainings: each is `ups.train` on a store of the scenario's data, and leaves one JSON file with its score.

The published score is of APEBench's own metric, so rollouts are made here with the model of the run's bundle.
"""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.apebench.metric import mean_nrmse, score
from benchmarks.apebench.recipes import Entry
from benchmarks.apebench.scenarios import (
    BATCH,
    OPTIMIZER,
    POINTS,
    SCENARIOS,
    SCORED_STEPS,
    TEST_FRAMES,
    TEST_TRAJECTORIES,
    TRAIN_FRAMES,
    TRAIN_TRAJECTORIES,
    UPDATES,
    VALID_FRAMES,
    VALID_TRAJECTORIES,
    same_coefficients,
)
from ups.config.identity import learned
from ups.config.schema import Recipe
from ups.errors import DataError, RunHeldError, TrainingError
from ups.record.files import write_file_atomically
from ups.supervise.run_file import hold_lock

_SHAPES = {
    "train": (TRAIN_TRAJECTORIES, TRAIN_FRAMES, 1, POINTS),
    "valid": (VALID_TRAJECTORIES, VALID_FRAMES, 1, POINTS),
    "test": (TEST_TRAJECTORIES, TEST_FRAMES, 1, POINTS),
}
_GENERATE = "make it with benchmarks/apebench/generate.py, whose text says how"


class Trainings:
    """One output directory: stores/, runs/, results/."""

    def __init__(self, data: Path, out: Path, updates: int = UPDATES) -> None:
        self.data, self.out, self.updates = data.resolve(), out.resolve(), updates

    def finish(self, entry: Entry) -> dict[str, Any] | None:
        """The row of one training, trained unless it is there; None if another process is at work on it."""
        who, hint = "another process trains in", "wait for it, or choose another --out"
        with contextlib.suppress(RunHeldError), hold_lock(self.out / "locks" / f"{entry.name}.lock", who, hint):
            return self.kept_row(entry) or self._train(entry)
        return None

    def result_of(self, entry: Entry) -> Path:
        return self.out / "results" / f"{entry.name}.json"

    def kept_row(self, entry: Entry) -> dict[str, Any] | None:
        """The row of an earlier call, if it is of this recipe with these defaults, and of this data."""
        path = self.result_of(entry)
        if not path.is_file():
            return None
        try:
            found: dict[str, Any] = json.loads(path.read_text())
            same = found["learned"] == _learned(self.recipe(entry)) and found["data"] == read_meta(self._npz(entry))
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(f"{path} is damaged: {error}", hint="remove it, and start again") from error
        if not same:
            raise DataError(
                f"{path} is of another recipe, of other defaults or of other data than asked for now",
                hint="choose another --out, or remove it and the run of this name",
            )
        return found

    def recipe(self, entry: Entry) -> dict[str, Any]:
        store = self.out / "stores" / f"{entry.scenario}.zarr"
        return entry.recipe(store, self.out / "runs" / entry.name, self.updates)

    def training_seconds(self, entry: Entry) -> float:
        """CPU time of the whole training, estimated from a few updates of each stage on this thread."""
        import torch

        from benchmarks.protocol.step_cost import step_costs, yardstick_seconds

        torch.set_num_threads(1)
        self._prepare(entry)
        recipe = self.recipe(entry)
        steps = [stage["steps"] for stage in recipe["stages"]]
        seconds: float = yardstick_seconds() * sum(n * cost for n, cost in zip(steps, step_costs(recipe), strict=True))
        return seconds

    def _npz(self, entry: Entry) -> Path:
        return self.data / f"{entry.scenario}.npz"

    def _prepare(self, entry: Entry) -> None:
        store = self.out / "stores" / f"{entry.scenario}.zarr"
        with hold_lock(self.out / "locks" / f"store-{entry.scenario}.lock", "another process writes into"):
            if not store.is_dir():
                write_store(self._npz(entry), entry.scenario, store)

    def _train(self, entry: Entry) -> dict[str, Any]:
        import ups

        self._prepare(entry)
        recipe = self.recipe(entry)
        run = ups.train(recipe)
        if run.state in ("preempted", "stopped"):
            raise TrainingError(f"training {entry.name} was asked to stop", hint="the same command goes on from there")
        if run.state != "completed" or run.bundle is None:
            raise TrainingError(f"training {entry.name} ended as '{run.state}'", hint=f"ups why {run.path}")
        meta = read_meta(self._npz(entry))
        found = {
            "model": entry.model,
            "scenario": entry.scenario,
            "seed": entry.seed,
            "coefficients": meta["coefficients"],
            **self._scored(entry, run.bundle),
            "cpu_seconds": _cpu_seconds(run.path),
            "updates": self.updates,
            "learned": _learned(recipe),
            "data": meta,
        }
        self.result_of(entry).parent.mkdir(parents=True, exist_ok=True)
        write_file_atomically(self.result_of(entry), (json.dumps(found, indent=1) + "\n").encode())
        return found

    def _scored(self, entry: Entry, bundle: Path) -> dict[str, Any]:
        from ups.inference.bundle import load_bundle

        stepper = load_bundle(bundle).stepper
        found: dict[str, Any] = {"parameters": sum(p.numel() for p in stepper.network.parameters())}
        with np.load(self._npz(entry)) as arrays:
            for split in ("test", "valid"):
                errors = mean_nrmse(predictions(stepper, arrays[split][:, 0]), arrays[split][:, 1 : SCORED_STEPS + 1])
                found["score" if split == "test" else "valid_score"] = _plain(score(errors))
                found["errors" if split == "test" else "valid_errors"] = [_plain(e) for e in errors]
        return found


def predictions(stepper: Any, given: Any, steps: int = SCORED_STEPS) -> Any:
    """(N, C, X) first frames -> (N, steps, C, X): the rollout of a trained model."""
    import torch

    from ups.models.normalization import one_thread
    from ups.models.stepper import rollout
    from ups.spec.batch import Batch

    (task,) = stepper.tasks
    points = given.shape[-1]
    batch = Batch.of(task, coordinates=[np.arange(points) / points], dt=task.dt, state=given[:, None])
    with torch.inference_mode(), one_thread():
        return torch.stack(list(rollout(stepper, batch, steps)), 1).numpy()


def read_meta(path: Path) -> dict[str, Any]:
    """What `generate.py` wrote next to the arrays, checked to be of the scenario and of the protocol."""
    if not path.is_file():
        raise DataError(f"{path} does not exist", hint=_GENERATE)
    try:
        with np.load(path) as arrays:
            meta: dict[str, Any] = json.loads(str(arrays["meta"]))
            shapes = {split: arrays[split].shape for split in _SHAPES}
    except (OSError, ValueError, KeyError) as error:
        raise DataError(f"{path} is no data of APEBench: {error}", hint=_GENERATE) from error
    scenario = SCENARIOS[path.stem]
    for what, expected, got in (
        ("scenario", scenario.key, meta.get("scenario")),
        ("shapes", _SHAPES, shapes),
        ("optimizer", OPTIMIZER, meta.get("optimizer")),
        ("batch size", BATCH, meta.get("batch_size")),
    ):
        if expected != got:
            raise DataError(f"{path} has another {what}: expected {expected}, got {got}", hint=_GENERATE)
    if not same_coefficients(scenario.coefficients, meta["coefficients"]):
        raise DataError(
            f"{path} is of another equation: expected {dict(scenario.coefficients)}, got {meta['coefficients']}",
            hint=_GENERATE,
        )
    return meta


def write_store(npz: Path, name: str, path: Path) -> None:
    """The arrays as a store, whose splits are those of APEBench."""
    from ups.formats.store_writer import StoreWriter
    from ups.spec.task import AxisSpec, FieldSpec, TaskSpec

    meta, scenario = read_meta(npz), SCENARIOS[name]
    task = TaskSpec(
        name=name,
        fields=(FieldSpec("u"),),
        # A difficulty is of steps and points, so that lengths and times have no unit.
        axes=(AxisSpec("x", "periodic", 1.0),),
        dt=1.0,
        conserved=("u",) if scenario.conserved else (),
        symmetries=("translation",),
        equation=scenario.equation,
    )
    with np.load(npz) as arrays:
        points = arrays["train"].shape[-1]
        with StoreWriter(path, task, [np.arange(points) / points], TEST_FRAMES, generator={"apebench": meta}) as writer:
            for split in ("train", "valid", "test"):
                for trajectory in arrays[split]:
                    writer.append(split, state=trajectory, frames=len(trajectory))


def _learned(recipe: dict[str, Any]) -> dict[str, Any]:
    """All that a recipe decides, with the defaults that it does not say, but for where its data are."""
    plain: dict[str, Any] = json.loads(json.dumps(learned(Recipe.model_validate(recipe))))
    for task in plain["data"]["tasks"]:
        task.pop("path", None)
    return plain


def _cpu_seconds(run_dir: Path) -> float:
    """CPU time of all stages, as the run has recorded it."""
    from ups.record.checkpoints import latest_verified, read_progress

    checkpoint = latest_verified(run_dir)
    if checkpoint is None:
        raise DataError(f"{run_dir} has lost its checkpoint", hint="remove it, and start again")
    progress = read_progress(checkpoint)["progress"]
    return float(progress["budget_used_seconds"]) + float(progress.get("earlier_seconds", 0.0))


def _plain(value: float) -> float | None:
    """A number as JSON has it: None for an error that grew without end."""
    return float(value) if np.isfinite(value) else None
