"""`ups bench RECIPE`: its model beside baselines; can be interrupted and called again.

The protocol of ups-bench v1 on nine tasks is a program of the repository, `benchmarks/protocol`: `ups bench` without a
recipe says so.
"""

from __future__ import annotations

from typing import Annotated

import typer

from ups.cli.options import JsonOption, PluginOption, SetOption, new_app
from ups.cli.output import note, report, say
from ups.errors import ConfigError

PROTOCOL = "python -m benchmarks.protocol"
WHERE = f"""ups bench RECIPE trains the model of a recipe, an FNO and a U-Net for the same CPU time, and compares them.

The protocol of ups-bench v1 on nine tasks is not part of the package. Start it in a checkout of the repository:
  {PROTOCOL} --help
  {PROTOCOL} --jobs 2
docs/benchmark.md says what it measures."""
app = new_app()


@app.command()
def bench(
    recipe: Annotated[
        str | None, typer.Argument(metavar="RECIPE", help="Compare the model of this recipe with baselines.")
    ] = None,
    model: Annotated[
        list[str], typer.Option(metavar="NAME", help="fno or unet; may be given many times. [default: both]")
    ] = [],  # noqa: B006 - typer copies it
    out: Annotated[str, typer.Option(help="Directory for runs and results. [default: runs/NAME-bench]")] = "",
    set: SetOption = [],  # noqa: B006 - typer copies it
    plugin: PluginOption = [],  # noqa: B006 - typer copies it
    json: JsonOption = False,
    # Options of the protocol, which was part of this command: known for one version, to say where it is.
    task: Annotated[list[str], typer.Option(hidden=True)] = [],  # noqa: B006
    data: Annotated[str | None, typer.Option(hidden=True)] = None,
    cpu_seconds: Annotated[float | None, typer.Option(hidden=True)] = None,
    jobs: Annotated[int | None, typer.Option(hidden=True)] = None,
    small: Annotated[bool, typer.Option("--small", hidden=True)] = False,
    page_only: Annotated[bool, typer.Option("--page-only", hidden=True)] = False,
) -> None:
    """Train the model of a RECIPE, an FNO and a U-Net for the same CPU time on its data, next to the references.

    Writes OUT/index.html, and runs into OUT. What is finished is not repeated. Without a RECIPE: says where the
    protocol of the nine tasks is.
    """
    options = {"--data": data, "--cpu-seconds": cpu_seconds, "--jobs": jobs}
    words = [f"--task {name}" for name in task]
    words += [f"{name} {value}" for name, value in options.items() if value is not None]
    words += [name for name, on in {"--small": small, "--page-only": page_only}.items() if on]
    if recipe is not None:
        if words:
            raise ConfigError("a RECIPE says tasks, data and budget itself", hint="use --model, --out, --set, --json")
        _bench_recipe(recipe, model, out, set, json=json)
        return
    if set:
        raise ConfigError("--set changes a RECIPE, and none is given", hint="ups bench RECIPE --set FIELD=VALUE")
    words = [*(f"--model {name}" for name in model), *words, *([f"--out {out}"] if out else [])]
    if words:
        raise ConfigError(
            "`ups bench` has no RECIPE, and the protocol of the nine tasks is not part of the package",
            hint=f"in a checkout of the repository: {' '.join([PROTOCOL, *words])}",
        )
    if json:
        report({"protocol": PROTOCOL})
    else:
        say(WHERE)


def _bench_recipe(recipe: str, models: list[str], out: str, changes: list[str], *, json: bool) -> None:
    from pathlib import Path

    from ups.cli.eval import show
    from ups.config.recipe import recipe_file, resolve
    from ups.library.bench import bench_recipe
    from ups.record.text import path_text
    from ups.run.directory import run_dir_of

    resolved = resolve(recipe_file(recipe), changes)
    run_dir = run_dir_of(resolved, recipe, changes)
    folder = Path(out).resolve() if out else run_dir.with_name(f"{run_dir.name}-bench")
    try:
        comparison = bench_recipe(resolved.recipe, folder, models, progress=not json)
    except (KeyboardInterrupt, SystemExit):
        note("the run in work has saved: the same command continues, and keeps what is finished")
        raise
    show(comparison, path_text(folder), json=json)
