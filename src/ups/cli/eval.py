"""`ups eval`: score a model on data it has not seen, beside its references, and draw the report."""

from __future__ import annotations

from typing import Annotated

import typer

from ups.cli.options import JsonOption, new_app
from ups.cli.output import note, report, say

app = new_app()


@app.command()
def evaluate(
    model: Annotated[str, typer.Argument(metavar="RUN|BUNDLE", help="A run, or a bundle.", show_default=False)],
    split: Annotated[str, typer.Option(help="Which trajectories: test or valid.")] = "test",
    task: Annotated[list[str], typer.Option(metavar="NAME", help="Only this task; may be given many times.")] = [],  # noqa: B006
    start_frame: Annotated[int | None, typer.Option(help="Last given frame; default the earliest possible.")] = None,
    trajectories: Annotated[int | None, typer.Option(help="At most so many trajectories of each task.", min=1)] = None,
    out: Annotated[str | None, typer.Option(help="For the report; default RUN/report or BUNDLE-report.")] = None,
    page: Annotated[bool, typer.Option("--report/--no-report", help="Draw report/index.html too.")] = True,
    solver_cost: Annotated[
        bool, typer.Option("--solver-cost", help="Also measure what the same error costs the solver; takes minutes.")
    ] = False,
    json: JsonOption = False,
) -> None:
    """Score a model beside persistence and the training mean, and write scores.json and a report.

    Whole rollouts from the start frame on held-out trajectories; a trajectory that blows up counts as infinite.
    """
    from pathlib import Path

    from ups.cli.score_table import score_lines
    from ups.errors import ConfigError
    from ups.evaluation.results import to_json
    from ups.run.reporting import report_folder, write_scores
    from ups.run.scoring import score
    from ups.run.trained import find_model, load_trained

    if split not in ("test", "valid"):
        raise ConfigError(f"'{split}' is not a held-out split", hint="use --split test or --split valid")
    if solver_cost:
        from ups.solvers.restart import require_solvers

        require_solvers()
    trained = load_trained(model)
    known = [reader.task.name for reader in trained.readers]
    wrong = [name for name in task if name not in known]
    if wrong:
        raise ConfigError(f"'{model}' has no task '{wrong[0]}'", hint=f"its tasks are {', '.join(known)}")
    results = score(
        trained,
        split=split,
        start_frame=start_frame,
        max_trajectories=trajectories,
        tasks=task,
        solver_cost=solver_cost,
        progress=None if json else lambda name: note(f"scoring {name}"),
    )
    folder = Path(out) if out is not None else report_folder(find_model(model))
    written = write_scores(folder, trained, results, page=page)
    if json:
        report({"model": trained.name, "identity": trained.identity, "results": to_json(results)})
        return
    say(score_lines(results))
    for path in written:
        say(f"wrote {path}")
