"""A small recipe for runs to plant faults in, and what such a run leaves: weights, rows, how far a rank is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from tests.support.faults.supervised import Result
from ups.record.identity import RunIdentity
from ups.record.manifest import read_manifest


def write_recipe(
    folder: Path,
    tasks: list[dict[str, Any]],
    steps: int = 20,
    save_every: int = 5,
    evaluate_every: int | None = None,
    batch_size: int = 4,
    **sections: Any,
) -> Path:
    """A recipe file in `folder`; `sections` replace top-level sections."""
    document = {
        "version": 1,
        "run": {"name": "small"},
        "data": {"tasks": tasks, "batch_size": batch_size, "loader": {"workers": 1}},
        "model": {"type": "latent_operator", "width": 16, "depth": 1, "num_heads": 2},
        "stages": [{"type": "operator", "steps": steps}],
        "engine": {"device": "cpu"},
        "checkpoint": {"interval_steps": save_every},
        "tracking": {"log_interval_steps": 1},
        "evaluate": {"max_trajectories": 1, "interval_steps": evaluate_every},
        **sections,
    }
    path = folder / f"recipe_{steps}.yaml"
    path.write_text(yaml.safe_dump(document))
    return path


def weights(result: Result) -> dict[str, str]:
    """Hashes of the files that hold the tensors of the final checkpoint."""
    final = max(result.run_dir.glob("checkpoints/step_*"))
    return {name: file.sha256 for name, file in read_manifest(final).files.items() if name.endswith(".distcp")}


def rows(result: Result) -> list[dict[str, Any]]:
    """The rows of training in metrics.jsonl, in the order in which they were written."""
    records = [json.loads(line) for line in (result.run_dir / "metrics.jsonl").read_text().splitlines()]
    return [row for row in records if "loss" in row]


def rank_is_at_step(run_dir: Path, step: int) -> bool:
    """Whether a living rank 0 has reached `step`, by its black box."""
    from ups.errors import UpsError
    from ups.supervise.run_file import read_run
    from ups.supervise.status import rank_statuses

    try:
        rows = rank_statuses(run_dir, read_run(run_dir))
    except (UpsError, OSError):
        return False
    return any(row.step >= step for row in rows)


def prepare_real(run_dir: Path, recipe: str) -> RunIdentity:
    """What `ups train` does before it starts ranks."""
    from ups.config.recipe import resolve
    from ups.data.open import open_tasks
    from ups.run.directory import ensure_run_statistics, identify, prepare
    from ups.run.warm_start import keep_starts

    resolved = resolve(recipe)
    prepare(run_dir, resolved, 2)
    with open_tasks(resolved.recipe.data) as readers:
        ensure_run_statistics(run_dir, resolved.recipe, readers)
    keep_starts(run_dir, resolved.recipe)
    return identify(run_dir, resolved.recipe)
