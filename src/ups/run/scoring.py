"""Scores of a trained model on its held-out data, next to the references; their table, report and bundle.

`ups eval`, `ups train`, `ups run` and the library all score here. Scores of several models: `ups.library.scores`.
"""

from __future__ import annotations

import json
import math
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from ups.data.validate import trajectories_in_train
from ups.evaluation.accumulate import Accumulator
from ups.evaluation.cost import BATCH_SIZE, model_milliseconds
from ups.evaluation.cost import break_even as break_even_of
from ups.evaluation.ensemble import score_ensemble
from ups.evaluation.figures import Example, examples
from ups.evaluation.report import write_report
from ups.evaluation.results import from_json, headlines, leak_words, task_result, to_json
from ups.evaluation.rollout import RolloutPlan, references, score_task
from ups.formats.base import Reader
from ups.inference.bundle import BundleInfo, write_bundle, write_card
from ups.inference.calibration import Stated
from ups.inference.stored_scores import MODEL
from ups.models.ensemble import has_members, members_of
from ups.models.stepper import Predictor
from ups.record.files import write_file_atomically
from ups.record.run_dir import SCORES_NAME, RunDir, find_model, is_bundle, is_shipped
from ups.run.gate import read_results
from ups.run.progress_line import plain, table
from ups.run.trained import Trained, load_trained, single_process_runtime
from ups.spec.descriptors import DivergenceLimits
from ups.spec.statistics import Statistics

NUM_WORST = 5
# Members of an ensemble: with 8, the sampling error of a score over 64 trajectories is far below its differences.
NUM_MEMBERS = 8
# what is done, how much of it, of how much
Progress = Callable[[str, int, int], None]


def score(
    trained: Trained,
    *,
    split: str = "test",
    start_frame: int | None = None,
    max_trajectories: int | None = None,
    tasks: Sequence[str] = (),
    break_even: bool = False,
    solve_seconds: float | None = None,
    training_seconds: float | None = None,
    progress: Progress | None = None,
) -> list[dict[str, Any]]:
    """A result (see `ups.evaluation.results`) for each task with such a split: whole rollouts from the start frame.

    Scores of a model that is an ensemble are those of its central member; its members are scored together next to it.
    break_even: also measure after how many solves the model has paid (takes minutes; see `ups.evaluation.cost`);
    solve_seconds: what a solve costs the user; training_seconds: of all tasks, default what the run took.
    """
    results = []
    for reader in trained.readers:
        if (tasks and reader.task.name not in tasks) or not reader.splits.get(split, 0):
            continue
        plan = RolloutPlan.whole(reader, trained.stepper.context_frames, start_frame, split)
        predictors: dict[str, Predictor] = {MODEL: trained.stepper, **references(reader, plan)}
        statistics = trained.stepper.statistics[reader.task.name]
        scores, steps = rollouts_and_steps(predictors, reader, plan, split, max_trajectories, progress, statistics)
        shared = trajectories_in_train(reader, split)
        result = task_result(reader, plan, split, scores, MODEL, steps, shared)
        if has_members(trained.stepper, reader.task):
            result["ensemble"] = _ensemble(trained, reader, plan, split, max_trajectories, progress)
        if break_even:
            seconds = training_seconds if training_seconds is not None else trained.training_seconds
            result["break_even"] = break_even_of(
                reader,
                plan,
                trained.stepper,
                split=split,
                training_seconds=None if seconds is None else seconds / len(trained.stepper.tasks),
                solve_seconds=solve_seconds,
                progress=progress,
            )
        results.append(result)
    return results


def rollouts_and_steps(
    predictors: dict[str, Predictor],
    reader: Reader,
    plan: RolloutPlan,
    split: str,
    max_trajectories: int | None = None,
    progress: Progress | None = None,
    statistics: Statistics | None = None,
) -> tuple[dict[str, Accumulator], dict[str, Accumulator]]:
    """Scores of whole rollouts, and of the same frames each predicted from the true ones before it."""
    total = 2 * min(reader.splits[split], max_trajectories or reader.splits[split])
    add = _counter(progress, f"scoring {reader.task.name}", total)
    common: dict[str, Any] = {"split": split, "max_trajectories": max_trajectories, "progress": add}
    with single_process_runtime() as runtime:
        rollouts = score_task(predictors, reader, runtime.place, plan, statistics=statistics, **common)
        steps = score_task(predictors, reader, runtime.place, plan, kind="one_step", **common)
    return rollouts, steps


def _counter(progress: Progress | None, what: str, total: int) -> Callable[[int], None]:
    """Adds up what is done for a display of progress, from 0 on."""
    done = 0

    def add(count: int) -> None:
        nonlocal done
        done += count
        if progress is not None:
            progress(what, done, total)

    add(0)
    return add


