"""Validation as training runs it, for the checks that compare its scores and count its samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from ups.config.schema import Recipe
from ups.evaluation.rollout import RolloutPlan, score_task
from ups.formats.base import Reader
from ups.run.assemble import Assembled, OpenData, build_validation
from ups.spec.batch import Batch, RankInfo
from ups.training.hooks import EvaluateHook

_NO_SCORES = ("step", "stage", "time")


class _Keep:
    def __init__(self) -> None:
        self.row: dict[str, Any] = {}

    def log(self, row: Mapping[str, object]) -> None:
        self.row = dict(row)


def validation_scores(recipe: Recipe, opened: OpenData, parts: Assembled) -> dict[str, float]:
    """Scores of the present weights by the hook that training uses. Collective: all ranks."""
    sink = _Keep()
    members = recipe.stages[parts.engine.progress.stage_index].num_members
    validate = build_validation(recipe.evaluate, opened.readers, parts.stepper, members)
    EvaluateHook(validate, None, sink).at_end(parts.engine)
    return {name: float(value) for name, value in sink.row.items() if name not in _NO_SCORES}


def scored_trajectories(reader: Reader, place: RankInfo, context_frames: int, limit: int) -> Sequence[int]:
    """Trajectories of the valid split that this rank scores, found by scoring them with a model that predicts 0."""
    plan = RolloutPlan(context_frames, 0 if reader.task.steady else context_frames - 1, 1)
    scores = score_task({"zero": _zero}, reader, place, plan, split="valid", max_trajectories=limit)
    return sorted(scores["zero"].rows)


def _zero(batch: Batch) -> Tensor:
    channels = batch.task.num_channels(batch.task.predicted)
    return batch.dt.new_zeros(batch.num_samples, channels, *batch.space)
