"""What the error bars and the distance of a bundle hold, on test trajectories and on shifted states.

    python benchmarks/model/trust.py --bundle RUN --data data --calibration data-seed1 --test data-seed2
        --shifted shifted --out DIR [--second RUN] [--task NAME ...] [--training-seconds S]

--data: the stores of the training; --calibration, --test: stores whose test splits calibrate and judge (`ups data
generate all --seed 1 --trajectories 1,0,256 --out data-seed1`, and seed 2); --shifted: of `shifted_states.py`. Copies
of the bundle are calibrated in --out, one for each task, so that tasks can be measured side by side. --second: another
bundle of the same tasks; the difference of two rollouts is then a scale of errors and a reason to doubt, next to ours.
--training-seconds: CPU time of the training, of all tasks.

1. Coverage of the statements of level 0.9: RMS error at each time and of each field, averaged within a task; whole
   trajectories; scalars. Each third of the range of each parameter is a cell; statements are judged one by one.
2. Width of the first one next to a band that is constant over trajectories, with a conformal quantile for each field
   and lead from the same trajectories. Coverages are made equal before: of two bands with one level, chance makes one
   wider. Beside it the band for each cell of arXiv 2408.09881, and the scale of the second model.
3. False alarms: test trajectories that are doubted at any step, by the distance or by a range check.
4. Shifted states with a known truth. Harmful: the RMS error exceeds twice the stated one at some step. Later steps than
   those calibrated have no statement, and for these alone the last one is used; they do not count as answered. Coverage
   before a doubt is the mean over fields, then over answered steps. Benign kinds are counted by themselves. The other
   detectors have their limit at the same conformal p-value as the distance.
5. Time of a step with error bars and distance next to one without either, medians of blocks in turns; weights added.

DIR has a JSON file for each task. What is finished is not repeated, unless a file that went into it has changed. Prints
tables; the last line is one JSON object. Exit code 1 if a bar is missed.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import math
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import trust_rows as rows
from in_turns import in_turns
from shifted_states import KINDS, KNOWN
from torch import Tensor
from trust_rows import LEVEL, Float64, Rolled

import ups
from ups.config.schema import TaskConfig
from ups.data.open import open_task
from ups.data.validate import trajectories_in_train
from ups.evaluation.rollout import RolloutPlan, batches_of, read_inputs, weights_of
from ups.formats.base import Reader
from ups.formats.held_out import HeldOutElsewhere
from ups.inference.bundle import Bundle, load_bundle, write_bundle, write_card
from ups.inference.calibration import Calibration, measured, quantities_of
from ups.inference.simulator import BundleWarning
from ups.inference.trust import KINDS as WARNINGS
from ups.models.error_model import field_rms
from ups.record.files import write_file_atomically
from ups.record.run_dir import CONFIG_NAME, find_bundle
from ups.run.calibrate import calibrate, choose
from ups.run.trained import load_trained
from ups.solvers.tasks import BENCH_TASKS
from ups.spec.descriptors import describe
from ups.spec.task import TaskSpec

VERSION = 3  # of what is measured: another one repeats it
LEVELS = (0.1, 0.3, 0.5, 0.7, 0.8, 0.9, 0.95)
BATCH, MOST_TRAIN, BLOCKS = 32, 1024, 9
BLOCK_SECONDS = 0.3
# What the simulator says of an input by a range; the others are of the bundle, or of the end of a rollout.
RANGE_CHECKS = ("parameter_range", "amplitude", "descriptor", "rollout_length")


@dataclass(frozen=True)
class Given:
    """What rollouts begin with. state (B, C, *S), static (B, Cs, *S), parameters (B, P), truth (B, L, C, *S)."""

    state: npt.NDArray[np.float32]
    static: npt.NDArray[np.float32]
    parameters: npt.NDArray[Any]
    truth: npt.NDArray[np.float32]


@dataclass(frozen=True)
class Subject:
    """The task, the calibrated simulator, its statements, and the second model."""

    task: TaskSpec
    reader: Reader
    simulator: ups.Simulator
    bundle: Bundle
    second: ups.Simulator | None

    @property
    def calibration(self) -> Calibration:
        return self.bundle.calibrations[self.task.name]


class Stopwatch:
    """CPU-seconds of the rollouts that fit the scale, and of those that calibrate it (`ups.run.calibrate.Progress`)."""

    def __init__(self) -> None:
        self.last, self.seconds = time.process_time(), {"scale": 0.0, "calibration": 0.0}

    def __call__(self, what: str, done: int, total: int) -> None:
        now, fits = time.process_time(), what.endswith((" train", " valid"))
        self.seconds["scale" if fits else "calibration"] += now - self.last
        self.last = now


def store(directory: Path, name: str) -> Path:
    return directory / f"{name}.zarr"


def opened(directory: Path, name: str) -> Reader:
    return open_task(TaskConfig(name=name, path=str(store(directory, name))))


def calibrated(options: argparse.Namespace, name: str) -> tuple[Path, dict[str, float]]:
    """A copy of the bundle with the statements of a task; CPU-seconds for the scale and for the calibration."""
    source = find_bundle(str(options.bundle))
    trained = load_trained(str(source), data={name: str(store(options.data, name))})
    chosen, watch = choose(trained, {name: str(store(options.calibration, name))}), Stopwatch()
    found, bundle = calibrate(trained, chosen, progress=watch), load_bundle(source, stated=False)
    card = write_card(trained.recipe.run.name, bundle.info, found)
    copy, text = options.out / f"bundle-{name}", (source / CONFIG_NAME).read_text(encoding="utf-8")
    write_bundle(copy, bundle.stepper, bundle.info, config_text=text, card=card, stated=found)
    return copy, watch.seconds


def stored(reader: Reader) -> Iterator[Given]:
    """The test trajectories, a batch at a time."""
    plan, count = RolloutPlan.whole(reader, 1, None, "test"), reader.splits["test"]
    for part, span in batches_of(reader, "test", range(count), plan, BATCH):
        batch, truth = read_inputs(reader, "test", part, span, torch.device("cpu"), torch.float32)
        state = batch.state[:, 0] if batch.state.shape[1] else batch.static[:, :0]
        yield Given(state.numpy(), batch.static.numpy(), batch.parameters.numpy(), truth.numpy())


def train_starts(reader: Reader) -> Given:
    """What train trajectories begin with; they have no truth here."""
    count = min(reader.splits["train"], MOST_TRAIN)
    steady = reader.task.steady
    block = reader.read_block("train", range(count), [0] * count, 0 if steady else 1)
    state = block.static[:, :0] if steady else block.state[:, 0]
    return Given(state, block.static, block.parameters, block.state[:, :0])


def rollout_of(simulator: ups.Simulator, task: TaskSpec, given: Given, **asked: Any) -> Any:
    steps = 1 if task.steady else given.truth.shape[1]
    columns = {p.name: given.parameters[:, n] for n, p in enumerate(task.parameters)}
    fields: dict[str, Any] = {
        "state": None if task.steady else given.state,
        "static": given.static if given.static.shape[1] else None,
    }
    return simulator.rollout(steps=steps, parameters=columns or None, task=task.name, **fields, **asked)


def frames_of(result: Any, task: TaskSpec) -> npt.NDArray[np.float32]:
    """(B, L, C, *S) of a result."""
    parts = []
    for field in task.fields_of(task.predicted):
        values = result[field.name].values
        values = values[:, None] if task.steady else values
        parts.append(values if field.tensor_rank else values[:, :, None])
    return np.concatenate(parts, axis=2)


def lines_of(result: Any, task: TaskSpec, names: list[str]) -> Float64:
    """(B, L, names) of a result."""
    parts = [result[name].values[:, None] if task.steady else result[name].values for name in names]
    return np.stack(parts, axis=2).astype(np.float64)


def known(errors: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """What is not a number is no small error."""
    return np.where(np.isnan(errors), np.inf, errors).astype(errors.dtype)


def rms(frames: npt.NDArray[np.float32], task: TaskSpec, weights: Tensor | None) -> Float64:
    """(B, L, C, *S) -> (B, L, M); infinite where a number is not finite."""
    values = field_rms(torch.from_numpy(frames).flatten(0, 1), task, weights).double().numpy()
    return known(values.reshape(*frames.shape[:2], -1))


def input_numbers(subject: Subject, given: Given) -> Float64:
    """(B, F): descriptors of what is given, in deviations of the train split, and parameters."""
    task, statistics = subject.task, subject.bundle.info.statistics[subject.task.name]
    columns = [_on_scale(p.scale, given.parameters[:, n]) for n, p in enumerate(task.parameters)]
    parts = [np.stack(columns, 1)] if columns else []
    for role, fields in (("state", given.state), ("static", given.static)):
        if fields.shape[1]:
            shape = (1, -1, *[1] * task.num_spatial_dims)
            mean, deviation = (np.reshape(getattr(statistics, f"{role}_{what}"), shape) for what in ("mean", "std"))
            parts.append(describe((fields - mean) / np.where(deviation > 0, deviation, 1.0), task.axes))
    return np.concatenate([part.reshape(len(part), -1) for part in parts], axis=1)


def beyond_ranges(subject: Subject, given: Given) -> Float64:
    """(B,): how far the worst descriptor or parameter is out of its range, in widths; below 0 inside of all."""
    task, ranges = subject.task, subject.bundle.info.statistics[subject.task.name].ranges
    worst = np.full(len(given.truth), -np.inf)
    for number, p in enumerate(task.parameters):
        value, width = given.parameters[:, number], max(p.maximum - p.minimum, 1e-30)
        worst = np.maximum(worst, np.maximum(value - p.maximum, p.minimum - value) / width)
    for role, fields in (("state", given.state), ("static", given.static)):
        if fields.shape[1] and ranges.get(role):
            least, most = np.moveaxis(np.array(ranges[role]), -1, 0)[2:]  # (C, D)
            values = describe(fields, task.axes)
            outside = np.maximum(values - most, least - values) / np.maximum(most - least, 1e-30)
            worst = np.maximum(worst, outside.max((1, 2)))
    return worst


def _on_scale(scale: str, values: npt.NDArray[Any]) -> Float64:
    return np.asarray(np.log(values) if scale == "log" else values, np.float64)


def follow(subject: Subject, keep_cells: bool, given: Given) -> Rolled:
    """Rollouts next to their truth, with everything that is stated about them."""
    task, weights = subject.task, weights_of(subject.reader)
    weights = None if weights is None else weights.float()
    # What would be stated after a doubt is needed to tell harm.
    result = rollout_of(subject.simulator, task, given, level=LEVEL, on_doubt="ignore")
    frames, fields = frames_of(result, task), [field.name for field in task.fields_of(task.predicted)]
    names = list(subject.calibration.document.quantities)
    functions = quantities_of(task, subject.reader.coordinates, {})
    truth = torch.from_numpy(given.truth)
    true = measured(task, truth.flatten(0, 1), subject.reader.coordinates, functions)
    values = lines_of(result, task, names)
    difference = np.empty((*frames.shape[:2], 0))
    if subject.second is not None:
        difference = rms(frames_of(rollout_of(subject.second, task, given), task) - frames, task, weights)
    far = result["p_value"].values.reshape(len(frames), -1) <= subject.calibration.alarm * (1 + 1e-6)
    residual = np.abs(frames - given.truth)
    return Rolled(
        errors=rms(residual, task, weights),
        stated=lines_of(result, task, [f"{name}_error" for name in fields]),
        band=lines_of(result, task, [f"{name}_band" for name in fields]),
        apart=known(np.abs(values - true.reshape(values.shape))),
        apart_stated=lines_of(result, task, [f"{name}_error" for name in names]),
        difference=difference,
        outside_at=result["outside_at"].values.astype(np.int64),
        far_at=np.where(far.any(1), far.argmax(1) + 1, 0),
        distance=(result["distance"].values if task.steady else result["distance"].values[:, -1]).astype(np.float64),
        warned=(result["warnings"].values & sum(1 << WARNINGS.index(kind) for kind in RANGE_CHECKS)) != 0,
        beyond=beyond_ranges(subject, given),
        numbers=input_numbers(subject, given),
        parameters=given.parameters.astype(np.float64),
        size=np.sqrt(np.square(rms(given.truth, task, weights)).mean(1)),
        cells=known(residual) if keep_cells else residual[:, :0],
    )


def step_times(subject: Subject, given: Given) -> dict[str, float]:
    """Time of a rollout with error bars and distance, relative to one without; medians of ratios of blocks."""
    found = {}
    for count in (1, 16):
        few = replace(given, **{name: values[:count] for name, values in vars(given).items()})
        plain = partial(rollout_of, subject.simulator, subject.task, few, on_doubt="ignore")
        stating = partial(rollout_of, subject.simulator, subject.task, few, on_doubt="warn", level=LEVEL)
        once = in_turns({"plain": plain}, 1, 1)["plain"][0]
        repeats = max(1, math.ceil(BLOCK_SECONDS / max(once, 1e-4)))
        seconds = in_turns({"plain": plain, "stating": stating}, BLOCKS, repeats)
        ratios = [a / b for a, b in zip(seconds["stating"], seconds["plain"], strict=True)]
        found[f"{count} sample{'s' * (count > 1)}"] = median(ratios)
    return found


def shift_counts(
    subject: Subject, path: Path, flags: Callable[[Rolled], Mapping[str, rows.Int64]]
) -> dict[str, dict[str, Any]]:
    """Kind -> counts of its samples whose truth is known."""
    found = {}
    with np.load(path) as arrays:
        for kind in KINDS:
            if f"{kind}/truth" not in arrays:
                continue
            off = arrays[f"{kind}/truth_off"]
            sound = off < KNOWN
            parts = {name: arrays[f"{kind}/{name}"][sound] for name in ("state", "static", "parameters", "truth")}
            batches = [
                Given(**{name: values[first : first + BATCH] for name, values in parts.items()})
                for first in range(0, int(sound.sum()), BATCH)
            ]
            if batches:
                rolled = Rolled.joined(follow(subject, False, batch) for batch in batches)
                found[kind] = rows.tally(rolled, flags(rolled), off[sound])
    return found


def coverage_at(calibration: Calibration, rolled: Rolled, level: float) -> dict[str, float]:
    """Statement -> its coverage with another level, of those that so few trajectories can state."""
    factors = {}
    for name in ("fields", "trajectory", "quantities"):
        used, asked = (calibration.bound(name, each) for each in (LEVEL, level))
        if not np.isfinite(asked).all():
            return {}
        with np.errstate(all="ignore"):
            factors[name] = np.where(used > 0, asked / used, 1.0)
    scaled = replace(
        rolled,
        stated=rolled.stated * factors["fields"],
        band=rolled.band * factors["trajectory"],
        apart_stated=rolled.apart_stated * factors["quantities"],
    )
    return {statement: float(each.mean()) for statement, each in rows.covered(scaled).items()}


def alarm_distance(calibration: Calibration) -> float:
    """The largest distance that is no reason to doubt."""
    kept = calibration.scores["distance"][0]
    return float(kept[calibration.p_value(kept + 1e-9 * np.abs(kept)) > calibration.alarm].max())


def measure(options: argparse.Namespace, name: str, inputs: Mapping[str, str]) -> dict[str, Any]:
    """All counts and figures of a task."""
    copy, seconds = calibrated(options, name)
    with contextlib.ExitStack() as stack:
        own, calibration, test = (
            stack.enter_context(contextlib.closing(opened(directory, name)))
            for directory in (options.data, options.calibration, options.test)
        )
        bundle, simulator = load_bundle(copy), ups.Simulator.load(copy, "cpu")
        second = None if options.second is None else ups.Simulator.load(find_bundle(str(options.second)), "cpu")
        task, grid = simulator.tasks[name], bundle.info.coordinates[name]
        readers = [HeldOutElsewhere(own, other, task, grid) for other in (calibration, test)]
        if test.identity() == calibration.identity() or trajectories_in_train(readers[1], "test"):
            raise SystemExit(f"{name}: test trajectories are those of the calibration, or of the training")
        subject = Subject(task, readers[1], simulator, bundle, second)
        usual = Rolled.joined(follow(subject, True, given) for given in stored(readers[0]))
        rolled = Rolled.joined(follow(subject, True, given) for given in stored(readers[1]))
        train = input_numbers(subject, train_starts(readers[1]))
        held = rows.covered(rolled)
        so_far = np.logical_and.accumulate((rolled.errors <= rolled.band).all(2), axis=1)
        flags = partial(rows.flags, usual, train=train, alarm=subject.calibration.alarm)
        components = [field.num_channels(task.num_spatial_dims) for field in task.fields_of(task.predicted)]
        numel = sum(tensor.numel() for tensor in vars(subject.calibration.model).values())
        return {
            "task": name,
            "inputs": dict(inputs),
            "trajectories": {"calibration": len(usual.errors), "test": len(rolled.errors)},
            "cpu_seconds": seconds,
            "coverage": {statement: float(each.mean()) for statement, each in held.items()},
            "coverage_by_lead": {
                "each time": (rolled.errors <= rolled.stated).mean((0, 2)).tolist(),
                "whole trajectory": so_far.mean(0).tolist(),
                "scalars": (rolled.apart <= rolled.apart_stated).mean((0, 2)).tolist(),
            },
            "coverage_by_level": {f"{level:g}": coverage_at(subject.calibration, rolled, level) for level in LEVELS},
            "thirds": {
                p.name: rows.in_thirds(rolled.parameters[:, n], p.minimum, p.maximum, p.scale, held)
                for n, p in enumerate(task.parameters)
            },
            "widths": rows.width_rows(usual, rolled, components),
            "points": rows.points(rolled),
            "alarm_distance": alarm_distance(subject.calibration),
            "alarms": {detector: int((at > 0).sum()) for detector, at in flags(rolled).items()},
            "shifts": shift_counts(subject, options.shifted / f"{name}.npz", flags),
            "steps": step_times(subject, next(stored(readers[1]))),
            "weights": {"error model": numel, "network": sum(p.numel() for p in bundle.stepper.parameters())},
        }


def inputs_of(options: argparse.Namespace, name: str) -> dict[str, str]:
    """What a task's figures depend on, by hash."""
    found = {"version": str(VERSION)}
    for what in ("bundle", "second"):
        if getattr(options, what) is not None:
            found[what] = load_bundle(find_bundle(str(getattr(options, what))), stated=False).hash
    for what in ("data", "calibration", "test"):
        with contextlib.closing(opened(getattr(options, what), name)) as reader:
            found[what] = reader.identity()
    with (options.shifted / f"{name}.npz").open("rb") as file:
        found["shifted"] = hashlib.file_digest(file, "sha256").hexdigest()
    return found


