"""`start_from` of a stage: weights of another run, bundle or checkpoint, or of an earlier stage of the same run.

What comes from outside is copied into the run (`start/<stage>`, a bundle) before any rank starts, and its hash is part
of the run's identity: the source may change or vanish afterwards, and a copy that was replaced is noticed. Weights
only: no optimizer state, no position.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from ups.config.schema import Recipe
from ups.errors import ConfigError, DataChangedError
from ups.record.checkpoints import list_checkpoints, read_progress
from ups.record.identity import file_sha256
from ups.record.manifest import MANIFEST_NAME, is_committed, write_file_atomically
from ups.record.places import BUNDLE_NAME, CONFIG_NAME, find_model, is_bundle

if TYPE_CHECKING:
    from ups.models.stepper import Stepper
    from ups.run.trained import Trained

logger = logging.getLogger(__name__)

FOLDER = "start"


def earlier_stage(recipe: Recipe, index: int) -> int | None:
    """The stage whose weights stage `index` starts from by name: the last one of that type before it; None if none."""
    wanted = recipe.stages[index].start_from
    found = [number for number in range(index) if recipe.stages[number].type == wanted]
    return found[-1] if found else None


def named_stages(recipe: Recipe) -> set[int]:
    """Stages whose last checkpoint is needed later."""
    found = {earlier_stage(recipe, index) for index in range(len(recipe.stages))}
    return {number for number in found if number is not None}


def from_outside(recipe: Recipe) -> list[int]:
    """Stages that start from another run, bundle or checkpoint."""
    stages = range(len(recipe.stages))
    return [n for n in stages if recipe.stages[n].start_from and earlier_stage(recipe, n) is None]


def start_path(run_dir: Path, index: int) -> Path:
    """Where a run keeps the weights that stage `index` starts from."""
    return run_dir / FOLDER / str(index)


def keep_starts(run_dir: Path, recipe: Recipe) -> None:
    """Copy into the run what its stages start from, unless it is there already."""
    for index in from_outside(recipe):
        path = start_path(run_dir, index)
        if not is_bundle(path):
            path.parent.mkdir(exist_ok=True)
            _write_bundle(path, recipe.stages[index].start_from or "")


def _write_bundle(path: Path, name: str) -> None:
    from ups.inference.bundle import load_bundle, write_bundle
    from ups.inference.card import write_card
    from ups.run.bundling import make_bundle

    source = _find(name)
    if is_bundle(source):
        bundle = load_bundle(source)
        text = (source / CONFIG_NAME).read_text(encoding="utf-8")
        write_bundle(path, bundle.stepper, bundle.info, config_text=text, card=write_card(source.name, bundle.info))
    else:
        make_bundle(path, _trained(source), [])


def _find(name: str) -> Path:
    """A bundle, a run (its bundle if it has one), or a checkpoint directory of a run."""
    if (Path(name) / MANIFEST_NAME).is_file() and not (Path(name) / CONFIG_NAME).is_file():
        return Path(name)
    try:
        found = find_model(name)
    except ConfigError as error:
        raise ConfigError(
            f"start_from '{name}' is no earlier stage, run, bundle or checkpoint",
            hint="give the type of an earlier stage, a run such as runs/NAME, a bundle, or runs/NAME/checkpoints/STEP",
        ) from error
    return found / BUNDLE_NAME if is_bundle(found / BUNDLE_NAME) else found


def _trained(source: Path) -> Trained:
    from ups.run.trained import load_trained

    if (source / CONFIG_NAME).is_file():
        return load_trained(str(source))
    return load_trained(str(source.parent.parent), checkpoint=source)


def start_hash(run_dir: Path, index: int) -> str:
    """Hash of the copy that stage `index` starts from."""
    return file_sha256(start_path(run_dir, index) / MANIFEST_NAME)


def check_starts(run_dir: Path, recipe: Recipe, known: Mapping[str, str]) -> dict[str, str]:
    """Name -> hash of what the stages start from. Raises DataChangedError if one is not what the run began with."""
    found = {}
    for index in from_outside(recipe):
        name = f"stages.{index}.start_from"
        found[name] = start_hash(run_dir, index)
        if known.get(name, found[name]) != found[name]:
            raise DataChangedError(
                f"{start_path(run_dir, index)} is not what the run was started with",
                hint="bring the old directory back, or start a new run: --set run.dir=PATH",
            )
    return found


def source_of(run_dir: Path, index: int) -> Stepper:
    """The model that stage `index` starts from, from the run's own copy, whose bytes are verified."""
    from ups.inference.bundle import load_bundle

    return load_bundle(start_path(run_dir, index)).stepper


def take_weights(run_dir: Path, index: int, target: Stepper, *, say: bool) -> None:
    """Write into a new model what the source has for it; with `say` also list it in the run."""
    from ups.models.transfer import transfer

    taken = transfer(source_of(run_dir, index), target)
    if not say:
        return
    logger.info("stage %d starts from %s: %s", index, start_path(run_dir, index), taken.describe())
    rows = {name: {"taken": list(pair[0]), "new": list(pair[1])} for name, pair in taken.rows.items()}
    document = {"weights": taken.num_weights, "taken": taken.num_taken, "new": list(taken.new), "rows": rows}
    text = json.dumps(document, indent=1) + "\n"
    write_file_atomically(start_path(run_dir, index).with_suffix(".json"), text.encode())


def end_of_stage(run_dir: Path, index: int) -> tuple[int, Path] | None:
    """Step and path of the checkpoint with which stage `index` of a run ended; None if it is not there."""
    for step, path in list_checkpoints(run_dir):
        if is_committed(path):
            progress = read_progress(path)["progress"]
            if progress.get("stage_index") == index and progress.get("stage_finished") is True:
                return step, path
    return None
