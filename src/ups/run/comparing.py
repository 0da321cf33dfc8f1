"""Finds the scores of several models, scoring those that have none, and puts them side by side.

What may be compared: `ups.evaluation.comparison`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from ups.config.changes import changes_between, shown_value
from ups.config.yaml_subset import parse
from ups.errors import ConfigError
from ups.evaluation.comparison import MAX_BYTES, Scored, TaskComparison, compare, read_scores
from ups.evaluation.headline import SCORES
from ups.record.checkpoints import latest_verified
from ups.record.files import read_object
from ups.record.manifest import read_manifest, write_file_atomically
from ups.record.run_dir import find_model, is_bundle
from ups.run.progress_line import table
from ups.run.scoring import report_folder, write_scores
from ups.run.trained import load_trained

Changes = dict[str, list[tuple[str, str, str]]]
# Label -> what its training took, by name.
Costs = dict[str, dict[str, float]]
# Above so many models, recipe changes are listed for one model of each group.
MAX_LISTED = 4
# Name -> labels of models that differ in nothing but their seed.
Groups = dict[str, list[str]]
# Sections of a recipe that do not change what is learned; `run` also has the seed.
_NOT_LEARNED = ("run", "checkpoint", "evaluate", "tracking", "supervise", "gate")
Progress = Callable[[str, int, int], None]


def compare_models(
    names: Sequence[str], tasks: Sequence[str] = (), progress: Progress | None = None
) -> tuple[list[str], list[TaskComparison], list[str], Changes, Groups]:
    """Labels, a comparison for each task, notes, the recipe changes of each model against the first, and groups.

    names: runs, bundles, reports or scores.json files. Raises ConfigError for fewer than two.
    """
    if len(names) < 2:
        raise ConfigError("a comparison needs two models or more", hint="ups compare runs/A runs/B")
    scored = [_only(one, tasks) for one in _labeled(names, progress)]
    found, notes = compare(scored)
    groups = seed_groups(scored)
    few = not groups or len(scored) <= MAX_LISTED
    shown = {one.label for one in scored} if few else {labels[0] for labels in groups.values()}
    changes = {one.label: _changes(scored[0], one) for one in scored[1:] if one.label in shown}
    return [one.label for one in scored], found, notes, changes, groups


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
    steady = task.first["steady"]
    for head, key in SCORES[1:] if steady else SCORES:
        name, value = task.reference(key)
        for group, row in task.over_seeds(groups, key).items():
            head = "solution" if steady and key == "trmse" else head
            spread = f"± {row['std']:.2g}" if row["num_seeds"] > 1 else ""
            rows.append([head, group, str(row["num_seeds"]), f"{row['mean']:.4g}", spread, f"{value:.4g} {name}"])
    return table(rows)


def write_page(
    folder: Path, tasks: Sequence[TaskComparison], notes: Sequence[str], changes: Changes, groups: Groups, costs: Costs
) -> Path:
    """Write the page with tables and curves; returns its path."""
    from ups.evaluation.report.side_by_side import write_comparison

    folder.mkdir(parents=True, exist_ok=True)
    seeds = {task.task: seed_table(task, groups) for task in tasks} if groups else {}
    text = write_comparison(tasks, notes, title="Comparison", changes=changes, seeds=seeds, costs=costs)
    write_file_atomically(folder / "index.html", text.encode())
    return folder / "index.html"


def _labeled(names: Sequence[str], progress: Progress | None) -> list[Scored]:
    """Scores of each model, in order; labeled by what was typed, without what says nothing."""
    if len({Path(n).resolve() for n in names}) < len(names):
        raise ConfigError("the same model is named twice")
    short = [_short_name(name) for name in names]
    labels = [s if short.count(s) == 1 else n for s, n in zip(short, names, strict=True)]
    return [_load(name, label, progress) for name, label in zip(names, labels, strict=True)]


def _short_name(name: str) -> str:
    parts = [p for p in Path(name).parts if p not in ("scores.json", "report", "bundle", "runs", ".", "..", "/")]
    return parts[-1] if parts else name


def _load(name: str, label: str, progress: Progress | None) -> Scored:
    path = Path(name)
    if path.is_file():
        return read_scores(path, label)
    if (path / "scores.json").is_file():
        return read_scores(path / "scores.json", label)
    folder = find_model(name)
    known = report_folder(folder) / "scores.json"
    if not (known.is_file() and _is_current(folder, known)):
        _score(name, label, known.parent, progress)
    return read_scores(known, label)


def _is_current(folder: Path, scores: Path) -> bool:
    """Whether scores that were kept are of the newest checkpoint of a run, or of this bundle."""
    identity = (read_object(scores, MAX_BYTES) or {}).get("identity")
    if not isinstance(identity, dict):
        return False
    if is_bundle(folder):
        return bool(identity.get("bundle") == read_manifest(folder).sha256)
    newest = latest_verified(folder)
    return newest is not None and identity.get("checkpoint") == newest.name


def _score(name: str, label: str, folder: Path, progress: Progress | None) -> None:
    """Score a model and leave scores.json in `folder`."""
    from ups.run.scoring import score

    def tell(what: str, done: int, total: int) -> None:
        if progress is not None:
            progress(f"{label}: {what}", done, total)

    trained = load_trained(name)
    write_scores(folder, trained, score(trained, progress=tell), page=False)


def _only(one: Scored, tasks: Sequence[str]) -> Scored:
    if not tasks:
        return one
    return replace(one, results={name: result for name, result in one.results.items() if name in tasks})


def _changes(a: Scored, b: Scored) -> list[tuple[str, str, str]]:
    """(field, value in a, value in b) of the recipes; empty if one of them is not known."""
    if not a.config_text or not b.config_text:
        return []
    pairs = changes_between(parse(a.config_text, a.label).value, parse(b.config_text, b.label).value)
    return [(field, shown_value(old), shown_value(new)) for field, old, new in pairs]