def _ensemble(
    trained: Trained,
    reader: Reader,
    plan: RolloutPlan,
    split: str,
    max_trajectories: int | None,
    progress: Progress | None,
) -> dict[str, Any]:
    """Scores of whole rollouts of `NUM_MEMBERS` members, as `ups.evaluation.ensemble` gives them."""
    total = min(reader.splits[split], max_trajectories or reader.splits[split])
    with single_process_runtime() as runtime:
        scores = score_ensemble(
            members_of(trained.stepper, reader.task, NUM_MEMBERS),
            reader,
            runtime.place,
            plan,
            split=split,
            max_trajectories=max_trajectories,
            progress=_counter(progress, f"scoring {NUM_MEMBERS} members on {reader.task.name}", total),
        )
    return scores.result()


def ensemble_words(ensemble: Mapping[str, Any]) -> str:
    """The scores of an ensemble in a line."""
    summary = ensemble["summary"]
    return (
        f"{ensemble['members']} members: CRPS {_number(summary['crps'])}, absolute error of the central one "
        f"{_number(summary['absolute_error'])}, with Gaussian noise of equal spread {_number(summary['gaussian'])}; "
        f"rollout error of their mean {_number(summary['mean_rmse'])}; spread / skill "
        f"{_number(summary['spread_skill'])}, {_number(summary['spread_skill_second_half'])} in the second half"
    )


def _number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, int | float) else str(value)[:20]


def add_cost(trained: Trained, results: Sequence[dict[str, Any]]) -> None:
    """Measure what a rollout step of the model costs, and put it into the result of each task under `cost`.

    Not a part of `score`: a measured time is another one each time, and would make equal bundles differ.
    """
    by_name = {reader.task.name: reader for reader in trained.readers}
    for result in results:
        reader, plan, split = by_name[result["task"]], _plan_of(result), result["split"]
        some: Sequence[int] = range(min(BATCH_SIZE, result["protocol"]["num_trajectories"]))
        if reader.differing:  # only the longest is sure to have all steps
            some = [max(range(reader.splits[split]), key=lambda n, r=reader, s=split: r.frames_in(s, n))]  # type: ignore[misc]
        milliseconds = model_milliseconds(trained.stepper, reader, plan, split, some)
        result["cost"] = {"step_milliseconds": milliseconds, "num_trajectories": len(some)}


def _plan_of(result: Mapping[str, Any]) -> RolloutPlan:
    protocol = result["protocol"]
    return RolloutPlan(protocol["context_frames"], protocol["start_frame"], protocol["num_steps"])


def worst_examples(trained: Trained, results: Sequence[Mapping[str, Any]]) -> dict[str, list[Example]]:
    """Truth and prediction of the model's worst trajectories of each task, worst first."""
    by_task = {}
    by_name = {reader.task.name: reader for reader in trained.readers}
    for result in results:
        reader, plan = by_name[result["task"]], _plan_of(result)
        worst = result["predictors"][MODEL]["worst"][:NUM_WORST]
        limits = DivergenceLimits.of(reader.task, trained.stepper.statistics[result["task"]])
        by_task[result["task"]] = examples(trained.stepper, reader, plan, worst, result["split"], limits)
    return by_task


def blow_up_words(result: Mapping[str, Any]) -> str:
    """How many rollouts of the model blew up or diverged, next to those of the references; '' if none did."""
    total, lines = int(result["predictors"][MODEL]["summary"]["num_samples"]), []
    for key, verb in (("num_blown_up", "blew up"), ("num_diverged", "diverged beyond all training data")):
        counts = {name: int(p["summary"].get(key, 0)) for name, p in result["predictors"].items()}
        if counts[MODEL]:
            others = ", ".join(f"{name} {count}" for name, count in counts.items() if name != MODEL)
            lines.append(f"{counts[MODEL]} of {total} trajectories of '{result['task']}' {verb} ({others})")
    return "; ".join(lines)


def score_lines(results: Sequence[Mapping[str, Any]], styled: Callable[..., str] = plain) -> str:
    """A table for people: each score of the model next to the best reference, with a word where it is not better.

    styled(text, *styles) makes a text bold, dim or yellow where that can be shown.
    """
    if not results:
        return "nothing was scored: no task has a test split"
    rows = [("task", "score", "model", "reference", "", "ratio", "")]
    for result in results:
        for number, line in enumerate(headlines(result)):
            name = "" if number else result["task"]
            steps = f" ({result['protocol']['num_steps']} steps)" if line.score == "rollout" else ""
            ratio = "-" if math.isnan(line.ratio) else f"{line.ratio:.3g}x" if line.ratio < 1 else f"{line.ratio:.1f}x"
            ours, theirs = f"{line.model:.4g}", f"{line.reference:.4g}"
            rows.append((name, line.score + steps, ours, theirs, line.reference_name, ratio, line.verdict))
    title = f"Errors on the {results[0]['split']} split, in physical units; given frames are not scored"
    note = (
        "one step, rollout, solution: RMSE relative to the RMS of the trajectory; nRMSE: of the frame; VRMSE: to its "
        "deviation\n  reference: the best baseline; ratio: reference / model"
    )
    lines = [styled(title, "bold"), table(rows), f"  {styled(note, 'dim')}"]
    lines += [styled(f"warning: {blow_up_words(r)}", "yellow") for r in results if blow_up_words(r)]
    lines += [styled(f"warning: {leak_words(result)}", "yellow") for result in results if result.get("in_train")]
    lines += [f"{r['task']}: {ensemble_words(r['ensemble'])}" for r in results if "ensemble" in r]
    costs = [(r["task"], r["break_even"]) for r in results if "break_even" in r]
    lines += [f"{task}: {cost.get('sentence') or cost['reason']}" for task, cost in costs]
    return "\n".join(lines)


