"""`ups eval`: score a model on data it has not seen, next to its references, and draw the report."""

from __future__ import annotations

from typing import Annotated

import typer

from ups.cli.options import JsonOption, PluginOption, new_app
from ups.cli.output import report, say, styled

app = new_app()


@app.command()
def evaluate(
    model: Annotated[str, typer.Argument(metavar="RUN|BUNDLE", help="A run, or a bundle.", show_default=False)],
    split: Annotated[str, typer.Option(help="Which trajectories: test or valid.")] = "test",
    task: Annotated[list[str], typer.Option(metavar="NAME", help="Only this task; may be given many times.")] = [],  # noqa: B006
    data: Annotated[
        list[str],
        typer.Option(
            metavar="TASK=PATH",
            help="Score a task on held-out trajectories of this data; needed for a bundle; may be given many times.",
            show_default=False,
        ),
    ] = [],  # noqa: B006 - typer copies it
    recipe_data: Annotated[
        bool, typer.Option("--recipe-data", help="Open the data that the recipe in a bundle names, and print which.")
    ] = False,
    start_frame: Annotated[int | None, typer.Option(help="Last given frame; default the earliest possible.")] = None,
    trajectories: Annotated[int | None, typer.Option(help="At most so many trajectories of each task.", min=1)] = None,
    out: Annotated[str | None, typer.Option(help="For the report; default RUN/report or BUNDLE-report.")] = None,
    page: Annotated[bool, typer.Option("--report/--no-report", help="Draw report/index.html too.")] = True,
    solver_cost: Annotated[
        bool, typer.Option("--solver-cost", help="Also measure what the same error costs the solver; takes minutes.")
    ] = False,
    plugin: PluginOption = [],  # noqa: B006 - typer copies it
    json: JsonOption = False,
) -> None:
    """Score a model next to persistence and the training mean, and write scores.json and a report.

    Whole rollouts from the start frame on held-out trajectories; a trajectory that blows up counts as infinite.
    """
    from ups.library.scores import evaluate as evaluate_model
    from ups.run.progress_line import ProgressLine
    from ups.run.scoring import score_lines

    scores = evaluate_model(
        model,
        split=split,
        tasks=task,
        data=dict(_other(text) for text in data),
        recipe_data=recipe_data,
        start_frame=start_frame,
        max_trajectories=trajectories,
        solver_cost=solver_cost,
        progress=not json,
    )
    if not json:
        say(score_lines(scores.results, styled))  # drawing takes longer
    with ProgressLine(quiet=json) as line:
        if page:
            line.working("drawing the worst cases")
        written = scores.write(out, page=page)
    if json:
        report(scores.to_json())
        return
    for path in written:
        say(f"wrote {path}")


def _other(text: str) -> tuple[str, str]:
    from ups.errors import ConfigError

    task, _, path = text.partition("=")
    if not task or not path:
        raise ConfigError(f"--data {text}: that is not TASK=PATH", hint="for example burgers1d=shifted/burgers1d.zarr")
    return task, path
