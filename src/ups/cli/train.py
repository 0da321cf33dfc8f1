"""`ups train RECIPE`: resolves the recipe, prepares the run directory, and hands the ranks to the supervisor.

No torch here: the ranks import it, and when torch is what is broken this process still tells so.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ups.cli.options import RecipeArgument, SetOption, new_app

if TYPE_CHECKING:
    from ups.config.schema import Recipe
    from ups.record.identity import RunIdentity

app = new_app()


@app.command()
def train(
    recipe: RecipeArgument,
    ranks: Annotated[int, typer.Option("--ranks", min=1, max=100_000, help="Processes that train together.")] = 1,
    set: SetOption = [],  # noqa: B006 - typer copies it
) -> None:
    """Train a recipe on one or many ranks, supervised; an interrupted run goes on where its last checkpoint is."""
    from ups.cli.output import say, styled
    from ups.config.recipe import recipe_file, resolve
    from ups.doctor.probes.preflight import preflight
    from ups.run.directory import ensure_run_statistics, prepare, run_dir_of
    from ups.run.identity import identify
    from ups.supervise.run_lock import hold_run

    resolved = resolve(recipe_file(recipe), set)
    run_dir = run_dir_of(resolved, recipe, set)
    check_ranks(resolved.recipe.data.block_size, ranks)
    for warning in preflight(resolved.recipe, ranks, run_dir):
        say(styled(f"warning: {warning}", "yellow"))
    # Held first: what follows writes files that a living run reads.
    with hold_run(run_dir):
        prepare(run_dir, resolved, ranks)
        ensure_run_statistics(run_dir, resolved.recipe)
        code = start_ranks(run_dir, resolved.recipe, ranks, identify(run_dir, resolved.recipe))
        if code == 0:
            leave_bundle(run_dir)
    raise typer.Exit(code)


def check_ranks(block_size: int, ranks: int) -> None:
    """Raises ConfigError, before anything starts, if a block cannot be cut evenly over the ranks."""
    from ups.errors import ConfigError

    if block_size % ranks:
        raise ConfigError(
            f"data.block_size ({block_size}) cannot be cut evenly over {ranks} ranks",
            hint=f"use --set data.block_size={-(-block_size // ranks) * ranks}, or a number of ranks that divides it",
        )


def leave_bundle(run_dir: Path) -> None:
    """Score a completed run on its test split and write RUN/bundle. The verdict stands already: torch may come now."""
    from ups.cli.output import say
    from ups.cli.score_table import score_lines
    from ups.run.bundling import bundle_of_run

    path, results = bundle_of_run(str(run_dir))
    say(score_lines(results))
    say(f"wrote {path}")


def start_ranks(run_dir: Path, recipe: Recipe, ranks: int, identity: RunIdentity) -> int:
    """Start the ranks of a prepared run that is held, and stay until its verdict; returns the exit code of the run."""
    from ups.cli.progress_line import ProgressLine
    from ups.run.identity import check_inputs
    from ups.supervise.options import Options
    from ups.supervise.supervisor import supervise_held

    share = recipe.data.block_size // ranks
    threads = recipe.engine.threads or (1 if ranks > 1 else None)
    environment = {"OMP_NUM_THREADS": str(threads)} if threads and "OMP_NUM_THREADS" not in os.environ else {}
    lengths = [stage.steps for stage in recipe.stages]
    options = Options(
        run_dir=run_dir,
        ranks=ranks,
        command=(sys.executable, "-m", "ups.run.rank_main", str(run_dir)),
        max_restarts=recipe.supervise.max_restarts,
        micro_batch=recipe.engine.micro_batch or share,
        block_size=share,
        environment=environment,
        show_rank=None,
        identity=identity,
        check_inputs=lambda: check_inputs(run_dir, identity),
        last_step=None if None in lengths else sum(length or 0 for length in lengths),
    )
    with ProgressLine(run_dir / "metrics.jsonl", [stage.type for stage in recipe.stages]) as line:
        return supervise_held(options, line.say)
