"""`ups.evaluate` and `ups.compare`: scores on held-out data, next to what costs nothing."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ups.errors import ConfigError
from ups.library.run import Run

if TYPE_CHECKING:
    import pandas

    from ups.evaluation.comparison import TaskComparison
    from ups.run.trained import Trained

ModelLike = str | os.PathLike[str] | Run
HELD_OUT = ("test", "valid")


@dataclass(frozen=True)
class Scores:
    """Scores of one model. `results`: one for each task, all of it (see docs/evaluation.md).

    `table()` has what to look at first; `print(scores)` shows it with its references.
    """

    model: str
    identity: dict[str, str]
    results: list[dict[str, Any]]
    folder: Path
    _trained: Trained = field(repr=False)
    _seconds: float = field(default=0.0, repr=False)

    def table(self) -> pandas.DataFrame:
        """Each score of the model next to its best reference: task, score, model, reference, ratio, verdict."""
        import pandas

        from ups.evaluation.headline import headlines
        from ups.run.scoring import MODEL

        rows = [
            {"task": result["task"], **line.to_json()} for result in self.results for line in headlines(result, MODEL)
        ]
        return pandas.DataFrame(rows)

    def to_json(self) -> dict[str, Any]:
        """What `ups eval --json` prints."""
        from ups.evaluation.results import to_json

        return {"model": self.model, "identity": self.identity, "results": to_json(self.results)}

    def write(self, folder: str | os.PathLike[str] | None = None, *, page: bool = False) -> list[Path]:
        """Write scores.json, and with `page` the report; default next to the model. Returns what was written."""
        from ups.run.scoring import write_scores

        place = Path(folder) if folder is not None else self.folder
        return write_scores(place, self._trained, self.results, page=page, scoring_seconds=self._seconds)

    def __str__(self) -> str:
        from ups.run.scoring import score_lines

        return score_lines(self.results)


@dataclass(frozen=True)
class Comparison:
    """Several models side by side: a comparison for each task, notes, and what their recipes differ in.

    groups: name -> models of the same recipe with different seeds. costs: model -> what its training took, by name.
    """

    models: list[str]
    tasks: list[TaskComparison]
    notes: list[str]
    recipe_changes: dict[str, list[tuple[str, str, str]]]
    groups: dict[str, list[str]] = field(default_factory=dict)
    costs: dict[str, dict[str, float]] = field(default_factory=dict)

    def table(self) -> pandas.DataFrame:
        """Error of each model and of the best reference, for each task and score, and which is significantly best."""
        import pandas

        from ups.evaluation.headline import SCORES

        rows = []
        for found in self.tasks:
            for head, key in SCORES:
                if found.first["steady"] and key == "one_step_trmse":
                    continue
                name, value = found.reference(key)
                scores = {label: found.summary(label)[key] for label in found.results}
                best = found.winner(key)[0]
                rows.append(
                    {
                        "task": found.task,
                        "score": head,
                        **scores,
                        "reference": value,
                        "reference_name": name,
                        "best": best,
                    }
                )
        return pandas.DataFrame(rows)

    def to_json(self) -> dict[str, Any]:
        """What `ups compare --json` prints."""
        from ups.evaluation.results import to_json

        changes = {label: [list(row) for row in rows] for label, rows in self.recipe_changes.items()}
        tasks = [to_json(_plain(found, self.groups)) for found in self.tasks]
        plain = {"models": self.models, "tasks": tasks, "notes": self.notes, "recipe_changes": changes}
        return plain | {"groups": self.groups, "costs": self.costs}

    def write(self, folder: str | os.PathLike[str]) -> Path:
        """Write a page with tables and curves; returns it."""
        from ups.run.comparing import write_page

        return write_page(Path(folder), self.tasks, self.notes, self.recipe_changes, self.groups, self.costs)

    def __str__(self) -> str:
        return str(self.table().to_string(index=False))


def evaluate(
    model: ModelLike,
    split: str = "test",
    *,
    tasks: Sequence[str] = (),
    data: Mapping[str, str | os.PathLike[str]] | None = None,
    recipe_data: bool = False,
    start_frame: int | None = None,
    max_trajectories: int | None = None,
    solver_cost: bool = False,
    progress: bool = False,
) -> Scores:
    """Score a run (its newest checkpoint) or a bundle on held-out trajectories: whole rollouts from the start frame.

    tasks: only these. data: task -> another data set, whose held-out trajectories are scored instead, and only these.
    A bundle needs it; recipe_data: open what the recipe of the bundle names, wherever that is.
    max_trajectories: at most so many of each task. solver_cost: also measure what the same error costs the solver that
    made the data (takes minutes). With `progress` a line shows how far it is. Writes nothing.
    """
    from ups.record.run_dir import find_model
    from ups.run.progress_line import ProgressLine
    from ups.run.scoring import report_folder, score
    from ups.run.trained import check_tasks, load_trained

    if split not in HELD_OUT:
        raise ConfigError(f"'{split}' is not a held-out split", hint="use test or valid")
    if solver_cost:
        from ups.solvers.coarse_solver import require_solvers

        require_solvers()
    name = _name_of(model)
    with ProgressLine(quiet=not progress) as line:
        named = {task: os.fspath(path) for task, path in (data or {}).items()}
        trained = load_trained(name, data=named, recipe_data=recipe_data)
        folder = report_folder(find_model(name))
        if trained.elsewhere:
            folder = folder.with_name(f"{folder.name}-other-data")
        check_tasks([reader.task.name for reader in trained.readers], tasks, name)
        began = time.monotonic()
        results = score(
            trained,
            split=split,
            start_frame=start_frame,
            max_trajectories=max_trajectories,
            tasks=tasks,
            solver_cost=solver_cost,
            progress=line.count,
        )
    return Scores(trained.name, trained.identity, results, folder, trained, time.monotonic() - began)


def compare(*models: ModelLike, tasks: Sequence[str] = (), progress: bool = False) -> Comparison:
    """Scores of several runs, bundles, reports or scores.json files, with paired differences to the first.

    One without scores is scored first, and its scores.json kept. Raises if the scores are of other data or of another
    protocol.
    """
    from ups.run.comparing import compare_models
    from ups.run.progress_line import ProgressLine

    with ProgressLine(quiet=not progress) as line:
        return Comparison(*compare_models([_name_of(model) for model in models], tasks, line.count))


def _name_of(model: ModelLike) -> str:
    return str(model.path) if isinstance(model, Run) else os.fspath(model)


def _plain(found: TaskComparison, groups: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    from ups.evaluation.headline import SCORES

    return {
        "task": found.task,
        "protocol": dict(found.first["protocol"]),
        "scores": {label: dict(found.summary(label)) for label in found.results},
        "seeds": {key: found.over_seeds(groups, key) for _, key in SCORES},
        "references": {name: dict(summary) for name, summary in found.references().items()},
        "best": {key: found.winner(key)[0] for _, key in SCORES},
        "verdicts": {label: found.rollout_verdict(label) for label in found.results},
        "differences": {label: dict(d) for label, d in found.differences.items()},
    }
