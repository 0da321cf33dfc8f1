"""What each stage of a run brought, from the validations at the ends of its stages. No torch.

Each stage is judged by what it trains: errors of a step from true frames, or the CRPS of members next to the same score
without any (the absolute error), or that of a student next to its teacher, which needs more evaluations. A stage that
trains the operator itself as an ensemble is also held to the operator that it began with.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ups.config.schema import Recipe
from ups.record.files import open_regular
from ups.record.run_dir import RunDir

_ONE_STEP = "one step"


def stage_gains(run_dir: Path, recipe: Recipe) -> list[dict[str, Any]]:
    """Rows of stage, task, figure, against (what `before` is), before and after; none of a stage without validation."""
    ends = _last_validations(run_dir)
    found = []
    for number, stage in enumerate(recipe.stages):
        row = ends.get(number)
        if row is None:
            continue
        label = stage.type if not getattr(stage, "kind", "") else f"{stage.type} ({stage.kind})"  # type: ignore[attr-defined]
        for task in recipe.data.tasks:
            if not stage.trains(task.name):
                continue
            # Every validation scores all tasks, also those that no stage has trained yet.
            trained = [n for n in range(number) if recipe.stages[n].trains(task.name)]
            earlier = [ends[n] for n in trained if n in ends]
            found += [
                {"stage": label, "task": task.name} | one
                for one in _figures(stage.needs_noise, task.name, row, earlier)
            ]
    return [one for one in found if math.isfinite(one["before"]) and math.isfinite(one["after"])]


def _figures(
    trains_operator: bool, task: str, row: Mapping[str, Any], earlier: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """trains_operator: as an ensemble, of which the score without members is that of the central one."""

    def value(of: Mapping[str, Any], name: str) -> float | None:
        return of.get(f"valid/{task}/{name}")

    crps, teacher, single = value(row, "crps"), value(row, "crps_teacher"), value(row, "absolute_error")
    rows = []
    if crps is not None and single is not None:
        against = "its central member" if trains_operator else "operator alone"
        rows = [{"figure": "CRPS", "against": against, "before": single, "after": crps}]
        if teacher is not None:
            rows.append({"figure": "CRPS", "against": "its teacher", "before": teacher, "after": crps})
        if not trains_operator:
            return rows
    after = value(row, "one_step")
    if after is None:
        return rows
    before = value(earlier[-1], "one_step") if earlier else None
    if before is not None:
        one_step = {"figure": _ONE_STEP, "against": "the stage before", "before": before, "after": after}
        return [*rows, one_step]
    if rows:
        return rows
    for reference in ("persistence", "training_mean"):
        bar = value(row, reference)
        if bar is not None:
            words = reference.replace("_", " ")
            return [{"figure": _ONE_STEP, "against": words, "before": bar, "after": after}]
    return []


def _last_validations(run_dir: Path) -> dict[int, dict[str, Any]]:
    """Stage -> the last row of its validations."""
    found: dict[int, dict[str, Any]] = {}
    with contextlib.suppress(OSError), open_regular(RunDir(run_dir).metrics, follow_link=True) as lines:
        for line in lines or ():
            with contextlib.suppress(ValueError):  # a line that was cut off
                row = json.loads(line)
                if (
                    isinstance(row, dict)
                    and isinstance(row.get("stage"), int)
                    and any(n.startswith("valid/") for n in row)
                ):
                    found[row["stage"]] = row
    return found
