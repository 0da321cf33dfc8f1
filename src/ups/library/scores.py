"""`ups.evaluate`, `ups.compare`, `ups.calibrate`: scores next to what costs nothing, and how wrong a model may be."""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ups.config.identity import changes_between
from ups.config.yaml_subset import parse, shown_value
from ups.errors import BundleError, ConfigError
from ups.evaluation.comparison import MAX_BYTES, Scored, TaskComparison, read_scores
from ups.evaluation.comparison import compare as compare_scored
from ups.evaluation.report import write_comparison
from ups.evaluation.results import SCORES, headlines, to_json
from ups.inference.bundle import load_bundle, write_bundle, write_card
from ups.inference.calibration import Quantities, TaskDocument, read_calibration
from ups.library.run import Run
from ups.record.checkpoints import latest_verified
from ups.record.files import read_object, write_file_atomically
from ups.record.manifest import read_manifest
from ups.record.run_dir import (
    CALIBRATION_NAME,
    CONFIG_NAME,
    SCORES_NAME,
    find_bundle,
    find_model,
    is_bundle,
    is_shipped,
)
from ups.record.text import html_table
from ups.run.calibrate import calibrate as calibrate_trained
from ups.run.calibrate import choose
from ups.run.progress_line import ProgressLine, table
from ups.run.scoring import report_folder, score, score_lines, write_scores
from ups.run.trained import Trained, check_tasks, load_trained
from ups.solvers.problem import require_solvers

if TYPE_CHECKING:
    import pandas

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

        rows = [{"task": result["task"], **line.to_json()} for result in self.results for line in headlines(result)]
        return pandas.DataFrame(rows)

    def to_json(self) -> dict[str, Any]:
        """What `ups eval --json` prints."""
        return {"model": self.model, "identity": self.identity, "results": to_json(self.results)}

    def write(self, folder: str | os.PathLike[str] | None = None, *, page: bool = False) -> list[Path]:
        """Write scores.json, and with `page` the report; default next to the model. Returns what was written."""
        target = Path(folder) if folder is not None else self.folder
        return write_scores(target, self._trained, self.results, page=page, scoring_seconds=self._seconds)

    def __str__(self) -> str:
        return score_lines(self.results)

    def _repr_html_(self) -> str:
        lines = [(result["task"], line) for result in self.results for line in headlines(result)]
        rows = [
            (task, line.score, f"{line.model:.4g}", f"{line.reference:.4g} {line.reference_name}", line.verdict)
            for task, line in lines
        ]
        return html_table(f"Scores of {self.model}", ("task", "score", "error", "reference", "the model is"), rows)


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

        rows = []
        for comparison in self.tasks:
            for head, key in comparison.scores():
                name, value = comparison.reference(key)
                scores = {label: comparison.summary(label)[key] for label in comparison.results}
                best = {"reference": value, "reference_name": name, "best": comparison.winner(key)[0]}
                rows.append({"task": comparison.task, "score": head, **scores, **best})
        return pandas.DataFrame(rows)

    def to_json(self) -> dict[str, Any]:
        """What `ups compare --json` prints."""
        changes = {label: [list(row) for row in rows] for label, rows in self.recipe_changes.items()}
        tasks = [to_json(_task_json(comparison, self.groups)) for comparison in self.tasks]
        plain = {"models": self.models, "tasks": tasks, "notes": self.notes, "recipe_changes": changes}
        return plain | {"groups": self.groups, "costs": self.costs}

    def write(self, folder: str | os.PathLike[str]) -> Path:
        """Write a page with tables and curves; returns it."""
        page = Path(folder) / "index.html"
        page.parent.mkdir(parents=True, exist_ok=True)
        seeds = {task.task: seed_table(task, self.groups) for task in self.tasks} if self.groups else {}
        changes, costs = self.recipe_changes, self.costs
        text = write_comparison(self.tasks, self.notes, title="Comparison", changes=changes, seeds=seeds, costs=costs)
        write_file_atomically(page, text.encode())
        return page

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
    break_even: bool = False,
    solve_seconds: float | None = None,
    training_seconds: float | None = None,
    progress: bool = False,
) -> Scores:
    """Score a run (its newest checkpoint) or a bundle on held-out trajectories: whole rollouts from the start frame.

    tasks: only these. data: task -> another data set, whose held-out trajectories are scored instead, and only these.
    A bundle needs it; recipe_data: open what the recipe of the bundle names, wherever that is.
    max_trajectories: the most of each task. break_even: also measure after how many solves the model has paid (takes
    minutes): next to our solvers, or to a solver of yours of which a solve takes solve_seconds. training_seconds: of
    training and tuning; default what the run took. With `progress` a line shows how far it is. Writes nothing.
    """
    if split not in HELD_OUT:
        raise ConfigError(f"'{split}' is not a held-out split", hint="use test or valid")
    if break_even and solve_seconds is None:
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
            break_even=break_even,
            solve_seconds=solve_seconds,
            training_seconds=training_seconds,
            progress=line.count,
        )
    return Scores(trained.name, trained.identity, results, folder, trained, time.monotonic() - began)


