"""`ups train RECIPE`: `ups.train` with options, and what it says on a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from ups.cli.options import RecipeArgument, SetOption, new_app

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
    from ups.library.output import Printed
    from ups.library.train import train_resolved
    from ups.record.text import path_text
    from ups.run.directory import run_dir_of

    class Terminal(Printed):
        def scored(self, results: Sequence[Mapping[str, Any]], bundle: Path) -> None:
            from ups.run.score_text import score_lines

            say(score_lines(results, styled))
            say(f"wrote {path_text(bundle)}")

    resolved = resolve(recipe_file(recipe), set)
    raise typer.Exit(train_resolved(resolved, run_dir_of(resolved, recipe, set), ranks, Terminal()))