LEAST_DRAWING_SECONDS = 20.0


def report_folder(model: Path) -> Path:
    """Where the report of a run or bundle goes: RUN/report, or next to a bundle, in which any new file is damage.

    That of a shipped model goes into the current directory.
    """
    if not is_bundle(model):
        return RunDir(model).report
    if is_shipped(model):
        return Path(f"{model.parent.name}-report")
    named = model.resolve() if model.name in ("", "..") else model
    return named.with_name(f"{named.name}-report")


def write_scores(
    folder: Path, trained: Trained, results: Sequence[Mapping[str, Any]], *, page: bool, scoring_seconds: float = 0.0
) -> list[Path]:
    """Write scores.json, and with `page` index.html, into `folder`; returns what was written."""
    folder.mkdir(parents=True, exist_ok=True)
    data = {"model": trained.name, "identity": trained.identity, "config": trained.config_text}
    data["results"] = to_json(
        [{**result, "headline": [line.to_json() for line in headlines(result)]} for result in results]
    )
    scores = folder / SCORES_NAME
    write_file_atomically(scores, json.dumps(data, indent=1, allow_nan=False).encode())
    return [scores, write_page(folder, trained, results, scoring_seconds)] if page else [scores]


def stored_results(scores: Path) -> list[dict[str, Any]]:
    """The results in a scores.json, as `score` gave them."""
    return cast(list[dict[str, Any]], from_json(read_results(scores)))


def write_page(
    folder: Path, trained: Trained, results: Sequence[Mapping[str, Any]], scoring_seconds: float = 0.0
) -> Path:
    """Write index.html into `folder`; returns it. Drawing takes no longer than scoring did, or LEAST_DRAWING_SECONDS.

    Pictures are for eyes, and on a machine without free cores they would take longer than the training.
    """
    # JAX, if a solver was measured, warns of every fork; the one that makes films replaces itself at once.
    warnings.filterwarnings("ignore", message=r"os\.fork\(\) was called", category=RuntimeWarning)
    ends = time.monotonic() + max(scoring_seconds, LEAST_DRAWING_SECONDS)
    examples = worst_examples(trained, results)
    text = write_report(
        results,
        examples,
        title=f"{trained.name}: scores",
        identity=trained.identity,
        config_text=trained.config_text,
        seconds=ends - time.monotonic(),
    )
    write_file_atomically(folder / "index.html", text.encode())
    return folder / "index.html"


# Enough for a card; `ups eval` scores the whole split.
SCORED_TRAJECTORIES = 64


def bundle_of_run(
    run: str,
    out: Path | None = None,
    max_trajectories: int = SCORED_TRAJECTORIES,
    progress: Progress | None = None,
    *,
    break_even: bool = False,
) -> tuple[Path, list[dict[str, Any]]]:
    """Score a run on its test split and write its bundle, by default into the run; returns its place and the scores."""
    trained = load_trained(run)
    results = score(trained, max_trajectories=max_trajectories, break_even=break_even, progress=progress)
    return make_bundle(out or RunDir(find_model(run)).bundle, trained, results), results


def make_bundle(
    directory: Path, trained: Trained, results: Sequence[Mapping[str, Any]], stated: Stated | None = None
) -> Path:
    """Write the bundle of a trained model; `results` (see `ups.run.scoring`) and what is stated go into its card."""
    stepper = trained.stepper
    info = BundleInfo(
        networks=stepper.configs,
        context_frames=stepper.context_frames,
        tasks=stepper.tasks,
        statistics=stepper.statistics,
        coordinates={reader.task.name: reader.coordinates for reader in trained.readers},
        scores=to_json({result["task"]: _summary(result) for result in results}),
        provenance=trained.identity,
        assumptions={reader.task.name: reader.assumptions for reader in trained.readers if reader.assumptions},
        stages=tuple(trained.stages),
        made_with=trained.made_with,
    )
    card = write_card(trained.name, info, stated)
    return write_bundle(directory, stepper, info, config_text=trained.config_text, card=card, stated=stated)


def _summary(result: Mapping[str, Any]) -> dict[str, Any]:
    """What a card keeps of a result: protocol, headline, and the summaries of the model and of its references."""
    plan = result["protocol"]
    words = f"{result['split']}, {plan['num_trajectories']} trajectories"
    if not result["steady"]:
        words += f", {plan['num_steps']} steps from frame {plan['start_frame']}"
    members = {"ensemble": ensemble_words(result["ensemble"])} if "ensemble" in result else {}
    pays = {"break_even": result["break_even"].get("sentence", "")} if "break_even" in result else {}
    return (
        members
        | pays
        | {
            "protocol": words,
            "num_steps": plan["num_steps"],
            "headline": [line.to_json() for line in headlines(result)],
            "predictors": {name: predictor["summary"] for name, predictor in result["predictors"].items()},
        }
    )