def calibrate(
    model: ModelLike,
    *,
    data: Mapping[str, str | os.PathLike[str]] | None = None,
    recipe_data: bool = False,
    quantities: Quantities | None = None,
    progress: bool = False,
) -> dict[str, TaskDocument]:
    """Measure how far a bundle (or that of a run) is off, on trajectories that chose nothing, and store that in it.

    The trajectories are the split `calibration` of the data of the run; of a bundle alone, name its data in `data`
    (task -> path), or open what its recipe names with `recipe_data`. data of a run: other trajectories instead, of the
    split `calibration` or else `test`. quantities: name -> function of fields by name (samples, [component,] *space)
    and coordinates by axis, which returns a number for each sample; give it to `rollout`, too. A shipped model stays as
    it is: its calibrated copy is written to the current directory, under the same name.
    """
    name, named = _name_of(model), {task: os.fspath(path) for task, path in (data or {}).items()}
    directory, alone = find_bundle(name), is_bundle(find_model(name)) and not recipe_data
    with ProgressLine(quiet=not progress) as line:
        trained = load_trained(name, data=named if alone else None, recipe_data=recipe_data)
        chosen, bundle = choose(trained, {} if alone else named), load_bundle(directory, stated=False)
        # A run may have trained on since its bundle was written.
        found = calibrate_trained(replace(trained, stepper=bundle.stepper), chosen, quantities, line.count)
    with contextlib.suppress(BundleError):  # those of other tasks stay, if they can be read
        found = read_calibration(directory / CALIBRATION_NAME, bundle.info.tasks) | found
    card = write_card(trained.recipe.run.name, bundle.info, found)
    config = (directory / CONFIG_NAME).read_text(encoding="utf-8")
    target = Path(directory.parent.name) if is_shipped(directory) else directory
    write_bundle(target, bundle.stepper, bundle.info, config_text=config, card=card, stated=found)
    return {task: one.document for task, one in found.items()}


def compare(*models: ModelLike, tasks: Sequence[str] = (), progress: bool = False) -> Comparison:
    """Scores of several runs, bundles, reports or scores.json files, with paired differences to the first.

    One without scores is scored first, and its scores.json kept. Raises if the scores are of other data or of another
    protocol.
    """
    names = [_name_of(model) for model in models]
    if len(names) < 2:
        raise ConfigError("a comparison needs two models or more", hint="ups compare runs/A runs/B")
    if len({Path(n).resolve() for n in names}) < len(names):
        raise ConfigError("the same model is named twice")
    short = [_short_name(name) for name in names]
    labels = [s if short.count(s) == 1 else n for s, n in zip(short, names, strict=True)]
    with ProgressLine(quiet=not progress) as line:
        scored = [_load(name, label, tasks, line.count) for name, label in zip(names, labels, strict=True)]
    comparisons, notes = compare_scored(scored)
    groups = seed_groups(scored)
    few = not groups or len(scored) <= MAX_LISTED
    listed = labels if few else {members[0] for members in groups.values()}
    changes = {one.label: _changes(scored[0], one) for one in scored[1:] if one.label in listed}
    return Comparison(labels, comparisons, notes, changes, groups)


def _name_of(model: ModelLike) -> str:
    return str(model.path) if isinstance(model, Run) else os.fspath(model)


