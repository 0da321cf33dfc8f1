"""What each stage brought: figures of the validations at the ends of stages, each next to what it is compared with."""

from __future__ import annotations

import json
from pathlib import Path

from ups.config.schema import Recipe
from ups.run.trained import stage_gains

RECIPE = Recipe.model_validate(
    {
        "run": {"name": "gains"},
        "data": {"tasks": [{"name": "line", "path": "line.zarr"}, {"name": "map", "path": "map.zarr"}]},
        "model": {"type": "multiscale"},
        "networks": {"steady": {"type": "multiscale"}},
        "stages": [
            {"type": "linear", "steps": 1, "tasks": ["line"]},
            {"type": "operator", "steps": 1, "tasks": ["line"]},
            {"type": "corrector", "kind": "flow", "steps": 1, "tasks": ["line"]},
            {"type": "steady", "steps": 1, "tasks": ["map"]},
        ],
    }
)


def row(stage: int, **values: float) -> str:
    return json.dumps({"step": 1, "stage": stage} | {f"valid/{k.replace('__', '/')}": v for k, v in values.items()})


def test_each_stage_is_compared_with_what_was_there_before_it(tmp_path: Path) -> None:
    lines = [
        row(0, line__one_step=0.9, line__persistence=1.0),
        json.dumps({"step": 3, "stage": 1, "loss": 0.5}),
        row(1, line__one_step=0.5, map__one_step=2.0),
        row(1, line__one_step=0.3, map__one_step=2.0),
        row(2, line__one_step=0.3, line__crps=0.1, line__absolute_error=0.2, map__one_step=2.0),
        row(3, line__one_step=0.3, map__one_step=0.4, map__training_mean=1.0),
        '{"step": 9, "stage": 3, "valid',
    ]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    gains = [(r["stage"], r["task"], r["against"], r["before"], r["after"]) for r in stage_gains(tmp_path, RECIPE)]
    assert gains == [
        ("linear", "line", "persistence", 1.0, 0.9),
        ("operator", "line", "the stage before", 0.9, 0.3),
        ("corrector (flow)", "line", "operator alone", 0.2, 0.1),
        ("steady", "map", "training mean", 1.0, 0.4),
    ]


def test_an_ensemble_is_held_to_its_central_member_and_to_the_operator_it_began_with(tmp_path: Path) -> None:
    stages = [{"type": "operator", "steps": 1}, {"type": "corrector", "kind": "ensemble", "steps": 1}]
    document = RECIPE.model_dump(mode="json", exclude_unset=True) | {
        "model": {"type": "multiscale", "noise_size": 4},
        "stages": stages,
    }
    lines = [row(0, line__one_step=0.01), row(1, line__one_step=0.02, line__crps=0.012, line__absolute_error=0.02)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    gains = stage_gains(tmp_path, Recipe.model_validate(document))
    assert [(r["figure"], r["against"], r["before"], r["after"]) for r in gains if r["stage"] != "operator"] == [
        ("CRPS", "its central member", 0.02, 0.012),
        ("one step", "the stage before", 0.01, 0.02),
    ]


def test_a_run_without_metrics_has_none(tmp_path: Path) -> None:
    assert stage_gains(tmp_path, RECIPE) == []
