"""One stage of a recipe as a run of its own (`ups train RECIPE --stage NAME`): from where the stage before it ended.

The first run stays as it is. The other one lies next to it, named after the stage, and can be continued, scored and
bundled like any run; two settings of a stage are compared without training what comes before it twice. No torch here.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

from ups.config.recipe import ResolvedRecipe, plain_data, resolve_data
from ups.config.schema import Recipe
from ups.errors import ConfigError, UpsError
from ups.record.checkpoints import list_checkpoints, read_progress
from ups.record.manifest import is_committed
from ups.record.text import path_text
from ups.run.directory import earlier_stage


def stage_alone(resolved: ResolvedRecipe, run_dir: Path, stage: str, changes: list[str]) -> ResolvedRecipe:
    """The recipe of stage `stage` (its type, or its number from 0) alone. run_dir: of the run that has the others.

    changes: of the whole recipe as `ups train --set` takes them; a change of the run's name or place is of the new run.
    """
    recipe = resolved.recipe
    index = _index(recipe, stage)
    place = f"{run_dir}-{stage}"
    document: Any = plain_data(recipe)
    start = _start(recipe, run_dir, index)
    document["stages"] = [document["stages"][index] | ({} if start is None else {"start_from": start})]
    document["run"] |= {"name": Path(place).name, "dir": place}
    own = [change for change in changes if change.partition(".")[0].strip() == "run"]
    return resolve_data(document, own, name=f"stage '{stage}' of the recipe")


def without_place(changes: list[str]) -> list[str]:
    """The changes but those of the run's name and place."""
    return [c for c in changes if c.partition("=")[0].strip() not in ("run.dir", "run.name")]


def _index(recipe: Recipe, stage: str) -> int:
    types = [one.type for one in recipe.stages]
    if stage.isascii() and stage.isdigit() and int(stage) < len(types):
        return int(stage)
    if types.count(stage) == 1:
        return types.index(stage)
    numbered = ", ".join(f"{number} ({name})" for number, name in enumerate(types))
    what = "several stages" if stage in types else "no stage"
    raise ConfigError(f"the recipe has {what} '{stage[:40]}'", hint=f"say which by its number: {numbered}")


def _start(recipe: Recipe, run_dir: Path, index: int) -> str | None:
    """What the stage starts from: the checkpoint with which an earlier one ended, or what the recipe says."""
    named = earlier_stage(recipe, index)
    before = index - 1 if named is None else named
    if before < 0 or (recipe.stages[index].start_from and named is None):
        return recipe.stages[index].start_from
    for _, path in list_checkpoints(run_dir):
        with contextlib.suppress(UpsError, OSError):
            progress = read_progress(path)["progress"]
            if progress.get("stage_index") == before and progress.get("stage_finished") and is_committed(path):
                return str(path)
    raise ConfigError(
        f"{path_text(run_dir)} has no checkpoint with which its stage {before} ('{recipe.stages[before].type}') ended",
        hint="train the whole recipe first, without --stage",
    )
