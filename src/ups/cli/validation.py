"""Validation during training: the error of one model step on held-out trajectories, beside doing nothing.

Composes `ups.evaluation` with the engine, which do not know each other. Scores of a finished run: `ups eval`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist

from ups.config.schema import EvaluateConfig
from ups.data.readers.base import Reader
from ups.evaluation.references import mean_field
from ups.evaluation.results import trajectory_means
from ups.evaluation.rollout import Predictor, RolloutPlan, score_task
from ups.models.baselines import TrainingMean, persistence
from ups.models.stepper import Stepper
from ups.training.engine import Engine
from ups.training.precision import autocast, weight_dtype


def build_validation(
    config: EvaluateConfig, readers: Sequence[Reader], stepper: Stepper
) -> Callable[[Engine], Mapping[str, float]]:
    """A validation of `stepper` on the valid split of each task that has one. Collective: all ranks call it together.

    Per task: `valid/<task>/one_step`, the error of every frame predicted from the true ones before it, relative to the
    RMS of the trajectory, and the same of persistence (for a steady task, of the mean over the train split).
    """
    held_out = [reader for reader in readers if reader.splits.get("valid", 0) > 0]
    plans = {reader.task.name: RolloutPlan.whole(reader, stepper.context_frames) for reader in held_out}
    bars: dict[str, dict[str, Predictor]] = {}  # filled at the first validation: a mean takes reading

    def validate(engine: Engine) -> Mapping[str, float]:
        device = engine.runtime.device
        names: list[str] = []
        sums: list[float] = []
        counts: list[float] = []
        for reader in held_out:
            task = reader.task.name
            if task not in bars:
                bars[task] = _bar(reader)
            predictors: dict[str, Predictor] = {"one_step": stepper, **bars[task]}
            with autocast(engine.config.precision, device):
                scores = score_task(
                    predictors,
                    reader,
                    engine.runtime.place,
                    plans[task],
                    split="valid",
                    max_trajectories=config.max_trajectories,
                    device=device,
                    dtype=weight_dtype(engine.config.precision),
                    kind="one_step",
                )
            for name in predictors:
                names.append(f"valid/{task}/{name}")
                sums.append(sum(trajectory_means(scores[name].rows).values()))
                counts.append(float(len(scores[name].rows)))
        packed = torch.tensor([sums, counts], dtype=torch.float64, device=device)
        if engine.runtime.control_group is not None:
            dist.all_reduce(packed)
        return dict(zip(names, (packed[0] / packed[1]).tolist(), strict=True))

    return validate


def _bar(reader: Reader) -> dict[str, Predictor]:
    """What a trained model must beat on this task, under the name of its metric."""
    if reader.task.steady:
        return {"training_mean": TrainingMean({reader.task.name: mean_field(reader, max_trajectories=64)})}
    return {"persistence": persistence}
