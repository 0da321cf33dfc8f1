"""Validation during training: the error of one model step on held-out trajectories, next to its references.

Composes `ups.evaluation` with the engine, which do not know each other. Scores of a finished run: `ups eval`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ups.config.schema import EvaluateConfig
from ups.distributed.precision import autocast, weight_dtype
from ups.evaluation.ensemble import score_ensemble
from ups.evaluation.references import mean_field
from ups.evaluation.results import trajectory_means
from ups.evaluation.rollout import RolloutPlan, score_task
from ups.formats.base import Reader
from ups.models.ensemble import FlowMembers, has_members, members_of
from ups.models.flow import FLOW, STUDENT, trained_flow
from ups.models.references import TrainingMean, persistence
from ups.models.rollout import Predictor
from ups.models.stepper import Stepper
from ups.spec.place import Place
from ups.training.engine import Engine

MODEL = "one_step"
# Of members together, of those of the corrector that a student learns from, and without members.
CRPS, TEACHER, CENTER = "crps", "crps_teacher", "absolute_error"


def build_validation(
    config: EvaluateConfig, readers: Sequence[Reader], stepper: Stepper, members: int = 0
) -> Callable[[Engine], Mapping[str, float]]:
    """A validation of `stepper` on the valid split of each task that has one. Collective: all ranks call it together.

    Per task: `valid/<task>/one_step`, the error of every frame predicted from the true ones before it, relative to the
    RMS of the trajectory, and the same of the references (see `_bar`); `better_on` of `trajectories`: on how many the
    model is better than the best of them. With `members`, for a stage that trains what has some: `crps` of them, next
    to `absolute_error`, the same score without members (one_step is of that too), and to that of a student's teacher.
    """
    context = stepper.context_frames
    held_out = [reader for reader in readers if reader.splits.get("valid", 0) > 0 and _long_enough(reader, context)]
    plans = {reader.task.name: RolloutPlan.whole(reader, context, split="valid") for reader in held_out}
    bars: dict[str, dict[str, Predictor]] = {}  # filled at the first validation: a mean takes reading

    def validate(engine: Engine) -> Mapping[str, float]:
        device = engine.runtime.device
        names: list[str] = []
        sums: list[float] = []
        wins: list[float] = []
        counts: list[float] = []
        for reader in held_out:
            task = reader.task.name
            if task not in bars:
                bars[task] = _bar(reader, stepper)
            predictors: dict[str, Predictor] = {MODEL: stepper, **bars[task]}
            place, plan = engine.runtime.place, plans[task]
            common: dict[str, Any] = {
                "split": "valid",
                "max_trajectories": config.max_trajectories,
                "device": device,
                "dtype": weight_dtype(engine.config.precision),
                "kind": "one_step",
            }
            with autocast(engine.precision, device):
                scores = score_task(predictors, reader, place, plan, **common)
                for name, total, count in _members(stepper, reader, place, plan, members, **common):
                    names.append(f"valid/{task}/{name}")
                    sums.append(total)
                    wins.append(0.0)
                    counts.append(count)
            ours = trajectory_means(scores[MODEL].rows)
            for name in predictors:
                theirs = trajectory_means(scores[name].rows)
                names.append(f"valid/{task}/{name}")
                sums.append(sum(theirs.values()))
                # not by rounding alone: who wins must not depend on the number of ranks
                wins.append(float(sum(ours[t] < error * (1 - 1e-6) for t, error in theirs.items())))
                counts.append(float(len(theirs)))
        packed = torch.tensor([sums, wins, counts], dtype=torch.float64, device=device)
        if engine.runtime.control_group is not None:
            dist.all_reduce(packed)
        means = dict(zip(names, (packed[0] / packed[2]).tolist(), strict=True))
        won = dict(zip(names, packed[1].tolist(), strict=True))
        scored = dict(zip(names, packed[2].tolist(), strict=True))
        found: dict[str, float] = {}
        for task, bar in bars.items():
            shown = (MODEL, CRPS, TEACHER, CENTER, *bar)
            found |= {key: means[key] for name in shown if (key := f"valid/{task}/{name}") in means}
            best = min((f"valid/{task}/{name}" for name in bar), key=lambda name: means[name])
            found |= {f"valid/{task}/better_on": won[best], f"valid/{task}/trajectories": scored[best]}
        return found

    return validate


def _members(
    stepper: Stepper, reader: Reader, place: Place, plan: RolloutPlan, members: int, **common: Any
) -> Iterator[tuple[str, float, float]]:
    """Name, sum and number of each score of `members` members on this rank; nothing without members."""
    flow = trained_flow(stepper, reader.task)
    if not members or not has_members(stepper, reader.task):
        return
    means = score_ensemble(members_of(stepper, reader.task, members), reader, place, plan, **common).means
    for name in (CRPS, CENTER):
        yield name, sum(means[name].values()), float(len(means[name]))
    if flow == STUDENT:
        teacher = FlowMembers(stepper, members, 0, FLOW)
        found = score_ensemble(teacher, reader, place, plan, **common).means[CRPS]
        yield TEACHER, sum(found.values()), float(len(found))


def _bar(reader: Reader, stepper: Stepper) -> dict[str, Predictor]:
    """What a trained model must beat on this task, under the names of their metrics.

    The training mean of each channel is known; that of each point, which `ups eval` takes, needs reading, and is worth
    it where it is the only reference.
    """
    task = reader.task
    if task.steady:
        return {"training_mean": TrainingMean({task.name: mean_field(reader, max_trajectories=64)})}
    mean = torch.tensor(stepper.statistics[task.name].state_mean, dtype=torch.float64)
    field = mean.reshape(-1, *[1] * task.num_spatial_dims).expand(-1, *reader.space)  # (C, *S)
    return {"persistence": persistence, "training_mean": TrainingMean({task.name: field})}


def _long_enough(reader: Reader, context_frames: int) -> bool:
    """Whether a trajectory of the valid split has a frame to predict."""
    frames = reader.frames_of("valid")
    return reader.task.steady or frames is None or int(frames.max()) > context_frames
