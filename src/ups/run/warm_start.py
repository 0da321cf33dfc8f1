"""`start_from` of a stage: weights of another run, bundle or checkpoint, or of an earlier stage of the same run.

What comes from outside is copied into the run (`start/<stage>`, a bundle) before any rank starts: the source may change
or vanish afterwards. Weights only: no optimizer state, no position. Which stages start from where, and the check of the
copy: `ups.run.directory`.
"""

from __future__ import annotations

import contextlib
import json
import logging
from pathlib import Path

import torch

from ups.config.schema import Recipe
from ups.data.normalize import compute_statistics
from ups.errors import ConfigError
from ups.evaluation.rollout import RolloutPlan, one_steps, read_inputs
from ups.formats.base import Reader
from ups.inference.bundle import load_bundle, write_bundle, write_card
from ups.models.build import build_model
from ups.models.stepper import Stepper, persistence
from ups.models.transfer import transfer
from ups.record.files import write_file_atomically
from ups.record.manifest import MANIFEST_NAME
from ups.record.run_dir import CONFIG_NAME, RunDir, find_model, is_bundle
from ups.run.directory import from_outside, read_run_recipe
from ups.run.scoring import make_bundle
from ups.run.trained import Trained, load_trained

logger = logging.getLogger(__name__)

_STEPS = 8  # of each trajectory, by which a start is judged


def keep_starts(run_dir: Path, recipe: Recipe) -> None:
    """Copy into the run what its stages start from, unless it is there already."""
    for index in from_outside(recipe):
        path = RunDir(run_dir).start(index)
        if is_bundle(path):
            continue
        path.parent.mkdir(exist_ok=True)
        source = _find(recipe.stages[index].start_from or "")
        if not is_bundle(source):
            make_bundle(path, _trained(source), [])
            continue
        bundle = load_bundle(source)
        text = (source / CONFIG_NAME).read_text(encoding="utf-8")
        write_bundle(path, bundle.stepper, bundle.info, config_text=text, card=write_card(source.name, bundle.info))


@torch.no_grad()
def explained(source: Stepper, reader: Reader) -> dict[str, float]:
    """Task of the source -> squared correlation of a change in the data (steady: of the difference from the mean) with
    the untrained step of a model that begins as that task. Training corrects a wrong size of the step first."""
    task, context, part = reader.task, source.context_frames, range(min(16, reader.splits["train"]))
    statistics = {task.name: compute_statistics(reader, max_bytes=1)}
    stepper = build_model(source.configs[source.network_of(task)], [task], statistics, context)
    frames = min(reader.frames_in("train", number) for number in part)
    steps = max(1, min(_STEPS, frames - context))
    plan = RolloutPlan(context, (frames + context - steps) // 2 - 1, steps)
    batch, truth = read_inputs(reader, "train", part, plan, torch.device("cpu"), torch.float32)
    if not task.steady:
        batch = batch.with_state(torch.cat([batch.state, truth], dim=1))
    still = truth.mean(0) if task.steady else one_steps(persistence, batch, context)
    shares = {}
    for known in source.tasks:
        with contextlib.suppress(ConfigError):  # that task has other axes or fields
            transfer(source, stepper, known.name)
            step = one_steps(stepper, batch, context)
            own, true = ((one - still).transpose(0, 2).flatten(1) for one in (step, truth))
            shares[known.name] = float(torch.cosine_similarity(own, true).clamp_min(0).square().mean())
    return shares


def _find(name: str) -> Path:
    """A bundle, a run (its bundle if it has one), or a checkpoint directory of a run."""
    if (Path(name) / MANIFEST_NAME).is_file() and not (Path(name) / CONFIG_NAME).is_file():
        return Path(name)
    try:
        model = find_model(name)
    except ConfigError as error:
        raise ConfigError(
            f"start_from '{name}' is no earlier stage, run, bundle or checkpoint",
            hint="give the type of an earlier stage, a run such as runs/NAME, a bundle, or runs/NAME/checkpoints/STEP",
        ) from error
    return RunDir(model).bundle if is_bundle(RunDir(model).bundle) else model


def _trained(source: Path) -> Trained:
    is_run = (source / CONFIG_NAME).is_file()
    return load_trained(str(source)) if is_run else load_trained(str(source.parent.parent), checkpoint=source)


def stepper_at(name: str) -> Stepper:
    """The model that a stage with this `start_from` starts from, from where the name leads now."""
    source = _find(name)
    return load_bundle(source).stepper if is_bundle(source) else _trained(source).stepper


def source_of(run_dir: Path, index: int) -> Stepper:
    """The model that stage `index` starts from, from the run's own copy, whose bytes are verified."""
    return load_bundle(RunDir(run_dir).start(index)).stepper


def take_weights(run_dir: Path, index: int, target: Stepper, *, say: bool) -> None:
    """Write into a new model what the source has for it; with `say` also list it in the run."""
    transferred = transfer(source_of(run_dir, index), target, read_run_recipe(run_dir).recipe.stages[index].start_task)
    if not say:
        return
    logger.info("stage %d starts from %s: %s", index, RunDir(run_dir).start(index), transferred.describe())
    rows = {name: {"taken": pair[0], "new": pair[1]} for name, pair in transferred.rows.items()}
    names = ("new", "converted", "other_scaling", "other_kernels", "like", "made_smaller")
    document = {"weights": transferred.num_weights, "taken": transferred.num_taken, "rows": rows}
    document |= {name: getattr(transferred, name) for name in names}
    text = json.dumps(document, indent=1) + "\n"
    write_file_atomically(RunDir(run_dir).start(index).with_suffix(".json"), text.encode())