def document_of(options: argparse.Namespace, name: str, inputs: Mapping[str, str]) -> dict[str, Any]:
    """The figures of a task, measured now or before."""
    path = options.out / f"{name}.json"
    if path.exists():
        document: dict[str, Any] = json.loads(path.read_text())
        if document["inputs"] == inputs:
            return document
    start = time.process_time()
    document = measure(options, name, inputs)
    print(f"{name}: {time.process_time() - start:.0f} CPU-seconds", file=sys.stderr, flush=True)
    write_file_atomically(path, json.dumps(document, indent=1).encode())
    return document


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("bundle", "data", "calibration", "test", "shifted", "out"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--second", type=Path, help="another run or bundle of the same tasks")
    parser.add_argument("--task", action="append", choices=BENCH_TASKS, help="default: all nine")
    parser.add_argument("--training-seconds", type=float, default=2700.0, help="CPU time; default: that of ups-bench")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", BundleWarning)
    options.out.mkdir(parents=True, exist_ok=True)
    names = options.task or list(BENCH_TASKS)
    inputs = {name: inputs_of(options, name) for name in names}  # of all first: what is missing shows before the work
    documents = [document_of(options, name, inputs[name]) for name in names]
    judged = rows.bars(documents, options.training_seconds * len(names) / len(BENCH_TASKS))
    print(rows.page(documents, judged))
    missed = [bar.name for bar in judged if not bar.passed]
    found = {bar.name: bar.value if math.isfinite(bar.value) else None for bar in judged}
    print(json.dumps({"tasks": names, "found": found, "missed": missed, "passed": not missed}))
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
