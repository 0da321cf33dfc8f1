"""Calibrates a trained model: fits its error model on rollouts of train and valid, and measures it on those set aside.

The only module that reads the split `calibration` (`ups.formats.set_aside`). Memory holds a batch of trajectories, and
a few numbers of each lead of all: never their frames.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from ups.data.open import open_task
from ups.data.validate import trajectories_in_train
from ups.errors import ConfigError
from ups.evaluation.metrics import without_holes
from ups.evaluation.rollout import RolloutPlan, batches_of, read_inputs, read_point_values, weights_of
from ups.formats.base import Reader
from ups.formats.held_out import HeldOutElsewhere
from ups.formats.set_aside import CALIBRATION, open_calibration
from ups.inference.calibration import (
    Calibration,
    Float64,
    Quantities,
    TaskDocument,
    choose_leads,
    measured,
    order_statistics,
    quantities_of,
    relative_error,
)
from ups.models.error_model import ErrorModel, Rollouts, Watched, field_rms, fit_error_model, period_ends
from ups.models.stepper import Stepper, rollout
from ups.run.trained import Trained
from ups.spec.batch import Batch
from ups.spec.points import POINTS, at_points, valid_at_points

Progress = Callable[[str, int, int], None]
# The trajectories that a task is calibrated on: a split of a reader.
Chosen = tuple[Reader, str]
# Rollouts that fit the law: more of them bring little, and the time of calibration stays far below that of training.
MOST_FITTED, MOST_HELD, LEAST_HELD = 128, 64, 8
# Of true frames of the trajectories of a batch.
_BATCH_BYTES, _MOST_SAMPLES = 1 << 27, 32


def choose(trained: Trained, data: Mapping[str, str]) -> dict[str, Chosen]:
    """By task, the trajectories to calibrate on: the split `calibration`, or `test` of another data set that is named.

    Raises ConfigError where there are none, or where the model may have seen them.
    """
    settings, chosen = {task.name: task for task in trained.recipe.data.tasks}, {}
    for own in trained.readers:
        name, path = own.task.name, data.get(own.task.name)
        reader, split = open_calibration(own), CALIBRATION
        if path is not None:
            other = open_calibration(open_task(settings[name].model_copy(update={"path": path, "source": None})))
            reader = HeldOutElsewhere(own, other, own.task, own.coordinates)
            split = CALIBRATION if reader.splits.get(CALIBRATION) else "test"
            if (split == "test" and reader.identity() == own.identity()) or trajectories_in_train(reader, split):
                raise ConfigError(
                    f"task '{name}': the model was trained or scored on trajectories of {path}, and error bars from "
                    "them would be too narrow",
                    hint="calibrate on other trajectories (docs/trust.md)",
                )
        if reader.splits.get(split):
            chosen[name] = (reader, split)
    if not chosen:
        raise ConfigError(
            "no task has trajectories to calibrate on: no split 'calibration', and no test split in other data",
            hint="set calibration_fraction of the task and train again; or name other trajectories: --data TASK=PATH",
        )
    return chosen


@torch.inference_mode()
def calibrate(
    trained: Trained,
    chosen: Mapping[str, Chosen],
    quantities: Quantities | None = None,
    progress: Progress | None = None,
) -> dict[str, Calibration]:
    """The statements of each task that trajectories were chosen for."""
    found = {}
    for own in trained.readers:
        if own.task.name not in chosen:
            continue
        reader, split = chosen[own.task.name]
        steps = RolloutPlan.whole(reader, trained.stepper.context_frames, None, split).num_steps
        leads = choose_leads(steps)
        functions = quantities_of(own.task, own.coordinates, quantities or {})
        follow = partial(_rollouts, trained.stepper, leads, progress)
        train = Rollouts.joined(follow(own, "train", MOST_FITTED))
        enough = own.splits.get("valid", 0) >= LEAST_HELD
        model = fit_error_model(leads, train, Rollouts.joined(follow(own, "valid", MOST_HELD)) if enough else train)
        parts = [_scores(model, b) for b in follow(reader, split, reader.splits[split], model, functions)]
        scores = {name: np.concatenate([one[name] for one in parts]) for name in parts[0]}
        count, data = len(scores["distance"]), reader.identity()
        document = TaskDocument(count=count, data=data, split=split, leads=leads, quantities=list(functions))
        kept = {name: order_statistics(values) for name, values in scores.items()}
        found[own.task.name] = Calibration(document, model, kept)
    return found


def _scores(model: ErrorModel, batch: Rollouts) -> dict[str, Float64]:
    """Errors in units of what the model expects: (B, L, M), (B,) and (B, L, Q); and distances (B,)."""
    logs = model.log_error(model.components(batch.means), slice(None))
    ratios = (batch.errors.log() - logs).double().exp()
    whole = (ratios / model.spread).nan_to_num(0.0, math.inf).amax((1, 2))  # no lead, no error
    apart = batch.apart.abs() / relative_error(model, logs, slice(None))[..., None]
    scores = {"fields": ratios, "trajectory": whole, "quantities": apart, "distance": batch.distance}
    return {name: values.double().cpu().numpy() for name, values in scores.items()}


def _rollouts(
    stepper: Stepper,
    leads: Sequence[int],
    progress: Progress | None,
    reader: Reader,
    split: str,
    most: int,
    model: ErrorModel | None = None,
    quantities: Quantities | None = None,
) -> Iterator[Rollouts]:
    """At most so many trajectories next to their truth, a batch at a time; at equal distances, for a sorted file."""
    task, total, context, done = reader.task, reader.splits[split], stepper.context_frames, 0
    rows = [int((n + 0.5) * max(1.0, total / most)) for n in range(min(total, most))]
    frame_bytes = 4 * math.prod(reader.space) * task.num_channels(task.predicted)
    size = max(1, min(_MOST_SAMPLES, _BATCH_BYTES // (frame_bytes * leads[-1])))
    for part, span in batches_of(reader, split, rows, RolloutPlan(context, context - 1, leads[-1]), size):
        inputs = read_inputs(reader, split, part, span, next(stepper.parameters()).device, torch.float32)
        values = read_point_values(reader, split, part, span).to(inputs[1]) if reader.most_points else None
        yield _followed(stepper, reader, *inputs, leads, model, quantities or {}, values)
        done += len(part)
        if progress is not None:
            progress(f"calibrating {task.name} on {split}", done, len(rows))


def _followed(
    stepper: Stepper,
    reader: Reader,
    batch: Batch,
    truth: Tensor,
    leads: Sequence[int],
    model: ErrorModel | None,
    quantities: Quantities,
    point_values: Tensor | None,
) -> Rollouts:
    task, ends, places = batch.task, period_ends(leads[-1]), {lead: place for place, lead in enumerate(leads)}
    watched, weights = Watched(stepper), weights_of(reader)
    weights = without_holes(weights, batch.valid)
    weights, points = None if weights is None else weights.to(truth), batch.extra.get(POINTS)
    if points is not None:
        weights = without_holes(None, valid_at_points(points)).to(truth)  # type: ignore[union-attr]

    def table(rows: int, columns: int, value: float) -> Tensor:
        return truth.new_full((batch.num_samples, rows, columns), value)

    errors = table(len(leads), len(task.fields_of(task.predicted)), math.nan)
    apart = table(len(leads), len(quantities), math.nan)
    distance, total = truth.new_full((batch.num_samples,), -math.inf), truth.new_zeros(())
    means = low = high = truth.new_empty(0)
    for step, frame in enumerate(rollout(watched, batch, truth.shape[1]), start=1):
        numbers, true, period = watched.numbers, truth[:, step - 1], bisect_left(ends, step)
        if step == 1:
            means = table(len(leads), numbers.shape[1], math.nan)
            low, high = (table(len(ends), numbers.shape[1], value) for value in (math.inf, -math.inf))
        total = total + numbers
        high[:, period] = torch.maximum(high[:, period], numbers)
        low[:, period] = torch.minimum(low[:, period], numbers)
        if model is not None:
            distance = torch.maximum(distance, model.distance(numbers, period))
        if (place := places.get(step)) is not None:
            means[:, place] = total / step
            off = frame - true
            if points is not None and point_values is not None:
                off = at_points(frame, points) - point_values[:, step - truth.shape[1] - 1]
            errors[:, place] = field_rms(off, task, weights).nan_to_num(math.inf, math.inf)
            here, there = (measured(task, one, reader.coordinates, quantities) for one in (frame, true))
            apart[:, place] = torch.from_numpy(here - there)
    return Rollouts(means, errors, low, high, apart, distance)
