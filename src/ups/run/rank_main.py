"""The composition root of a rank: `python -m ups.run.rank_main RUN_DIR` runs the stages of RUN_DIR/config.yaml.

Started by the wrapper of the rank, or as a plain process for one rank. The failure recorder comes before any heavy
import, so that a crash while torch is loaded is recorded too. A rank that fails leaves at once, without a
collective and without destructors that could wait for its peers; what happens next is the supervisor's decision.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

from ups.errors import RecipeChangedError, UpsError, exit_code_of_signal
from ups.record.failure import install_from_environment
from ups.record.log import show_log, write_to_stderr
from ups.record.run_dir import RunDir

if TYPE_CHECKING:
    from ups.config.schema import Recipe
    from ups.record.failure import Recorder


def main(arguments: list[str]) -> int:
    """Run one rank to its end; returns its exit code (0 finished, 128 + signal asked to leave)."""
    run_dir = Path(arguments[0]).resolve()
    show_log(write_to_stderr, logging.INFO)
    recorder = install_from_environment(run_dir)
    try:
        with recorder.watch():
            return train(run_dir, read_recipe(run_dir), recorder)
    except Exception as error:  # noqa: BLE001 - the last handler of the process: keeps the traceback, sets the code
        traceback.print_exc()
        code = error.exit_code if isinstance(error, UpsError) else 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def read_recipe(run_dir: Path) -> Recipe:
    """The resolved recipe of a run, with what the supervisor changed for this attempt (a smaller micro-batch)."""
    from ups.config.identity import recipe_identity
    from ups.config.recipe import resolve
    from ups.record.identity import RunIdentity

    changes = json.loads(os.environ.get("UPS_OVERRIDES") or "{}")
    overrides = [f"{name}={json.dumps(value)}" for name, value in changes.items()]
    recipe = resolve(RunDir(run_dir).config, overrides).recipe
    identity = RunIdentity.from_environment()
    if identity is not None and recipe_identity(recipe) not in identity.recipes:
        raise RecipeChangedError(
            f"{RunDir(run_dir).config} is not the recipe that the supervisor started this run with",
            hint="bring the old file back, or start a new run: --set run.dir=PATH",
        )
    return recipe


def train(run_dir: Path, recipe: Recipe, recorder: Recorder) -> int:
    """All stages of a run, as the variables of the launcher say. Collective: all ranks."""
    from ups.distributed.environment import RankEnvironment
    from ups.record.identity import HASHED_VARIABLE, RunIdentity, note_commit, note_damage
    from ups.run.assemble import run_stages
    from ups.training.progress import StopRequests

    boxes = os.environ.get("UPS_BLACKBOX_DIR")
    stopped, _ = run_stages(
        run_dir,
        recipe,
        RankEnvironment.read(),
        recorder,
        StopRequests(recipe.engine.max_seconds),
        identity=RunIdentity.from_environment(),
        hashed=os.environ.get(HASHED_VARIABLE, ""),
        on_commit=functools.partial(note_commit, Path(boxes)) if boxes else None,
        on_damage=functools.partial(note_damage, Path(boxes)) if boxes else None,
    )
    return exit_code_of_signal(stopped) if stopped else 0


if __name__ == "__main__":
    exit_code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    # Destructors of torch take seconds on a busy machine and save nothing: the black box says that the work is done.
    os._exit(exit_code)
