"""`ups.reproduce`: retrain a bundle from what it says about its training, and compare the two.

The recipe, the solver requests of its data, the number of ranks and threads come from the bundle. Paths, trackers and
mirrors of its recipe are not used: a bundle may come from anybody. Compared are every weight, bit by bit, the scores,
and all that both bundles say about their training, so that a difference has a name.
"""

from __future__ import annotations

import json
import math
import os
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ups.config.identity import changes_between, learned
from ups.config.recipe import ResolvedRecipe, plain_data, resolve_data
from ups.config.schema import Recipe, TaskConfig
from ups.errors import BundleError, ConfigError, TrainingError, errors_as
from ups.inference.bundle import Bundle, BundleInfo, load_bundle
from ups.inference.hub import local_bundle
from ups.inference.stored_scores import score_rows
from ups.library.train import Output, train_resolved
from ups.record.run_dir import RUNS
from ups.record.text import path_text, printable
from ups.run.directory import from_outside, read_run_recipe
from ups.run.scoring import SCORED_TRAJECTORIES, bundle_of_run
from ups.run.trained import check_tasks
from ups.solvers.request import Request, make_request
from ups.solvers.sweep import generate

BITWISE, WITHIN, BEYOND, UNKNOWN = "bitwise", "within seed noise", "beyond seed noise", "not bitwise"
# Standard deviations of the scores over seeds that count as noise.
MOST_DEVIATIONS = 2.0
# What decides a training, by the beginning of its label in a bundle -> how a difference is called.
_KINDS = dict.fromkeys(("data", "solver", "weights"), "data") | {"version": "version", "step": "length"}
_KINDS |= dict.fromkeys(("ranks", "threads", "processor"), "machine")
_MALFORMED = (ValueError, LookupError, TypeError, AttributeError, RecursionError)


@dataclass(frozen=True)
class Reproduction:
    """A bundle that was retrained; `bundle` is the new one. reproduced: bitwise, or within seed noise.

    differences: rows of kind (seed, setting, data, version, machine, length), name, before and now. scores: rows of
    task, score, before, now, std, deviations: how many standard deviations over seeds the bundle is from their mean;
    None where no other seed was trained.
    """

    verdict: str
    reproduced: bool
    bundle: str
    num_tensors: int
    num_differing: int
    differences: list[dict[str, str]]
    scores: list[dict[str, Any]]


def reproduce(
    bundle: str | os.PathLike[str],
    data: Mapping[str, str] | None = None,
    *,
    seeds: int = 0,
    changes: Sequence[str] = (),
    output: Output | None = None,
) -> Reproduction:
    """Retrain a bundle as runs/NAME-reproduced, and compare. Interrupted, the same call continues.

    data: task -> path; without it a solver makes the data of a task anew, in the run. seeds: train so many more with
    other seeds, which tells how far scores differ by chance. changes: as `ups train --set` takes them.
    """
    source = local_bundle(bundle)
    before, old = load_bundle(source), read_run_recipe(source).recipe
    run_dir, shown = Path(RUNS) / f"{old.run.name}-reproduced", output or Output()
    ranks = min(_number(before.info, "ranks") or 1, os.cpu_count() or 1)
    paths = _data_of(old, before.info, run_dir / "data", data or {})
    counts = [int(n) for n in re.findall(r"'protocol': '\w+, ([1-9]\d{0,8}) trajectories", str(before.info.scores))]

    def retrained(place: Path, *more: str) -> tuple[Bundle, Recipe]:
        resolved = _recipe(old, before.info, paths, place, [*changes, *more])
        code = train_resolved(resolved, place.resolve(), ranks, shown, bundle=False)
        if code:
            run = path_text(place)
            raise TrainingError(f"{run} was not trained to its end: exit code {code}", hint=f"ups why {run}")
        with shown.scoring() as progress:  # of as many trajectories as the bundle was scored on
            path, _ = bundle_of_run(str(place), None, max(counts, default=SCORED_TRAJECTORIES), progress)
        return load_bundle(path), resolved.recipe

    after, new = retrained(run_dir)
    more = range(new.run.seed + 1, new.run.seed + 1 + seeds)
    others = [retrained(run_dir.with_name(f"{run_dir.name}-seed{n}"), f"run.seed={n}")[0].info for n in more]
    a, b = before.stepper.state_dict(), after.stepper.state_dict()
    names = a.keys() | b.keys()
    num_differing = sum(name not in a or name not in b or not a[name].equal(b[name]) for name in names)
    scores = _scores(before.info, after.info, others)
    far = [row["deviations"] for row in scores if row["deviations"] is not None]
    noisy = UNKNOWN if not far else WITHIN if max(far) <= MOST_DEVIATIONS else BEYOND
    verdict, differences = noisy if num_differing else BITWISE, _differences(before.info, after.info, old, new)
    reproduced = verdict in (BITWISE, WITHIN)
    return Reproduction(verdict, reproduced, str(after.path), len(names), num_differing, differences, scores)