def _task_json(comparison: TaskComparison, groups: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    keys = dict.fromkeys(key for _, key in (*SCORES, *comparison.scores()))
    return {
        "task": comparison.task,
        "protocol": dict(comparison.first["protocol"]),
        "scores": {label: dict(comparison.summary(label)) for label in comparison.results},
        "seeds": {key: comparison.over_seeds(groups, key) for key in keys},
        "references": {name: dict(summary) for name, summary in comparison.references().items()},
        "best": {key: comparison.winner(key)[0] for key in keys},
        "verdicts": {label: comparison.rollout_verdict(label) for label in comparison.results},
        "differences": {label: dict(d) for label, d in comparison.differences.items()},
    }


# With more models, recipe changes are listed for one model of each group.
MAX_LISTED = 4
# Name -> labels of models that differ in nothing but their seed.
Groups = dict[str, list[str]]
# Sections of a recipe that do not change what is learned; `run` also has the seed.
_NOT_LEARNED = ("run", "checkpoint", "evaluate", "tracking", "supervise", "gate")


def seed_groups(scored: Sequence[Scored]) -> Groups:
    """The models in groups of the same recipe with different seeds; {} if each would be alone."""
    by_recipe: dict[str, dict[str, str]] = {}
    for one in scored:
        recipe = parse(one.config_text, one.label).value if one.config_text else None
        recipe = recipe if isinstance(recipe, dict) else {"label": one.label}
        run = recipe.get("run")
        seed = str(run.get("seed", 0) if isinstance(run, dict) else 0)
        learned = json.dumps({name: value for name, value in recipe.items() if name not in _NOT_LEARNED})
        if seed in by_recipe.get(learned, {}):  # the same model twice, such as a run and its bundle
            learned += one.label
        by_recipe.setdefault(learned, {})[seed] = one.label
    groups: Groups = {}
    for seeds in by_recipe.values():
        short = {re.sub(rf"[-_.]?seed[-_=]?{re.escape(seed)}(?![0-9])", "", label) for seed, label in seeds.items()}
        named = len(short) == 1 < len(seeds) and not short & groups.keys()
        groups[short.pop() if named else ", ".join(seeds.values())] = list(seeds.values())
    return groups if len(groups) < len(scored) else {}


def seed_table(task: TaskComparison, groups: Groups) -> str:
    """A line for each score and recipe: mean and standard deviation over seeds, next to the reference."""
    rows = [["error", "recipe", "seeds", "mean", "", "reference"]]
    for head, key in task.scores():
        name, value = task.reference(key)
        for group, row in task.over_seeds(groups, key).items():
            spread = f"± {row['std']:.2g}" if row["num_seeds"] > 1 else ""
            rows.append([head, group, str(row["num_seeds"]), f"{row['mean']:.4g}", spread, f"{value:.4g} {name}"])
    return table(rows)


def _short_name(name: str) -> str:
    """What was typed, without what says nothing."""
    parts = [p for p in Path(name).parts if p not in (SCORES_NAME, "report", "bundle", "runs", ".", "..", "/")]
    return parts[-1] if parts else name


def _load(name: str, label: str, tasks: Sequence[str], progress: Callable[[str, int, int], None]) -> Scored:
    """Scores of a model; one that has none is scored. tasks: only these, default all."""
    path = Path(name)
    if not path.is_file():
        path = path / SCORES_NAME
    if not path.is_file():
        folder = find_model(name)
        path = report_folder(folder) / SCORES_NAME
        if not (path.is_file() and _is_current(folder, path)):
            trained = load_trained(name)
            results = score(trained, progress=lambda what, *counts: progress(f"{label}: {what}", *counts))
            write_scores(path.parent, trained, results, page=False)
    scored = read_scores(path, label)
    wanted = {task: result for task, result in scored.results.items() if not tasks or task in tasks}
    return replace(scored, results=wanted)


def _is_current(folder: Path, scores: Path) -> bool:
    """Whether scores that were kept are of the newest checkpoint of a run, or of this bundle."""
    identity = (read_object(scores, MAX_BYTES) or {}).get("identity")
    if not isinstance(identity, dict):
        return False
    if is_bundle(folder):
        return bool(identity.get("bundle") == read_manifest(folder).sha256)
    newest = latest_verified(folder)
    return newest is not None and identity.get("checkpoint") == newest.name


def _changes(a: Scored, b: Scored) -> list[tuple[str, str, str]]:
    """(field, value in a, value in b) of the recipes; empty if one of them is not known."""
    if not a.config_text or not b.config_text:
        return []
    pairs = changes_between(parse(a.config_text, a.label).value, parse(b.config_text, b.label).value)
    return [(field, shown_value(old), shown_value(new)) for field, old, new in pairs]
