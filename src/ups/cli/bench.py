"""`ups bench RECIPE`: its model beside baselines; can be interrupted and called again."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ups.cli.options import JsonOption, PluginOption, RecipeArgument, SetOption, new_app
from ups.cli.output import note

app = new_app()


@app.command()
def bench(
    recipe: RecipeArgument,
    model: Annotated[
        list[str], typer.Option(metavar="NAME", help="fno or unet; may be given many times. [default: both]")
    ] = [],  # noqa: B006 - typer copies it
    out: Annotated[str, typer.Option(help="Directory for runs and results. [default: runs/NAME-bench]")] = "",
    set: SetOption = [],  # noqa: B006 - typer copies it
    plugin: PluginOption = [],  # noqa: B006 - typer copies it
    json: JsonOption = False,
) -> None:
    """Train the model of a RECIPE, an FNO and a U-Net for the same CPU time on its data, next to the references.

    Writes OUT/index.html, and runs into OUT. What is finished is not repeated. The protocol of ups-bench v1 on nine
    tasks is a program of the repository: python -m benchmarks.protocol (docs/benchmark.md).
    """
    from ups.cli.eval import show
    from ups.config.recipe import recipe_file, resolve
    from ups.library.bench import bench_recipe
    from ups.record.text import path_text
    from ups.run.directory import run_dir_of

    resolved = resolve(recipe_file(recipe), set)
    run_dir = run_dir_of(resolved, recipe, set)
    folder = Path(out).resolve() if out else run_dir.with_name(f"{run_dir.name}-bench")
    try:
        comparison = bench_recipe(resolved.recipe, folder, model, progress=not json)
    except (KeyboardInterrupt, SystemExit):
        note("the run in work has saved: the same command continues, and keeps what is finished")
        raise
    show(comparison, path_text(folder), json=json)
