"""Makes a bundle of a run: weights of the newest verified checkpoint, scores with their protocol, a card."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ups.run.scoring import MODEL, Progress, ensemble_words

# Enough for a card; `ups eval` scores the whole split.
SCORED_TRAJECTORIES = 64

if TYPE_CHECKING:
    from ups.run.trained import Trained


def bundle_of_run(
    run: str,
    out: Path | None = None,
    max_trajectories: int = SCORED_TRAJECTORIES,
    progress: Progress | None = None,
) -> tuple[Path, list[dict[str, Any]]]:
    """Score a run on its test split and write its bundle, by default into the run; returns its place and the scores."""
    from ups.record.run_dir import RunDir, find_model
    from ups.run.scoring import score
    from ups.run.trained import load_trained

    trained = load_trained(run)
    results = score(trained, max_trajectories=max_trajectories, progress=progress)
    return make_bundle(out or RunDir(find_model(run)).bundle, trained, results), results


def make_bundle(directory: Path, trained: Trained, results: Sequence[Mapping[str, Any]]) -> Path:
    """Write the bundle of a trained model; `results` (see `ups.run.scoring`) go into its card."""
    from ups.evaluation.results import to_json
    from ups.inference.bundle import BundleInfo, write_bundle
    from ups.inference.card import write_card

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
    )
    card = write_card(trained.name, info)
    return write_bundle(directory, stepper, info, config_text=trained.config_text, card=card)


def _summary(result: Mapping[str, Any]) -> dict[str, Any]:
    """What a card keeps of a result: protocol, headline, and the summaries of the model and of its references."""
    from ups.evaluation.headline import headlines

    plan = result["protocol"]
    words = f"{result['split']}, {plan['num_trajectories']} trajectories"
    if not result["steady"]:
        words += f", {plan['num_steps']} steps from frame {plan['start_frame']}"
    members = {"ensemble": ensemble_words(result["ensemble"])} if "ensemble" in result else {}
    return members | {
        "protocol": words,
        "num_steps": plan["num_steps"],
        "headline": [line.to_json() for line in headlines(result, MODEL)],
        "predictors": {name: predictor["summary"] for name, predictor in result["predictors"].items()},
    }
