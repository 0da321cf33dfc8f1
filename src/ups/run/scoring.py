"""Scores of a trained model on its held-out data, next to the references: shared by eval, train and bench."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ups.evaluation.accumulate import Accumulator
    from ups.evaluation.gallery import Example
    from ups.evaluation.rollout import RolloutPlan
    from ups.formats.base import Reader
    from ups.models.rollout import Predictor
    from ups.run.trained import Trained
    from ups.spec.statistics import Statistics

MODEL = "model"
NUM_WORST = 5
# Of an ensemble. With so many, what is left of chance in a score of 64 trajectories is far below its differences.
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
    solver_cost: bool = False,
    progress: Progress | None = None,
) -> list[dict[str, Any]]:
    """A result (see `ups.evaluation.results`) for each task with such a split: whole rollouts from the start frame.

    Scores of a model that is an ensemble are those of its central member; its members are scored together next to it.
    solver_cost: also measure what the same error costs the solver that made the data (takes minutes).
    """
    from ups.data.validate import trajectories_in_train
    from ups.evaluation.references import references
    from ups.evaluation.results import task_result
    from ups.evaluation.rollout import RolloutPlan
    from ups.models.ensemble import has_members

    results = []
    for reader in trained.readers:
        if (tasks and reader.task.name not in tasks) or not reader.splits.get(split, 0):
            continue
        plan = RolloutPlan.whole(reader, trained.stepper.context_frames, start_frame, split)
        predictors: dict[str, Predictor] = {MODEL: trained.stepper, **references(reader, plan)}
        statistics = trained.stepper.statistics[reader.task.name]
        scores, steps = _rollouts_and_steps(predictors, reader, plan, split, max_trajectories, progress, statistics)
        shared = trajectories_in_train(reader, split)
        result = task_result(reader, plan, split, scores, MODEL, steps, shared)
        if has_members(trained.stepper, reader.task):
            result["ensemble"] = _ensemble(trained, reader, plan, split, max_trajectories, progress)
        if solver_cost:
            result["solver_cost"] = _solver_cost(trained, reader, plan, result, progress)
        results.append(result)
    return results


def _rollouts_and_steps(
    predictors: dict[str, Predictor],
    reader: Reader,
    plan: RolloutPlan,
    split: str,
    max_trajectories: int | None = None,
    progress: Progress | None = None,
    statistics: Statistics | None = None,
) -> tuple[dict[str, Accumulator], dict[str, Accumulator]]:
    """Scores of whole rollouts, and of the same frames each predicted from the true ones before it."""
    from ups.evaluation.rollout import score_task
    from ups.run.trained import single_process_runtime

    total = 2 * min(reader.splits[split], max_trajectories or reader.splits[split])
    done = 0

    def add(count: int) -> None:
        nonlocal done
        done += count
        if progress is not None:
            progress(f"scoring {reader.task.name}", done, total)

    add(0)
    common: dict[str, Any] = {"split": split, "max_trajectories": max_trajectories, "progress": add}
    with single_process_runtime() as runtime:
        rollouts = score_task(predictors, reader, runtime.place, plan, statistics=statistics, **common)
        steps = score_task(predictors, reader, runtime.place, plan, kind="one_step", **common)
    return rollouts, steps


def _ensemble(
    trained: Trained,
    reader: Reader,
    plan: RolloutPlan,
    split: str,
    max_trajectories: int | None,
    progress: Progress | None,
) -> dict[str, Any]:
    """Scores of whole rollouts of `NUM_MEMBERS` members, as `ups.evaluation.ensemble` gives them."""
    from ups.evaluation.ensemble import score_ensemble
    from ups.models.ensemble import members_of
    from ups.run.trained import single_process_runtime

    total, done = min(reader.splits[split], max_trajectories or reader.splits[split]), 0

    def add(count: int) -> None:
        nonlocal done
        done += count
        if progress is not None:
            progress(f"scoring {NUM_MEMBERS} members on {reader.task.name}", done, total)

    with single_process_runtime() as runtime:
        found = score_ensemble(
            members_of(trained.stepper, reader.task, NUM_MEMBERS),
            reader,
            runtime.place,
            plan,
            split=split,
            max_trajectories=max_trajectories,
            progress=add,
        )
    return found.result()


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


def _solver_cost(
    trained: Trained,
    reader: Reader,
    plan: RolloutPlan,
    result: Mapping[str, Any],
    progress: Progress | None,
) -> dict[str, Any]:
    from ups.evaluation.solver_cost import solver_cost

    error = float(result["predictors"][MODEL]["summary"]["trmse"])
    count = int(result["protocol"]["num_trajectories"])
    return solver_cost(
        reader, plan, trained.stepper, error, split=result["split"], max_trajectories=count, progress=progress
    )


def add_cost(trained: Trained, results: Sequence[dict[str, Any]]) -> None:
    """Measure what a rollout step of the model costs, and put it into the result of each task under `cost`.

    Not a part of `score`: a measured time is another one each time, and would make equal bundles differ.
    """
    from ups.evaluation.model_cost import BATCH_SIZE, model_milliseconds
    from ups.evaluation.rollout import RolloutPlan

    by_name = {reader.task.name: reader for reader in trained.readers}
    for result in results:
        reader, protocol, split = by_name[result["task"]], result["protocol"], result["split"]
        plan = RolloutPlan(protocol["context_frames"], protocol["start_frame"], protocol["num_steps"])
        some: Sequence[int] = range(min(BATCH_SIZE, protocol["num_trajectories"]))
        if reader.differing:  # only the longest is sure to have all steps
            some = [max(range(reader.splits[split]), key=lambda n, r=reader, s=split: r.frames_in(s, n))]  # type: ignore[misc]
        milliseconds = model_milliseconds(trained.stepper, reader, plan, split, some)
        result["cost"] = {"step_milliseconds": milliseconds, "num_trajectories": len(some)}


def score_references(reader: Reader, context_frames: int = 1, split: str = "test") -> dict[str, Any]:
    """The result of the untrained predictors alone on one task."""
    from ups.evaluation.references import references
    from ups.evaluation.results import task_result
    from ups.evaluation.rollout import RolloutPlan

    plan = RolloutPlan.whole(reader, context_frames, split=split)
    scores, steps = _rollouts_and_steps(references(reader, plan), reader, plan, split)
    return task_result(reader, plan, split, scores, reference_of({"steady": reader.task.steady}), steps)


def worst_examples(trained: Trained, results: Sequence[Mapping[str, Any]]) -> dict[str, list[Example]]:
    """Truth and prediction of the model's worst trajectories of each task, worst first."""
    from ups.evaluation.gallery import examples
    from ups.evaluation.rollout import RolloutPlan
    from ups.spec.divergence import DivergenceLimits

    found = {}
    by_name = {reader.task.name: reader for reader in trained.readers}
    for result in results:
        protocol = result["protocol"]
        plan = RolloutPlan(protocol["context_frames"], protocol["start_frame"], protocol["num_steps"])
        worst = result["predictors"][MODEL]["worst"][:NUM_WORST]
        reader = by_name[result["task"]]
        limits = DivergenceLimits.of(reader.task, trained.stepper.statistics[result["task"]])
        found[result["task"]] = examples(trained.stepper, reader, plan, worst, result["split"], limits)
    return found


def reference_of(result: Mapping[str, Any]) -> str:
    """The reference that a model must beat: the training mean for a steady task, else persistence."""
    return "training mean" if result["steady"] else "persistence"


def ratio_words(ratio: float) -> str:
    """'31.2x'; a dash where there is none."""
    import math

    return "-" if math.isnan(ratio) else f"{ratio:.3g}x" if ratio < 1 else f"{ratio:.1f}x"


def blow_up_words(result: Mapping[str, Any]) -> str:
    """How many rollouts of the model blew up or diverged, next to those of the references; '' if none did."""
    total, lines = int(result["predictors"][MODEL]["summary"]["num_samples"]), []
    for key, verb in (("num_blown_up", "blew up"), ("num_diverged", "diverged beyond all training data")):
        counts = {name: int(p["summary"].get(key, 0)) for name, p in result["predictors"].items()}
        if counts[MODEL]:
            others = ", ".join(f"{name} {count}" for name, count in counts.items() if name != MODEL)
            lines.append(f"{counts[MODEL]} of {total} trajectories of '{result['task']}' {verb} ({others})")
    return "; ".join(lines)
