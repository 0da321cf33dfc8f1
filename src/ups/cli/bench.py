"""`ups bench`: ups-bench v1, or with a recipe its model beside baselines; can be interrupted and called again."""

from __future__ import annotations

from typing import Annotated

import typer

from ups.cli.options import JsonOption, SetOption, new_app
from ups.cli.output import note, report, say
from ups.errors import ConfigError

CPU_SECONDS = 240.0
app = new_app()


@app.command()
def bench(
    recipe: Annotated[
        str | None,
        typer.Argument(metavar="RECIPE", help="Compare the model of this recipe with baselines.", show_default=False),
    ] = None,
    model: Annotated[
        list[str],
        typer.Option(
            metavar="NAME",
            help="reference, fno, unet, fno+, unet+, ups-alone or ups; with RECIPE fno or unet. May be given many "
            "times. [default: all]",
        ),
    ] = [],  # noqa: B006 - typer copies it
    task: Annotated[list[str], typer.Option(metavar="NAME", help="Only this task; may be given many times.")] = [],  # noqa: B006
    data: Annotated[str, typer.Option(help="Directory of the data sets; what is missing is generated.")] = "data",
    out: Annotated[
        str, typer.Option(help="Directory for runs and results. [default: bench, with RECIPE runs/NAME-bench]")
    ] = "",
    cpu_seconds: Annotated[
        float, typer.Option(min=1.0, help="Budget of each task, CPU-seconds of one thread. ups-bench v1: 240.")
    ] = CPU_SECONDS,
    jobs: Annotated[int, typer.Option(min=1, help="Trainings at the same time, one thread each.")] = 1,
    small: Annotated[bool, typer.Option("--small", help="A quick try on 32,8,8 trajectories; not comparable.")] = False,
    page_only: Annotated[
        bool, typer.Option("--page-only", help="Only write the page and its pictures again, from OUT/bench.json.")
    ] = False,
    set: SetOption = [],  # noqa: B006 - typer copies it
    json: JsonOption = False,
) -> None:
    """Train and score models at equal CPU time: by the fixed protocol on nine tasks, or on the data of a RECIPE.

    With a RECIPE: its model, FNO and U-Net next to the references; writes OUT/index.html, and runs into OUT.

    Without: writes OUT/bench.json, OUT/bench.md and OUT/pictures (extra `report`). Each training is an ordinary run in
    OUT/runs with its recipe in OUT/recipes. What is finished is not repeated.
    """
    from pathlib import Path

    if recipe is not None:
        if task or data != "data" or cpu_seconds != CPU_SECONDS or jobs > 1 or small or page_only:
            raise ConfigError("a RECIPE says tasks, data and budget itself", hint="use --model, --out, --set, --json")
        _bench_recipe(recipe, model, out, set, json=json)
        return
    if set:
        raise ConfigError("--set changes a RECIPE, and none is given", hint="ups bench RECIPE --set FIELD=VALUE")
    from ups.evaluation.protocol import MODELS
    from ups.run.bench import Bench
    from ups.run.progress_line import ProgressLine
    from ups.solvers.tasks import BENCH_TASKS

    for name, known, what in [(n, MODELS, "model") for n in model] + [(n, BENCH_TASKS, "task") for n in task]:
        if name not in known:
            raise ConfigError(f"ups-bench has no {what} '{name}'", hint=f"choose from {', '.join(known)}")
    # In the order of the protocol, each once.
    models = [name for name in MODELS if name in (model or MODELS)]
    tasks = [name for name in BENCH_TASKS if name in (task or BENCH_TASKS)]
    work = Bench(models, tasks, Path(data), Path(out or "bench"), cpu_seconds=cpu_seconds, small=small)
    if page_only and (model or task):
        raise ConfigError("--page-only shows what bench.json holds", hint="leave --model and --task out")
    if page_only:
        document = work.write_page()
    else:
        with ProgressLine() as line:
            document = work.run(jobs, line)
    if json:
        report(document)
    else:
        say(work.page.read_text().rstrip("\n"))
        note(f"wrote {work.page} and {work.result}")
    if document["failures"]:
        raise typer.Exit(6)


def _bench_recipe(recipe: str, models: list[str], out: str, changes: list[str], *, json: bool) -> None:
    from pathlib import Path

    from ups.cli.compare import show
    from ups.config.recipe import recipe_file, resolve
    from ups.evaluation.report.figures import check_packages
    from ups.library.bench import bench_recipe
    from ups.record.text import path_text
    from ups.run.directory import run_dir_of

    check_packages(film=False)  # before hours of training
    resolved = resolve(recipe_file(recipe), changes)
    run_dir = run_dir_of(resolved, recipe, changes)
    folder = Path(out).resolve() if out else run_dir.with_name(f"{run_dir.name}-bench")
    try:
        comparison = bench_recipe(resolved.recipe, folder, models, progress=not json)
    except (KeyboardInterrupt, SystemExit):
        note("the run in work has saved: the same command continues, and keeps what is finished")
        raise
    show(comparison, path_text(folder), json=json)