def _differences(before: BundleInfo, after: BundleInfo, old: Recipe, new: Recipe) -> list[dict[str, str]]:
    rows = [
        ("seed" if name == "run.seed" else "setting", name, *pair)
        for name, *pair in changes_between(learned(old), learned(new))
    ]
    was, now = ({**info.provenance, **info.made_with} for info in (before, after))
    for label in sorted(was.keys() | now.keys()):
        pair, kind = [one.get(label, "not recorded") for one in (was, now)], _KINDS.get(label.partition(" ")[0])
        rows += [(kind, label, *pair)] if kind and pair[0] != pair[1] else []
    return [
        dict(zip(("kind", "name", "before", "now"), (printable(str(text)[:200]) for text in row), strict=True))
        for row in rows
    ]


def _scores(before: BundleInfo, after: BundleInfo, others: Sequence[BundleInfo]) -> list[dict[str, Any]]:
    bundles = [
        {(row.task, row.score): row.model for task, result in info.scores.items() for row in score_rows(task, result)}
        for info in (before, after, *others)
    ]
    rows = []
    for task, score in sorted(bundles[0].keys() & bundles[1].keys()):
        was, *drawn = (values.get((task, score), math.nan) for values in bundles)
        std = statistics.stdev(drawn) if others and all(map(math.isfinite, drawn)) else None
        deviations = None
        if std is not None:
            # The bundle is one more draw, and the mean is one of few: both have noise.
            away = abs(was - statistics.fmean(drawn))
            deviations = away / (std * math.sqrt(1 + 1 / len(drawn))) if std else math.inf if away else 0.0
        row = {"task": task, "score": score, "before": was, "now": drawn[0]}
        rows.append(row | {"std": std, "deviations": deviations})
    return rows


def _number(info: BundleInfo, label: str) -> int:
    """Of ranks or threads; 0 where it is not recorded."""
    text = info.made_with.get(label, "")
    return int(text) if text.isascii() and text.isdigit() and len(text) < 5 else 0


def _recipe(
    old: Recipe, info: BundleInfo, paths: Mapping[str, str], run_dir: Path, changes: Sequence[str]
) -> ResolvedRecipe:
    """The recipe of the bundle, with nothing of the place where it was trained."""
    document: Any = plain_data(old)
    for task in document["data"]["tasks"]:
        task |= {"path": paths[task["name"]], "source": None}
    for stage in document["stages"]:
        stage |= {"cache": None} if "cache" in stage else {}
    document["data"] |= {"cache_dir": None, "cache_bytes": None}
    document["run"] |= {"name": run_dir.name, "dir": None}
    document["checkpoint"]["mirror"], document["tracking"]["trackers"], document["gate"] = None, [], []
    document["engine"]["threads"] = _number(info, "threads") or document["engine"]["threads"]
    resolved = resolve_data(document, list(changes), name="the recipe of the bundle")
    for index in from_outside(old):
        if resolved.recipe.stages[index].start_from == old.stages[index].start_from:
            hint = f"name a copy of them: --set stages.{index}.start_from=PATH"
            raise ConfigError(f"stage {index} of the bundle began with weights that it does not hold", hint=hint)
    return resolved


def _data_of(recipe: Recipe, info: BundleInfo, folder: Path, named: Mapping[str, str]) -> dict[str, str]:
    """Task -> path: what is named, else what a solver makes from the request that the bundle keeps."""
    check_tasks([task.name for task in recipe.data.tasks], named, "the bundle")
    requests = {task.name: _request(task, info) for task in recipe.data.tasks if task.name not in named}
    if unmade := [name for name, request in requests.items() if request is None]:
        hint = f"name a copy of them: --data {unmade[0]}=PATH"
        raise ConfigError(f"the bundle does not say how the data of '{unmade[0]}' are made", hint=hint)
    made = generate([one for one in requests.values() if one], folder.resolve(), num_processes=os.cpu_count() or 1)
    places = {one.request.task: str(one.path) for one in made}
    return {**named, **{name: places[one.task] for name, one in requests.items() if one}}


def _request(task: TaskConfig, info: BundleInfo) -> Request | None:
    """What the store of a task was asked for; bundles of earlier versions have it in the recipe alone, if at all."""
    start, source = f"solver {task.name}: ", task.source
    with errors_as(BundleError, f"the {start}request is malformed", *_MALFORMED):
        stored = {name.removeprefix(start): text for name, text in info.made_with.items() if name.startswith(start)}
        asked = {name: json.loads(text) for name, text in stored.items()}
        if not asked and source is not None and source.type == "generate":
            asked = source.model_dump(include={"trajectories", "resolution", "seed"})
            asked |= {"task": source.task or task.name, "num_frames": source.frames, "fixed": source.parameters}
        return make_request(**{**asked, "trajectories": tuple(asked["trajectories"])}) if asked else None
